"""What a language model is asked for as nugget candidates, and how its answer is read.

The task is the CoinRAG paper's (short verbatim phrases or clauses that stand alone as facts); the
words and the example are ours. Any chat model can be asked: the turns need no system role.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from pydantic_core import from_json

_TASK = """\
List the nuggets of the text below: short phrases or clauses, each of which states one fact.

- Copy each nugget word for word from the text, as one unbroken piece. Do not reword it, correct \
it, shorten it inside or translate it.
- A nugget can be understood alone: it says who or what it is about wherever the text allows \
that. Prefer a whole clause to a bare name or number.
- Most nuggets have 5 to 25 words. Divide a sentence that states several facts.
- Keep the order of the text, cover every fact in it, and let nuggets not overlap.
- Answer with JSON only, {"nuggets": ["...", "..."]}; with an empty list if the text states nothing.

Text:
"""
_EXAMPLE = (
    "Lake Orrin\nLake Orrin is a reservoir in the north of Valdia, built between 1931 and 1936 to "
    "supply the mills of Hartsby. After the mills closed, its shores became a nature reserve."
)
_EXAMPLE_NUGGETS = [
    "Lake Orrin is a reservoir in the north of Valdia",
    "built between 1931 and 1936 to supply the mills of Hartsby",
    "After the mills closed, its shores became a nature reserve.",
]

Messages = list[dict[str, str]]
"""The turns of a chat, each with `role` and `content`."""

# For servers with structured output.
NUGGETS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"nuggets": {"type": "array", "items": {"type": "string"}}},
    "required": ["nuggets"],
    "additionalProperties": False,
}

_REASONING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_JSON_START = re.compile(r'\{\s*"|\[\s*["\]]')
# Beyond so many places where JSON could begin, none is looked for: broken JSON has many.
_MAX_STARTS = 32
_BULLET = re.compile(r"(?:[-*•–]|\(?\d+[.)])\s+")
# To be raised whenever `parse_candidates` reads the same answer differently.
READING_VERSION = 1


def messages(text: str) -> Messages:
    """The chat turns that ask for the nuggets of a text, with one worked example."""
    return [
        {"role": "user", "content": _TASK + _EXAMPLE},
        {"role": "assistant", "content": json.dumps({"nuggets": _EXAMPLE_NUGGETS})},
        {"role": "user", "content": f"Text:\n{text}"},
    ]


def parse_candidates(answer: str) -> list[str]:
    """The candidates in a model's answer, in its order, repeats included.

    Reads JSON, alone or with a fence or prose around it, the complete entries of JSON that was cut
    off, and numbered, bulleted or quoted lines. Blank entries and those that are not text are left
    out; an empty list is an answer too.

    Raises:
        ValueError: nothing can be read; says why.
    """
    answer = _REASONING.sub("", answer).strip()
    if not answer:
        raise ValueError("empty answer")
    entries = next(_complete_lists(answer), None)
    if entries is None:
        # In broken JSON the lines can hold more than what precedes the fault.
        entries = max(next(_cut_off_lists(answer), []), _listed_lines(answer), key=len)
        if not entries:
            raise ValueError("no list found")
    texts = [entry.strip() for entry in entries if isinstance(entry, str)]
    if entries and not texts:
        raise ValueError("no text in the list")
    return [text for text in texts if text]


def _complete_lists(answer: str) -> Iterator[list[Any]]:
    decoder = json.JSONDecoder(strict=False)
    for start in islice(_JSON_START.finditer(answer), _MAX_STARTS):
        try:
            value, _ = decoder.raw_decode(answer, start.start())
        except (ValueError, RecursionError):
            continue
        if (entries := _list_in(value)) is not None:
            yield entries


def _cut_off_lists(answer: str) -> Iterator[list[Any]]:
    for start in islice(_JSON_START.finditer(answer), _MAX_STARTS):
        try:
            value = from_json(answer[start.start() :], allow_partial=True)
        except ValueError:
            continue
        if entries := _list_in(value):
            yield entries


def _list_in(value: Any) -> list[Any] | None:
    """The list itself, or that of the key `nuggets`, or of the only key."""
    if isinstance(value, dict):
        value = value.get("nuggets", next(iter(value.values())) if len(value) == 1 else None)
    return value if isinstance(value, list) else None


def _listed_lines(answer: str) -> list[str]:
    """What follows bullets or numbers, and whole lines in quotation marks (of broken JSON)."""
    items = []
    for line in map(str.strip, answer.splitlines()):
        bullet = _BULLET.match(line)
        item = line[bullet.end() :] if bullet else line.removesuffix(",")
        is_quoted = len(item) > 1 and item[0] == item[-1] == '"' and '":' not in item
        if bullet or is_quoted:
            items.append((item[1:-1] if is_quoted else item).replace('\\"', '"'))
    return items


# What is asked and in which form: part of the identity of the nuggets that come of it.
PROMPT_VERSION = hashlib.sha256(json.dumps([messages(""), NUGGETS_SCHEMA]).encode()).hexdigest()
