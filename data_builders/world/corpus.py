"""The sample world at any size: passages as a stream, or a corpus with questions about it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, TextIO

from data_builders.world.asking import Question
from data_builders.world.entities import Entity, World, build_world
from data_builders.world.names import NameSource
from data_builders.world.prose import write_passages
from data_builders.world.questions import make_questions
from data_builders.world.write import DATASET
from recipes.errors import UserError
from recipes.files import write_text

_BLOCK_SCALE = 500  # people a block; the largest block has 2,500 entities
_PASSAGES_A_PERSON = 5  # at most
_PASSAGES_A_QUESTION = 10  # at least
_SMALLEST = 400


def iter_passages(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Stream `count` (title, paragraph) pairs with distinct titles.

    One block of about 2,000 entities is held at a time, plus the words already used.
    """
    blocks = (passages for _, passages in _blocks(seed, _BLOCK_SCALE))
    return islice(((e.title, text) for block in blocks for e, text in block.items()), count)


def write_corpus(
    folder: Path, *, passages: int, train_questions: int, dev_questions: int, seed: int
) -> dict[str, Any]:
    """Write `corpus.jsonl`, `train.jsonl`, `dev.jsonl` and `world.json` into `folder`.

    All are in the package's own format; the questions bring no contexts, but name their supporting
    passages of the corpus. Train and dev questions are about different entities. Memory holds one
    block of the corpus and the questions; the same arguments give the same bytes. Returns what
    `world.json` holds.

    Raises:
        UserError: fewer than 400 passages, a question count below 1, more than one question for
            ten passages, or a folder that cannot be written.
    """
    counts = {"dev": dev_questions, "train": train_questions}
    _check(passages, counts)
    scale = min(_BLOCK_SCALE, passages // (2 * _PASSAGES_A_PERSON))
    shares = _shares(passages // (_PASSAGES_A_PERSON * scale), counts)
    rng = Random(f"questions {seed}")
    written = 0
    types: dict[str, Counter[str]] = {split: Counter() for split in counts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            _replacing(folder / "corpus.jsonl") as corpus,
            _replacing(folder / "dev.jsonl") as dev,
            _replacing(folder / "train.jsonl") as train,
        ):
            files = {"dev": dev, "train": train}
            # Blocks beyond those with questions fill the corpus up.
            for world, texts in _blocks(seed, scale):
                ids = {e: f"{DATASET}-{seed}-{written + i:07d}" for i, e in enumerate(texts)}
                for entity in islice(texts, passages - written):
                    row = {"id": ids[entity], "title": entity.title, "text": texts[entity]}
                    _write_row(corpus, row)
                    written += 1
                split, share = next(shares, ("", 0))
                for question in make_questions(world, texts, share, rng):
                    row = _row(split, seed, types[split].total(), question, ids)
                    _write_row(files[split], row)
                    types[split][question.type] += 1
                if written == passages:
                    break
        assert {split: asked.total() for split, asked in types.items()} == counts
        summary: dict[str, Any] = {"dataset": DATASET, "seed": seed, "corpus": written}
        for split, count in counts.items():
            summary[split] = {"questions": count, "types": dict(sorted(types[split].items()))}
        write_text(folder / "world.json", json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write a corpus into {folder}: {error.strerror}") from error
    return summary


def _check(passages: int, counts: Mapping[str, int]) -> None:
    if passages < _SMALLEST:
        raise UserError(f"a corpus needs at least {_SMALLEST} passages, not {passages}")
    for split, count in counts.items():
        if count < 1:
            raise UserError(f"{split}_questions must be at least 1, not {count}")
    most = passages // _PASSAGES_A_QUESTION
    if sum(counts.values()) > most:
        raise UserError(
            f"{passages} passages are enough for {most} questions, not {sum(counts.values())}; "
            f"a question needs {_PASSAGES_A_QUESTION}"
        )


def _shares(blocks: int, counts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """(split, its questions) for each of `blocks` blocks; every split has blocks of its own."""
    part = counts["dev"] / sum(counts.values())
    dev_blocks = min(blocks - 1, max(1, round(part * blocks)))
    for split, own in (("dev", dev_blocks), ("train", blocks - dev_blocks)):
        for block in range(own):
            yield split, counts[split] * (block + 1) // own - counts[split] * block // own


def _blocks(seed: int, scale: int) -> Iterator[tuple[World, dict[Entity, str]]]:
    """Worlds without end, each with its passages; no two share a coined word."""
    rng, names = Random(f"passages {seed}"), NameSource(Random(f"passage names {seed}"))
    while True:
        world = build_world(rng, names, scale)
        passages = write_passages(world, rng)
        assert len(passages) <= _PASSAGES_A_PERSON * scale
        yield world, passages


def _row(
    split: str, seed: int, number: int, question: Question, ids: Mapping[Entity, str]
) -> dict[str, Any]:
    return {
        "id": f"{DATASET}-{seed}-{split}-{number:05d}",
        "dataset": DATASET,
        "question": question.text,
        "answers": list(question.answers),
        "supporting_ids": [ids[entity] for entity in question.gold],
        "metadata": {"type": question.type},
    }


def _write_row(file: TextIO, row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """A file that takes its place at `path` when it is whole."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
