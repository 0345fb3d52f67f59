"""The package's own format, for data that comes in none of the others.

A passage of a corpus: `{"id"?, "title"?, "text", "metadata"?}`.
A question: `{"id"?, "question", "answers": [...] or "answer", "contexts": [passage, ...]?,
"supporting_ids": [...]?, "dataset"?, "metadata"?}`, where a passage of `contexts` has no id but
may have `is_supporting`, and `supporting_ids` are those of a corpus. An id is a string or an
integer; `metadata` is free. Any other field is a mistake.
"""

from collections import Counter
from typing import Any

from data_builders.readers.rows import (
    RowError,
    acceptable,
    check_unicode,
    digest,
    field,
    found,
    optional,
    refuse_unknown,
    single_answer,
    strings,
    text_field,
)
from data_builders.records import Passage, Question

DATASET = "custom"
_PASSAGE_FIELDS = ("id", "title", "text", "metadata")
_CONTEXT_FIELDS = ("title", "text", "is_supporting", "metadata")
_QUESTION_FIELDS = (
    "id", "question", "answers", "answer", "contexts", "supporting_ids", "dataset", "metadata",
)  # fmt: skip


def parse_passage(row: dict[str, Any]) -> Passage:
    """The passage of one corpus row, under an id made of its content if it has none.

    Raises:
        RowError: the row is malformed.
    """
    refuse_unknown(row, _PASSAGE_FIELDS)
    title, text = optional(row, "title", str, ""), text_field(row, "text")
    passage_id = _id(row["id"], "id") if row.get("id") is not None else ""
    return Passage(title, text, id=passage_id or digest(f"{title}\n{text}", hex_digits=20))


def parse_question(row: dict[str, Any], _drops: Counter[str]) -> Question:
    """The question of one row; RowError for a malformed one. No row is dropped."""
    refuse_unknown(row, _QUESTION_FIELDS)
    text = text_field(row, "question")
    dataset = optional(row, "dataset", str, "").strip() or DATASET
    question_id = _id(row["id"], "id") if row.get("id") is not None else ""
    passages = [
        _context(entry, f"contexts[{index}]")
        for index, entry in enumerate(optional(row, "contexts", list, []))
    ]
    supporting = [
        _id(value, f"supporting_ids[{index}]")
        for index, value in enumerate(optional(row, "supporting_ids", list, []))
    ]
    return Question(
        question_id or f"{dataset}~{digest(text)}",
        dataset,
        text,
        _answers(row),
        tuple(passages),
        tuple(dict.fromkeys(supporting)),
    )


def _answers(row: dict[str, Any]) -> tuple[str, ...]:
    if row.get("answers") is None:
        return (single_answer(row),)
    if row.get("answer") is not None:
        raise RowError("answer: expected either answer or answers, found both")
    return acceptable(strings(field(row, "answers", list), "answers"), "answers")


def _context(entry: object, where: str) -> Passage:
    refuse_unknown(entry, _CONTEXT_FIELDS, where)
    assert isinstance(entry, dict)
    text = text_field(entry, "text", where)
    title = optional(entry, "title", str, "", where)
    return Passage(title, text, optional(entry, "is_supporting", bool, False, where))


def _id(value: object, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"{where}: expected a string or an integer, found {found(value)}")
    name = str(value).strip()
    if not name:
        raise RowError(f"{where}: expected an id, found an empty string")
    check_unicode(name, where)
    return name
