"""Conversations as the sample world writes them: turns that share their passages.

`{"conversation_id", "turns": [{"question_text", "answers": [...], "gold_titles": [...]}, ...],
"contexts": [passage in IRCoT's fields, ...]}`; a gold title is that of one of the contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from data_builders.readers.ircot import paragraph
from data_builders.readers.rows import RowError, acceptable, field, found, strings, text_field
from data_builders.records import Passage, Question

DATASET = "conversations"


@dataclass(frozen=True)
class Conversation:
    """Questions in turn over the same passages; in each question its own gold ones are marked."""

    id: str
    turns: tuple[Question, ...]


def parse_conversation(row: dict[str, Any], place: str) -> Conversation:
    """The conversation of one row, its turns named `<id>/1`, `<id>/2`, …

    Raises:
        RowError: the row is malformed.
    """
    name = text_field(row, "conversation_id")
    entries = field(row, "contexts", list)
    passages = [paragraph(entry, f"contexts[{index}]") for index, entry in enumerate(entries)]
    turns = [
        _turn(entry, f"turns[{index}]", passages)
        for index, entry in enumerate(field(row, "turns", list))
    ]
    for field_name, values in (("contexts", passages), ("turns", turns)):
        if not values:
            raise RowError(f"{field_name}: expected at least one, found an empty list")
    named = [replace(turn, id=f"{name}/{n}", place=place) for n, turn in enumerate(turns, start=1)]
    return Conversation(name, tuple(named))


def _turn(entry: object, where: str, passages: Sequence[Passage]) -> Question:
    text = text_field(entry, "question_text", where)
    answers = strings(field(entry, "answers", list, where), f"{where}.answers")
    gold = strings(field(entry, "gold_titles", list, where), f"{where}.gold_titles")
    titles = {passage.title for passage in passages}
    for index, title in enumerate(gold):
        if title not in titles:
            raise RowError(
                f"{where}.gold_titles[{index}]: expected the title of one of the contexts, "
                f"found {found(title)}"
            )
    marked = tuple(replace(passage, is_supporting=passage.title in gold) for passage in passages)
    return Question("", DATASET, text, acceptable(answers, f"{where}.answers"), marked)
