"""Fields of one row: checked as they are taken, so that a mistake names the field."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from typing import Any

from recipes.fields import nearest

_MISSING = object()
_EXPECTED = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}
_FOUND = {type(None): "null", int: "a number", float: "a number", **_EXPECTED}


class RowError(Exception):
    """One mistake of one row: the field, then what was expected and found there."""


def field(owner: object, name: str, kind: type, where: str = "") -> Any:
    """The value of a field that must be there, as `kind` (str, list, dict or bool).

    `where` is the path of `owner` inside its row.

    Raises:
        RowError: `owner` is no object, or the field is missing, of another kind or no Unicode.
    """
    if not isinstance(owner, dict):
        raise RowError(f"{where}: expected an object, found {found(owner)}")
    path = f"{where}.{name}" if where else name
    value = owner.get(name, _MISSING)
    if value is _MISSING:
        raise RowError(f"{path}: missing; expected {_EXPECTED[kind]}")
    if not isinstance(value, kind):
        raise RowError(f"{path}: expected {_EXPECTED[kind]}, found {found(value)}")
    if isinstance(value, str):
        check_unicode(value, path)
    return value


def optional(owner: dict[str, Any], name: str, kind: type, default: Any, where: str = "") -> Any:
    """As `field`, with `default` where the field is missing or null."""
    return default if owner.get(name) is None else field(owner, name, kind, where)


def text_field(owner: object, name: str, where: str = "") -> str:
    """A string with something to read in it, verbatim."""
    text: str = field(owner, name, str, where)
    if not text.strip():
        path = f"{where}.{name}" if where else name
        raise RowError(f"{path}: expected some text, found an empty string")
    return text


def strings(values: list[Any], where: str) -> list[str]:
    """The list itself, once every entry is known to be a Unicode string."""
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise RowError(f"{where}[{index}]: expected a string, found {found(value)}")
        check_unicode(value, f"{where}[{index}]")
    return values


def single_answer(row: dict[str, Any]) -> str:
    """The `answer` of a row; the public test sets, which have none, are told apart from typos."""
    if row.get("answer") is None or row["answer"] == "":
        raise RowError(
            "answer: expected the answer, found none; a test set without answers can be neither "
            "trained nor measured on"
        )
    return text_field(row, "answer")


def acceptable(answers: Iterable[str], where: str) -> tuple[str, ...]:
    """Every distinct answer that is not blank, in order; RowError if none is left."""
    kept = tuple(dict.fromkeys(answer for answer in answers if answer.strip()))
    if not kept:
        raise RowError(f"{where}: expected at least one answer, found none")
    return kept


def refuse_unknown(owner: object, names: Collection[str], where: str = "") -> None:
    """RowError for the first field that is none of `names`, with the nearest one."""
    if not isinstance(owner, dict):
        raise RowError(f"{where}: expected an object, found {found(owner)}")
    for name in owner:
        if name not in names:
            check_unicode(name, where or "the row")
            close = nearest(name, names)
            advice = f"; did you mean {close!r}?" if close else f"; known are {', '.join(names)}"
            raise RowError(f"{f'{where}.' if where else ''}{name}: unknown field{advice}")


def check_unicode(text: str, where: str) -> None:
    """JSON can spell half of a surrogate pair, which is no character; no tokenizer takes it."""
    half = re.search("[\ud800-\udfff]", text)
    if half:
        raise RowError(f"{where}: expected Unicode text, found a lone surrogate {found(half[0])}")


def found(value: object) -> str:
    """What stands where something else was expected, cut to a few words."""
    if value is None or isinstance(value, list | dict):
        return _FOUND[type(value)]
    shown = ascii(value) if isinstance(value, str) else json.dumps(value)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    return f"{_FOUND[type(value)]} ({shown})"


def digest(text: str, hex_digits: int = 12) -> str:
    """A name made of content."""
    return hashlib.sha256(text.encode()).hexdigest()[:hex_digits]
