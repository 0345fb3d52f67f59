"""`coinrag inject`: the questions of some files, one passage of each with a planted instruction."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

from data_builders.injection.planting import (
    KINDS,
    PLACES,
    Injection,
    coin_target,
    insertion_point,
    plant,
    worded,
)
from data_builders.readers import read_questions
from data_builders.readers.rows import digest
from data_builders.records import Question
from recipes.building import DataFormat
from recipes.errors import UserError
from recipes.files import write_text

_QUESTIONS = "questions.jsonl"
_INJECTIONS = "injections.jsonl"


def write_injections(
    paths: Sequence[Path],
    folder: Path,
    *,
    data_format: DataFormat = "ircot",
    seed: int = 0,
    share: float = 1,
) -> dict[str, Any]:
    """Write `questions.jsonl` and `injections.jsonl` into `folder`, from the questions of `paths`.

    The first holds all questions, in the package's own format, under the ids that they are read
    with; a `share` of them has one passage with a planted instruction, and nothing else is changed.
    The second has one line for each of those, an `Injection`. Kinds, places and carriers are
    balanced, each alone and in pairs; the same arguments give the same bytes. Returns how many
    questions there are, how many were attacked, and why others could not be.

    Raises:
        UserError: a share that is none, a file that cannot be read, no question that can be
            attacked, or a folder that holds another set or cannot be written.
    """
    if not 0 < share <= 1:
        raise UserError(f"share: expected more than 0 and at most 1, got {share}")
    for path in paths:
        if path.name == _QUESTIONS and (path.parent / _INJECTIONS).exists():
            raise UserError(f"{path} holds planted instructions already; give the clean questions")
    questions = list(read_questions(paths, data_format))
    skipped: Counter[str] = Counter()
    injections: dict[str, Injection] = {}
    taken: set[str] = set()
    for question, kind, place, carrier in _design(questions, seed, share, skipped):
        injection = _injection(question, kind, place, carrier, seed, taken)
        if injection is None:
            skipped["no passage has such a place"] += 1
            continue
        taken.add(injection.target)
        injections[question.id] = injection
    if not injections:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in (+skipped).items())
        names = ", ".join(map(str, paths))
        raise UserError(f"{names}: no question could be attacked ({reasons})")
    poisoned = [_poisoned(question, injections.get(question.id)) for question in questions]
    ordered = [injections[question.id] for question in questions if question.id in injections]
    # The injections come last: where they are, the set is whole.
    _write_new(
        folder,
        {
            _QUESTIONS: _lines(map(_row, poisoned)),
            _INJECTIONS: _lines(map(asdict, ordered)),
        },
    )
    return {"questions": len(questions), "attacked": len(injections), "skipped": dict(+skipped)}


def _design(
    questions: Sequence[Question], seed: int, share: float, skipped: Counter[str]
) -> Iterator[tuple[Question, str, str, str]]:
    """(question, kind, place, carrier) of each question to attack, in an order of the seed's.

    Numbers count through each list at once. The lists' lengths share no divisor, so that all
    combinations come equally often, and any pair of properties is balanced at any number.
    """
    able = [question for question in questions if question.passages]
    skipped["no passages of its own"] += len(questions) - len(able)
    able.sort(key=lambda question: digest(f"{seed}\n{question.id}", hex_digits=32))
    numbers: Counter[tuple[str, ...]] = Counter()
    for question in able[: max(1, round(share * len(able)))]:
        carriers = tuple(sorted({_carrier(question, at) for at in range(len(question.passages))}))
        number = numbers[carriers]
        numbers[carriers] += 1
        yield (
            question,
            KINDS[number % len(KINDS)],
            PLACES[number % len(PLACES)],
            carriers[number % len(carriers)],
        )


def _carrier(question: Question, index: int) -> str:
    """What the passage of that index is to the question."""
    if not any(passage.is_supporting for passage in question.passages):
        return "unmarked"
    return "gold" if question.passages[index].is_supporting else "distractor"


def _injection(
    question: Question, kind: str, place: str, carrier: str, seed: int, taken: set[str]
) -> Injection | None:
    """What is planted for the question; None where none of the carriers has such a place."""
    rng = Random(f"injection {seed} {question.id}")
    carriers = [
        index
        for index, passage in enumerate(question.passages)
        if _carrier(question, index) == carrier
        and insertion_point(passage.text, kind, place) is not None
    ]
    if not carriers:
        return None
    index = rng.choice(carriers)
    passages = (passage.full_text for passage in question.passages)
    target = coin_target([*passages, question.text, *question.answers], taken, rng)
    text = worded(kind, question.text, target, rng)
    title = question.passages[index].title
    return Injection(question.id, index, title, carrier, kind, place, text, target)


def _poisoned(question: Question, injection: Injection | None) -> Question:
    if injection is None:
        return question
    passages = list(question.passages)
    passage = passages[injection.passage]
    at = insertion_point(passage.text, injection.kind, injection.place)
    assert at is not None, "an injection was made for a place that is there"
    passages[injection.passage] = replace(passage, text=plant(passage.text, at, injection.text))
    return replace(question, passages=tuple(passages))


def _row(question: Question) -> dict[str, Any]:
    """A question in the package's own format."""
    return {
        "id": question.id,
        "dataset": question.dataset,
        "question": question.text,
        "answers": question.answers,
        "contexts": [
            {"title": passage.title, "text": passage.text, "is_supporting": passage.is_supporting}
            for passage in question.passages
        ],
        "supporting_ids": question.supporting_ids,
    }


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_new(folder: Path, texts: dict[str, str]) -> None:
    """Writes the files by name, unless one is there with another content."""
    try:
        for name, text in texts.items():
            path = folder / name
            if path.exists() and path.read_bytes() != text.encode():
                raise UserError(f"{path} is there already, with other content: give a new folder")
        for name, text in texts.items():
            write_text(folder / name, text)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}") from error
