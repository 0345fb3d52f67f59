"""HotpotQA's original rows, and 2WikiMultihopQA's, which have the same shape.

`context` is a list of `[title, sentences]` and `supporting_facts` one of `[title, sentence]`; rows
exported from Hugging Face's datasets have both as columns. Sources: the READMEs of hotpotqa/hotpot
and Alab-NII/2wikimultihop.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

from data_builders.readers.rows import (
    RowError,
    digest,
    field,
    found,
    optional,
    single_answer,
    strings,
    text_field,
)
from data_builders.records import Passage, Question

# HotpotQA's sentences carry the spaces between them and 2WikiMultihopQA's do not. IRCoT's
# processed files come from the same joins.
_BETWEEN_SENTENCES = {"hotpotqa": "", "2wikimultihopqa": " "}


def parse_hotpotqa(row: dict[str, Any], drops: Counter[str]) -> Question:
    """The question of one row of HotpotQA; RowError for a malformed one."""
    if "evidences" in row:
        raise RowError("evidences: expected HotpotQA's fields, found one of 2WikiMultihopQA's")
    return _parse(row, drops, "hotpotqa")


def parse_2wiki(row: dict[str, Any], drops: Counter[str]) -> Question:
    """The question of one row of 2WikiMultihopQA; RowError for a malformed one."""
    if "level" in row and "evidences" not in row:
        raise RowError("level: expected 2WikiMultihopQA's fields, found one of HotpotQA's")
    return _parse(row, drops, "2wikimultihopqa")


def _parse(
    row: dict[str, Any], drops: Counter[str], dataset: Literal["hotpotqa", "2wikimultihopqa"]
) -> Question:
    text = text_field(row, "question")
    row_id = optional(row, "_id", str, "") or optional(row, "id", str, "")
    answer = single_answer(row)
    supporting = _supporting_titles(row)
    passages = []
    for title, sentences in _paragraphs(row):
        paragraph = _BETWEEN_SENTENCES[dataset].join(sentences)
        if paragraph.strip():
            passages.append(Passage(title, paragraph, title in supporting))
        else:
            drops["passages without text"] += 1
    if not passages:
        raise RowError("context: expected at least one passage with text, found none")
    question_id = row_id.strip() or f"{dataset}~{digest(text)}"
    return Question(question_id, dataset, text, (answer,), tuple(passages))


def _paragraphs(row: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """(title, sentences) of every context, in order."""
    if isinstance(row.get("context"), dict):
        columns = row["context"]
        titles = field(columns, "title", list, "context")
        sentences = field(columns, "sentences", list, "context")
        if len(titles) != len(sentences):
            raise RowError(
                f"context: expected as many titles as lists of sentences, found {len(titles)} "
                f"and {len(sentences)}"
            )
        pairs: list[Any] = [list(pair) for pair in zip(titles, sentences, strict=True)]
    else:
        pairs = field(row, "context", list)
    for index, pair in enumerate(pairs):
        where = f"context[{index}]"
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], list)):
            raise RowError(f"{where}: expected [title, sentences], found {found(pair)}")
        [title] = strings(pair[:1], where)
        yield title, strings(pair[1], f"{where}[1]")


def _supporting_titles(row: dict[str, Any]) -> set[str]:
    if isinstance(row.get("supporting_facts"), dict):
        titles = field(row["supporting_facts"], "title", list, "supporting_facts")
        return set(strings(titles, "supporting_facts.title"))
    facts = field(row, "supporting_facts", list)
    for index, fact in enumerate(facts):
        if not (isinstance(fact, list) and fact):
            raise RowError(
                f"supporting_facts[{index}]: expected [title, sentence], found {found(fact)}"
            )
    return set(strings([fact[0] for fact in facts], "supporting_facts"))
