"""What the systems of whole chunks share."""

from collections.abc import Sequence

from cache_ops.layout import ChunkPositions, whole_chunks
from data_builders.tables import Chunk
from eval.systems.interface import Evidence, Question, Request, Serving, Width


def chunk_lengths(chunks: Sequence[Chunk]) -> list[tuple[str, int]]:
    """Key and number of tokens of each chunk."""
    return [(chunk.chunk_id, len(chunk.token_ids)) for chunk in chunks]


def chunk_evidence(chunks: Sequence[Chunk]) -> list[Evidence]:
    """Whole chunks as what the model sees."""
    return [Evidence(chunk.chunk_id, chunk.text) for chunk in chunks]


def cached_chunks(
    question: Question, width: Width, serving: Serving, positions: ChunkPositions = "reordered"
) -> Request:
    """The retrieved chunks, whole and from the cache, in their order."""
    chunks = question.chunks[: width.k_c]
    prompt_length = len(serving.template.prompt_ids)
    return Request(
        layout=whole_chunks(chunk_lengths(chunks), prompt_length, positions),
        segments=serving.segments(chunks),
        evidence=chunk_evidence(chunks),
    )
