"""What a nugget scorer learns from: each question of the built train tables with its nuggets.

Good nuggets are those of gold passages that hold an answer, word for word. Where there is none, as
for an answer of yes or no, the bi-encoder's best nugget of a gold passage may stand in for them: a
weak label, which teaches little that the bi-encoder does not know. All other nuggets of the same
chunk and of the question's other chunks are the negatives; retrieval has made them hard ones.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data_builders.nugget_recall import answer_nuggets
from data_builders.tables import Chunk, Tables

Place = tuple[int, int]


@dataclass(frozen=True)
class NuggetList:
    """A question with the nuggets of its retrieved chunks, in the order of the chunks."""

    question_id: str
    question: str
    good_N: Tensor
    """Whether a nugget is a good one; at least one is, unless none is known."""
    answering: set[Place]
    """The nuggets that hold an answer, as (chunk index, nugget index); none where labels are weak.
    """
    chunks: list[Chunk]
    bi_encoder: list[list[float]]
    """Its score of each nugget of each chunk."""

    @property
    def texts(self) -> list[str]:
        """The nuggets' texts."""
        return [text for chunk in self.chunks for text in chunk.nugget_texts]

    @property
    def teaches(self) -> bool:
        """Whether some of the nuggets are good and some are not."""
        return bool(self.good_N.any()) and not bool(self.good_N.all())


def nugget_lists(tables: Tables, *, weak: bool) -> Iterator[NuggetList]:
    """The lists of all questions for which a nugget was retrieved.

    Args:
        tables: built with `retrieval.nugget_scorer: bi_encoder`.
        weak: the bi-encoder's best nugget of a gold passage counts as good where none holds an
            answer.
    """
    for row in tables.samples:
        chunks = [tables.chunk(name) for name in row["chunk_ids"]]
        if not any(chunk.nuggets for chunk in chunks):
            continue
        answering = answer_nuggets(row, chunks)
        good = answering or (_weakly_good(row, chunks) if weak else set())
        places = [(at, n) for at, chunk in enumerate(chunks) for n in range(len(chunk.nuggets))]
        yield NuggetList(
            row["question_id"],
            row["question"],
            torch.tensor([place in good for place in places]),
            answering,
            chunks,
            row["nugget_scores"],
        )


def _weakly_good(row: Mapping[str, Any], chunks: Sequence[Chunk]) -> set[Place]:
    """The nugget of a gold passage that the bi-encoder scores highest; the earliest of equals."""
    gold = set(row["gold_chunk_ids"])
    scored = [
        (-score, at, nugget)
        for at, (chunk, scores) in enumerate(zip(chunks, row["nugget_scores"], strict=True))
        if chunk.chunk_id in gold
        for nugget, score in enumerate(scores)
    ]
    return {min(scored)[1:]} if scored else set()


def is_held_out(question_id: str, share: float) -> bool:
    """Whether a question is of the `share` that is not learned from; its id alone decides."""
    digest = hashlib.sha256(question_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
