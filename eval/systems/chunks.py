"""What the systems of whole chunks share."""

from collections.abc import Sequence

from data_builders.tables import Chunk
from eval.systems.interface import Evidence


def chunk_lengths(chunks: Sequence[Chunk]) -> list[tuple[str, int]]:
    """Key and number of tokens of each chunk."""
    return [(chunk.chunk_id, len(chunk.token_ids)) for chunk in chunks]


def chunk_evidence(chunks: Sequence[Chunk]) -> list[Evidence]:
    """Whole chunks as what the model sees."""
    return [Evidence(chunk.chunk_id, chunk.text) for chunk in chunks]
