"""Write the sample world as IRCoT-format files, and conversations about it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from data_builders.world.asking import Question
from data_builders.world.contexts import CONTEXTS, context_rows, distractors
from data_builders.world.conversations import Conversation, make_conversations
from data_builders.world.entities import Entity, World, build_world
from data_builders.world.names import NameSource
from data_builders.world.prose import write_passages
from data_builders.world.questions import make_questions
from recipes.errors import UserError
from recipes.files import write_text

DATASET = "sample_world"


def write_world(
    folder: Path, *, train_questions: int, dev_questions: int, seed: int, conversations: int = 0
) -> dict[str, Any]:
    """Write `train.jsonl`, `dev.jsonl` and `world.json` (counts and seed) into `folder`.

    Train and dev are two worlds that share no coined word, hence no entity and no fact. With
    `conversations` so many about the passages of `dev.jsonl` are written to `conversations.jsonl`;
    the other files do not depend on it. The same arguments give the same bytes. Returns what
    `world.json` holds, and the number of conversations if there are some.

    Raises:
        UserError: a count below 1, more conversations than the passages are enough for, or a folder
            that cannot be written.
    """
    counts = {"dev": dev_questions, "train": train_questions}
    for split, count in counts.items():
        if count < 1:
            raise UserError(f"{split}_questions must be at least 1, not {count}")
    told: list[dict[str, Any]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = NameSource(Random(f"names {seed}"))
        summary: dict[str, Any] = {"dataset": DATASET, "seed": seed}
        # Dev comes first, so that it stays the same whatever the amount of training data.
        for split, count in counts.items():
            rng = Random(f"{split} {seed}")
            world = build_world(rng, names, count // 2)
            passages = write_passages(world, rng)
            rows = _rows(split, count, seed, rng, world, passages)
            titles = {c["title"] for row in rows for c in row["contexts"]}
            if split == "dev" and conversations:
                rng = Random(f"conversations {seed}")
                made = make_conversations(world, passages, titles, conversations, rng)
                told = [_told(f"{DATASET}-{seed}-{n:05d}", c, passages) for n, c in enumerate(made)]
                _write_rows(folder / "conversations.jsonl", told)
            _write_rows(folder / f"{split}.jsonl", rows)
            summary[split] = {
                "questions": count,
                "passages": len(titles),
                "types": dict(sorted(Counter(row["type"] for row in rows).items())),
            }
        write_text(folder / "world.json", json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write a world into {folder}: {error.strerror}") from error
    return summary | ({"conversations": len(told)} if told else {})


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _rows(
    split: str, count: int, seed: int, rng: Random, world: World, passages: Mapping[Entity, str]
) -> list[dict[str, Any]]:
    questions = make_questions(world, passages, count, rng)
    return [
        _row(f"{DATASET}-{seed}-{split}-{number:05d}", question, world, passages, rng)
        for number, question in enumerate(questions)
    ]


def _row(
    question_id: str, question: Question, world: World, passages: Mapping[Entity, str], rng: Random
) -> dict[str, Any]:
    # A passage may well say yes or no.
    answers = question.answers if question.source else ()
    chosen = [*question.gold, *distractors(question.gold, answers, world.by_type, passages, rng)]
    assert len(chosen) == CONTEXTS, f"too few distractors for {question.text!r}"
    rng.shuffle(chosen)
    return {
        "dataset": DATASET,
        "question_id": question_id,
        "question_text": question.text,
        "answers_objects": [
            {"number": "", "date": {"day": "", "month": "", "year": ""}, "spans": [answer]}
            for answer in question.answers
        ],
        "contexts": context_rows(chosen, question.gold, passages),
        "type": question.type,
    }


def _told(name: str, told: Conversation, passages: Mapping[Entity, str]) -> dict[str, Any]:
    gold = {entity for turn in told.turns for entity in turn.gold}
    return {
        "conversation_id": name,
        "turns": [
            {
                "question_text": turn.text,
                "answers": list(turn.answers),
                "gold_titles": [entity.title for entity in turn.gold],
            }
            for turn in told.turns
        ],
        "contexts": context_rows(told.contexts, gold, passages),
    }
