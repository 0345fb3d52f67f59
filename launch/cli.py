"""`coinrag`: build, train and compare from a recipe, and write the sample world.

Every command ends with status 0, 2 (the user's mistake, one message), 130 (interrupted) or 1
(ours, a traceback). With `--json` the last line of stdout is one JSON object, also when the
command failed. What is heavy is imported by the command that needs it: help comes at once.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.exit import INTERRUPTED, OK, USERS, Ending, run

Result = dict[str, Any]

_RECIPE_HELP = "shipped recipes or YAML files, later ones win; then section.key=value"


class TrainingFailedError(Exception):
    """The training process has failed and said why itself."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.message)
        self.ending = ending


def build(
    arguments: Sequence[str],
    *,
    stats: bool = False,
    retry_failed: bool = False,
    read_batch: Sequence[str] = (),
    write_batch: str | None = None,
) -> Result:
    """Build the train and dev tables of a recipe; by split the folders and what was made anew.

    With `stats` also each split's report, drawn as `statistics.png` in its folder. `read_batch`
    files are taken into the journal of model answers first. With `write_batch` nothing is built:
    the requests that building needs are written there, and the files are the result.
    """
    from recipes.resolve import resolve

    config = resolve(arguments).config
    from data_builders import build as builder

    if read_batch:
        builder.read_batches(config, [Path(file) for file in read_batch])
    if write_batch is not None:
        files = builder.write_batches(config, Path(write_batch), retry_failed=retry_failed)
        return {"batch_files": [str(file) for file in files]}
    built = {
        split: builder.build(config, split, retry_failed=retry_failed) for split in builder.SPLITS
    }
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


def train(arguments: Sequence[str], processes: int = 1, *, quiet_stdout: bool = False) -> Result:
    """Train a recipe in processes of its own; the run folder.

    With `quiet_stdout` what the training prints goes to stderr.

    Raises:
        UserError: the recipe is wrong; found before any process starts.
        TrainingFailedError: the training ended with another status than 0.
    """
    from launch.training import run_training
    from recipes.resolve import resolve

    config = resolve(arguments).config
    ending = run_training(arguments, processes, output=sys.stderr if quiet_stdout else None)
    if ending.status != OK:
        raise TrainingFailedError(ending)
    return {"run_folder": config.train.run_folder}


def compare(arguments: Sequence[str]) -> Result:
    """Compare the systems and checkpoints of a recipe; the content of `compare.json`."""
    from recipes.resolve import resolve

    config = resolve(arguments).config
    from eval.compare import compare as compare_systems

    return compare_systems(config)


def world(
    folder: str, train_questions: int, dev_questions: int, seed: int, passages: int | None = None
) -> Result:
    """Write the fictional sample world; its folder and what it holds.

    Its questions bring their contexts, in IRCoT's format; or, with `passages`, a corpus of that
    many beside them, in the package's own.
    """
    from data_builders.world import write_corpus, write_world

    sizes = {"train_questions": train_questions, "dev_questions": dev_questions, "seed": seed}
    if passages is None:
        counts = write_world(Path(folder), **sizes)
    else:
        counts = write_corpus(Path(folder), passages=passages, **sizes)
    return counts | {"folder": folder}


