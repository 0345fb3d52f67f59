"""Experiment trackers beside the local `metrics.jsonl`; none is on unless a recipe asks for it.

They write on the main rank alone, and a resumed run goes on in the tracker's own run.
"""

import json
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker
from accelerate.utils import is_tensorboard_available, is_trackio_available, is_wandb_available

from recipes.errors import UserError
from recipes.resolve import Resolved
from recipes.training import TrainConfig
from train.run_folder import flat
from train.watching import answer_text

# Of a tracker's settings, the one that names its run.
_RUN = {"wandb": "id", "trackio": "name"}
# Where trackio would send metrics to in place of this machine.
_TRACKIO_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


def refuse_missing_trackers(train: TrainConfig) -> None:
    """Passes recipes whose trackers are installed.

    Raises:
        UserError: one is not; or trackio, which is local here, is set to send metrics elsewhere.
    """
    installed = {
        "wandb": is_wandb_available,
        "tensorboard": is_tensorboard_available,
        "trackio": is_trackio_available,
    }
    for name, is_installed in installed.items():
        if getattr(train, name) and not is_installed():
            raise UserError(
                f"train.{name} is set but {name} is not installed: pip install 'coinrag[{name}]'"
            )
    for variable in _TRACKIO_ELSEWHERE if train.trackio else ():
        if os.environ.get(variable):
            raise UserError(
                f"train.trackio keeps metrics on this machine, and {variable} would send them "
                "elsewhere: unset it"
            )


def start_trackers(
    accelerator: Accelerator, resolved: Resolved, previous: Mapping[str, str], step: int
) -> None:
    """Starts the trackers of a run.

    Args:
        resolved: the recipe; its options are the run's configuration, and hold no secrets.
        previous: `tracker_state` of the run that this one continues; of a new one it is empty.
        step: its finished steps; what a tracker has after them will come again.
    """
    accelerator.log_with = _trackers(resolved, previous, step)
    for noisy in ("wandb", "trackio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # stdout belongs to the command.
    with redirect_stdout(sys.stderr):
        accelerator.init_trackers("", config=None if step else _plain_values(resolved))


def tracker_state(accelerator: Accelerator) -> dict[str, str]:
    """What `start_trackers` of a continuation must know: by tracker, how it names this run."""
    trackers: list[Any] = accelerator.trackers
    return {one.name: one.init_kwargs[_RUN[one.name]] for one in trackers if one.name in _RUN}


def end_trackers(accelerator: Accelerator) -> None:
    """Ends the trackers and the accelerator's part in the run; all ranks must call it."""
    with redirect_stdout(sys.stderr):
        accelerator.end_training()


def log_numbers(accelerator: Accelerator, values: Mapping[str, Any], step: int) -> None:
    """Hands what is a number or a text to the trackers."""
    shown = {name: value for name, value in values.items() if isinstance(value, float | int | str)}
    accelerator.log(shown, step=step)


def log_evaluation(accelerator: Accelerator, found: Mapping[str, Any], step: int) -> None:
    """Hands an evaluation to the trackers; its answers are a text."""
    values = {f"evaluation_{name}": found[name] for name in ("f1", "em", "stop_rate")}
    values |= {f"evaluation_f1_{name}": f1 for name, f1 in found["f1_by_dataset"].items()}
    values["evaluation_answers"] = "\n\n".join(map(answer_text, found["answers"]))
    log_numbers(accelerator, values, step)


def _trackers(resolved: Resolved, previous: Mapping[str, str], step: int) -> list[GeneralTracker]:
    name, train = resolved.config.name, resolved.config.train
    new = secrets.token_hex(4)
    trackers: list[GeneralTracker] = []
    if train.wandb:
        run = {"id": previous.get("wandb", new), "name": name, "resume": "allow"}
        trackers.append(
            WandBTracker(train.wandb.project, mode=train.wandb.mode, dir=train.run_folder, **run)
        )
    if train.tensorboard:
        # Of steps that come again the first writing is taken back.
        trackers.append(TensorBoardTracker("tensorboard", train.run_folder, purge_step=step + 1))
    if train.trackio:
        run = {"name": previous.get("trackio", f"{name}-{new}"), "resume": "allow"}
        trackers.append(TrackioTracker(train.trackio.project, embed=False, **run))
    return trackers


def _plain_values(resolved: Resolved) -> dict[str, Any]:
    """The options by dotted path; lists and tables as JSON, which every tracker takes."""
    return {
        path: json.dumps(value) if isinstance(value, list | dict) else value
        for path, value in flat(resolved).items()
    }
