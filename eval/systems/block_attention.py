"""Block-Attention (Ma et al., 2025): blocks encoded alone, the last one sees all of them.

Served like TurboRAG's reordered positions; what differs is the training, which learns every sample
in blocks and in full, so that the same weights also serve as Standard RAG.
"""

from cache_ops.layout import whole_chunks
from eval.systems.chunks import chunk_evidence, chunk_lengths
from eval.systems.interface import Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """Every chunk is a block, at global positions; the query is the last block."""
    chunks = question.chunks[: width.k_c]
    return Request(
        layout=whole_chunks(chunk_lengths(chunks), len(serving.template.prompt_ids)),
        segments=serving.segments(chunks),
        evidence=chunk_evidence(chunks),
    )
