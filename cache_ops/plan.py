"""Which chunk tokens form a prefix, in which order, and at which positions.

One `PrefixPlan` is consumed by the packed training pass (`packing`) and by serving (`assemble`).
Slices follow the prompt without gaps, as in the CoinRAG paper's section on RoPE rotation and
contiguous assembly: slice i starts where slice i-1 ended.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

PROMPT = "<prompt>"
"""The chunk key of the static prompt, which every prefix starts with."""

MEAN_TOKEN = -1
"""Behind a chunk's own tokens it stands for their mean (see `cache_ops.means`); no model has it."""

Order = Literal["rank_then_document", "score"]
Overlap = Literal["merge", "keep"]
Positions = Literal["contiguous", "original"]


@dataclass(frozen=True)
class Span:
    """Tokens `[start, end)` of a chunk, in the chunk's own token positions."""

    chunk: str
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(
                f"span [{self.start}, {self.end}) of chunk {self.chunk!r} is empty or negative"
            )


@dataclass(frozen=True)
class Slice(Span):
    """A span placed in a prefix: its first token sits at `position`."""

    position: int

    @property
    def delta(self) -> int:
        """Positions by which the span's keys are rotated."""
        return self.position - self.start


@dataclass(frozen=True)
class PrefixPlan:
    """The slices of a prefix, prompt first, in the order in which their keys are laid out."""

    slices: tuple[Slice, ...]

    @property
    def tokens(self) -> int:
        """Prefix tokens, the prompt included: the field's "active tokens"."""
        return sum(piece.end - piece.start for piece in self.slices)

    @property
    def length(self) -> int:
        """The position of the first query token: one past the last prefix position."""
        return max((piece.position + piece.end - piece.start for piece in self.slices), default=0)


@dataclass(frozen=True)
class Anchors:
    """What joins a prefix of every chunk that a span is selected from.

    Attributes:
        prefix_tokens, suffix_tokens: so many of the chunk's first and last tokens.
        lengths: the tokens of each chunk, without what stands for their mean.
        mean: the chunk's `MEAN_TOKEN`.
    """

    prefix_tokens: int
    suffix_tokens: int
    lengths: Mapping[str, int]
    mean: bool = False


def anchor_ranges(
    length: int, prefix_tokens: int, suffix_tokens: int, mean: bool = False
) -> tuple[range, range]:
    """A chunk's first tokens, and of its last tokens those that are not among the first.

    With `mean` what stands for the mean of its `length` tokens follows them.
    """
    first = min(prefix_tokens, length)
    return range(first), range(max(first, length - suffix_tokens), length + mean)


def plan_prefix(
    spans: Sequence[Span],
    *,
    prompt_length: int,
    chunk_ranks: Sequence[str],
    order: Order = "rank_then_document",
    overlap: Overlap = "merge",
    positions: Positions = "contiguous",
    anchors: Anchors | None = None,
) -> PrefixPlan:
    """Lays the prompt and the spans side by side.

    Args:
        spans: the selected spans, best score first.
        prompt_length: tokens of the static prompt; 0 leaves it out.
        chunk_ranks: chunk keys, best retrieved first; holds every span's chunk.
        order: `rank_then_document` sorts by chunk rank, then by place in the chunk; `score` keeps
            the order of `spans`.
        overlap: `merge` joins overlapping and touching spans of a chunk, so that no token stands
            twice (under `score` the joined span takes the place of its best part); `keep` leaves
            the spans as they are.
        positions: `contiguous` lays them end to end after the prompt; `original` leaves each at its
            chunk's positions, so that nothing is rotated and positions may coincide (the paper's
            ablation); the query then follows the last of them.
        anchors: laid out as spans are, as far as no span covers them. Under `score` a chunk's first
            tokens stand right before its best span and its last ones right after its worst.

    Raises:
        ValueError: a span's chunk is not among `chunk_ranks`, or a choice is unknown.
    """
    ranks = {chunk: rank for rank, chunk in enumerate(chunk_ranks)}
    if unknown := [span.chunk for span in spans if span.chunk not in ranks]:
        raise ValueError(f"spans of chunks that were not retrieved: {unknown}")
    if order not in ("rank_then_document", "score"):
        raise ValueError(f"order is {order!r}; choose rank_then_document or score")
    if overlap not in ("merge", "keep"):
        raise ValueError(f"overlap is {overlap!r}; choose merge or keep")
    if positions not in ("contiguous", "original"):
        raise ValueError(f"positions is {positions!r}; choose contiguous or original")

    if anchors is not None:
        spans = anchored(spans, anchors)
    ordered = merge_spans(spans) if overlap == "merge" else list(spans)
    if order == "rank_then_document":
        ordered.sort(key=lambda span: (ranks[span.chunk], span.start, span.end))

    slices = [Slice(PROMPT, 0, prompt_length, 0)] if prompt_length else []
    position = prompt_length
    for span in ordered:
        at = position if positions == "contiguous" else span.start
        slices.append(Slice(span.chunk, span.start, span.end, at))
        position += span.end - span.start
    return PrefixPlan(tuple(slices))


