"""A comparison as one HTML page that needs nothing else: tables, plots, a browser of questions."""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment

from eval.answers import Answer, Variant
from eval.budget import steps
from eval.labels import (
    CHECKPOINT_NAMES,
    ERROR_NAMES,
    SYSTEM_COLOURS,
    SYSTEM_MARKERS,
    SYSTEM_NAMES,
)
from recipes.files import write_text

Json = Mapping[str, Any]
Chunks = Mapping[str, Mapping[str, str]]

_SCRIPTS = ("base.js", "tables.js", "plots.js", "questions.js", "page.js")
# What the page shows of `compare.json`; the recipe's paths and servers stay out of it.
_SHOWN = (
    "recipe",
    "questions_by_dataset",
    "environment",
    "notes",
    "results",
    "differences",
    "budget",
)


def write_page(
    result: Json,
    answers: Iterable[Answer],
    chunks: Chunks,
    path: Path,
) -> None:
    """Write a comparison to `path` as one HTML file without any reference to another.

    `result` is the content of `compare.json`, `answers` are those that it sums up, and `chunks` has
    the `title` and `text` of every chunk that they name.

    The page's policy lets nothing run but its own script and nothing be fetched, and every text of
    the data enters the document as text, for passages may hold anything.

    Raises KeyError for a chunk or cell that an answer names and the others lack.
    """
    style, script = _part("page.css"), "\n".join(map(_part, _SCRIPTS))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = Environment(autoescape=True).from_string(_part("page.html"))
    content = page.render(
        recipe=result["recipe"],
        policy=policy,
        style=style,
        script=script,
        data=_embedded(_data(result, answers, chunks)),
    )
    write_text(path, content + "\n")


@cache
def _part(name: str) -> str:
    return (files("eval") / "web" / name).read_text(encoding="utf-8")


def _digest(source: str) -> str:
    """How a content security policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _embedded(data: Json) -> str:
    """JSON that cannot end the script element it stands in: ASCII, without angle brackets."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e")


def _data(result: Json, answers: Iterable[Answer], chunks: Chunks) -> Json:
    """What the page's script reads.

    Chunks and, within a question, contexts (retrieved chunks and evidence) are held once and named
    by number, since most cells share them. `answers` of a question has a place for each row of
    `results`: null, or answer, F1 in [0, 1], median TTFT in ms, error kinds, context.
    """
    cells = {Variant.of(row): number for number, row in enumerate(result["results"])}
    numbers: dict[str, int] = {}
    questions: dict[str, dict[str, Any]] = {}
    for answer in answers:
        question = questions.setdefault(
            answer.question_id,
            {
                "id": answer.question_id,
                "dataset": answer.dataset,
                "question": answer.question,
                "gold": answer.gold,
                "contexts": {},
                "answers": [None] * len(cells),
            },
        )
        for named in (*answer.chunk_ids, *(str(piece["chunk_id"]) for piece in answer.evidence)):
            numbers.setdefault(named, len(numbers))
        retrieved = tuple(numbers[chunk_id] for chunk_id in answer.chunk_ids)
        context = retrieved, _placed(answer.evidence, chunks, numbers)
        question["answers"][cells[answer.variant]] = [
            answer.answer,
            round(answer.f1, 6),
            round(median(answer.ttft_ms), 2),
            answer.error_kinds,
            question["contexts"].setdefault(context, len(question["contexts"])),
        ]
    curves = steps(row for row in result["results"] if not row["arm"])
    return {
        "names": {
            "systems": {
                name: {"name": text, "colour": SYSTEM_COLOURS[name], "marker": SYSTEM_MARKERS[name]}
                for name, text in SYSTEM_NAMES.items()
            },
            "checkpoints": CHECKPOINT_NAMES,
            "errors": ERROR_NAMES,
        },
        "curves": [[cells[Variant.of(row)] for row in curve] for curve in curves.values()],
        "result": {name: result[name] for name in _SHOWN}
        | {"injection": result.get("injection", [])},
        "chunks": [[chunks[named]["title"], chunks[named]["text"]] for named in numbers],
        "questions": [{**q, "contexts": list(q["contexts"])} for q in questions.values()],
    }


def _placed(
    evidence: Iterable[Mapping[str, str | None]], chunks: Chunks, numbers: Mapping[str, int]
) -> tuple[tuple[int | str, ...], ...]:
    """Each piece of evidence, best first, as a chunk's number and where in its text it stands.

    (chunk,) is the whole of it; (chunk, start, end) counts UTF-16 units, as scripts do; (chunk,
    text) does not stand there verbatim. The n-th piece of one text takes its n-th occurrence.
    """
    placed: list[tuple[int | str, ...]] = []
    seen: Counter[tuple[str, str]] = Counter()
    for piece in evidence:
        chunk_id = str(piece["chunk_id"])
        text = chunks[chunk_id]["text"]
        wanted = text.strip() if piece["text"] is None else piece["text"].strip()
        start = text.find(wanted, seen[chunk_id, wanted])
        if wanted == text.strip():
            placed.append((numbers[chunk_id],))
        elif wanted and start >= 0:
            first = _utf16_units(text[:start])
            placed.append((numbers[chunk_id], first, first + _utf16_units(wanted)))
            seen[chunk_id, wanted] = start + len(wanted)
        else:
            placed.append((numbers[chunk_id], wanted))
    return tuple(placed)


def _utf16_units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
