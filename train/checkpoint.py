"""What a run leaves: states to resume from, the best weights so far, and the trained model.

Everything is safetensors and JSON; nothing is unpickled. Whole tensors are saved whatever the
sharding, so a state can be resumed on another number of ranks.
"""

import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipes.errors import UserError
from recipes.training import TrainConfig
from train.adapters import mark_activated, merge
from train.beside import take_beside
from train.history import state_step, states
from train.ranks import from_main
from train.run_folder import replace_folder, told_unwritable
from train.tensor_files import FILE_BYTES, DamagedError, TensorFiles, write_tensors
from train.watching import Watch
from train.whole import put_state, whole_state

logger = logging.getLogger(__name__)

_PROGRESS = "progress.json"
_WEIGHT = "weight."
_GENERATOR = "generator"


@dataclass
class Progress:
    """How far a run has come; the same on all ranks, and part of its state."""

    step: int = 0
    """Finished optimizer steps."""
    seconds: float = 0.0
    """That they took, over all parts of the run."""
    watch: Watch = field(default_factory=Watch)
    tracker_ids: dict[str, str] = field(default_factory=dict)
    """Where each tracker goes on with this run."""


def save_state(
    accelerator: Accelerator,
    run_folder: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: Optimizer,
    keep: int,
) -> None:
    """Saves trained weights, optimizer, progress and every rank's random generators; collective.

    The newest `keep` states stay. The new one is there before the oldest goes, so there is room
    needed for `keep` + 1.

    Raises:
        UserError: it cannot be written (no room, no right).
    """
    target = run_folder / "state" / f"step-{progress.step:08d}"
    before = states(run_folder)
    tensors = chain(_generators(accelerator), whole_state(accelerator, model, optimizer))
    described = asdict(progress) | {"made_with": _circumstances(accelerator)}
    if accelerator.is_main_process:
        # Only what could not be read is newer than a step that was trained.
        _remove(state for state in before if state.name >= target.name)
    _write(accelerator, target, tensors, described)
    if accelerator.is_main_process:
        older = [state for state in before if state.name < target.name]
        _remove(older[: max(0, len(older) - keep + 1)])
        _remove_bests(run_folder, {progress.watch.best_step})
    accelerator.wait_for_everyone()


def load_state(
    accelerator: Accelerator,
    run_folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    train: TrainConfig,
) -> Progress:
    """Puts the newest whole state back, or does nothing where there is none; collective.

    States that are not whole are passed over and named in the log.

    Raises:
        UserError: there are states and none is whole; or it is of another number of ranks, and
            random numbers are drawn in training.
    """
    step = from_main(accelerator, _newest_whole(run_folder) if accelerator.is_main_process else 0)
    if not step:
        return Progress()
    folder = run_folder / "state" / f"step-{step:08d}"
    found = json.loads((folder / _PROGRESS).read_text("utf-8"))
    made_with = found["made_with"]
    _check_circumstances(made_with, accelerator, model)
    files = TensorFiles.open(folder)
    put_state(accelerator, model, optimizer, files.files, files.read)
    if made_with["ranks"] == accelerator.num_processes:
        rank = accelerator.process_index
        torch.set_rng_state(files.read(f"{_GENERATOR}.cpu")[rank].clone())
        if f"{_GENERATOR}.cuda" in files.files and torch.cuda.is_available():
            torch.cuda.set_rng_state(files.read(f"{_GENERATOR}.cuda")[rank].clone())
    if accelerator.is_main_process:
        logger.info("%s: goes on after step %d", run_folder, step)
    watch = Watch.of(found["watch"])
    if train.evaluate and train.evaluate.keep_best and watch.best_step:
        try:
            TensorFiles.open(_best(run_folder, watch.best_step))
        except DamagedError as error:
            logger.warning("the best weights, of step %d, are lost: %s", watch.best_step, error)
            watch.best_step, watch.best_f1 = 0, None
    return Progress(step, found["seconds"], watch, found["tracker_ids"])


def save_best(
    accelerator: Accelerator, run_folder: Path, model: nn.Module, step: int, *, earlier: int
) -> None:
    """Keeps the weights after `step` as the best so far; collective.

    Those after the step `earlier` stay too: the newest state calls them the best, and a run may go
    on from there.

    Raises:
        UserError: they cannot be written (no room, no right).
    """
    weights = whole_state(accelerator, model, optimizer=None)
    _write(accelerator, _best(run_folder, step), weights, {"step": step})
    if accelerator.is_main_process:
        _remove_bests(run_folder, {step, earlier})
    accelerator.wait_for_everyone()


def put_best(run_folder: Path, model: PreTrainedModel, step: int) -> None:
    """Puts the weights that `save_best` has kept after `step` into a whole model.

    Raises:
        UserError: they are not there as they were written.
    """
    folder = _best(run_folder, step)
    try:
        files = TensorFiles.open(folder)
        files.verify()
    except DamagedError as error:
        raise UserError(
            f"{folder}, the best weights, are damaged: {error}. Delete {folder.parent} to train "
            "again from the start, or set train.evaluate.keep_best=false in a new run"
        ) from error
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in files.files:
            weights[name.removeprefix(_WEIGHT)].copy_(files.read(name))


