"""What a run folder tells of a run's steps; read without anything heavy."""

import json
from pathlib import Path
from typing import Any

from recipes.errors import UserError

METRICS_FILE = "metrics.jsonl"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics; a half-written last one is left out.

    Raises:
        UserError: another line is not one that a run writes; names it.
    """
    path = folder / METRICS_FILE
    # Complete lines end with a newline, so the last piece is empty or what a kill has cut.
    complete = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [_metrics_line(path, number, line) for number, line in enumerate(complete, start=1)]


def _metrics_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError:
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise UserError(
            f"{path}, line {number}, is not a line of metrics: {line[:80].decode(errors='replace')}"
            "; take it out, the run itself does not need it"
        )
    return values


def states(folder: Path) -> list[Path]:
    """The states of a run, whole or not, oldest first."""
    return sorted((folder / "state").glob("step-*"))


def state_step(state: Path) -> int:
    """The finished steps of a state."""
    return int(state.name.removeprefix("step-"))


def is_finished(folder: Path) -> bool:
    """Whether the run in the folder has left its trained model."""
    return (folder / "checkpoint").is_dir()


def outcome(folder: Path) -> dict[str, Any]:
    """How far the run in a folder has come: whether it is `finished`, and its last `step`.

    Raises:
        UserError: see `read_metrics`.
    """
    steps = [state_step(state) for state in states(folder)]
    steps += [line["step"] for line in read_metrics(folder)]
    return {"finished": is_finished(folder), "step": max(steps, default=0)}
