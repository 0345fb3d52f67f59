"""Causal attention of many sequences in one flash kernel, by torch's `varlen_attn`.

Where a sequence has more keys than queries, its last query sees all keys and the one before sees
one less ("bottom-right"). The kernel takes no mask and no dropout.
"""

from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedConfig

from cache_ops.rope import head_dim

# torch 2.11 shares heads without being asked; later ones want to be asked.
_ASKED = "enable_gqa" in signature(varlen_attn).parameters
_SHARES_HEADS: dict[str, Any] = {"enable_gqa": True} if _ASKED else {}


def why_not_varlen(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What stands against the kernel, in words that follow "varlen attention"; None: nothing.

    Args:
        config: the model's.
        dtype: what attention computes in; under autocast, autocast's.
        device: where.
    """
    if device.type != "cuda":
        return f"needs a CUDA GPU, and this runs on {device.type}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "needs flash attention, which this build of torch lacks"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"needs a GPU of compute capability 8.0, and this one has {capability[0]}.x"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    if (dimensions := head_dim(config)) > 256 or dimensions % 8:
        return f"needs a multiple of 8 up to 256 as head dimension, and the model has {dimensions}"
    if dropout := getattr(config, "attention_dropout", 0.0):
        return f"has no attention dropout, and the model's config asks for {dropout}"
    return None


def causal_attention(
    query_TQD: Tensor,
    key_SHD: Tensor,
    value_SHD: Tensor,
    query_bounds_N: Tensor,
    key_bounds_N: Tensor,
    longest: tuple[int, int],
    scaling: float,
) -> Tensor:
    """Attends sequence by sequence, bottom-right causal; [T, Q, D].

    Args:
        query_TQD: the sequences' queries one after the other, bf16 or fp16.
        key_SHD, value_SHD: their keys and values, with as many heads or a divisor.
        query_bounds_N, key_bounds_N: int32, where each sequence starts, and the end of the last.
        longest: the most queries and the most keys of one sequence.
        scaling: of the scores.
    """
    output = varlen_attn(
        query_TQD,
        key_SHD,
        value_SHD,
        query_bounds_N,
        key_bounds_N,
        *longest,
        scale=scaling,
        window_size=(-1, 0),
        **_SHARES_HEADS,
    )
    return cast(Tensor, output)
