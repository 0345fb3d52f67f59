"""Slices of encoded chunks, rotated and laid side by side as a prefix cache."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import DynamicCache

from cache_ops.plan import PrefixPlan
from cache_ops.rope import Rope, rotate


def assemble(plan: PrefixPlan, chunk_kv: Mapping[str, Tensor], rope: Rope) -> DynamicCache:
    """Builds the cache that a query is encoded on, its first token at position `plan.length`.

    Args:
        plan: what to lay where.
        chunk_kv: chunk key to kv_TL2HD of `encode_chunk`, the prompt's included.
        rope: the model's RoPE.

    Raises:
        ValueError: a slice reaches beyond its chunk's tokens.
    """
    cache = DynamicCache()
    if not plan.slices:
        return cache
    for piece in plan.slices:
        if piece.end > (tokens := chunk_kv[piece.chunk].shape[0]):
            raise ValueError(
                f"slice [{piece.start}, {piece.end}) is beyond the {tokens} cached tokens "
                f"of chunk {piece.chunk!r}"
            )
    kv_TL2HD = torch.cat([chunk_kv[piece.chunk][piece.start : piece.end] for piece in plan.slices])
    deltas = torch.tensor([piece.delta for piece in plan.slices], device=kv_TL2HD.device)
    lengths = torch.tensor(
        [piece.end - piece.start for piece in plan.slices], device=kv_TL2HD.device
    )
    cosine_TD, sine_TD = rope.tables(deltas.repeat_interleave(lengths))
    keys_TLHD = rotate(kv_TL2HD[:, :, 0], cosine_TD[:, None, None], sine_TD[:, None, None])
    keys_LHTD = keys_TLHD.permute(1, 2, 0, 3)
    values_LHTD = kv_TL2HD[:, :, 1].permute(1, 2, 0, 3)
    for layer, (keys_HTD, values_HTD) in enumerate(zip(keys_LHTD, values_LHTD, strict=True)):
        cache.update(keys_HTD[None], values_HTD[None], layer)
    return cache
