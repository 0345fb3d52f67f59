"""Slices of encoded chunks, rotated and laid side by side as a prefix cache."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import DynamicCache

from cache_ops.plan import PrefixPlan
from cache_ops.rope import Rope


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
        keys_THD = torch.empty_like(kv_TL2HD[:, layer, 0])
        rotation.into(kv_TL2HD[:, layer, 0], keys_THD)
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
        # Both halves of a head turn by the same angles.
        half = cosine_TD.shape[-1] // 2
        self._cosine_T1D = cosine_TD[:, None, :half].contiguous()
        self._sine_T1D = sine_TD[:, None, :half].contiguous()

    @classmethod
    def of(cls, plan: PrefixPlan, rope: Rope, device: torch.device) -> "Rotation":
        """The rotation of each token of the plan by its slice's `delta`."""
        deltas = torch.tensor([piece.delta for piece in plan.slices], device=device)
        lengths = torch.tensor([piece.end - piece.start for piece in plan.slices], device=device)
        return cls(*rope.tables(deltas.repeat_interleave(lengths)))

    def into(self, keys_THD: Tensor, out_THD: Tensor) -> None:
        """Writes one layer's keys at their new positions.

        In fp32 as `rope.rotate`, but in place and without its temporaries, which take most of the
        time on a CPU.

        Args:
            keys_THD: at chunk positions.
            out_THD: where they go, of any strides, in the model's dtype.
        """
        in_place = out_THD.dtype == torch.float32
        wide_THD = out_THD if in_place else torch.empty_like(out_THD, dtype=torch.float32)
        first_THD, second_THD = keys_THD.float().chunk(2, dim=-1)
        out_first_THD, out_second_THD = wide_THD.chunk(2, dim=-1)
        torch.mul(first_THD, self._cosine_T1D, out=out_first_THD)
        out_first_THD.addcmul_(second_THD, self._sine_T1D, value=-1)
        torch.mul(second_THD, self._cosine_T1D, out=out_second_THD)
        out_second_THD.addcmul_(first_THD, self._sine_T1D)
        if not in_place:
            out_THD.copy_(wide_THD)
