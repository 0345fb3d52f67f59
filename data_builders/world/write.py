"""Write the sample world as IRCoT-format files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from data_builders.world.asking import Question
from data_builders.world.entities import Entity, World, build_world
from data_builders.world.names import NameSource
from data_builders.world.prose import write_passages
from data_builders.world.questions import make_questions, states_any
from recipes.errors import UserError
from recipes.files import write_text

CONTEXTS = 10
DATASET = "sample_world"


def write_world(
    folder: Path, *, train_questions: int, dev_questions: int, seed: int
) -> dict[str, Any]:
    """Write `train.jsonl`, `dev.jsonl` and `world.json` (counts and seed) into `folder`.

    Train and dev are two worlds that share no coined word, hence no entity and no fact. The same
    arguments give the same bytes. Returns what `world.json` holds; UserError on a count below 1 or
    a folder that cannot be written.
    """
    counts = {"dev": dev_questions, "train": train_questions}
    for split, count in counts.items():
        if count < 1:
            raise UserError(f"{split}_questions must be at least 1, not {count}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = NameSource(Random(f"names {seed}"))
        summary: dict[str, Any] = {"dataset": DATASET, "seed": seed}
        # Dev comes first, so that it stays the same whatever the amount of training data.
        for split, count in counts.items():
            rng = Random(f"{split} {seed}")
            rows = _rows(split, count, seed, rng, names)
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_text(folder / f"{split}.jsonl", text)
            summary[split] = {
                "questions": count,
                "passages": len({c["title"] for row in rows for c in row["contexts"]}),
                "types": dict(sorted(Counter(row["type"] for row in rows).items())),
            }
        write_text(folder / "world.json", json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write a world into {folder}: {error.strerror}") from error
    return summary


def _rows(
    split: str, count: int, seed: int, rng: Random, names: NameSource
) -> list[dict[str, Any]]:
    world = build_world(rng, names, count // 2)
    passages = write_passages(world, rng)
    questions = make_questions(world, passages, count, rng)
    return [
        _row(f"{DATASET}-{seed}-{split}-{number:05d}", question, world, passages, rng)
        for number, question in enumerate(questions)
    ]


def _row(
    question_id: str, question: Question, world: World, passages: Mapping[Entity, str], rng: Random
) -> dict[str, Any]:
    chosen = [*question.gold, *_distractors(question, world, passages, rng)]
    rng.shuffle(chosen)
    return {
        "dataset": DATASET,
        "question_id": question_id,
        "question_text": question.text,
        "answers_objects": [
            {"number": "", "date": {"day": "", "month": "", "year": ""}, "spans": [answer]}
            for answer in question.answers
        ],
        "contexts": [
            {
                "idx": idx,
                "title": entity.title,
                "paragraph_text": passages[entity],
                "is_supporting": entity in question.gold,
            }
            for idx, entity in enumerate(chosen)
        ],
        "type": question.type,
    }


def _distractors(
    question: Question, world: World, passages: Mapping[Entity, str], rng: Random
) -> list[Entity]:
    """The passages most like the gold ones, in turn, that do not state an answer."""
    gold = question.gold
    ranked = []
    for entity in gold:
        group = world.by_type[entity.type]
        sample = rng.sample(group, min(len(group), 60))
        ranked.append(sorted(sample, key=lambda other, e=entity: -_likeness(e, other)))  # type: ignore[misc]
    chosen: list[Entity] = []
    for turn in range(60):
        for candidates in ranked:
            if len(gold) + len(chosen) == CONTEXTS:
                return chosen
            if turn >= len(candidates) or candidates[turn] in (*gold, *chosen):
                continue
            other = candidates[turn]
            if question.source is None or not states_any(
                question.answers, other.title, passages[other]
            ):
                chosen.append(other)
    raise AssertionError(f"too few distractors for {question.text!r}")


def _likeness(a: Entity, b: Entity) -> int:
    """Kind, name words and facts that two entities of one type share."""
    names = len(set(a.name.split()) & set(b.name.split()))
    facts = sum(b.facts.get(relation) is value for relation, value in a.facts.items())
    return 2 * (a.kind == b.kind) + 2 * names + facts
