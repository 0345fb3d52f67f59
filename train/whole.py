"""Whole tensors of a model, however its ranks share it.

All functions are collective: every rank calls them, and iterates to the end, so that one weight at
a time is whole.
"""

from collections.abc import Callable, Collection, Iterator
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from train import zero
from train.optim import restore_state, state_tensors
from train.sharding import WHOLE_MODEL_ON_EACH_RANK, zero_stage

_WEIGHT, _OPTIMIZER = "weight.", "optimizer."


def prepare(
    accelerator: Accelerator, model: PreTrainedModel, optimizer: Optimizer
) -> tuple[PreTrainedModel, Optimizer]:
    """Accelerate's `prepare`, after which fp32 masters under ZeRO are the weights that were read.

    DeepSpeed makes its masters from weights that it has rounded to bf16 before.
    """
    read = {name: weight.detach() for name, weight in _trained(model)}
    shared, optimizer = accelerator.prepare(model, optimizer)
    if zero_stage(accelerator) and accelerator.deepspeed_plugin.deepspeed_config["bf16"]["enabled"]:
        for name, weight in _trained(_plain(accelerator, shared)):
            zero.put(weight, read[name])
    return shared, optimizer


def whole_state(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    """What a run resumes from: `weight.NAME` and `optimizer.NAME.KEY` of every trained weight.

    Without an optimizer, the weights alone. NAME is the weight's in the model as it was before
    `accelerator.prepare`. Where bf16 weights have fp32 masters, these are given. Each tensor is on
    the CPU of the main rank, and on the meta device of the others.
    """

    def main_only(tensor: Tensor) -> Tensor:
        return _whole(tensor).detach().to("cpu" if accelerator.is_main_process else "meta")

    plain = _plain(accelerator, model)
    if not zero_stage(accelerator):
        kept = state_tensors(plain, optimizer) if optimizer is not None else {}
        for name, weight in _trained(plain):
            yield _WEIGHT + name, main_only(weight)
            for key, value in kept.get(name, {}).items():
                yield f"{_OPTIMIZER}{name}.{key}", main_only(value)
        return
    keys = zero.moment_keys(optimizer) if optimizer is not None else []
    for name, weight in _trained(plain):
        yield _WEIGHT + name, main_only(zero.whole(weight))
        for key in keys:
            yield f"{_OPTIMIZER}{name}.{key}", main_only(zero.whole(weight, key))
        if optimizer is not None and keys:
            yield f"{_OPTIMIZER}{name}.{zero.STEP}", main_only(zero.finished_steps(optimizer))


def put_state(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    names: Collection[str],
    read: Callable[[str], Tensor],
) -> None:
    """Puts back what `whole_state` gave, on any number of ranks.

    Args:
        names: what there is to be read; other names than of weights and optimizer are left alone.
        read: the whole tensor of a name, on the CPU, the same on every rank.
    """
    keys: dict[str, list[str]] = {}
    for full_name in names:
        if full_name.startswith(_OPTIMIZER):
            name, _, key = full_name.removeprefix(_OPTIMIZER).rpartition(".")
            keys.setdefault(name, []).append(key)
    plain = _plain(accelerator, model)
    if zero_stage(accelerator):
        if keys:
            name, kept = next(iter(keys.items()))
            moments = [key for key in kept if key != zero.STEP]
            zero.start_state(optimizer, moments, read(f"{_OPTIMIZER}{name}.{zero.STEP}"))
        for name, weight in _trained(plain):
            zero.put(weight, read(_WEIGHT + name))
            for key in moments if keys else ():
                zero.put(weight, read(f"{_OPTIMIZER}{name}.{key}"), key)
        return
    restored = {}
    for name, weight in _trained(plain):
        with torch.no_grad():
            weight.copy_(_as_shared(read(_WEIGHT + name), weight))
        if name in keys:
            values = {key: read(f"{_OPTIMIZER}{name}.{key}") for key in keys[name]}
            restored[name] = {key: _as_shared(value, weight) for key, value in values.items()}
    if restored:
        restore_state(plain, optimizer, restored)


def whole_model(
    accelerator: Accelerator, model: nn.Module, untrained: Callable[[], PreTrainedModel]
) -> PreTrainedModel | None:
    """The trained model as it would be had it never been split, on the main rank; else None.

    Args:
        untrained: makes the model that the run began with, adapter and all; the main rank calls it
            where ranks do not hold the whole model, and the trained weights are put into it.
    """
    plain = _plain(accelerator, model)
    if accelerator.distributed_type in WHOLE_MODEL_ON_EACH_RANK:
        return cast(PreTrainedModel, plain) if accelerator.is_main_process else None
    fresh = untrained() if accelerator.is_main_process else None
    targets = dict(fresh.named_parameters()) if fresh is not None else {}
    for name, weight in _trained(plain):
        whole = zero.whole(weight) if zero_stage(accelerator) else _whole(weight)
        if fresh is not None:
            with torch.no_grad():
                targets[name].copy_(whole)
    return fresh


def _plain(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    unwrapped: nn.Module = accelerator.unwrap_model(model, keep_torch_compile=False)
    return unwrapped


def _trained(plain: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, weight) for name, weight in plain.named_parameters() if weight.requires_grad)


def _whole(tensor: Tensor) -> Tensor:
    # What gathers is not a tensor with memory until something waits for it.
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor


def _as_shared(value: Tensor, weight: nn.Parameter) -> Tensor:
    """A whole tensor split as `weight` is, if it has the weight's shape and the weight is split."""
    if not isinstance(weight, DTensor) or value.shape != weight.shape:
        return value
    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
