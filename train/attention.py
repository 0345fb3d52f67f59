"""Which kernel computes a run's packed attention."""

import torch
from transformers import PreTrainedConfig

from cache_ops.attention import Kernel
from cache_ops.varlen import why_not_varlen
from recipes.errors import UserError
from recipes.schema import Recipe


def attention_kernel(
    recipe: Recipe, model_config: PreTrainedConfig, device: torch.device
) -> Kernel:
    """What `train.attention` means on this device: `auto` is varlen wherever that can be.

    Raises:
        UserError: varlen was asked for where it cannot be; says why.
    """
    train = recipe.train
    if train.attention == "sdpa":
        return "sdpa"
    mixed = train.mixed_precision == "bf16"
    dtype = torch.bfloat16 if mixed else getattr(torch, recipe.model.dtype)
    reason = why_not_varlen(model_config, dtype, device)
    if reason is None:
        return "varlen"
    if train.attention == "varlen":
        raise UserError(
            f"train.attention=varlen {reason}; train.attention=auto takes it wherever it can be"
        )
    return "sdpa"
