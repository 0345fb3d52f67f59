"""LongBench's rows: one long `context` for a question, which tells nothing of what supports it.

The multi-document sets number their passages, each as a line `Passage N:`, a title line and the
text; the context of any other set is one passage. Source: THUDM/LongBench.
"""

from collections import Counter
from itertools import count
from typing import Any

from data_builders.readers.rows import (
    RowError,
    acceptable,
    digest,
    field,
    optional,
    strings,
    text_field,
)
from data_builders.records import Passage, Question


def parse(row: dict[str, Any], drops: Counter[str]) -> Question:
    """The question of one row; RowError for a malformed one."""
    dataset = text_field(row, "dataset")
    text = text_field(row, "input")
    answers = acceptable(strings(field(row, "answers", list), "answers"), "answers")
    found = split_context(text_field(row, "context"))
    passages = tuple(passage for passage in found if passage.text.strip())
    drops["passages without text"] += len(found) - len(passages)
    if not passages:
        raise RowError("context: expected at least one passage with text, found none")
    question_id = optional(row, "_id", str, "").strip() or f"{dataset}~{digest(text)}"
    return Question(question_id, dataset, text, answers, passages)


def split_context(context: str) -> list[Passage]:
    """The passages of a context, verbatim; the whole context if it has no numbered passages.

    A line such as "Passage 7:" begins a passage only if it is the next number, and only after a
    blank line if the second passage comes after one: passages may hold such lines themselves.
    """
    head = "Passage 1:\n"
    if not context.startswith(head):
        return [Passage("", context)]
    between = "\n\n" if "\n\nPassage 2:\n" in context else "\n"
    passages: list[Passage] = []
    start = len(head)
    for number in count(2):
        head = f"{between}Passage {number}:\n"
        end = context.find(head, start)
        title, _, text = context[start : end if end >= 0 else None].partition("\n")
        # A single line has no title.
        passages.append(Passage(title, text) if text.strip() else Passage("", title))
        if end < 0:
            break
        start = end + len(head)
    return passages
