"""Saving and loading: the state a run resumes from, and the model a stranger loads.

Everything is safetensors and JSON; nothing is unpickled.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache_ops.links import save_links, take_links
from train.run_folder import remove_other_states, replace_folder

_STATE = "state.safetensors"
_PROGRESS = "progress.json"


def save_state(
    run_folder: Path, step: int, model: nn.Module, optimizer: Optimizer, seconds: float
) -> None:
    """Saves trainable weights, optimizer and random generators after `step` finished steps."""
    tensors: dict[str, Tensor] = {
        f"weight.{name}": weight
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{key}": value for key, value in state.items()}
    tensors["generator.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["generator.cuda"] = torch.cuda.get_rng_state()

    def write(folder: Path) -> None:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, folder / _STATE)
        (folder / _PROGRESS).write_text(json.dumps({"step": step, "seconds": seconds}))

    target = run_folder / "state" / f"step-{step:08d}"
    replace_folder(target, write)
    remove_other_states(target)


def load_state(run_folder: Path, model: nn.Module, optimizer: Optimizer) -> tuple[int, float]:
    """Puts the newest state back; the finished steps and seconds, 0 where there is no state."""
    states = sorted((run_folder / "state").glob("step-*"))
    if not states:
        return 0, 0.0
    tensors = load_file(states[-1] / _STATE)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.copy_(tensors[f"weight.{name}"])
    restored: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, number, key = name.split(".")
            restored.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": restored})
    torch.set_rng_state(tensors["generator.cpu"])
    if torch.cuda.is_available() and "generator.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["generator.cuda"])
    progress = json.loads((states[-1] / _PROGRESS).read_text())
    return progress["step"], progress["seconds"]


def save_model(
    run_folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    link_tokens: int = 0,
) -> None:
    """Writes `checkpoint`, with tokenizer, chat template and generation settings.

    LoRA also writes `adapter`; its checkpoint is the merged model, so that both kinds load alike.
    Link tokens, `link_tokens` for each document, lie in a file beside the weights of both.
    """
    links_ND = take_links(model)

    def write_weights(folder: Path) -> None:
        model.save_pretrained(folder)
        if links_ND is not None:
            save_links(folder, links_ND, link_tokens)

    if hasattr(model, "merge_and_unload"):
        replace_folder(run_folder / "adapter", write_weights)
        model = cast(Any, model).merge_and_unload()

    def write(folder: Path) -> None:
        write_weights(folder)
        tokenizer.save_pretrained(folder)

    replace_folder(run_folder / "checkpoint", write)
