"""Questions and passages as every reader gives them. Text is verbatim, as the file has it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Passage:
    """One passage: a context of a question, or an entry of a corpus.

    `id` is the corpus file's own name for it, and empty for a question's context.
    """

    title: str
    text: str
    is_supporting: bool = False
    id: str = ""

    @property
    def full_text(self) -> str:
        """What is tokenized and retrieved: the title line, if there is one, then the paragraph."""
        return f"{self.title}\n{self.text}\n" if self.title.strip() else f"{self.text}\n"


@dataclass(frozen=True)
class Question:
    """One row: a question, every acceptable answer, and its contexts in file order.

    A row without contexts may name its supporting passages of the corpus in `supporting_ids`.
    `place` is the file and line it came from, for messages.
    """

    id: str
    dataset: str
    text: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...] = ()
    supporting_ids: tuple[str, ...] = ()
    place: str = field(default="", compare=False)
