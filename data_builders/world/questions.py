"""Multi-hop questions over a world; the graph gives each exactly one answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from random import Random

from data_builders.world.asking import Question
from data_builders.world.chains import chain
from data_builders.world.comparisons import bridge_choice, choice, yes_no
from data_builders.world.entities import Entity, World

# One cycle of question forms: no single answer, "yes" and "no" included, can dominate.
_FORMS = (
    *("bridge",) * 8, *("choice",) * 3, "yes", "no", "yes_or_no",
    *("three_hops",) * 3, "four_hops", *("bridge_choice",) * 2,
)  # fmt: skip
_HOPS = {"bridge": 2, "three_hops": 3, "four_hops": 4}
_ATTEMPTS = 400


def states_any(answers: tuple[str, ...], title: str, text: str) -> bool:
    """True if a passage holds one of the answers, whatever the case."""
    passage = f"{title}\n{text}".casefold()
    return any(answer.casefold() in passage for answer in answers)


def make_questions(
    world: World, passages: Mapping[Entity, str], count: int, rng: Random
) -> list[Question]:
    """Draw `count` distinct questions in a fixed mix of forms, and check each on the passages.

    A question is kept only if its answer stands word for word in its source passage and in no
    other gold passage.
    """
    questions: list[Question] = []
    seen: set[tuple[object, ...]] = set()
    forms = _forms(rng)
    turns: dict[str, int] = defaultdict(int)
    while len(questions) < count:
        form = next(forms)
        for _ in range(_ATTEMPTS):
            turns[form] += 1
            question = _draw(form, turns[form], world, rng)
            if question is None or not well_stated(question, passages):
                continue
            key = (question.type, frozenset(question.starts), question.path)
            if key not in seen:
                seen.add(key)
                questions.append(question)
                break
        else:
            raise AssertionError(f"the world is too small for {count} questions")
    return questions


def _forms(rng: Random) -> Iterator[str]:
    while True:
        cycle = [rng.choice(("yes", "no")) if f == "yes_or_no" else f for f in _FORMS]
        yield from rng.sample(cycle, len(cycle))


def well_stated(question: Question, passages: Mapping[Entity, str]) -> bool:
    """True if the answer stands in its source passage and in no other gold one; or is yes or no."""
    source = question.source
    if source is None:
        return True
    others = [entity for entity in question.gold if entity is not source]
    return question.answers[0] in passages[source] and not any(
        states_any(question.answers, entity.title, passages[entity]) for entity in others
    )


def _draw(form: str, turn: int, world: World, rng: Random) -> Question | None:
    if form in _HOPS:
        return chain(_HOPS[form], turn, world, rng)
    if form == "choice":
        return choice(turn, world, rng)
    if form == "bridge_choice":
        return bridge_choice(turn, world, rng)
    return yes_no(form, turn, world, rng)
