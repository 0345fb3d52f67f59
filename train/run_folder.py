"""The folder of a training run: who may use it, and how what is in it gets there.

recipe.yaml, origins.json   the resolved recipe and where each value came from
metrics.jsonl               one line a logged step, evaluation or spike; see `train.recorder`
training.png                the same as curves
tensorboard, wandb          what these trackers keep, where a recipe asks for them
state/step-N                what a resumed run continues from, the newest `train.keep_states`
state/best-N                the weights of the best evaluation so far
checkpoint                  the trained model, for AutoModelForCausalLM.from_pretrained
adapter                     the LoRA adapter alone, where one was trained
lock                        held by the process that is training
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError

from recipes.errors import UserError
from recipes.resolve import Resolved, resolve
from train.ranks import from_main

logger = logging.getLogger(__name__)

# Settings that may differ between a run and its continuation.
_FREE = (
    "train.run_folder", "train.resume", "train.save_every_steps", "train.log_every_steps",
    "train.keep_states", "train.spike_factor", "train.evaluate.sample_answers",
)  # fmt: skip
_FREE_SECTIONS = ("eval.", "store.", "scorer.", "context.repair")
# Of these, what changes the numbers that a frozen context reads.
_NEVER_FREE = ("store.dtype",)
_LOCK = "lock"
_PARTS = ("state", "checkpoint", "adapter")
CONTRACT_FILE = "serving.json"
"""An export has it; see `train.contract`."""
_WRITING = ".writing-"


def refuse_unwritable(folder: Path, option: str = "train.run_folder") -> None:
    """Passes a folder that is there or can be made, and is not what a run has written.

    Raises:
        UserError: `option` names it.
    """
    nearest = nearest_folder(folder)
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise UserError(f"{option}: {nearest} is not a folder that can be written to")
    path = folder.absolute()
    for part in (path, *path.parents):
        if part.name in _PARTS and (part.parent / "origins.json").is_file():
            raise UserError(
                f"{option}: {folder} lies in {part}, which the run in {part.parent} has written; "
                "choose a folder outside it"
            )


@contextmanager
def told_unwritable(target: Path) -> Iterator[None]:
    """Tells the user of what cannot be written.

    Raises:
        UserError: in place of what the system or safetensors raises.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{target} cannot be written: {error}. What was there before still is; "
            "train.resume=true goes on from the last state"
        ) from error


def nearest_folder(path: Path) -> Path:
    """What is there already of a path: itself, or the nearest above it."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


@contextmanager
def alone_in(
    folder: Path, accelerator: Accelerator, option: str = "train.run_folder"
) -> Iterator[None]:
    """Makes a folder and keeps other trainings out of it; all ranks must call it.

    The system gives the lock back when the process dies. A folder that stays empty goes again.

    Raises:
        UserError: another training is in it, or it cannot be made; `option` names it.
    """
    held = _lock(folder, option) if accelerator.is_main_process else None
    if not from_main(accelerator, held is not None):
        raise UserError(
            f"another process is training in {option} {folder}: wait for its end, or "
            "choose another folder"
        )
    try:
        yield
    finally:
        if held is not None:
            (folder / _LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
            os.close(held)


def _lock(folder: Path, option: str) -> int | None:
    """An open file with the lock on it, or None where another process has it."""
    path = folder / _LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"{option} {folder} cannot be made or used: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        logger.warning(
            "%s: no lock (%s): nothing keeps a second training out", folder, error.strerror
        )
        return descriptor
    # Its holder may have ended, and taken the file away, since it was opened.
    if not path.exists() or path.stat().st_ino != os.fstat(descriptor).st_ino:
        os.close(descriptor)
        return None
    return descriptor


def refuse_used(resolved: Resolved) -> None:
    """Passes a run folder that is new, or on resume the same run's.

    Raises:
        UserError: the folder is in use, or is resumed with other settings.
    """
    train = resolved.config.train
    folder = Path(train.run_folder)
    if not folder.is_dir() or all(path.name == _LOCK for path in folder.iterdir()):
        return
    if (folder / CONTRACT_FILE).is_file():
        raise UserError(f"train.run_folder {folder} is an export ({CONTRACT_FILE}): choose another")
    if not train.resume:
        raise UserError(
            f"train.run_folder {folder} is in use; choose another, or continue that run with "
            "train.resume=true"
        )
    _refuse_changes(resolved, folder)


def finished_run(folder: Path, option: str) -> Resolved:
    """The recipe of the run in a folder, which has left its trained model.

    Raises:
        UserError: there is none, or it has not come to its end; `option` names the folder.
    """
    if (folder / CONTRACT_FILE).is_file():
        raise UserError(
            f"{option}: {folder} is an export ({CONTRACT_FILE}), not the folder of a run: name "
            "the run folder that it was made of"
        )
    recipe = folder / "recipe.yaml"
    if not recipe.is_file():
        above = folder.parent
        hint = f"; did you mean {above}?" if (above / "recipe.yaml").is_file() else ""
        raise UserError(
            f"{option}: {folder} is not the folder of a run (train.run_folder), it has no "
            f"recipe.yaml{hint}"
        )
    if not (folder / "checkpoint" / "config.json").is_file():
        raise UserError(
            f"{option}: {folder} is not finished, it has no checkpoint: coinrag train {recipe} "
            "train.resume=true goes on with it"
        )
    return resolve([str(recipe)])


def _refuse_changes(resolved: Resolved, folder: Path) -> None:
    recipe = folder / "recipe.yaml"
    if not recipe.is_file():
        raise UserError(f"train.run_folder {folder} has no recipe.yaml: it is not a run to resume")
    changed = changes(resolve([str(recipe)]), resolved)
    if changed:
        raise UserError(
            f"train.resume=true continues the run in {folder} as it was; changed settings:\n  "
            + "\n  ".join(changed)
        )


def changes(before: Resolved, now: Resolved) -> list[str]:
    """The settings that are not the same, but for those that a run's continuation may change."""
    old, new = flat(before), flat(now)
    # These are learned where a teacher's answers are.
    learns_own = new.get("train.distillation.answers") == "teacher"
    fixed = {*_NEVER_FREE, *(["eval.max_new_tokens"] if learns_own else [])}
    return [
        f"{path}: {old.get(path)!r} -> {new.get(path)!r}"
        for path in old | new
        if (path in fixed or not _is_free(path)) and old.get(path) != new.get(path)
    ]


def _is_free(path: str) -> bool:
    return path in _FREE or path.startswith(_FREE_SECTIONS)


def flat(resolved: Resolved) -> dict[str, Any]:
    """The resolved options by dotted path."""
    values: dict[str, Any] = {}
    for path in resolved.origins:
        value: Any = resolved.config.model_dump(mode="json")
        for key in path.split("."):
            value = value[key]
        values[path] = value
    return values


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Fills a folder by `write` under a temporary name, then renames it; never half there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_WRITING) as scratch:
        fresh = Path(scratch) / target.name
        fresh.mkdir()
        write(fresh)
        for path in (*fresh.rglob("*"), fresh):
            _flush(path)
        if target.exists():
            target.rename(Path(scratch) / "old")
        fresh.rename(target)
        _flush(target.parent)


def _flush(path: Path) -> None:
    """Has what was written to a file, or the names in a folder, outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes of a run were writing; for the holder of its lock."""
    for place in (folder, folder / "state"):
        for path in place.glob(f"{_WRITING}*"):
            shutil.rmtree(path)
    for name in ("recipe.yaml", "origins.json", "metrics.jsonl"):
        for path in folder.glob(f".{name}.*"):
            path.unlink()
