"""The model, optimizer and schedule of a recipe, and the optimizer's state as plain tensors.

What the optimizers do at a learning rate of 5e-6, and their bytes for each weight (the weight, its
gradient, its two moments):

adamw             16 with fp32 weights. Of bf16 weights those around 0.02 go a twentieth of the way
                  that fp32 goes, and larger ones nowhere; so that is refused.
adamw_stochastic  8, with bf16 weights. The step is computed in fp32 and rounded at random, so what
                  bf16 cannot hold is kept on average: the whole way at every size of weight.
adamw_8bit        10 with fp32 weights, 6 with bf16 ones, which are rounded at random too.

Compensated (Kahan) sums take 10 bytes, and a bf16 weight of 1 with a bf16 compensation has too few
bits for a step of 5e-6: it does not move. They are not offered.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, get_scheduler

from cache_ops.attention import enable_packed
from cache_ops.hf import load_config, load_model
from recipes.errors import UserError
from recipes.schema import Recipe
from recipes.training import TrainConfig
from train.adapters import refuse_quantized, with_adapter
from train.beside import refuse_nothing_to_train

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
# Moments of so few bits cannot follow changes of a thousandth: with the usual 0.999 weights go 0.94
# of fp32's way in 3,000 noisy steps, with 0.99 they go 0.99 of it.
_LOW_PRECISION_BETAS = (0.9, 0.99)
_QUANTIZED = ("_codes", "_scale")


def trainable_model(config: Recipe) -> PreTrainedModel:
    """Loads the model, puts adapters on it where asked for, and makes it take packed batches.

    Raises:
        UserError: quantized weights, LoRA targets that the model does not have; see also
            `check_optimizer`.
        ModelNotFoundError, UnsupportedModelError: see `load_model`.
    """
    train = config.train
    check_optimizer(config)
    refuse_quantized(load_config(config.model.path))
    model = load_model(config.model.path, config.model.dtype)
    enable_packed(model)
    if train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if train.tuning == "lora":
        model = with_adapter(model, train.lora)
    if train.tuning == "none":
        model.requires_grad_(False)
    return model.train()


def check_optimizer(config: Recipe) -> None:
    """Passes an optimizer that has weights to train, moves them, and whose library is installed.

    Raises:
        UserError
    """
    name, dtype, tuning = config.train.optimizer, config.model.dtype, config.train.tuning
    refuse_nothing_to_train(config)
    if tuning == "full" and dtype != "float32" and name == "adamw":
        raise UserError(
            f"model.dtype={dtype} with train.tuning=full and train.optimizer=adamw loses updates "
            "that are small beside the weights; use train.optimizer=adamw_stochastic or "
            "adamw_8bit, model.dtype=float32 with train.mixed_precision=bf16, or train.tuning=lora"
        )
    if name == "adamw_stochastic" and (tuning != "full" or dtype == "float32"):
        of_tuning = {"lora": "an adapter's weights are", "none": "soft tokens are"}
        kept = of_tuning.get(tuning, "model.dtype=float32 weights are")
        raise UserError(
            f"train.optimizer=adamw_stochastic rounds bf16 weights, and {kept} kept in fp32: use "
            "train.optimizer=adamw, or adamw_8bit for smaller moments"
        )
    if name != "adamw" and find_spec("torchao") is None:
        raise UserError(
            f"train.optimizer={name} is torchao's, which is not installed: "
            "pip install 'coinrag[optim]'"
        )


def optimizer_and_schedule(
    model: nn.Module, train: TrainConfig, total_steps: int
) -> tuple[Optimizer, LRScheduler]:
    """`train.optimizer` over the trainable weights, with decay on matrices only, and its schedule.

    torchao's learning rates are tensors; so are then those that the schedule reports.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer == "adamw":
        optimizer: Optimizer = AdamW(groups, lr=train.learning_rate, fused=True)
    else:
        optimizer = _rounding_adamw(groups, train)
    warmup_steps = round(train.warmup_fraction * total_steps)
    schedule = get_scheduler(_SCHEDULES[train.schedule], optimizer, warmup_steps, total_steps)
    return optimizer, schedule


class _OwnRandomNumbers(Optimizer):
    """Mixed into an optimizer of torchao: what its step draws depends on the step's number alone.

    So ranks round alike, and a resumed run as the one it continues, whatever else draws.
    """

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; compiled on a GPU, where nothing of a weight's size is then held in fp32."""
        weight = self.param_groups[0]["params"][0]
        finished = next((int(state["step"]) for state in self.state.values()), 0)
        devices = [weight.device] if weight.is_cuda else []
        stance = "default" if weight.is_cuda else "force_eager"
        with torch.random.fork_rng(devices), torch.compiler.set_stance(stance):
            torch.manual_seed(finished)
            return super().step(closure)


def _rounding_adamw(groups: list[dict[str, Any]], train: TrainConfig) -> Optimizer:
    from torchao import optim

    kind = {"adamw_stochastic": optim._AdamW, "adamw_8bit": optim.AdamW8bit}[train.optimizer]
    rounding: Callable[..., Optimizer] = type(kind.__name__, (_OwnRandomNumbers, kind), {})
    return rounding(
        groups,
        lr=torch.tensor(train.learning_rate, dtype=torch.float64),
        betas=_LOW_PRECISION_BETAS,
        bf16_stochastic_round=True,
    )


def state_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """What an optimizer keeps for each weight, by the weight's name, as plain tensors.

    A moment of 8 bits becomes two: its codes (uint8, the weight's shape) and the scale of each of
    its blocks (fp32).
    """
    names: dict[Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    kept: dict[str, dict[str, Tensor]] = {}
    for weight, state in optimizer.state.items():
        parts = kept[names[weight]] = {}
        for key, value in state.items():
            if hasattr(value, "codes"):
                parts |= {key + part: getattr(value, part[1:]) for part in _QUANTIZED}
            else:
                parts[key] = value
    return kept


def restore_state(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Gives an optimizer, bit by bit, the state that `state_tensors` took from one like it."""
    weights = dict(model.named_parameters())
    ordered = (weight for group in optimizer.param_groups for weight in group["params"])
    numbers = {weight: number for number, weight in enumerate(ordered)}
    state = {
        numbers[weights[name]]: _joined(parts, weights[name]) for name, parts in tensors.items()
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _joined(parts: Mapping[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    state = {key: part for key, part in parts.items() if not key.endswith(_QUANTIZED)}
    for key, codes in parts.items():
        if not key.endswith("_codes"):
            continue
        from torchao.optim.subclass_8bit import OptimState8bit

        name = key.removesuffix("_codes")
        scale = parts[f"{name}_scale"]
        moment: Any = OptimState8bit.zeros(
            codes.shape,
            signed=name == "exp_avg",
            block_size=codes.numel() // scale.numel(),
            dtype=weight.dtype,
        )
        moment.codes.copy_(codes)
        moment.scale.copy_(scale)
        state[name] = moment
    return state
