"""What is cached and what is computed before a query, for every kind of system.

A `Layout` is a `PrefixPlan` and the tokens that are computed online between or after its slices,
each at a position of its own. Who sees whom is decided by these positions alone. Training packs a
layout and serving fills a cache by it, so the two cannot differ in what a system is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cache_ops.plan import PROMPT, PrefixPlan, Slice

ChunkPositions = Literal["reordered", "composite"]


@dataclass(frozen=True)
class Layout:
    """A cached prefix with the tokens that are computed online before the query's first.

    Attributes:
        plan: the cached slices.
        online_ids: tokens computed before the query, in the order of their positions.
        online_positions: where each of them stands; none is taken twice, also not by a slice that
            must be seen before it.
    """

    plan: PrefixPlan
    online_ids: tuple[int, ...] = ()
    online_positions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.online_ids) == len(self.online_positions), "a position for every token"

    @property
    def length(self) -> int:
        """The position of the first query token."""
        return max((self.plan.length, *(position + 1 for position in self.online_positions)))

    @property
    def tokens(self) -> int:
        """Tokens in the KV cache before the query: the field's "active tokens"."""
        return self.plan.tokens + len(self.online_ids)

    def positions_with(self, query_tokens: int) -> list[int]:
        """Positions of all tokens computed online: `online_ids`, then the query."""
        return [*self.online_positions, *range(self.length, self.length + query_tokens)]


def computed(token_ids: Sequence[int]) -> Layout:
    """Standard RAG: nothing is cached, prompt and chunks are one causal text."""
    return Layout(PrefixPlan(()), tuple(token_ids), tuple(range(len(token_ids))))


def whole_chunks(
    chunks: Sequence[tuple[str, int]], prompt_length: int, positions: ChunkPositions = "reordered"
) -> Layout:
    """TurboRAG (Lu et al., 2024): whole chunks, each encoded alone, behind the prompt.

    Args:
        chunks: key and number of tokens of each, best first.
        prompt_length: tokens of the static prompt; 0 leaves it out.
        positions: `reordered`, each chunk starts where the one before ended; `composite`, every
            chunk starts right after the prompt, so that their positions overlap.
    """
    slices = [Slice(PROMPT, 0, prompt_length, 0)] if prompt_length else []
    position = prompt_length
    for chunk, tokens in chunks:
        slices.append(Slice(chunk, 0, tokens, position))
        if positions == "reordered":
            position += tokens
    return Layout(PrefixPlan(tuple(slices)))


def wrapped(plan: PrefixPlan, before_ids: Sequence[int], after_ids: Sequence[int]) -> Layout:
    """Soft tokens around every slice but the prompt's: the idea of KV Packet (Chen et al., 2026).

    The same ones for every slice, as what is learned must hold for any chunk at any place. The
    paper encodes them with each document; here they are computed online: slices do not see them and
    stay as cached, while they see everything before them, and the query sees all.

    Args:
        plan: slices that follow each other without gaps.
        before_ids, after_ids: soft tokens; see `cache_ops.soft_tokens`.
    """
    slices: list[Slice] = []
    ids: list[int] = []
    positions: list[int] = []
    position = 0
    for piece in plan.slices:
        around = ([], []) if piece.chunk == PROMPT else (before_ids, after_ids)
        for place, soft_ids in enumerate(around):
            if place:
                slices.append(Slice(piece.chunk, piece.start, piece.end, position))
                position += piece.end - piece.start
            ids += soft_ids
            positions += range(position, position + len(soft_ids))
            position += len(soft_ids)
    return Layout(PrefixPlan(tuple(slices)), tuple(ids), tuple(positions))


def linked_chunks(
    chunks: Sequence[tuple[str, int]], prompt_length: int, link_ids: Sequence[Sequence[int]]
) -> Layout:
    """KVLink (Yang et al., 2025): after each whole chunk its link tokens, computed online.

    Chunks do not see link tokens; these see everything before them, and the query sees all.

    Args:
        chunks: key and number of tokens of each, best first.
        prompt_length: tokens of the static prompt; 0 leaves it out.
        link_ids: for each chunk the ids of its link tokens; see `cache_ops.soft_tokens`.
    """
    slices = [Slice(PROMPT, 0, prompt_length, 0)] if prompt_length else []
    ids: list[int] = []
    positions: list[int] = []
    position = prompt_length
    for (chunk, tokens), links in zip(chunks, link_ids, strict=True):
        slices.append(Slice(chunk, 0, tokens, position))
        position += tokens
        ids += links
        positions += range(position, position + len(links))
        position += len(links)
    return Layout(PrefixPlan(tuple(slices)), tuple(ids), tuple(positions))
