"""Attention over a packed row, registered with transformers under the name `coinrag_packed`.

The function sees queries and keys after RoPE at the row's own positions. Segments attend causally
inside themselves. Each example's own tokens attend to its sliced prefix, whose keys are rotated to
their new positions, and to themselves; visibility there is decided by positions alone. The prefix
is gathered from the segments, or comes with the layout. The model's code is not touched, and
nothing passes through a cache, so gradient checkpointing is safe.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from cache_ops.packing import PackedLayout
from cache_ops.rope import rotate

PACKED = "coinrag_packed"


def enable_packed(model: PreTrainedModel) -> None:
    """Makes the model's forward take `packed=`; from then on it accepts packed batches only."""
    model.set_attn_implementation(PACKED)


def packed_attention(
    module: nn.Module,
    query_1QTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packed: PackedLayout | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends as `packed` says; returns [1, T, Q, D].

    Raises:
        ValueError: the model was called without `packed=`, or with a padding mask.
    """
    if packed is None or attention_mask is not None:
        raise ValueError(
            "this model takes packed batches only (PackedBatch.model_inputs()); "
            "call set_attn_implementation('sdpa') to use it otherwise"
        )
    segments, examples = len(packed.segment_lengths), len(packed.own_lengths)
    lengths = packed.segment_lengths + packed.own_lengths
    queries = _split_tokens(query_1QTD, lengths)
    keys = _split_tokens(key_1HTD, lengths)
    values = _split_tokens(value_1HTD, lengths)

    if packed.prefix_rows_P is not None:
        prefix_key_1HPD = key_1HTD.index_select(2, packed.prefix_rows_P)
        prefix_value_1HPD = value_1HTD.index_select(2, packed.prefix_rows_P)
    else:
        assert packed.prefix_kv_PL2HD is not None, "prefixes are segments' rows or from outside"
        layer: Any = module.layer_idx
        kv_2HPD = packed.prefix_kv_PL2HD[:, layer].permute(1, 2, 0, 3).to(key_1HTD.dtype)
        prefix_key_1HPD, prefix_value_1HPD = kv_2HPD.split(1)
    if packed.detach_context:
        prefix_key_1HPD, prefix_value_1HPD = prefix_key_1HPD.detach(), prefix_value_1HPD.detach()
    prefix_key_1HPD = rotate(prefix_key_1HPD, packed.cosine_PD, packed.sine_PD)
    prefix_keys = _split_tokens(prefix_key_1HPD, packed.prefix_lengths)
    prefix_values = _split_tokens(prefix_value_1HPD, packed.prefix_lengths)

    for number in range(examples):
        own = segments + number
        keys[own] = torch.cat((prefix_keys[number], keys[own]), dim=2)
        values[own] = torch.cat((prefix_values[number], values[own]), dim=2)
    masks = [None] * segments + list(packed.visible)
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
    return torch.cat(outputs, dim=1), None


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


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
