"""EPIC (Hu et al., 2025): cached chunks, each joined on by recomputing its first tokens (LegoLink).

The prompt, or without one the first chunk, starts the prefix and stays as cached.
"""

from dataclasses import replace

from cache_ops.recompute import first_rows
from eval.systems.chunks import cached_chunks
from eval.systems.interface import Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """TurboRAG's reordered prefix; the first pass recomputes the start of every further slice."""
    cached = cached_chunks(question, width, serving)
    rows = first_rows(cached.layout.plan, serving.config.systems.epic.recomputed_tokens)
    return replace(cached, recompute=rows)
