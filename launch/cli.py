"""`coinrag`: build, train, compare and ask from a recipe, keep stores, write the sample world.

Every command ends with status 0, 2 (the user's mistake, one message), 130 (interrupted) or 1
(ours, a traceback). With `--json` the last line of stdout is one JSON object, also when the
command failed. What is heavy is imported by the command that needs it: help comes at once.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from launch import ask, cache, check, cost, export, nuggets
from launch.cache import UnrepairedError
from launch.commands import (
    RECIPE_HELP,
    Result,
    TrainingFailedError,
    build,
    compare,
    inject,
    train,
    train_scorer,
    world,
)
from launch.training import Nodes
from recipes.exit import INTERRUPTED, OK, USERS, Ending, run
from recipes.logs import set_up_logging
from recipes.sharding import SHARDINGS


def parser() -> argparse.ArgumentParser:
    """The whole command line; each command's name is in `command`."""
    top = argparse.ArgumentParser(
        prog="coinrag",
        description="Fine-tune language models to answer from KV-cache slices of nuggets.",
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = _adder(commands)
    for name, text in (
        ("build", "Build training and dev tables from raw questions and passages."),
        ("train", "Fine-tune the model on the built training table."),
        ("train-scorer", "Train the nugget scorer on the built train table."),
        ("compare", "Measure F1, EM and TTFT of systems, before and after fine-tuning."),
    ):
        command = add(name, text)
        command.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE", help=RECIPE_HELP)
        if name == "build":
            _add_build_flags(command)
        if name == "train":
            _add_train_flags(command)
    ask.add_command(add)
    stores = commands.add_parser("cache", help="Keep stores of chunks' keys and values.")
    cache.add_commands(
        _adder(stores.add_subparsers(dest="cache_command", required=True, metavar="COMMAND"))
    )
    check.add_command(add)
    cost.add_command(add)
    export.add_command(add)
    nuggets.add_command(add)
    command = add("world", "Write a fictional world of questions and passages.")
    command.add_argument("folder", metavar="OUT", help="folder for train.jsonl and dev.jsonl")
    command.add_argument("--train", type=_positive, default=1200, help="questions (default 1200)")
    command.add_argument("--dev", type=_positive, default=200, help="questions (default 200)")
    command.add_argument(
        "--passages", type=_positive, help="a corpus of so many, and questions without contexts"
    )
    command.add_argument(
        "--conversations",
        type=_positive,
        default=0,
        help="so many conversations about the passages of dev.jsonl (default none)",
    )
    command.add_argument("--seed", type=int, default=0, help="another seed, another world")
    command = add("inject", "Plant instructions in passages: a test set for prompt injection.")
    command.add_argument(
        "questions", nargs="+", metavar="QUESTIONS", help="files of questions with passages"
    )
    command.add_argument("folder", metavar="OUT", help="folder for the attacked questions")
    command.add_argument(
        "--format", default="ircot", help="of QUESTIONS, as in data.format (default ircot)"
    )
    command.add_argument(
        "--share", type=float, default=1.0, help="of the questions that are attacked (default 1)"
    )
    command.add_argument("--seed", type=int, default=0, help="another seed, other attacks")
    return top


def _adder(commands: Any) -> Callable[[str, str], argparse.ArgumentParser]:
    """A function that adds a command, with the flags that all have, by its name and its help."""

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        command.add_argument(
            "--json", action="store_true", help="end stdout with one line of JSON; log to stderr"
        )
        return command

    return add


def _add_train_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--processes", type=_positive, default=1, help="ranks on this machine (default 1)"
    )
    command.add_argument(
        "--sharding", choices=SHARDINGS, default="ddp", help="how ranks share the model"
    )
    several = command.add_argument_group(
        "several machines (the same command on each, with its own --node-rank)"
    )
    several.add_argument("--nodes", type=_positive, default=1, help="machines (default 1)")
    several.add_argument("--node-rank", type=int, default=0, help="of this machine, from 0")
    several.add_argument("--head", metavar="HOST:PORT", help="on machine 0, where ranks meet")


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
    if parsed.command == "world" and parsed.passages and parsed.conversations:
        top.error(
            "--conversations are about the contexts of questions, which --passages leaves out"
        )
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
    set_up_logging()

    started = time.monotonic()
    result: Result = {}
    child: list[Ending] = []

    def command() -> None:
        try:
            result.update(_call(arguments))
        except TrainingFailedError as error:
            child.append(error.ending)
        except UnrepairedError as error:
            result.update(error.result)
            raise

    ending = run(command)
    if child:
        ending = child[0]
        if ending.status not in (USERS, INTERRUPTED):
            # A killed process has said nothing; the user's mistake has been told.
            print(f"error: {ending.message}", file=sys.stderr)
    if arguments.json:
        report = {"command": _name(arguments), "status": ending.status}
        report |= {"error": ending.message} if ending.message else {}
        report |= {"seconds": round(time.monotonic() - started, 3)}
        # In ASCII: stdout may not take every character, such as a path's stray bytes.
        print(json.dumps(report | result), flush=True)
    elif ending.status == OK:
        _show(arguments, result)
    return ending.status


