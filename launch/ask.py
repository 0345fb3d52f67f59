"""`coinrag ask`: questions answered one after the other, their tokens shown as they come."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import Literal, TextIO

from launch.commands import Result
from recipes.errors import UserError
from recipes.files import write_text


def ask(
    arguments: Sequence[str],
    questions: Sequence[str] = (),
    *,
    checkpoint: Literal["base", "fine_tuned"] = "base",
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
            answers.append({"question": question, "answer": reply.answer} | asdict(reply.report))
            if metrics:
                write_text(Path(metrics), engine.prometheus_text())
    if not answers:
        raise UserError("no question: give --question TEXT, or lines on stdin")
    return {"answers": answers}


def _questions(lines: Iterable[str]) -> Iterator[str]:
    return (line.strip() for line in lines if line.strip())


def _show(text: str, output: TextIO | None) -> None:
    if output is not None:
        print(text, end="", flush=True, file=output)
