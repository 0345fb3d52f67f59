"""Block-Attention (Ma et al., 2025): blocks encoded alone, the last one sees all of them.

Served like TurboRAG's reordered positions; what differs is the training, which learns every sample
in blocks and in full, so that the same weights also serve as Standard RAG.
"""

from eval.systems.chunks import cached_chunks
from eval.systems.interface import Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """Every chunk is a block, at global positions; the query is the last block."""
    return cached_chunks(question, width, serving)
