"""Reads questions and passages in IRCoT's processed format, one JSON object a line.

Text is kept verbatim: missing spaces, trailing spaces and unusual characters are part of the data.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import UserError

MISTAKES_SHOWN = 10
_MISSING = object()
_TYPE_NAMES = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}
_JSON_NAMES = {type(None): "null", int: "a number", float: "a number", **_TYPE_NAMES}


@dataclass(frozen=True)
class Passage:
    """One context of a question."""

    title: str
    text: str
    is_supporting: bool

    @property
    def full_text(self) -> str:
        """What is tokenized and retrieved: the title line, then the paragraph."""
        return f"{self.title}\n{self.text}\n"


@dataclass(frozen=True)
class Question:
    """One row: a question, every acceptable answer, and its contexts in file order."""

    id: str
    dataset: str
    text: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]


class _Mistake(Exception):
    """One mistake of one row: the field, then what was expected and found there."""


def read_ircot_files(paths: Sequence[str | Path], limit: int | None = None) -> list[Question]:
    """The first `limit` rows of each file (None: all), in order; ids are unique across files.

    Raises:
        UserError: a file cannot be read or has no rows, or rows are malformed. The message lists
            the first mistakes of the file, each with its line and field.
    """
    questions: list[Question] = []
    first_seen: dict[str, str] = {}
    for path in map(Path, paths):
        mistakes: list[str] = []
        rows = 0
        for number, line in _numbered_lines(path):
            if limit is not None and rows == limit:
                break
            rows += 1
            try:
                question = _parse_row(line)
                if question.id in first_seen:
                    raise _Mistake(
                        f"question_id: {question.id!r} was already used at "
                        f"{first_seen[question.id]}; ids must be unique"
                    )
            except _Mistake as mistake:
                mistakes.append(f"{path}:{number}: {mistake}")
                if len(mistakes) == MISTAKES_SHOWN:
                    mistakes.append("(more may follow)")
                    break
                continue
            first_seen[question.id] = f"{path}:{number}"
            questions.append(question)
        if mistakes:
            raise UserError("malformed IRCoT rows:\n  " + "\n  ".join(mistakes))
        if rows == 0:
            raise UserError(f"{path}: no rows; expected one JSON object a line")
    return questions


def read_ircot(path: str | Path, limit: int | None = None) -> list[Question]:
    """The first `limit` rows (None: all) of one file; errors as in `read_ircot_files`."""
    return read_ircot_files([path], limit)


def answer_key(text: str) -> str:
    """Case-folded words between single spaces, for finding an answer in text by whole words."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return f" {' '.join(words)} "


def holds_answer(text_key: str, answers: Sequence[str]) -> bool:
    """Whether any answer occurs, word for word, in the text whose `answer_key` is given."""
    keys = [answer_key(answer) for answer in answers]
    return any(key.strip() and key in text_key for key in keys)


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
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise _Mistake(f"expected a JSON object, found malformed JSON{at}: {error}") from error
    if not isinstance(row, dict):
        raise _Mistake(f"expected a JSON object, found {_found(row)}")
    question_id = _text(row, "question_id")
    dataset = _text(row, "dataset")
    text = _text(row, "question_text")
    entries = _field(row, "answers_objects", list)
    answers = [
        _answer(entry, f"answers_objects[{index}]") for index, entry in enumerate(entries)
    ]
    acceptable = tuple(dict.fromkeys(answer for answer in answers if answer.strip()))
    if not acceptable:
        raise _Mistake("answers_objects: expected at least one answer, found none")
    contexts = _field(row, "contexts", list)
    if not contexts:
        raise _Mistake("contexts: expected at least one passage, found an empty list")
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
            raise _Mistake(f"{where}.spans[{index}]: expected a string, found {_found(span)}")
    assert isinstance(entry, dict)
    number = entry.get("number", "")
    if isinstance(number, bool) or not isinstance(number, str | int | float):
        raise _Mistake(f"{where}.number: expected a string, found {_found(number)}")
    date = entry.get("date") or {}
    if not isinstance(date, dict):
        raise _Mistake(f"{where}.date: expected an object, found {_found(date)}")
    parts = [str(date.get(part) or "") for part in ("day", "month", "year")]
    return ", ".join(spans) or str(number) or " ".join(part for part in parts if part)


def _text(owner: object, name: str, where: str = "") -> str:
    text: str = _field(owner, name, str, where)
    if not text.strip():
        path = f"{where}.{name}" if where else name
        raise _Mistake(f"{path}: expected some text, found an empty string")
    return text


def _field(owner: object, name: str, kind: type, where: str = "") -> Any:
    if not isinstance(owner, dict):
        raise _Mistake(f"{where}: expected an object, found {_found(owner)}")
    path = f"{where}.{name}" if where else name
    value = owner.get(name, _MISSING)
    if value is _MISSING:
        raise _Mistake(f"{path}: missing; expected {_TYPE_NAMES[kind]}")
    if not isinstance(value, kind):
        raise _Mistake(f"{path}: expected {_TYPE_NAMES[kind]}, found {_found(value)}")
    return value


def _found(value: object) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    return f"{_JSON_NAMES[type(value)]} ({shown})"
