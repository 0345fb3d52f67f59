"""What the main rank shows and writes of a run: progress and `metrics.jsonl`."""

import json
import resource
from pathlib import Path
from typing import Any

import torch

from recipes.files import write_text
from recipes.progress import Progress
from recipes.schema import TrainConfig


class Recorder:
    """Records finished steps; a resumed run forgets the lines of steps that it repeats."""

    def __init__(self, folder: Path, train: TrainConfig, first_step: int, total_steps: int) -> None:
        self._path = folder / "metrics.jsonl"
        self._train = train
        self._total_steps = total_steps
        self._progress = Progress("train", total_steps, "steps", start=first_step)
        lines = self._path.read_text("utf-8").splitlines() if self._path.exists() else []
        # A killed run may have left half a line at the end.
        whole = [line for line in lines if line.endswith("}")]
        kept = [line for line in whole if json.loads(line)["step"] <= first_step]
        write_text(self._path, "".join(f"{line}\n" for line in kept))

    def record(self, values: dict[str, Any]) -> bool:
        """Counts a step, and writes its values where it is one to be logged; whether it was."""
        self._progress.advance()
        done = values["step"]
        logged = done % self._train.log_every_steps == 0 or done == self._total_steps
        if logged:
            values["peak_memory_gib"] = round(peak_memory_gib(), 3)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        return logged

    def saves(self, done: int) -> bool:
        """Whether the state is to be saved after `done` steps; the end has its checkpoint."""
        every = self._train.save_every_steps
        return every is not None and done % every == 0 and done < self._total_steps

    def close(self) -> None:
        """Ends the progress display."""
        self._progress.close()


def peak_memory_gib() -> float:
    """The most memory this process has held: of its GPU, or resident where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
