"""The commands that start from a recipe, and the sample world, as functions.

What is heavy is imported by the command that needs it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast, get_args

from launch.training import ONE_NODE, Nodes
from recipes.exit import OK, Ending
from recipes.sharding import Sharding

Result = dict[str, Any]

RECIPE_HELP = "shipped recipes or YAML files, later ones win; then section.key=value"


class TrainingFailedError(Exception):
    """The training process has failed and said why itself."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.message)
        self.ending = ending


def system_name(text: str) -> str:
    """A system's name on the command line, checked against those of a recipe.

    Raises:
        ArgumentTypeError: there is no such system.
    """
    # Not as `choices`, which would have the recipes' schema loaded for help.
    from recipes.systems import SystemName

    if text not in (names := get_args(SystemName)):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {text!r}")
    return text


def build(
    arguments: Sequence[str],
    *,
    stats: bool = False,
    retry_failed: bool = False,
    read_batch: Sequence[str] = (),
    write_batch: str | None = None,
) -> Result:
    """Build the train and dev tables of a recipe; by split the folders and what was made anew.

    The dev tables of the arms of its comparison are built too, where they are others.

    With `stats` also each split's report, drawn as `statistics.png` in its folder. `read_batch`
    files are taken into the journal of model answers first. With `write_batch` nothing is built:
    the requests that building needs are written there, and the files are the result.
    """
    from recipes.resolve import resolve

    config = resolve(arguments).config
    from data_builders import build as builder
    from recipes.arms import arms_of

    if read_batch:
        builder.read_batches(config, [Path(file) for file in read_batch])
    if write_batch is not None:
        files = builder.write_batches(config, Path(write_batch), retry_failed=retry_failed)
        return {"batch_files": [str(file) for file in files]}
    built: dict[str, builder.Built] = {
        split: builder.build(config, split, retry_failed=retry_failed) for split in builder.SPLITS
    }
    known = {built["dev"].folder}
    for arm in arms_of(config):
        if (folder := builder.built_folder(arm.config, "dev")) not in known:
            known.add(folder)
            built[f"dev of {arm.name}"] = builder.build(
                arm.config, "dev", retry_failed=retry_failed
            )
    result: Result = {
        "folders": {split: str(one.folder) for split, one in built.items()},
        "made": {
            split: {kind: asdict(needed) for kind, needed in one.made.items()}
            for split, one in built.items()
        },
    }
    if stats:
        from data_builders.statistics import draw_statistics

        result["reports"] = {split: one.report for split, one in built.items()}
        for split, one in built.items():
            title = f"{config.name}: {split}"
            draw_statistics(one.report, title, one.folder / "statistics.png")
    return result


def train(
    arguments: Sequence[str],
    processes: int = 1,
    *,
    sharding: Sharding = "ddp",
    nodes: Nodes = ONE_NODE,
    quiet_stdout: bool = False,
) -> Result:
    """Train a recipe in processes of its own; the run folder, whether it is `finished`, its `step`.

    With `quiet_stdout` what the training prints goes to stderr.

    Raises:
        UserError: the recipe is wrong, or its ranks cannot be started so; found before any process
            starts.
        TrainingFailedError: the training ended with another status than 0.
    """
    from launch.training import run_training
    from recipes.resolve import resolve
    from train.history import outcome

    config = resolve(arguments).config
    ending = run_training(
        arguments,
        processes,
        sharding=sharding,
        nodes=nodes,
        output=sys.stderr if quiet_stdout else None,
    )
    if ending.status != OK:
        raise TrainingFailedError(ending)
    folder = config.train.run_folder
    return {"run_folder": folder, **outcome(Path(folder))}


def train_scorer(arguments: Sequence[str]) -> Result:
    """Train the nugget scorer of a recipe, see `train.scorer_run`; its folder and its report.

    The same as `train/nugget_scorer.py`, in this process.
    """
    from recipes.resolve import resolve

    resolved = resolve(arguments)
    from train.scorer_run import train_scorer as train_its_scorer

    folder = train_its_scorer(resolved)
    report: Result = json.loads((folder / "report.json").read_text("utf-8"))
    return {"folder": str(folder), **report}


def compare(arguments: Sequence[str]) -> Result:
    """Compare the systems and checkpoints of a recipe; the content of `compare.json`."""
    from recipes.resolve import resolve

    config = resolve(arguments).config
    from eval.compare import compare as compare_systems

    return compare_systems(config)


def world(
    folder: str,
    train_questions: int,
    dev_questions: int,
    seed: int,
    *,
    passages: int | None = None,
    conversations: int = 0,
) -> Result:
    """Write the fictional sample world; its folder and what it holds.

    Its questions bring their contexts, in IRCoT's format, and `conversations` about the passages of
    the dev questions may stand beside them; or, with `passages`, a corpus of that many and
    questions about it, in the package's own format.
    """
    from data_builders.world import write_corpus, write_world

    sizes = {"train_questions": train_questions, "dev_questions": dev_questions, "seed": seed}
    if passages is None:
        counts = write_world(Path(folder), **sizes, conversations=conversations)
    else:
        counts = write_corpus(Path(folder), passages=passages, **sizes)
    return counts | {"folder": folder}


def inject(
    questions: Sequence[str],
    folder: str,
    *,
    data_format: str = "ircot",
    share: float = 1.0,
    seed: int = 0,
) -> Result:
    """Write a test set for prompt injection; how many questions were attacked, and left out why.

    `overrides` are the settings with which a recipe measures it, once its data are built with them.

    Raises:
        UserError: see `write_injections`; or an unknown format.
    """
    from data_builders.injection import write_injections
    from recipes.building import DataFormat
    from recipes.errors import UserError

    formats = get_args(DataFormat)
    if data_format not in formats:
        raise UserError(f"--format: expected one of {', '.join(formats)}, got {data_format!r}")
    out = Path(folder)
    counts = write_injections(
        [Path(file) for file in questions],
        out,
        data_format=cast(DataFormat, data_format),
        seed=seed,
        share=share,
    )
    overrides = [
        f"data.dev={json.dumps([str(out / 'questions.jsonl')])}",
        "data.dev_format=jsonl",
        f"eval.injections={out / 'injections.jsonl'}",
        f"eval.output={out / 'compare'}",
    ]
    return counts | {"folder": folder, "overrides": overrides}
