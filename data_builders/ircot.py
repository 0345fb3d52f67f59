"""Reads questions and passages in IRCoT's processed format, one JSON object a line.

Text is kept verbatim: missing spaces, trailing spaces and unusual characters are part of the data.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_builders.records import Passage, Question
from recipes.errors import UserError

log = logging.getLogger(__name__)

MISTAKES_SHOWN = 10
_MISSING = object()
_TYPE_NAMES = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}
_JSON_NAMES = {type(None): "null", int: "a number", float: "a number", **_TYPE_NAMES}


class _RowError(Exception):
    """One mistake of one row: the field, then what was expected and found there."""


def read_ircot(*paths: str | Path, limit: int | None = None) -> list[Question]:
    """The first `limit` rows of each file (None: all), in order, each under an id of its own.

    A blank id is replaced by one made of the question. Rows that share an id, but ask something
    else (MuSiQue has such), stay apart by a suffix; asking the same again is a mistake.

    Raises:
        UserError: a file cannot be read or has no rows, or rows are malformed. The message lists
            the first mistakes of the file, each with its line and field.
    """
    questions: dict[str, Question] = {}
    first_seen: dict[tuple[str, str], str] = {}
    for path in map(Path, paths):
        mistakes: list[str] = []
        rows = 0
        for number, line in _numbered_lines(path):
            if limit is not None and rows == limit:
                break
            rows += 1
            place = f"{path}:{number}"
            try:
                question = _parse_row(line)
                before = first_seen.setdefault((question.id, question.text), place)
                if before != place:
                    raise _RowError(
                        f"question_id: {question.id!r} with the same question is already at "
                        f"{before}; expected each question once"
                    )
            except _RowError as mistake:
                mistakes.append(f"{place}: {mistake}")
                if len(mistakes) == MISTAKES_SHOWN:
                    mistakes.append("(more may follow)")
                    break
                continue
            taken = question.id
            while question.id in questions:
                question = replace(question, id=f"{question.id}~{_digest(question.text)}")
            if question.id != taken:
                log.warning("%s: question_id %r is taken; using %r", place, taken, question.id)
            questions[question.id] = question
        if mistakes:
            raise UserError("malformed IRCoT rows:\n  " + "\n  ".join(mistakes))
        if rows == 0:
            raise UserError(f"{path}: no rows; expected one JSON object a line")
    return list(questions.values())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Non-blank lines with their numbers, decoded one by one so that an error has its line."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path}:{number}: expected UTF-8, found byte "
                        f"0x{raw[error.start]:02x} at byte {error.start} of the line"
                    ) from error
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UserError(f"{path}: cannot read data file: {error.strerror}") from error


def _parse_row(line: str) -> Question:
    try:
        # Beside bad syntax, ValueError is an integer of more digits than Python converts.
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise _RowError(f"expected a JSON object, found malformed JSON{at}: {error}") from error
    if not isinstance(row, dict):
        raise _RowError(f"expected a JSON object, found {_found(row)}")
    dataset = _text(row, "dataset")
    text = _text(row, "question_text")
    # Part of HotpotQA's rows come with an empty id.
    question_id = _field(row, "question_id", str).strip() or f"{dataset}~{_digest(text)}"
    entries = _field(row, "answers_objects", list)
    answers = [_answer(entry, f"answers_objects[{index}]") for index, entry in enumerate(entries)]
    acceptable = tuple(dict.fromkeys(answer for answer in answers if answer.strip()))
    if not acceptable:
        raise _RowError("answers_objects: expected at least one answer, found none")
    contexts = _field(row, "contexts", list)
    if not contexts:
        raise _RowError("contexts: expected at least one passage, found an empty list")
    passages = [_passage(entry, f"contexts[{index}]") for index, entry in enumerate(contexts)]
    return Question(question_id, dataset, text, acceptable, tuple(passages))


def _passage(entry: object, where: str) -> Passage:
    title = _field(entry, "title", str, where)
    text = _text(entry, "paragraph_text", where)
    return Passage(title, text, _field(entry, "is_supporting", bool, where))


def _answer(entry: object, where: str) -> str:
    """One acceptable answer: spans joined with ", ", else the number, else "day month year".

    As in IRCoT's data (after DROP), an entry holds one of the three kinds; several spans of an
    entry are together one answer.
    """
    spans = _field(entry, "spans", list, where)
    for index, span in enumerate(spans):
        if not isinstance(span, str):
            raise _RowError(f"{where}.spans[{index}]: expected a string, found {_found(span)}")
        _check_unicode(span, f"{where}.spans[{index}]")
    assert isinstance(entry, dict)
    number = entry.get("number", "")
    if isinstance(number, bool) or not isinstance(number, str | int | float) or _endless(number):
        raise _RowError(f"{where}.number: expected a string, found {_found(number)}")
    _check_unicode(str(number), f"{where}.number")
    date = entry.get("date") or {}
    if not isinstance(date, dict):
        raise _RowError(f"{where}.date: expected an object, found {_found(date)}")
    parts = [_date_part(date, part, f"{where}.date") for part in ("day", "month", "year")]
    joined = ", ".join(spans) if any(span.strip() for span in spans) else ""
    return joined or str(number) or " ".join(part for part in parts if part)


def _endless(number: str | int | float) -> bool:
    # Python reads NaN and Infinity, which JSON does not have.
    return isinstance(number, float) and not math.isfinite(number)


def _date_part(date: dict[str, Any], name: str, where: str) -> str:
    value = date.get(name) or ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _RowError(f"{where}.{name}: expected a string, found {_found(value)}")
    _check_unicode(str(value), f"{where}.{name}")
    return str(value)


def _text(owner: object, name: str, where: str = "") -> str:
    text: str = _field(owner, name, str, where)
    if not text.strip():
        path = f"{where}.{name}" if where else name
        raise _RowError(f"{path}: expected some text, found an empty string")
    return text


def _field(owner: object, name: str, kind: type, where: str = "") -> Any:
    if not isinstance(owner, dict):
        raise _RowError(f"{where}: expected an object, found {_found(owner)}")
    path = f"{where}.{name}" if where else name
    value = owner.get(name, _MISSING)
    if value is _MISSING:
        raise _RowError(f"{path}: missing; expected {_TYPE_NAMES[kind]}")
    if not isinstance(value, kind):
        raise _RowError(f"{path}: expected {_TYPE_NAMES[kind]}, found {_found(value)}")
    if isinstance(value, str):
        _check_unicode(value, path)
    return value


def _check_unicode(text: str, where: str) -> None:
    """JSON can spell half of a surrogate pair, which is no character; no tokenizer takes it."""
    half = re.search("[\ud800-\udfff]", text)
    if half:
        raise _RowError(f"{where}: expected Unicode text, found a lone surrogate {_found(half[0])}")


def _found(value: object) -> str:
    shown = ascii(value) if isinstance(value, str) else json.dumps(value)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    return f"{_JSON_NAMES[type(value)]} ({shown})"
