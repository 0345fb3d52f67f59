"""TurboRAG (Lu et al., 2024): whole cached chunks behind the prompt, each encoded alone."""

from eval.systems.chunks import cached_chunks
from eval.systems.interface import Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """Every slice is a whole chunk, in retrieval order; only the query is computed online."""
    return cached_chunks(question, width, serving, serving.config.systems.turborag.positions)
