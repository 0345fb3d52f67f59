"""Slices of encoded chunks, rotated and laid side by side as a prefix cache."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import DynamicCache

from cache_ops.plan import PrefixPlan
from cache_ops.rope import Rope, rotate


def assemble(plan: PrefixPlan, chunk_kv: Mapping[str, Tensor], rope: Rope) -> DynamicCache:
    """Builds the transformers cache that a query is encoded on, its first token at `plan.length`.

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
    kv_TL2HD = gather(plan, chunk_kv)
    rotation = Rotation.of(plan, rope, kv_TL2HD.device)
    for layer in range(kv_TL2HD.shape[1]):
        keys_THD = rotation(kv_TL2HD[:, layer, 0])
        values_THD = kv_TL2HD[:, layer, 1]
        cache.update(keys_THD.transpose(0, 1)[None], values_THD.transpose(0, 1)[None], layer)
    return cache


def gather(plan: PrefixPlan, chunk_kv: Mapping[str, Tensor]) -> Tensor:
    """The plan's tokens in its order, as kv_TL2HD still at chunk positions.

    Raises:
        ValueError: a slice reaches beyond its chunk's tokens.
    """
    for piece in plan.slices:
        if piece.end > (tokens := chunk_kv[piece.chunk].shape[0]):
            raise ValueError(
                f"slice [{piece.start}, {piece.end}) is beyond the {tokens} cached tokens "
                f"of chunk {piece.chunk!r}"
            )
    return torch.cat([chunk_kv[piece.chunk][piece.start : piece.end] for piece in plan.slices])


class Rotation:
    """Moves a plan's keys from their chunk positions to their places in the prefix."""

    def __init__(self, cosine_TD: Tensor, sine_TD: Tensor) -> None:
        self._cosine_T1D = cosine_TD[:, None]
        self._sine_T1D = sine_TD[:, None]

    @classmethod
    def of(cls, plan: PrefixPlan, rope: Rope, device: torch.device) -> "Rotation":
        """The rotation of each token of the plan by its slice's `delta`."""
        deltas = torch.tensor([piece.delta for piece in plan.slices], device=device)
        lengths = torch.tensor([piece.end - piece.start for piece in plan.slices], device=device)
        return cls(*rope.tables(deltas.repeat_interleave(lengths)))

    def __call__(self, keys_THD: Tensor) -> Tensor:
        """One layer's keys at their new positions, in the keys' dtype."""
        return rotate(keys_THD, self._cosine_T1D, self._sine_T1D)
