"""Many plans in one row without padding.

A packed row holds first the *segments* (the prompt and every distinct chunk of the micro-batch,
each at its own positions from 0), then for each example its own tokens (question and answer, at
the positions that follow its prefix). A segment is cut after the last token that a plan uses:
attention inside it is causal, so later tokens change nothing.

Where the keys and values of the prefixes were computed before (`pack_over_prefix`), the row has no
segments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from cache_ops.contextualizer import Contextualizer
from cache_ops.layout import Layout
from cache_ops.plan import MEAN_TOKEN, PrefixPlan
from cache_ops.rope import Rope


@dataclass(frozen=True)
class Example:
    """One question: its prefix, its query tokens and the answer tokens to be learned.

    `query_positions` are ascending; None: they follow the prefix. The answer follows the query.
    """

    plan: PrefixPlan
    query_ids: Sequence[int]
    answer_ids: Sequence[int]
    query_positions: Sequence[int] | None = None

    @classmethod
    def of(cls, layout: Layout, query_ids: Sequence[int], answer_ids: Sequence[int]) -> Self:
        """The example of a layout; what it computes online goes before the query."""
        positions = layout.positions_with(len(query_ids))
        return cls(layout.plan, [*layout.online_ids, *query_ids], answer_ids, positions)

    def positions(self) -> Tensor:
        """Positions of query and answer."""
        tokens = len(self.query_ids) + len(self.answer_ids)
        if self.query_positions is None:
            return torch.arange(tokens) + self.plan.length
        answer = torch.arange(len(self.answer_ids)) + self.query_positions[-1] + 1
        return torch.cat((torch.tensor(self.query_positions, dtype=torch.long), answer))


@dataclass(frozen=True)
class Means:
    """Of which segments the means of keys and values are sliced too; see `cache_ops.means`."""

    lengths: tuple[int, ...]
    rows_K: Tensor
    """Rows of these segments, one after the other."""
    cosine_KD: Tensor
    sine_KD: Tensor
    """The rotation of each of their keys back to position 0, fp32."""

    def to(self, device: torch.device) -> Self:
        """The same with its tensors on `device`."""
        tensors = ("rows_K", "cosine_KD", "sine_KD")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})


@dataclass(frozen=True)
class PackedLayout:
    """What the attention must know of a packed row; passed to the model as `packed=`."""

    segment_lengths: tuple[int, ...]
    own_lengths: tuple[int, ...]
    prefix_lengths: tuple[int, ...]
    prefix_rows_P: Tensor | None
    """Rows of the sliced prefix tokens, all examples one after the other, if they are segments'.

    Where there are `means`, each of these counts as a row before the others.
    """
    prefix_kv_PL2HD: Tensor | None
    """Otherwise their keys, at chunk positions, and values: constants from outside the row."""
    cosine_PD: Tensor
    sine_PD: Tensor
    """The rotation of each sliced key to its new position, fp32."""
    visible: tuple[Tensor, ...]
    """For each example [own tokens, prefix + own tokens]: key position <= query position."""
    own_is_causal: bool
    """`visible` is plain causality behind the prefix in all examples: own token i sees the whole
    prefix and own tokens up to i."""
    detach_context: bool
    """No gradient flows from an answer into the encoding of its prefix."""
    means: Means | None = None
    segment_bounds_N: Tensor = field(init=False)
    own_bounds_N: Tensor = field(init=False)
    key_bounds_N: Tensor = field(init=False)
    """Where each segment, each example's own tokens, and its prefix and own tokens together start
    when laid one after the other, and where the last ends: int32."""

    def __post_init__(self) -> None:
        keys = [mask.shape[1] for mask in self.visible]
        for name, lengths in (
            ("segment_bounds_N", self.segment_lengths),
            ("own_bounds_N", self.own_lengths),
            ("key_bounds_N", keys),
        ):
            bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            object.__setattr__(self, name, bounds.to(self.cosine_PD.device))

    def to(self, device: torch.device) -> Self:
        """The same layout with its tensors on `device`."""
        return replace(
            self,
            prefix_rows_P=_moved(self.prefix_rows_P, device),
            prefix_kv_PL2HD=_moved(self.prefix_kv_PL2HD, device),
            cosine_PD=self.cosine_PD.to(device),
            sine_PD=self.sine_PD.to(device),
            visible=tuple(mask.to(device) for mask in self.visible),
            means=None if self.means is None else self.means.to(device),
        )


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch as one row of T tokens, of which A predict an answer token."""

    input_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[1, T]"""
    layout: PackedLayout
    answer_rows_A: Tensor
    """Rows whose logits predict `labels_A`: each stands one before its answer token."""
    labels_A: Tensor
    examples_A: Tensor
    """The example that each answer token belongs to."""

    @property
    def tokens(self) -> int:
        """Tokens of the row; none is padding."""
        return self.input_ids.shape[1]

    def to(self, device: torch.device) -> Self:
        """The same batch with its tensors on `device`."""
        moved = {field.name: getattr(self, field.name).to(device) for field in fields(self)}
        return type(self)(**moved)

    def model_inputs(self, contextualizer: Contextualizer | None = None) -> dict[str, object]:
        """Keyword arguments of a causal LM's forward; its logits come as [1, A, vocabulary].

        `contextualizer` is the model's, if it has one.
        """
        correction = {} if contextualizer is None else {"contextualizer": contextualizer}
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "packed": self.layout,
            "logits_to_keep": self.answer_rows_A,
            "use_cache": False,
            **correction,
        }


def pack(
    examples: Sequence[Example],
    chunk_ids: Mapping[str, Sequence[int]],
    rope: Rope,
    *,
    detach_context: bool = False,
) -> PackedBatch:
    """Packs examples into one row; a chunk used by several of them is encoded once.

    Args:
        examples: at least one, each with query tokens (the last predicts the first answer token).
        chunk_ids: chunk key to token ids, for every chunk of every plan, the prompt included.
        rope: the model's RoPE.
        detach_context: stop gradients at the sliced keys and values.

    Raises:
        ValueError: no examples, an example without query tokens, or a plan beyond its chunk's end.
    """
    lengths = used_tokens(examples, chunk_ids)
    segment_ids: list[int] = []
    first_row: dict[str, int] = {}
    for chunk, length in lengths.items():
        first_row[chunk] = len(segment_ids)
        segment_ids.extend(chunk_ids[chunk][:length])
    pieces = [piece for example in examples for piece in example.plan.slices]
    prefix_rows = [
        torch.arange(piece.start, piece.end) + first_row[piece.chunk] for piece in pieces
    ]
    prefix_rows_P = torch.cat([torch.empty(0, dtype=torch.long), *prefix_rows])
    means, from_start_P = None, None
    averaged = {p.chunk: lengths[p.chunk] for p in pieces if p.end > lengths[p.chunk]}
    if averaged:
        means = _means(averaged, first_row, rope)
        prefix_rows_P += len(averaged)
        # A mean is not yet at the position that follows its chunk's tokens.
        from_start_P = torch.zeros_like(prefix_rows_P)
        ends = list(accumulate(piece.end - piece.start for piece in pieces))
        for piece, end in zip(pieces, ends, strict=True):
            if piece.end > lengths[piece.chunk]:
                prefix_rows_P[end - 1] = list(averaged).index(piece.chunk)
                from_start_P[end - 1] = lengths[piece.chunk]
    return _lay_out(
        examples,
        rope,
        segment_ids,
        tuple(lengths.values()),
        prefix_rows_P=prefix_rows_P,
        from_start_P=from_start_P,
        means=means,
        detach_context=detach_context,
    )


def _means(lengths: Mapping[str, int], first_row: Mapping[str, int], rope: Rope) -> Means:
    """What averages the segments of some chunks, given by their tokens."""
    positions_K = torch.cat([torch.arange(length) for length in lengths.values()])
    starts = [torch.full((length,), first_row[chunk]) for chunk, length in lengths.items()]
    tables = rope.tables(-positions_K)
    return Means(tuple(lengths.values()), positions_K + torch.cat(starts), *tables)


def pack_over_prefix(
    examples: Sequence[Example], prefix_kv_PL2HD: Tensor, rope: Rope
) -> PackedBatch:
    """Packs questions and answers alone, over prefixes whose keys and values are at hand.

    No gradient flows into the prefixes: where the model's own weights computed them, logits and
    gradients are those of `pack(..., detach_context=True)`.

    Args:
        examples: as for `pack`.
        prefix_kv_PL2HD: the slices of all examples' plans, one after the other; keys as
            `encode_chunk` gives them, at chunk positions.
        rope: the model's RoPE.

    Raises:
        ValueError: as `pack`, or another number of prefix tokens than the plans have.
    """
    tokens = sum(example.plan.tokens for example in examples)
    if tokens != len(prefix_kv_PL2HD):
        raise ValueError(
            f"the plans have {tokens} prefix tokens, the keys and values {len(prefix_kv_PL2HD)}"
        )
    return _lay_out(examples, rope, [], (), prefix_kv_PL2HD=prefix_kv_PL2HD)


def _lay_out(
    examples: Sequence[Example],
    rope: Rope,
    segment_ids: Sequence[int],
    segment_lengths: tuple[int, ...],
    *,
    prefix_rows_P: Tensor | None = None,
    from_start_P: Tensor | None = None,
    means: Means | None = None,
    prefix_kv_PL2HD: Tensor | None = None,
    detach_context: bool = False,
) -> PackedBatch:
    """The row of some segments and of every example's own tokens."""
    if not examples:
        raise ValueError("a packed batch needs at least one example")
    if any(not example.query_ids for example in examples):
        raise ValueError("every example needs query tokens, from which the answer is predicted")
    row_ids = list(segment_ids)
    positions = [torch.arange(length) for length in segment_lengths]
    deltas, visible = [], []
    answer_rows: list[int] = []
    labels: list[int] = []
    answer_examples: list[int] = []
    for number, example in enumerate(examples):
        pieces = example.plan.slices
        lengths = torch.tensor([piece.end - piece.start for piece in pieces], dtype=torch.long)
        delta = torch.tensor([piece.delta for piece in pieces], dtype=torch.long)
        deltas.append(delta.repeat_interleave(lengths))
        prefix_positions = [
            torch.arange(piece.end - piece.start) + piece.position for piece in pieces
        ]

        own_ids = [*example.query_ids, *example.answer_ids]
        own_positions = example.positions()
        key_positions = torch.cat([*prefix_positions, own_positions])
        visible.append(key_positions[None, :] <= own_positions[:, None])

        first_answer_row = len(row_ids) + len(example.query_ids) - 1
        answer_rows.extend(range(first_answer_row, first_answer_row + len(example.answer_ids)))
        labels.extend(example.answer_ids)
        answer_examples.extend([number] * len(example.answer_ids))
        row_ids.extend(own_ids)
        positions.append(own_positions)

    deltas_P = torch.cat(deltas)
    if from_start_P is not None:
        deltas_P = deltas_P + from_start_P
    cosine_PD, sine_PD = rope.tables(deltas_P)
    layout = PackedLayout(
        segment_lengths=segment_lengths,
        own_lengths=tuple(mask.shape[0] for mask in visible),
        prefix_lengths=tuple(example.plan.tokens for example in examples),
        prefix_rows_P=prefix_rows_P,
        prefix_kv_PL2HD=prefix_kv_PL2HD,
        cosine_PD=cosine_PD,
        sine_PD=sine_PD,
        visible=tuple(visible),
        own_is_causal=all(
            torch.equal(mask, torch.ones_like(mask).tril(mask.shape[1] - mask.shape[0]))
            for mask in visible
        ),
        detach_context=detach_context,
        means=means,
    )
    return PackedBatch(
        input_ids=torch.tensor([row_ids]),
        position_ids=torch.cat(positions)[None],
        layout=layout,
        answer_rows_A=torch.tensor(answer_rows, dtype=torch.long),
        labels_A=torch.tensor(labels, dtype=torch.long),
        examples_A=torch.tensor(answer_examples, dtype=torch.long),
    )


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def used_tokens(
    examples: Sequence[Example], chunk_ids: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """For each chunk of the batch, in order of first use, one past its last used token.

    The mean of a chunk uses all of its tokens.

    Raises:
        ValueError: a plan beyond its chunk's end.
    """
    used: dict[str, int] = {}
    for example in examples:
        for piece in example.plan.slices:
            if piece.end > (length := len(chunk_ids[piece.chunk])):
                raise ValueError(
                    f"slice [{piece.start}, {piece.end}) is beyond the {length} tokens "
                    f"of chunk {piece.chunk!r}"
                )
            end = piece.end - (chunk_ids[piece.chunk][piece.end - 1] == MEAN_TOKEN)
            used[piece.chunk] = max(used.get(piece.chunk, 0), end)
    return used
