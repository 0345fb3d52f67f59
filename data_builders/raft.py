"""RAFT noise: some training questions lose their supporting passages to distractors.

From the RAFT paper (retrieval-augmented fine-tuning), whose P is read as 1 - noise probability.
The answer stays, so the model learns to answer also when retrieval fails. Every draw depends only
on the seed, the question's id and the data, never on the order of processing.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
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


def add_noise(
    question: Question,
    pools: Mapping[str, Sequence[Passage]],
    noise_probability: float,
    seed: int,
) -> Noised:
    """Replaces, with the given probability, the supporting passages by distractors, in place.

    Args:
        question: a question with contexts.
        pools: for each dataset the distinct passages to draw from, in an order that depends on
            nothing but their content.
        noise_probability: of drawing noise for a question that has supporting passages.
        seed: another seed, other draws.
    """
    rng, drawn = _draw_noise(question, noise_probability, seed)
    if not drawn:
        return Noised(question, drawn=False, noised=False)
    supporting = [i for i, passage in enumerate(question.passages) if passage.is_supporting]
    distractors = _draw(pools[question.dataset], question, len(supporting), rng)
    if distractors is None:
        return Noised(question, drawn=True, noised=False)
    passages = list(question.passages)
    for index, distractor in zip(supporting, distractors, strict=True):
        passages[index] = distractor
    return Noised(replace(question, passages=tuple(passages)), drawn=True, noised=True)


def remove_supporting(question: Question, noise_probability: float, seed: int) -> Noised:
    """Takes, with the given probability, the supporting passages away.

    For a question that is searched in a corpus: the next best passages take their place.
    """
    _, drawn = _draw_noise(question, noise_probability, seed)
    kept = tuple(p for p in question.passages if not (drawn and p.is_supporting))
    return Noised(replace(question, passages=kept), drawn=drawn, noised=drawn)


def _draw_noise(
    question: Question, noise_probability: float, seed: int
) -> tuple[random.Random, bool]:
    """Whether noise is due for a question, and the generator for what else is drawn for it."""
    digest = hashlib.sha256(f"{seed}\0{question.id}".encode()).digest()
    rng = random.Random(int.from_bytes(digest, "big"))
    due = rng.random() < noise_probability
    return rng, due and any(passage.is_supporting for passage in question.passages)


def _draw(
    pool: Sequence[Passage], question: Question, count: int, rng: random.Random
) -> list[Passage] | None:
    """`count` distinct passages that are none of the question's and hold no answer of it.

    None if too few are found within `DRAWS_PER_PASSAGE` draws for each.
    """
    own = {passage.full_text for passage in question.passages}
    drawn: list[Passage] = []
    for _ in range(count * DRAWS_PER_PASSAGE):
        candidate = pool[int(rng.random() * len(pool))]
        text = candidate.full_text
        if text not in own and not holds_answer(answer_key(text), question.answers):
            own.add(text)
            drawn.append(candidate)
            if len(drawn) == count:
                return drawn
    return None
