"""Attention over a packed row, registered with transformers in two forms.

`coinrag_packed` calls torch's SDPA for every segment and example, `coinrag_packed_varlen` one
flash kernel for all segments and one for all examples (see `cache_ops.varlen`).

The functions see queries and keys after RoPE at the row's own positions. Segments attend causally
inside themselves. Each example's own tokens attend to its sliced prefix, whose keys are rotated to
their new positions, and to themselves; visibility there is decided by positions alone. The prefix
is gathered from the segments, or comes with the layout, and a contextualizer corrects it if the
model's call names one. The model's code is not touched, and nothing passes through a cache, so
gradient checkpointing is safe.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from cache_ops.contextualizer import Contextualizer
from cache_ops.packing import Means, PackedLayout
from cache_ops.rope import rotate
from cache_ops.varlen import causal_attention

PACKED = "coinrag_packed"
PACKED_VARLEN = "coinrag_packed_varlen"

Kernel = Literal["sdpa", "varlen"]
_NAMES: dict[Kernel, str] = {"sdpa": PACKED, "varlen": PACKED_VARLEN}


def enable_packed(model: PreTrainedModel, kernel: Kernel = "sdpa") -> None:
    """Makes the model's forward take `packed=`; from then on it accepts packed batches only.

    `why_not_varlen` tells where the kernel `varlen` cannot be.
    """
    model.set_attn_implementation(_NAMES[kernel])


def packed_attention(
    module: nn.Module,
    query_1QTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packed: PackedLayout | None = None,
    contextualizer: Contextualizer | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends as `packed` says; returns [1, T, Q, D].

    Raises:
        ValueError: the model was called without `packed=`, or with a padding mask.
    """
    packed = _checked(packed, attention_mask)
    segments = len(packed.segment_lengths)
    lengths = packed.segment_lengths + packed.own_lengths
    queries = _split_tokens(query_1QTD, lengths)
    keys = _split_tokens(key_1HTD, lengths)
    values = _split_tokens(value_1HTD, lengths)
    prefix_keys, prefix_values = _prefixes(module, key_1HTD, value_1HTD, packed, contextualizer)
    for number in range(len(packed.own_lengths)):
        own = segments + number
        keys[own] = torch.cat((prefix_keys[number], keys[own]), dim=2)
        values[own] = torch.cat((prefix_values[number], values[own]), dim=2)
    masks = [None] * segments + list(packed.visible)
    return _one_by_one(queries, keys, values, masks, scaling, dropout), None


