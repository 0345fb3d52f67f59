"""MuSiQue's original rows, MuSiQue-Ans and MuSiQue-Full.

Source: StonyBrookNLP/musique. In MuSiQue-Full a question comes twice under one id, once with
contexts that cannot answer it; those rows are dropped.
"""

from collections import Counter
from typing import Any

from data_builders.readers.ircot import paragraph
from data_builders.readers.rows import (
    RowError,
    acceptable,
    digest,
    field,
    optional,
    single_answer,
    strings,
    text_field,
)
from data_builders.records import Question


def parse(row: dict[str, Any], drops: Counter[str]) -> Question | None:
    """The question of one row, None for an unanswerable one; RowError for a malformed one."""
    text = text_field(row, "question")
    entries = field(row, "paragraphs", list)
    if not optional(row, "answerable", bool, True):
        drops["unanswerable questions"] += 1
        return None
    aliases = strings(optional(row, "answer_aliases", list, []), "answer_aliases")
    answers = acceptable([single_answer(row), *aliases], "answer")
    if not entries:
        raise RowError("paragraphs: expected at least one passage, found an empty list")
    passages = [paragraph(entry, f"paragraphs[{index}]") for index, entry in enumerate(entries)]
    question_id = optional(row, "id", str, "").strip() or f"musique~{digest(text)}"
    return Question(question_id, "musique", text, answers, tuple(passages))