def isolated(
    plan: PrefixPlan, chunk_ids: Mapping[str, Sequence[int]], positions: Positions = "contiguous"
) -> tuple[PrefixPlan, dict[str, Sequence[int]]]:
    """The same prefix with every slice a chunk of its own, encoded without the text around it.

    The paper's ablation of contextualized caching.

    Args:
        plan: the prefix.
        chunk_ids: the tokens of every chunk of the plan; the prompt stays whole.
        positions: `contiguous` keeps the plan's; `original` are those of the encoding, from 0.

    Returns:
        The plan and the tokens of its chunks.
    """
    slices: list[Slice] = []
    alone: dict[str, Sequence[int]] = {}
    for piece in plan.slices:
        if piece.chunk == PROMPT:
            alone[PROMPT] = chunk_ids[PROMPT]
            slices.append(piece)
            continue
        name = f"{piece.chunk}[{piece.start}:{piece.end}]"
        alone[name] = chunk_ids[piece.chunk][piece.start : piece.end]
        at = piece.position if positions == "contiguous" else 0
        slices.append(Slice(name, 0, piece.end - piece.start, at))
    return PrefixPlan(tuple(slices)), alone


def anchored(spans: Sequence[Span], anchors: Anchors) -> list[Span]:
    """Spans with the anchors of their chunks around them, cut to what no span covers."""
    covered: defaultdict[str, set[int]] = defaultdict(set)
    for span in spans:
        covered[span.chunk].update(range(span.start, span.end))
    worst = {span.chunk: at for at, span in enumerate(spans)}
    best: set[str] = set()
    joined: list[Span] = []
    for at, span in enumerate(spans):
        length = anchors.lengths[span.chunk]
        first, last = anchor_ranges(
            length, anchors.prefix_tokens, anchors.suffix_tokens, anchors.mean
        )
        if span.chunk not in best:
            best.add(span.chunk)
            joined += _uncovered(span.chunk, first, covered[span.chunk])
        joined.append(span)
        if worst[span.chunk] == at:
            joined += _uncovered(span.chunk, last, covered[span.chunk])
    return joined


def _uncovered(chunk: str, tokens: range, covered: AbstractSet[int]) -> Iterator[Span]:
    """The runs of tokens that are not among the covered ones."""
    start = tokens.start
    for token in [*tokens, tokens.stop]:
        if token == tokens.stop or token in covered:
            if start < token:
                yield Span(chunk, start, token)
            start = token + 1


def merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Joins overlapping and touching spans of the same chunk.

    The result is disjoint and covers the same tokens; a joined span stands where the first of its
    parts stood in `spans`.
    """
    by_place = sorted(
        enumerate(spans), key=lambda item: (item[1].chunk, item[1].start, item[1].end)
    )
    merged: list[tuple[int, Span]] = []
    for index, span in by_place:
        if merged and merged[-1][1].chunk == span.chunk and span.start <= merged[-1][1].end:
            first, last = merged[-1]
            merged[-1] = (
                min(first, index),
                Span(span.chunk, last.start, max(last.end, span.end)),
            )
        else:
            merged.append((index, span))
    return [span for _, span in sorted(merged, key=lambda item: item[0])]
