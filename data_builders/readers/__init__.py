"""Questions, corpora and conversations from files.

Questions come in IRCoT's format, the original ones of its sets, LongBench's, or the package's own.

Every reader streams: however large a file, only names and digests of what was read are kept.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from data_builders.readers import hotpotqa, ircot, jsonl, longbench, musique
from data_builders.readers.conversations import Conversation, parse_conversation
from data_builders.readers.files import file_rows
from data_builders.readers.rows import RowError, digest
from data_builders.records import Passage, Question
from recipes.building import DataFormat
from recipes.errors import UserError

log = logging.getLogger(__name__)

MISTAKES_SHOWN = 10
# A row of a question file, and where to count what is left out by its reason; None: no question.
Parse = Callable[[dict[str, Any], Counter[str]], Question | None]
Record = TypeVar("Record", Passage, Question, Conversation)

_PARSERS: dict[DataFormat, Parse] = {
    "ircot": ircot.parse,
    "jsonl": jsonl.parse_question,
    "hotpotqa": hotpotqa.parse_hotpotqa,
    "2wikimultihopqa": hotpotqa.parse_2wiki,
    "musique": musique.parse,
    "longbench": longbench.parse,
}
# Fields that tell what a file is, the more telling first.
_MARKS: dict[str, set[str]] = {
    "data.format: ircot": {"question_text", "answers_objects"},
    "data.format: musique": {"question", "paragraphs"},
    "data.format: 2wikimultihopqa": {"question", "context", "evidences"},
    "data.format: hotpotqa": {"question", "context", "supporting_facts"},
    "data.format: longbench": {"input", "context", "answers"},
    "data.format: jsonl": {"question", "answers"},
    "data.corpus": {"title", "text"},
    "conversations": {"turns", "contexts"},
}


def read_questions(
    paths: Iterable[str | Path], data_format: DataFormat, limit: int | None = None
) -> Iterator[Question]:
    """Streams the questions of the first `limit` rows of each file (None: all), in order.

    Each comes under an id of its own: a blank id is replaced by one made of the question, and rows
    that share an id, but ask something else (MuSiQue has such), stay apart by a suffix.

    Raises:
        UserError: a file cannot be read or gives no question, rows are malformed or ask the same
            again under one id. The message lists the first mistakes of the file, each with its
            place and field. Questions that stand before the first mistake came already.
    """
    places: dict[str, str] = {}
    taken: set[str] = set()

    def admit(row: dict[str, Any], place: str, drops: Counter[str]) -> Question | None:
        question = _PARSERS[data_format](row, drops)
        if question is None:
            return None
        asked = digest(f"{question.id}\n{question.text}", hex_digits=32)
        if asked in places:
            raise RowError(
                f"id {question.id!r} with the same question is already at {places[asked]}; "
                "expected each question once"
            )
        places[asked] = place
        name = question.id
        while name in taken:
            name = f"{name}~{digest(question.text)}"
        if name != question.id:
            log.warning("%s: id %r is taken; using %r", place, question.id, name)
        taken.add(name)
        return replace(question, id=name, place=place)

    for path in map(Path, paths):
        yield from _records(path, admit, f"data.format: {data_format}", limit)


def read_corpus(paths: Iterable[str | Path]) -> Iterator[Passage]:
    """Streams the passages of corpus files in the package's own format, each under its id.

    A passage that comes again under the same id is left out; about 200 bytes are kept of each.

    Raises:
        UserError: as `read_questions`; also an id that names two different passages.
    """
    # Places would take more memory than a second look at the files, which only a mistake needs.
    files = [Path(path) for path in paths]
    contents: dict[str, int] = {}

    def admit(row: dict[str, Any], place: str, drops: Counter[str]) -> Passage | None:
        passage = jsonl.parse_passage(row)
        content = int(digest(passage.full_text, hex_digits=15), 16)
        if passage.id not in contents:
            contents[passage.id] = content
            return passage
        if contents[passage.id] != content:
            first = _first_place(files, passage.id)
            raise RowError(f"id: {passage.id!r} names another passage at {first}; expected its own")
        drops["passages given before"] += 1
        return None

    for path in files:
        yield from _records(path, admit, "data.corpus", None)


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    """Streams the conversations of a file as `coinrag world --conversations` writes it.

    Raises:
        UserError: the file cannot be read or holds none, rows are malformed, or two have one id.
            The message lists the first mistakes, each with its place and field.
    """
    places: dict[str, str] = {}

    def admit(row: dict[str, Any], place: str, _drops: Counter[str]) -> Conversation:
        conversation = parse_conversation(row, place)
        first = places.setdefault(conversation.id, place)
        if first != place:
            raise RowError(f"conversation_id: {conversation.id!r} is already at {first}")
        return conversation

    yield from _records(Path(path), admit, "conversations", None)


def _records(
    path: Path,
    admit: Callable[[dict[str, Any], str, Counter[str]], Record | None],
    option: str,
    limit: int | None,
) -> Iterator[Record]:
    """What `admit` makes of each row of a file that `option` says what it is."""
    mistakes: list[str] = []
    drops: Counter[str] = Counter()
    kept = 0
    for place, row in islice(file_rows(path), limit):
        try:
            if isinstance(row, RowError):
                raise row
            record = admit(row, place, drops)
        except RowError as mistake:
            mistakes.append(f"{place}: {mistake}")
            if (likely := _recognised(row)) not in (None, option):
                mistakes.append(f"({path} looks like a file for {likely}, not for {option})")
                break
            if len(mistakes) == MISTAKES_SHOWN:
                mistakes.append("(more may follow)")
                break
            continue
        if record is not None:
            kept += 1
            if not mistakes:
                yield record
    if mistakes:
        raise UserError(f"malformed rows ({option}):\n  " + "\n  ".join(mistakes))
    left_out = ", ".join(f"{number} {reason}" for reason, number in sorted((+drops).items()))
    if not kept:
        raise UserError(
            f"{path}: no rows; expected one JSON object a line or a list of them"
            + (f" (left out: {left_out})" if left_out else "")
        )
    if left_out:
        log.warning("%s: left out %s", path, left_out)


def _recognised(row: dict[str, Any] | RowError) -> str | None:
    """The option that takes files with rows of these fields."""
    if isinstance(row, RowError):
        return None
    return next((option for option, marks in _MARKS.items() if marks <= row.keys()), None)


def _first_place(paths: Iterable[Path], passage_id: str) -> str:
    """Where an id that was read stands first."""
    for path in paths:
        for place, row in file_rows(path):
            try:
                if isinstance(row, dict) and jsonl.parse_passage(row).id == passage_id:
                    return place
            except RowError:
                continue
    raise AssertionError(f"{passage_id} was read from none of {paths}")
