"""The per-question record of a comparison: one JSON line an answer, written as it is earned."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.errors import UserError


@dataclass(frozen=True)
class Answer:
    """One question answered by one system at one width with one checkpoint's weights."""

    key: str
    """Digest of everything that decides the answer and its timing; see `compare`."""
    checkpoint: str
    system: str
    k_c: int
    k: int | None
    question_id: str
    dataset: str
    question: str
    evidence: list[str]
    """Nugget texts, best first; titles of the chunks where whole chunks are served."""
    answer: str
    gold: list[str]
    f1: float
    em: float
    ttft_ms: float
    active_tokens: int
    new_tokens: int
    stopped: bool
    offline_tokens: int
    """Chunk tokens of this question that were encoded before the clock started."""
    offline_ms: float

    @property
    def variant(self) -> tuple[str, str, int, int | None]:
        """What was measured: checkpoint, system, k_c, k."""
        return self.checkpoint, self.system, self.k_c, self.k


def read_answers(path: Path) -> list[Answer]:
    """The answers of a file, none if it is not there; a half-written last line is left out.

    Raises UserError, naming the line, where the file holds anything else than answers.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    answers = []
    # Every complete line ends with a newline, so the last piece is empty or was cut by a kill.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            answers.append(Answer(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path}:{number}: not an answer of this version ({error}); move the file away, "
                "or give the comparison another folder with eval.output=…"
            ) from error
    return answers


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    """Replace the file as a whole, or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(map(_line, answers)), encoding="utf-8")
    temporary.replace(path)


def append_answers(path: Path, answers: Iterable[Answer]) -> None:
    """Add answers and wait until they are on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(map(_line, answers)))
        file.flush()
        os.fsync(file.fileno())


def _line(answer: Answer) -> str:
    return json.dumps(asdict(answer), ensure_ascii=False) + "\n"
