"""Whole weights and optimizer values of a model that DeepSpeed's ZeRO has split.

ZeRO lays the fp32 weights of a rank one after the other and gives the optimizer these flat tensors.
Moments lie as the weights do; the number of finished steps is kept for each flat tensor alike.
"""

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

STEP = "step"


def moment_keys(optimizer: Optimizer) -> list[str]:
    """What the optimizer keeps beside the step's number; nothing before the first step."""
    inner, flats = _inner(optimizer)
    keys = [key for key in inner.state.get(flats[0], {}) if key != STEP]
    if keys:
        _link(optimizer)
    return keys


def finished_steps(optimizer: Optimizer) -> Tensor:
    """The number of finished steps, fp32."""
    inner, flats = _inner(optimizer)
    return torch.tensor(float(inner.state[flats[0]][STEP]))


def start_state(optimizer: Optimizer, keys: Collection[str], steps: Tensor) -> None:
    """Gives a new optimizer moments, still to be filled, and the number of finished steps."""
    inner, flats = _inner(optimizer)
    for flat in flats:
        moments = {key: torch.zeros_like(flat) for key in keys}
        inner.state[flat] = {STEP: steps.to(flat.device, copy=True), **moments}
    _link(optimizer)


def whole(weight: nn.Parameter, key: str | None = None) -> Tensor:
    """A weight in fp32, or a moment of it, from all ranks; collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if key is None:
        return safe_get_full_fp32_param(weight)
    return safe_get_full_optimizer_state(weight, key)


def put(weight: nn.Parameter, value: Tensor, key: str | None = None) -> None:
    """The inverse of `whole`, for the value that every rank has; collective for weights."""
    from deepspeed import utils
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    if key is None:
        with torch.no_grad(), GatheredParameters([weight], modifier_rank=0):
            weight.copy_(value)
    if hasattr(weight, "ds_tensor"):
        # The last rank's part is padded.
        part = weight.ds_tensor.ds_numel
        ranks = -(-value.numel() // part)
        rank = torch.distributed.get_rank()
        padded = pad(value.flatten(), (0, max(ranks, rank + 1) * part - value.numel()))
        value = padded[rank * part : (rank + 1) * part]
        if key is None:
            utils.safe_set_local_fp32_param(weight, value)
        else:
            utils.safe_set_local_optimizer_state(weight, value, key)
    elif key is None:
        utils.safe_set_full_fp32_param(weight, value)
    else:
        utils.safe_set_full_optimizer_state(weight, value, key)


def _link(optimizer: Optimizer) -> None:
    """Lets each weight of ZeRO-2 know its moments.

    DeepSpeed does it after the first of several groups of weights was updated, when the others have
    none yet.
    """
    zero: Any = cast(Any, optimizer).optimizer
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _inner(optimizer: Optimizer) -> tuple[Optimizer, list[Tensor]]:
    """The optimizer that updates, and the flat tensors that it updates on this rank."""
    # DeepSpeed's optimizer is inside accelerate's.
    zero: Any = cast(Any, optimizer).optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return zero.optimizer, zero.fp32_partitioned_groups_flat
    return zero.optimizer, zero.single_partition_of_fp32_groups
