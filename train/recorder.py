"""What the main rank shows and writes of a run: progress, `metrics.jsonl` and `training.png`.

A line of `metrics.jsonl` is a logged step, or has one of the keys `evaluation` and `spike` and
stands behind the step that it belongs to.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.files import write_text
from recipes.progress import Progress
from recipes.training import TrainConfig
from train.curves import draw_curves
from train.history import METRICS_FILE, read_metrics
from train.run_folder import told_unwritable
from train.throughput import used
from train.watching import answer_text, spike_text

logger = logging.getLogger(__name__)


class Recorder:
    """Records finished steps; a resumed run forgets the lines of steps that it repeats."""

    def __init__(
        self,
        folder: Path,
        train: TrainConfig,
        first_step: int,
        total_steps: int,
        peak_flops: float | None = None,
    ) -> None:
        """Goes on with the folder's metrics after `first_step`; see `throughput.used` for the peak.

        Lines of later steps, which come again, are taken out.

        Raises:
            UserError: the metrics cannot be read or written; so of every method that writes a line.
        """
        self._folder = folder
        self._path = folder / METRICS_FILE
        self._train = train
        self._total_steps = total_steps
        self._peak_flops = peak_flops
        self._progress = Progress("train", total_steps, "steps", start=first_step)
        kept = [line for line in read_metrics(folder) if line["step"] <= first_step]
        with told_unwritable(self._path):
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def record(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Counts a step, and writes its values where it is one to be logged: what was written."""
        self._progress.note = f"loss {values['loss']:.3f}"
        self._progress.advance()
        done = values["step"]
        if done % self._train.log_every_steps and done != self._total_steps:
            return None
        line = {**values, **used(values, self._peak_flops)}
        self._append(line)
        return line

    def spike(
        self, step: int, spikes: Mapping[str, Mapping[str, float]], questions: Sequence[str]
    ) -> None:
        """Says and writes which values of a step stand out, and the questions that it saw."""
        logger.warning("%s", spike_text(step, spikes, questions))
        self._append({"step": step, "spike": {**spikes, "questions": [*questions]}})

    def evaluation(self, step: int, found: Mapping[str, Any], *, best: bool) -> None:
        """Says and writes what the evaluation after a step has found, and draws the run so far."""
        logger.info(
            "step %d: F1 %.1f%s, EM %.1f over %d dev questions; %.0f%% of the answers stopped",
            step, found["f1"], " (the best so far)" if best else "", found["em"],
            found["questions"], 100 * found["stop_rate"],
        )  # fmt: skip
        for one in found["answers"]:
            logger.info("  %s", answer_text(one))
        self._append({"step": step, "evaluation": dict(found)})
        self._draw()

    def close(self) -> None:
        """Ends the progress display, and draws the run."""
        self._progress.close()
        self._draw()

    def _append(self, line: Mapping[str, Any]) -> None:
        with told_unwritable(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _draw(self) -> None:
        picture = self._folder / "training.png"
        try:
            draw_curves(read_metrics(self._folder), picture)
        except OSError as error:
            logger.warning("%s is not drawn: %s", picture, error)
