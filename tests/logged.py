"""The steps that a training run has logged."""

from pathlib import Path
from typing import Any

from train.history import read_metrics


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The step lines of a run's metrics, without evaluations and spikes."""
    return [line for line in read_metrics(folder) if "loss" in line]
