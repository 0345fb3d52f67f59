"""TurboRAG (Lu et al., 2024): whole cached chunks behind the prompt, each encoded alone."""

from dataclasses import replace

from eval.systems.chunks import cached_chunks
from eval.systems.interface import Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """Every slice is a whole chunk, in retrieval order; only the query is computed online."""
    cached = cached_chunks(question, width, serving, serving.config.systems.turborag.positions)
    return replace(cached, contextualizer=serving.contextualizer_of("turborag"))
