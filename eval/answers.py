"""The per-question record of a comparison: one JSON line an answer, written as it is earned."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from recipes.errors import UserError
from recipes.files import write_text

logger = logging.getLogger(__name__)


class Variant(NamedTuple):
    """What a cell of a comparison measures; `arm` is "" for the recipe without changes."""

    arm: str
    checkpoint: str
    system: str
    k_c: int
    k: int | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """That of an answer's fields, or of a row of results."""
        return cls(*(row[name] for name in cls._fields))


@dataclass(frozen=True)
class Answer:
    """One question answered in one cell of a comparison."""

    key: str
    """Digest of everything that decides the answer and its timing; see `identity`."""
    arm: str
    """The changes to the recipe that it was measured under; empty for the recipe itself."""
    checkpoint: str
    system: str
    k_c: int
    k: int | None
    question_id: str
    dataset: str
    question: str
    chunk_ids: list[str]
    """The retrieved chunks, best first."""
    evidence: list[dict[str, str | None]]
    """`chunk_id` and `text` of what the model saw, best first; no text: all of the chunk."""
    answer: str
    gold: list[str]
    f1: float
    em: float
    ttft_ms: list[float]
    """One for each timed prefill."""
    load_ms: float
    """Of the first, loading, copying and rotating the prefix."""
    extract_ms: float
    """Of the first, having nuggets extracted for the question."""
    active_tokens: int
    online_tokens: int
    """Tokens computed before the first answer token: the query's, and what is not cached."""
    recomputed_tokens: float
    """Cached tokens that were computed anew beside them, in the mean of the layers."""
    bytes_read: int
    new_tokens: int
    stopped: bool
    """Whether a stop token ended the answer, and not the token limit."""
    beyond_context: bool
    """Whether prefix, query and answer may reach past the model's trained positions."""
    offline_tokens: int
    """Chunk tokens of this question that were encoded before the clock started."""
    offline_ms: float
    cut_tokens: int
    """Context tokens left out of an over-long prompt."""
    gold_recall: float | None
    gold_tokens: int
    context_tokens: int
    answer_in_chunks: bool
    answer_in_prefix: bool
    error_kinds: list[str]
    """These six as in `diagnosis.Diagnosis`."""

    @property
    def variant(self) -> Variant:
        """The cell it belongs to."""
        return Variant.of(vars(self))


def read_answers(path: Path) -> list[Answer]:
    """The answers of a file, none if it is not there; a half-written last line is left out.

    Raises UserError, naming the line, where the file holds anything else than answers.
    """
    if not path.exists():
        return []
    # As bytes: what was cut by a kill may end inside a character.
    lines = path.read_bytes().split(b"\n")
    answers = []
    # Every complete line ends with a newline, so the last piece is empty or such a piece.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            answers.append(Answer(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path}:{number}: not an answer of this version ({error}); move the file away, "
                "or give the comparison another folder with eval.output=…"
            ) from error
    return answers


def resume_answers(path: Path, keys: Mapping[Variant, str]) -> list[Answer]:
    """The answers that still hold, given the key of each cell that a run measures.

    Answers under another key are moved to the end of `answers.previous.jsonl` beside the file, with
    a warning; those of cells without a key here stay.
    """
    found = read_answers(path)
    kept = [answer for answer in found if keys.get(answer.variant, answer.key) == answer.key]
    if stale := [answer for answer in found if keys.get(answer.variant, answer.key) != answer.key]:
        previous = path.with_name("answers.previous.jsonl")
        earlier = previous.read_text(encoding="utf-8") if previous.exists() else ""
        write_text(previous, earlier + "".join(map(_line, stale)))
        logger.warning(
            "settings, data, weights or machine changed: %d answers (%s) moved to %s, asked again",
            len(stale),
            ", ".join(sorted({" ".join(answer.variant[:3]).strip() for answer in stale})),
            previous,
        )
    # Also without stale answers: a half-written last line must not be appended to.
    write_text(path, "".join(map(_line, kept)))
    return kept


def append_answers(path: Path, answers: Iterable[Answer]) -> None:
    """Add answers and wait until they are on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(map(_line, answers)))
        file.flush()
        os.fsync(file.fileno())


def _line(answer: Answer) -> str:
    return json.dumps(asdict(answer), ensure_ascii=False) + "\n"
