"""The model, optimizer and schedule of a recipe."""

from typing import cast

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, get_scheduler

from cache_ops.attention import enable_packed
from cache_ops.hf import load_model
from recipes.errors import UserError
from recipes.schema import Recipe, TrainConfig

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def trainable_model(config: Recipe) -> PreTrainedModel:
    """Loads the model, puts adapters on it where asked for, and makes it take packed batches.

    Raises:
        UserError: full fine-tuning of bf16 weights, or LoRA targets that the model does not have.
        ModelNotFoundError, UnsupportedModelError: see `load_model`.
    """
    train = config.train
    if train.tuning == "full" and config.model.dtype != "float32":
        raise UserError(
            f"model.dtype={config.model.dtype} with train.tuning=full loses updates that are small "
            "beside the weights; use model.dtype=float32 with train.mixed_precision=bf16, or LoRA"
        )
    model = load_model(config.model.path, config.model.dtype)
    enable_packed(model)
    if train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if train.tuning == "lora":
        model = _with_lora(model, train)
    return model.train()


def _with_lora(model: PreTrainedModel, train: TrainConfig) -> PreTrainedModel:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=train.lora.rank,
        lora_alpha=train.lora.alpha,
        lora_dropout=train.lora.dropout,
        target_modules=train.lora.target_modules,
    )
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    if unknown := sorted(set(train.lora.target_modules) - linear):
        raise UserError(
            f"train.lora.target_modules: {', '.join(unknown)} not in the model; "
            f"it has {', '.join(sorted(linear))}"
        )
    return cast(PreTrainedModel, get_peft_model(model, lora))


def optimizer_and_schedule(
    model: torch.nn.Module, train: TrainConfig, total_steps: int
) -> tuple[Optimizer, LRScheduler]:
    """AdamW over the trainable weights, with decay on matrices only, and its schedule by steps."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        [group for group in groups if group["params"]], lr=train.learning_rate, fused=True
    )
    warmup_steps = round(train.warmup_fraction * total_steps)
    schedule = get_scheduler(_SCHEDULES[train.schedule], optimizer, warmup_steps, total_steps)
    return optimizer, schedule
