"""Client threads on one engine: throughput, tail latency, and whether answers change.

    python tests/benchmarks/concurrency.py RECIPE [key=value ...] [--questions N]
        [--clients 1,2,4,8,16] [--checkpoint NAME] [--system NAME] [--json FILE]

Every round asks the first N dev questions once, dealt to so many threads, each of which asks its
next question when its last is answered. The engine is warmed by one unmeasured round. Prints for
each number of clients answers and tokens a second, p50 and p99 of TTFT and of the whole answer, and
how many answers differ from those of one client.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from figures import render, write

from eval.engine import Engine, Reply
from eval.questions import dev_questions
from recipes.resolve import resolve


def round_of(engine: Engine, questions: list[str], clients: int) -> tuple[list[Reply], float]:
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        replies = list(threads.map(engine.answer, questions))
    return replies, time.perf_counter() - start


def row(replies: list[Reply], seconds: float, alone: list[Reply]) -> dict[str, Any]:
    reports = [reply.report for reply in replies]
    times = {"ttft": [r.ttft_ms for r in reports], "total": [r.total_ms for r in reports]}
    return {
        "answers_a_second": len(replies) / seconds,
        "tokens_a_second": sum(r.new_tokens for r in reports) / seconds,
        **{
            f"{name}_p{q}_ms": float(np.percentile(values, q))
            for name, values in times.items()
            for q in (50, 99)
        },
        "requests_a_pass": float(np.mean([r.batch_requests for r in reports])),
        "changed_answers": sum(
            one.token_ids != other.token_ids for one, other in zip(replies, alone, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--clients", default="1,2,4,8,16")
    parser.add_argument("--checkpoint", choices=("base", "fine_tuned"), default="base")
    parser.add_argument("--system", default="coinrag")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = resolve(arguments.arguments).config
    questions = [question.question for question in dev_questions(config)[: arguments.questions]]
    rows: dict[str, dict[str, Any]] = {}
    with Engine.open(config, arguments.checkpoint, arguments.system) as engine:
        engine.answer_all(questions)
        alone, seconds = round_of(engine, questions, 1)
        rows["1"] = row(alone, seconds, alone)
        for clients in arguments.clients.split(","):
            if clients != "1":
                replies, seconds = round_of(engine, questions, int(clients))
                rows[clients] = row(replies, seconds, alone)
    print(render(rows, "clients"))
    write(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
