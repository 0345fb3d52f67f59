"""Conversations: what consecutive questions on the same passages reuse of each other's slices.

    python tests/benchmarks/conversations.py RECIPE [key=value ...] --conversations FILE
        [--checkpoint NAME] [--json FILE]

The recipe's dev corpus must hold the passages that the conversations are about, as the sample
world's does (`coinrag world OUT --conversations N`). The turns are asked of one engine four times:
in order and shuffled, each with the recipe's memory tier and without one, all with the slices in
the store before. Shuffled turns show what the tier gives without conversations. Prints for each
the share of active tokens that came from memory, bytes read from disk and TTFT.
"""

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from figures import render, write

from data_builders.readers import read_conversations
from eval.engine import Engine, Reply
from recipes.resolve import resolve
from recipes.schema import Recipe


def ask(
    config: Recipe, checkpoint: str, questions: list[str], memory_gib: float
) -> tuple[list[Reply], dict[str, Any]]:
    store = config.store.model_copy(update={"memory_gib": memory_gib})
    with Engine.open(config.model_copy(update={"store": store}), checkpoint) as engine:
        replies = [engine.answer(question) for question in questions]
    # The first question warms the engine.
    reports = [reply.report for reply in replies[1:]]
    active = sum(report.active_tokens for report in reports)
    return replies, {
        "questions": len(reports),
        "from_memory": sum(report.tokens_memory for report in reports) / active,
        "from_disk": sum(report.tokens_disk for report in reports) / active,
        "computed": sum(report.tokens_computed for report in reports) / active,
        "bytes_read": float(np.mean([report.bytes_read for report in reports])),
        "ttft_p50_ms": float(np.median([report.ttft_ms for report in reports])),
        "read_p50_ms": float(np.median([report.stage_ms["read"] for report in reports])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE")
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--checkpoint", choices=("base", "fine_tuned"), default="base")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = resolve(arguments.arguments).config
    turns = [
        turn.text
        for conversation in read_conversations(arguments.conversations)
        for turn in conversation.turns
    ]
    shuffled = random.Random(config.seed).sample(turns, len(turns))
    rows: dict[str, dict[str, Any]] = {}
    answers: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        store = config.store.model_copy(update={"folder": config.store.folder or scratch})
        config = config.model_copy(update={"store": store})
        ask(config, arguments.checkpoint, turns, config.store.memory_gib)
        for order, questions in (("in order", turns), ("shuffled", shuffled)):
            for tier in (config.store.memory_gib, 0.0):
                name = f"{order}, {tier:g} GiB"
                replies, rows[name] = ask(config, arguments.checkpoint, questions, tier)
                answers[name] = {r.report.question: r.answer for r in replies}
    print(render(rows, "turns"))
    first = next(iter(answers.values()))
    print(f"\nanswers the same in all: {all(other == first for other in answers.values())}")
    write(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