def parser() -> argparse.ArgumentParser:
    """The whole command line; each command's name is in `command`."""
    top = argparse.ArgumentParser(
        prog="coinrag",
        description="Fine-tune language models to answer from KV-cache slices of nuggets.",
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument(
            "--json", action="store_true", help="end stdout with one line of JSON; log to stderr"
        )
        return command

    for name, text in (
        ("build", "Build training and dev tables from raw questions and passages."),
        ("train", "Fine-tune the model on the built training table."),
        ("compare", "Measure F1, EM and TTFT of systems, before and after fine-tuning."),
    ):
        command = add(name, text)
        command.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE", help=_RECIPE_HELP)
        if name == "build":
            _add_build_flags(command)
        if name == "train":
            command.add_argument(
                "--processes", type=_positive, default=1, help="ranks on this machine (default 1)"
            )
    command = add("world", "Write a fictional world of questions and passages.")
    command.add_argument("folder", metavar="OUT", help="folder for train.jsonl and dev.jsonl")
    command.add_argument("--train", type=_positive, default=1200, help="questions (default 1200)")
    command.add_argument("--dev", type=_positive, default=200, help="questions (default 200)")
    command.add_argument(
        "--passages", type=_positive, help="a corpus of so many, and questions without contexts"
    )
    command.add_argument("--seed", type=int, default=0, help="another seed, another world")
    return top


def _add_build_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--stats", action="store_true", help="show statistics of the corpora, and draw them"
    )
    model = command.add_argument_group("nuggets from a language model (nuggets.extractor=llm)")
    model.add_argument(
        "--retry-failed", action="store_true", help="ask again where the model has failed"
    )
    model.add_argument(
        "--write-batch", metavar="FOLDER", help="write Batch-API files in place of asking; stop"
    )
    model.add_argument(
        "--read-batch",
        metavar="FILE",
        action="append",
        default=[],
        help="take a Batch-API output or error file in before building; may be repeated",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`; flags may stand anywhere among the key=value arguments."""
    top = parser()
    parsed, rest = top.parse_known_args(argv)
    # argparse takes positional arguments from one place only and leaves those after a flag.
    flags = [word for word in rest if word.startswith("-") or "arguments" not in parsed]
    if flags:
        top.error(f"unrecognized arguments: {' '.join(flags)}")
    if rest:
        parsed.arguments += rest
    if parsed.command == "build" and parsed.write_batch is not None and parsed.stats:
        top.error("--stats needs a build, and --write-batch makes none")
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = parse(words)
    except SystemExit as ended:
        if ended.code == USERS and "--json" in words:
            message = "the command line is wrong; stderr says where"
            print(json.dumps({"command": words[0], "status": USERS, "error": message}))
        raise
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Libraries speak up from warnings on, our own packages from progress on.
    for package in ("cache_ops", "data_builders", "eval", "launch", "recipes", "train"):
        logging.getLogger(package).setLevel(logging.INFO)

    started = time.monotonic()
    result: Result = {}
    child: list[Ending] = []

    def command() -> None:
        try:
            result.update(_call(arguments))
        except TrainingFailedError as error:
            child.append(error.ending)

    ending = run(command)
    if child:
        ending = child[0]
        if ending.status not in (USERS, INTERRUPTED):
            # A killed process has said nothing; the user's mistake has been told.
            print(f"error: {ending.message}", file=sys.stderr)
    if arguments.json:
        report = {"command": arguments.command, "status": ending.status}
        report |= {"error": ending.message} if ending.message else {}
        report |= {"seconds": round(time.monotonic() - started, 3)}
        # In ASCII: stdout may not take every character, such as a path's stray bytes.
        print(json.dumps(report | result), flush=True)
    elif ending.status == OK:
        _show(arguments.command, result)
    return ending.status


def _call(arguments: argparse.Namespace) -> Result:
    match arguments.command:
        case "build":
            return build(
                arguments.arguments,
                stats=arguments.stats,
                retry_failed=arguments.retry_failed,
                read_batch=arguments.read_batch,
                write_batch=arguments.write_batch,
            )
        case "train":
            return train(arguments.arguments, arguments.processes, quiet_stdout=arguments.json)
        case "compare":
            return compare(arguments.arguments)
        case _:
            return world(
                arguments.folder,
                arguments.train,
                arguments.dev,
                arguments.seed,
                arguments.passages,
            )


def _show(command: str, result: Result) -> None:
    match command:
        case "compare":
            from eval.report import render_table

            print(render_table(result))
        case "build":
            for file in result.get("batch_files", []):
                print(file)
            for split, folder in result.get("folders", {}).items():
                print(f"{split}: {folder}")
            if "reports" in result:
                from data_builders.statistics import render_statistics

                print(render_statistics(result["reports"]))
        case _:
            print(result.get("run_folder") or result["folder"])


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
