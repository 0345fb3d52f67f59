"""The steps of a run, and what stands between them: evaluations, states, a stop."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recipes.training import TrainConfig
from train.checkpoint import Progress, save_best, save_state
from train.ranks import any_rank
from train.recorder import Recorder
from train.step import Stepper
from train.stopping import StopRequest
from train.trackers import log_evaluation, log_numbers
from train.watching import Evaluate


@dataclass
class Loop:
    """A run that is set up, at `progress`; all ranks do the same."""

    accelerator: Accelerator
    train: TrainConfig
    folder: Path
    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    stepper: Stepper
    total_steps: int
    progress: Progress
    stop: StopRequest
    evaluate: Evaluate | None
    recorder: Recorder | None
    """On the main rank."""
    _saved_best: int = field(init=False)
    """The best step, as the state knows it that a killed run would go on from."""

    def __post_init__(self) -> None:
        self._saved_best = self.progress.watch.best_step

    def run(self) -> bool:
        """Trains to the end, or until asked to stop with a state saved; whether it is the end.

        Raises:
            DivergedError: see `Stepper.step`.
            UserError: see `save_state`.
        """
        train, progress, watch = self.train, self.progress, self.progress.watch
        first = saved = progress.step
        started = time.perf_counter() - progress.seconds
        while True:
            stopping = any_rank(self.accelerator, self.stop.asked)
            due = watch.is_due(progress.step, self.total_steps, train.evaluate)
            if due and not stopping:
                self._evaluate()
                continue
            if not due and (
                progress.step == self.total_steps or watch.is_exhausted(train.evaluate)
            ):
                return True
            if progress.step > saved and (
                stopping or _is_multiple(progress.step, train.save_every_steps)
            ):
                self._save()
                saved = progress.step
                continue
            if stopping:
                return False
            self._step(started)
            if progress.step == first + 1 < self.total_steps:
                self.stepper.probe(self.total_steps)

    def _step(self, started: float) -> None:
        progress, order = self.progress, self.stepper.order
        samples = order.step_samples(progress.step)
        values = self.stepper.step(progress.step)
        values["learning_rate"] = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        progress.step += 1
        progress.seconds = time.perf_counter() - started
        values |= {
            "step": progress.step,
            "epoch": progress.step / order.steps_per_epoch,
            "elapsed_seconds": progress.seconds,
        }
        spikes = progress.watch.spikes(values, self.train.spike_factor)
        if self.recorder is not None:
            if (line := self.recorder.record(values)) is not None:
                log_numbers(self.accelerator, line, progress.step)
            if spikes:
                questions = self.stepper.builder.question_ids(samples)
                self.recorder.spike(progress.step, spikes, questions)

    def _evaluate(self) -> None:
        assert self.evaluate is not None, "an evaluation that is due was opened"
        assert self.train.evaluate is not None, "an evaluation is only due where asked for"
        found = self.evaluate()
        best = self.progress.watch.note(self.progress.step, found["f1"])
        if self.recorder is not None:
            self.recorder.evaluation(self.progress.step, found, best=best)
            log_evaluation(self.accelerator, found, self.progress.step)
        if best and self.train.evaluate.keep_best:
            save_best(
                self.accelerator,
                self.folder,
                self.model,
                self.progress.step,
                earlier=self._saved_best,
            )

    def _save(self) -> None:
        save_state(
            self.accelerator,
            self.folder,
            self.progress,
            self.model,
            self.optimizer,
            self.train.keep_states,
        )
        self._saved_best = self.progress.watch.best_step


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
