"""`coinrag ask`: questions answered one after the other, their tokens shown as they come."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from launch.cache import CHECKPOINTS, Checkpoint
from launch.commands import RECIPE_HELP, Result, system_name
from recipes.errors import UserError
from recipes.files import write_text

logger = logging.getLogger(__name__)


def ask(
    arguments: Sequence[str],
    questions: Sequence[str] = (),
    *,
    checkpoint: Checkpoint = "base",
    system: str = "coinrag",
    log: str | None = None,
    metrics: str | None = None,
    output: TextIO | None = None,
) -> Result:
    """Answer questions from a recipe's built dev passages; the answers with their reports.

    Args:
        arguments: the recipe.
        questions: none: those of stdin, a line each, answered as they arrive.
        checkpoint: whose weights answer.
        system: what the answers are given from, see `eval.systems`.
        log: a file to which the report of each request is appended as a line of JSON.
        metrics: a file that holds the sums of all requests in Prometheus' text format.
        output: where answers go token by token, each on a line of its own; None: nowhere.

    Raises:
        UserError: the recipe is wrong, nothing is built, or there is no question.
    """
    from recipes.resolve import resolve

    config = resolve(arguments).config
    from eval.engine import Engine

    if isinstance(output, TextIOWrapper):
        # A terminal may not have every character of an answer.
        output.reconfigure(errors="replace")
    answers = []
    with Engine.open(config, checkpoint, system, log=Path(log) if log else None) as engine:
        for question in _questions(questions or sys.stdin):
            asked = engine.ask(question)
            for piece in asked:
                _show(piece, output)
            _show("\n", output)
            reply = asked.reply()
            answers.append(asdict(reply.report))
            if metrics:
                _write_metrics(Path(metrics), engine.prometheus_text())
    if not answers:
        raise UserError("no question: give --question TEXT, or lines on stdin")
    memory, disk, computed = (
        sum(answer[f"tokens_{source}"] for answer in answers)
        for source in ("memory", "disk", "computed")
    )
    logger.info(
        "prefix tokens: %d from memory, %d from the store, %d computed", memory, disk, computed
    )
    return {"answers": answers}


def add_command(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Describe the command to a parser; `add` takes a name and a help text."""
    command = add("ask", "Answer questions from the built dev passages, token by token.")
    command.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE", help=RECIPE_HELP)
    command.add_argument(
        "--checkpoint", choices=CHECKPOINTS, default="base", help="whose weights (default base)"
    )
    command.add_argument(
        "--system",
        metavar="NAME",
        type=system_name,
        default="coinrag",
        help="how it serves, as in eval.systems (default coinrag)",
    )
    command.add_argument(
        "--question",
        metavar="TEXT",
        action="append",
        default=[],
        help="a question; may be repeated (default: the lines of stdin)",
    )
    command.add_argument("--log", metavar="FILE", help="append a line of JSON for each question")
    command.add_argument("--metrics", metavar="FILE", help="keep Prometheus text up to date there")


def _questions(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"question {number} is not UTF-8 text: {line!a}") from error
        if line.strip():
            yield line.strip()


def _write_metrics(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(f"cannot write the metrics, {path}: {error.strerror}") from error


def _show(text: str, output: TextIO | None) -> None:
    if output is None:
        return
    try:
        print(text, end="", flush=True, file=output)
    except BrokenPipeError as error:
        # Nor can anything else be shown there when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UserError("nobody reads the answers any more") from error
