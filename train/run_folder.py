"""The folder of a training run: who may use it, its metrics, and what stays in it.

recipe.yaml, origins.json   the resolved recipe and where each value came from
metrics.jsonl               one line a logged step
state/step-N                what a resumed run continues from; only the newest is kept
checkpoint                  the trained model, for AutoModelForCausalLM.from_pretrained
adapter                     the LoRA adapter alone, where one was trained
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.errors import UserError
from recipes.resolve import Resolved, resolve

# Settings that may differ between a run and its continuation.
_FREE = ("train.resume", "train.save_every_steps", "train.log_every_steps")
_FREE_SECTIONS = ("eval.", "store.")
# Of these, what changes the numbers that a frozen context reads.
_NEVER_FREE = ("store.dtype",)


def refuse_used(resolved: Resolved) -> None:
    """Passes a run folder that is new, or on resume the same run's.

    Raises:
        UserError: the folder is in use, or is resumed with other settings.
    """
    train = resolved.config.train
    folder = Path(train.run_folder)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise UserError(f"train.run_folder: {nearest} is not a folder that can be written to")
    if folder.is_dir() and any(folder.iterdir()):
        if not train.resume:
            raise UserError(
                f"train.run_folder {folder} is in use; choose another, or continue that run with "
                "train.resume=true"
            )
        _refuse_changes(resolved, folder)


def is_finished(folder: Path) -> bool:
    """Whether the run in the folder has left its trained model."""
    return (folder / "checkpoint").is_dir()


def _refuse_changes(resolved: Resolved, folder: Path) -> None:
    recipe = folder / "recipe.yaml"
    if not recipe.is_file():
        raise UserError(f"train.run_folder {folder} has no recipe.yaml: it is not a run to resume")
    before, now = flat(resolve([str(recipe)])), flat(resolved)
    changed = [
        f"{path}: {before.get(path)!r} -> {value!r}"
        for path, value in now.items()
        if not _is_free(path) and before.get(path) != value
    ]
    if changed:
        raise UserError(
            f"train.resume=true continues the run in {folder} as it was; changed settings:\n  "
            + "\n  ".join(changed)
        )


def _is_free(path: str) -> bool:
    return path in _FREE or (path.startswith(_FREE_SECTIONS) and path not in _NEVER_FREE)


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
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".writing-") as scratch:
        fresh = Path(scratch) / target.name
        fresh.mkdir()
        write(fresh)
        for path in fresh.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if target.exists():
            target.rename(Path(scratch) / "old")
        fresh.rename(target)


def remove_other_states(newest: Path) -> None:
    """Keeps only the newest state folder."""
    for state in newest.parent.glob("step-*"):
        if state != newest:
            shutil.rmtree(state)
