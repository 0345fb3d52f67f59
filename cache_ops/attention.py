"""Attention over a packed row, registered with transformers under the name `coinrag_packed`.

The function sees queries and keys after RoPE at the row's own positions. Segments attend causally
inside themselves. Each example's own tokens attend to its sliced prefix, whose keys are rotated to
their new positions, and to themselves; visibility there is decided by positions alone. The model's
code is not touched, and nothing passes through a cache, so gradient checkpointing is safe.
"""

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
    context_tokens = sum(packed.segment_lengths)
    lengths = [context_tokens, *packed.own_lengths]
    context_key, *own_keys = key_1HTD.split(lengths, dim=2)
    context_value, *own_values = value_1HTD.split(lengths, dim=2)
    context_query, *own_queries = query_1QTD.split(lengths, dim=2)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    segments = packed.segment_lengths
    outputs = [
        attend(query, key, value, None)
        for query, key, value in zip(
            context_query.split(segments, dim=2),
            context_key.split(segments, dim=2),
            context_value.split(segments, dim=2),
            strict=True,
        )
    ]

    prefix_key = context_key.index_select(2, packed.prefix_rows_P)
    prefix_value = context_value.index_select(2, packed.prefix_rows_P)
    if packed.detach_context:
        prefix_key, prefix_value = prefix_key.detach(), prefix_value.detach()
    prefix_key = rotate(prefix_key, packed.cosine_PD, packed.sine_PD)
    outputs += [
        attend(query, torch.cat((before, key), 2), torch.cat((before_value, value), 2), mask)
        for query, before, key, before_value, value, mask in zip(
            own_queries,
            prefix_key.split(packed.prefix_lengths, dim=2),
            own_keys,
            prefix_value.split(packed.prefix_lengths, dim=2),
            own_values,
            packed.visible,
            strict=True,
        )
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Visibility is the layout's business; transformers builds no mask."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
