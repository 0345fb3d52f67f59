"""TurboRAG (Lu et al., 2024): whole cached chunks behind the prompt, each encoded alone."""

from cache_ops.layout import whole_chunks
from eval.systems.chunks import chunk_evidence, chunk_lengths
from eval.systems.interface import Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """Every slice is a whole chunk, in retrieval order; only the query is computed online."""
    chunks = question.chunks[: width.k_c]
    return Request(
        layout=whole_chunks(
            chunk_lengths(chunks),
            len(serving.template.prompt_ids),
            serving.config.systems.turborag.positions,
        ),
        segments=serving.segments(chunks),
        evidence=chunk_evidence(chunks),
    )