def save_model(
    run_folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    invocation: list[int] | None = None,
) -> None:
    """Writes `checkpoint`, with tokenizer, chat template and generation settings.

    LoRA also writes `adapter`; its checkpoint is the merged model, so that both kinds load alike.
    What was trained beside the weights lies in files of its own beside both.

    Args:
        run_folder: where to.
        model: whole, on this rank; it is taken apart.
        tokenizer: goes along.
        invocation: the tokens from which an activated adapter acts on.

    Raises:
        UserError: it cannot be written (no room, no right), or not be merged.
    """
    write_beside = take_beside(model)

    def write_weights(folder: Path) -> None:
        model.save_pretrained(folder, max_shard_size=FILE_BYTES)
        write_beside(folder)

    def write_adapter(folder: Path) -> None:
        write_weights(folder)
        if invocation is not None:
            mark_activated(folder, invocation)

    def write(folder: Path) -> None:
        write_weights(folder)
        tokenizer.save_pretrained(folder)

    with told_unwritable(run_folder):
        if hasattr(model, "merge_and_unload"):
            replace_folder(run_folder / "adapter", write_adapter)
            model = merge(model)
        replace_folder(run_folder / "checkpoint", write)


def _write(
    accelerator: Accelerator,
    target: Path,
    tensors: Iterable[tuple[str, Tensor]],
    described: dict[str, Any],
) -> None:
    """Writes a folder of tensors on the main rank; the others iterate along."""
    if not accelerator.is_main_process:
        for _ in tensors:
            pass
        return

    def write(folder: Path) -> None:
        (folder / _PROGRESS).write_text(json.dumps(described, indent=1), encoding="utf-8")
        write_tensors(folder, tensors)

    with told_unwritable(target):
        replace_folder(target, write)


def _generators(accelerator: Accelerator) -> Iterator[tuple[str, Tensor]]:
    """The random state of every rank, [ranks, bytes]."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for kind, state in states.items():
        yield f"{_GENERATOR}.{kind}", accelerator.gather(state.to(accelerator.device)[None])


def _best(run_folder: Path, step: int) -> Path:
    return run_folder / "state" / f"best-{step:08d}"


def _remove_bests(run_folder: Path, needed: set[int]) -> None:
    kept = {_best(run_folder, step) for step in needed}
    _remove(set((run_folder / "state").glob("best-*")) - kept)


def _newest_whole(run_folder: Path) -> int:
    """The step of the newest state that is whole; 0 where there is no state at all.

    Raises:
        UserError: none is whole.
    """
    damaged: list[str] = []
    found = 0
    for state in reversed(states(run_folder)):
        try:
            TensorFiles.open(state).verify()
        except DamagedError as error:
            damaged.append(f"{state}: {error}")
        else:
            found = state_step(state)
            break
    if damaged and not found:
        raise UserError(
            "train.resume=true: no state of this run can be read:\n  "
            + "\n  ".join(damaged)
            + f"\nTo begin anew, delete {run_folder / 'state'} or choose another train.run_folder"
        )
    for one in damaged:
        logger.warning("passed over %s", one)
    return found


def _circumstances(accelerator: Accelerator) -> dict[str, Any]:
    """What must not change for a resumed run to be the same bit by bit."""
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    ranks, sharding = accelerator.num_processes, accelerator.distributed_type.value
    return {"ranks": ranks, "sharding": sharding, "device": accelerator.device.type, **versions}


def _check_circumstances(
    before: dict[str, Any], accelerator: Accelerator, model: nn.Module
) -> None:
    now = _circumstances(accelerator)
    if before["ranks"] != now["ranks"] and (drawing := _dropouts(model)):
        raise UserError(
            f"train.resume=true: the last state is of {before['ranks']} ranks, now there are "
            f"{now['ranks']}; {drawing} draws random numbers on each rank, so this would be "
            f"another run: train on {before['ranks']} ranks, or begin a new run"
        )
    changed = [
        f"{name} {before[name]} -> {value}" for name, value in now.items() if before[name] != value
    ]
    if changed and accelerator.is_main_process:
        logger.warning(
            "resumed with %s: the same steps up to rounding, not bit by bit", ", ".join(changed)
        )


def _dropouts(model: nn.Module) -> str:
    """What of a model is dropped out at random in training, in words; empty: nothing."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            found["train.lora.dropout" if "lora_dropout" in name else f"{name}.p"] = module.p
        if chance := getattr(module, "attention_dropout", 0.0):
            found["the model's attention_dropout"] = chance
    return " and ".join(f"{name}={chance}" for name, chance in found.items())


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)
