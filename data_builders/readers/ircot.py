"""IRCoT's processed rows: any multi-hop set in one shape, answers as in DROP.

Text is kept verbatim: missing spaces, trailing spaces and unusual characters are part of the data.
"""

import math
from collections import Counter
from typing import Any

from data_builders.readers.rows import (
    RowError,
    acceptable,
    check_unicode,
    digest,
    field,
    found,
    strings,
    text_field,
)
from data_builders.records import Passage, Question


def parse(row: dict[str, Any], _drops: Counter[str]) -> Question:
    """The question of one row; RowError for a malformed one. No row is dropped."""
    dataset = text_field(row, "dataset")
    text = text_field(row, "question_text")
    # Part of HotpotQA's rows come with an empty id.
    question_id = field(row, "question_id", str).strip() or f"{dataset}~{digest(text)}"
    entries = field(row, "answers_objects", list)
    answers = [_answer(entry, f"answers_objects[{index}]") for index, entry in enumerate(entries)]
    kept = acceptable(answers, "answers_objects")
    contexts = field(row, "contexts", list)
    if not contexts:
        raise RowError("contexts: expected at least one passage, found an empty list")
    passages = [paragraph(entry, f"contexts[{index}]") for index, entry in enumerate(contexts)]
    return Question(question_id, dataset, text, kept, tuple(passages))


def paragraph(entry: object, where: str) -> Passage:
    """A passage in the fields that IRCoT took over from MuSiQue."""
    title = field(entry, "title", str, where)
    text = text_field(entry, "paragraph_text", where)
    return Passage(title, text, field(entry, "is_supporting", bool, where))


def _answer(entry: object, where: str) -> str:
    """One acceptable answer: spans joined with ", ", else the number, else "day month year".

    As in IRCoT's data (after DROP), an entry holds one of the three kinds; several spans of an
    entry are together one answer.
    """
    spans = strings(field(entry, "spans", list, where), f"{where}.spans")
    assert isinstance(entry, dict)
    number = entry.get("number", "")
    if isinstance(number, bool) or not isinstance(number, str | int | float) or _endless(number):
        raise RowError(f"{where}.number: expected a string, found {found(number)}")
    check_unicode(str(number), f"{where}.number")
    date = entry.get("date") or {}
    if not isinstance(date, dict):
        raise RowError(f"{where}.date: expected an object, found {found(date)}")
    parts = [_date_part(date, part, f"{where}.date") for part in ("day", "month", "year")]
    joined = ", ".join(spans) if any(span.strip() for span in spans) else ""
    return joined or str(number) or " ".join(part for part in parts if part)


def _endless(number: str | int | float) -> bool:
    # Python reads NaN and Infinity, which JSON does not have.
    return isinstance(number, float) and not math.isfinite(number)


def _date_part(date: dict[str, Any], name: str, where: str) -> str:
    value = date.get(name) or ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"{where}.{name}: expected a string, found {found(value)}")
    check_unicode(str(value), f"{where}.{name}")
    return str(value)
