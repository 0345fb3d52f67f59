"""EPIC (Hu et al., 2025): cached chunks, each joined on by recomputing its first tokens (LegoLink).

The prompt, or without one the first chunk, starts the prefix and stays as cached.
"""

from cache_ops.layout import whole_chunks
from cache_ops.recompute import first_rows
from eval.systems.chunks import chunk_evidence, chunk_lengths
from eval.systems.interface import Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """TurboRAG's reordered prefix; the first pass recomputes the start of every further slice."""
    chunks = question.chunks[: width.k_c]
    layout = whole_chunks(chunk_lengths(chunks), len(serving.template.prompt_ids))
    return Request(
        layout=layout,
        segments=serving.segments(chunks),
        evidence=chunk_evidence(chunks),
        recompute=first_rows(layout.plan, serving.config.systems.epic.recomputed_tokens),
    )