def _name(arguments: argparse.Namespace) -> str:
    name: str = arguments.command
    return f"cache {arguments.cache_command}" if name == "cache" else name


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
            return train(
                arguments.arguments,
                arguments.processes,
                sharding=arguments.sharding,
                nodes=Nodes(arguments.nodes, arguments.node_rank, arguments.head),
                quiet_stdout=arguments.json,
            )
        case "train-scorer":
            return train_scorer(arguments.arguments)
        case "compare":
            return compare(arguments.arguments)
        case "ask":
            return ask.ask(
                arguments.arguments,
                arguments.question,
                checkpoint=arguments.checkpoint,
                system=arguments.system,
                log=arguments.log,
                metrics=arguments.metrics,
                output=None if arguments.json else sys.stdout,
            )
        case "cache":
            return cache.call(arguments)
        case "check":
            return check.check(
                arguments.arguments,
                samples=arguments.samples,
                processes=arguments.processes,
                sharding=arguments.sharding,
                gpu_gib=arguments.gpu_gib,
                tflops=arguments.tflops,
                probe=arguments.probe,
            )
        case "cost":
            return cost.cost(arguments.arguments, arguments.measured, arguments.picture)
        case "export":
            return export.export(
                arguments.run,
                arguments.out,
                form=arguments.form,
                dtype=arguments.dtype,
                store=arguments.build_store,
                questions=arguments.questions,
            )
        case "nuggets":
            return nuggets.nuggets(arguments.arguments, arguments.picture)
        case "inject":
            return inject(
                arguments.questions,
                arguments.folder,
                data_format=arguments.format,
                share=arguments.share,
                seed=arguments.seed,
            )
        case _:
            return world(
                arguments.folder,
                arguments.train,
                arguments.dev,
                arguments.seed,
                passages=arguments.passages,
                conversations=arguments.conversations,
            )


def _show(arguments: argparse.Namespace, result: Result) -> None:
    match arguments.command:
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
        case "cache":
            print(cache.render(arguments.cache_command, result))
        case "check":
            print(check.render(result))
        case "cost":
            print(cost.render(result))
        case "export":
            print(export.render(result))
        case "nuggets":
            print(nuggets.render(result))
        case "train":
            print(result["run_folder"])
        case "world" | "train-scorer":
            print(result["folder"])
        case "inject":
            print(f"{result['attacked']} of {result['questions']} questions attacked; measure with")
            for step in ("build", "compare"):
                print(f"  coinrag {step} RECIPE {shlex.join(result['overrides'])}")
            for reason, count in result["skipped"].items():
                print(f"left as they are, {reason}: {count}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
