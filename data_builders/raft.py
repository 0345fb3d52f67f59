"""RAFT noise: some training questions lose their supporting passages to distractors.

From the RAFT paper (retrieval-augmented fine-tuning), whose P is read as 1 - noise probability.
The answer stays, so the model learns to answer also when retrieval fails. Every draw depends only
on the seed, the question's id and the data, never on the order of processing.
"""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from data_builders.answers import answer_key, holds_answer
from data_builders.records import Passage, Question

DRAWS_PER_PASSAGE = 1000


@dataclass(frozen=True)
class Noised:
    """A question after RAFT. `drawn` says that noise was due, `noised` that it was applied."""

    question: Question
    drawn: bool
    noised: bool


@dataclass(frozen=True)
class _Distractor:
    passage: Passage
    key: str


class DistractorPools:
    """The distinct passages of each dataset, in an order that only their text decides."""

    def __init__(self, questions: Iterable[Question]) -> None:
        distinct: dict[str, set[tuple[str, str]]] = {}
        for question in questions:
            texts = distinct.setdefault(question.dataset, set())
            texts.update((passage.title, passage.text) for passage in question.passages)
        self._pools = {
            dataset: [
                _Distractor(passage, answer_key(passage.full_text))
                for passage in (Passage(title, text, False) for title, text in sorted(texts))
            ]
            for dataset, texts in distinct.items()
        }

    def draw(self, question: Question, count: int, rng: random.Random) -> list[Passage] | None:
        """`count` distinct passages that are none of the question's and hold no answer of it.

        None if too few are found within `DRAWS_PER_PASSAGE` draws for each.
        """
        pool = self._pools[question.dataset]
        own = {passage.full_text for passage in question.passages}
        drawn: list[Passage] = []
        for _ in range(count * DRAWS_PER_PASSAGE):
            candidate = pool[int(rng.random() * len(pool))]
            text = candidate.passage.full_text
            if text not in own and not holds_answer(candidate.key, question.answers):
                own.add(text)
                drawn.append(candidate.passage)
                if len(drawn) == count:
                    return drawn
        return None


def add_noise(
    question: Question, pools: DistractorPools, noise_probability: float, seed: int
) -> Noised:
    """Replaces, with the given probability, the supporting passages by distractors, in place."""
    digest = hashlib.sha256(f"{seed}\0{question.id}".encode()).digest()
    rng = random.Random(int.from_bytes(digest, "big"))
    supporting = [i for i, passage in enumerate(question.passages) if passage.is_supporting]
    if rng.random() >= noise_probability or not supporting:
        return Noised(question, drawn=False, noised=False)
    distractors = pools.draw(question, len(supporting), rng)
    if distractors is None:
        return Noised(question, drawn=True, noised=False)
    passages = list(question.passages)
    for index, distractor in zip(supporting, distractors, strict=True):
        passages[index] = distractor
    return Noised(replace(question, passages=tuple(passages)), drawn=True, noised=True)