def packed_varlen_attention(
    module: nn.Module,
    query_1QTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packed: PackedLayout | None = None,
    contextualizer: Contextualizer | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """As `packed_attention`, with one kernel for all segments and one for all examples.

    Examples whose tokens stand between those of their prefix need a mask, which the kernel cannot
    take: a row with any of them has its examples computed one by one.

    Raises:
        ValueError: as `packed_attention`, or dropout was asked for.
    """
    packed = _checked(packed, attention_mask)
    if dropout:
        raise ValueError("varlen attention has no dropout")
    prefix_keys, prefix_values = _prefixes(module, key_1HTD, value_1HTD, packed, contextualizer)
    # RoPE leaves fp32 under autocast, which does not reach into the kernel.
    device = query_1QTD.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else value_1HTD.dtype
    encoded, own = sum(packed.segment_lengths), sum(packed.own_lengths)
    segment_query, own_query = _split_tokens(query_1QTD.to(dtype), (encoded, own))
    segment_key, *keys = _split_tokens(key_1HTD.to(dtype), (encoded, *packed.own_lengths))
    segment_value, *values = _split_tokens(value_1HTD.to(dtype), (encoded, *packed.own_lengths))
    pairs_of_keys = [(p.to(dtype), k) for p, k in zip(prefix_keys, keys, strict=True)]
    pairs_of_values = [(p.to(dtype), v) for p, v in zip(prefix_values, values, strict=True)]

    outputs_1TQD = []
    if encoded:
        longest = max(packed.segment_lengths)
        output_TQD = causal_attention(
            _token_major(segment_query),
            _token_major(segment_key),
            _token_major(segment_value),
            packed.segment_bounds_N,
            packed.segment_bounds_N,
            (longest, longest),
            scaling,
        )
        outputs_1TQD.append(output_TQD[None])
    if packed.own_is_causal:
        output_TQD = causal_attention(
            _token_major(own_query),
            torch.cat([_token_major(piece) for pair in pairs_of_keys for piece in pair]),
            torch.cat([_token_major(piece) for pair in pairs_of_values for piece in pair]),
            packed.own_bounds_N,
            packed.key_bounds_N,
            (max(packed.own_lengths), max(mask.shape[1] for mask in packed.visible)),
            scaling,
        )
        outputs_1TQD.append(output_TQD[None])
    else:
        output_1TQD = _one_by_one(
            _split_tokens(own_query, packed.own_lengths),
            [torch.cat(pair, dim=2) for pair in pairs_of_keys],
            [torch.cat(pair, dim=2) for pair in pairs_of_values],
            packed.visible,
            scaling,
            dropout,
        )
        outputs_1TQD.append(output_1TQD)
    return torch.cat(outputs_1TQD, dim=1), None


def _checked(packed: PackedLayout | None, attention_mask: Tensor | None) -> PackedLayout:
    if packed is None or attention_mask is not None:
        raise ValueError(
            "this model takes packed batches only (PackedBatch.model_inputs()); "
            "call set_attn_implementation('sdpa') to use it otherwise"
        )
    return packed


def _prefixes(
    module: nn.Module,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    packed: PackedLayout,
    contextualizer: Contextualizer | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Each example's sliced keys, at their new positions, and values: 1HPD."""
    layer: Any = module.layer_idx
    if packed.prefix_rows_P is not None:
        if packed.means is not None:
            key_1HTD, value_1HTD = _with_means(key_1HTD, value_1HTD, packed.means)
        prefix_key_1HPD = key_1HTD.index_select(2, packed.prefix_rows_P)
        prefix_value_1HPD = value_1HTD.index_select(2, packed.prefix_rows_P)
    else:
        assert packed.prefix_kv_PL2HD is not None, "prefixes are segments' rows or from outside"
        kv_2HPD = packed.prefix_kv_PL2HD[:, layer].permute(1, 2, 0, 3).to(key_1HTD.dtype)
        prefix_key_1HPD, prefix_value_1HPD = kv_2HPD.split(1)
    if packed.detach_context:
        prefix_key_1HPD, prefix_value_1HPD = prefix_key_1HPD.detach(), prefix_value_1HPD.detach()
    prefix_key_1HPD = rotate(prefix_key_1HPD, packed.cosine_PD, packed.sine_PD)
    if contextualizer is not None:
        prefix_key_1HPD, prefix_value_1HPD = contextualizer(
            layer, prefix_key_1HPD, prefix_value_1HPD, packed.prefix_lengths
        )
    return (
        _split_tokens(prefix_key_1HPD, packed.prefix_lengths),
        _split_tokens(prefix_value_1HPD, packed.prefix_lengths),
    )


def _with_means(key_1HTD: Tensor, value_1HTD: Tensor, means: Means) -> tuple[Tensor, Tensor]:
    """The row's keys and values behind the means of some segments, whose keys are at position 0."""
    keys_1HKD, values_1HKD = (
        states.index_select(2, means.rows_K).float() for states in (key_1HTD, value_1HTD)
    )
    keys_1HKD = rotate(keys_1HKD, means.cosine_KD, means.sine_KD)

    def before(row_1HTD: Tensor, averaged_1HKD: Tensor) -> Tensor:
        pieces = averaged_1HKD.split(means.lengths, dim=2)
        means_1HMD = [piece.mean(dim=2, keepdim=True).to(row_1HTD.dtype) for piece in pieces]
        return torch.cat((*means_1HMD, row_1HTD), dim=2)

    return before(key_1HTD, keys_1HKD), before(value_1HTD, values_1HKD)


def _one_by_one(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    scaling: float,
    dropout: float,
) -> Tensor:
    """SDPA of each sequence under its mask, or causal without one; [1, T, Q, D]."""
    outputs = [
        scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        for query, key, value, mask in zip(queries, keys, values, masks, strict=True)
    ]
    return torch.cat(outputs, dim=1)


def _token_major(states_1HTD: Tensor) -> Tensor:
    """The row as [T, H, D]."""
    return states_1HTD[0].transpose(0, 1)


def _split_tokens(states_1HTD: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Splits along T in the token-major layout that projections leave.

    The backward of a split is then one concatenation of contiguous pieces; that of slicing would
    be a zero-fill and an addition of the whole tensor for every piece.
    """
    return [
        piece.transpose(1, 2) for piece in states_1HTD.transpose(1, 2).split(list(lengths), dim=1)
    ]


def _no_mask(*_: Any, **__: Any) -> None:
    """Visibility is the layout's business; transformers builds no mask."""


for _name, _function in ((PACKED, packed_attention), (PACKED_VARLEN, packed_varlen_attention)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, _no_mask)
