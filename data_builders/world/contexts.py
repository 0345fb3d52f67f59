"""The passages that a question brings: those it needs among others that look like them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Any

from data_builders.world.entities import Entity
from data_builders.world.questions import states_any

CONTEXTS = 10
_CANDIDATES = 60  # of each gold passage's type


def distractors(
    gold: Sequence[Entity],
    answers: Sequence[str],
    pool: Mapping[str, Sequence[Entity]],
    passages: Mapping[Entity, str],
    rng: Random,
) -> list[Entity]:
    """The passages most like the gold ones, in turn, that state none of the answers.

    As many as make `CONTEXTS` with the gold ones, fewer if `pool` (entities by type) has no more.
    """
    ranked = []
    for entity in gold:
        group = pool[entity.type]
        sample = rng.sample(group, min(len(group), _CANDIDATES))
        ranked.append(sorted(sample, key=lambda other, e=entity: -_likeness(e, other)))  # type: ignore[misc]
    chosen: list[Entity] = []
    for turn in range(_CANDIDATES):
        for candidates in ranked:
            if len(gold) + len(chosen) == CONTEXTS:
                return chosen
            if turn >= len(candidates) or candidates[turn] in (*gold, *chosen):
                continue
            other = candidates[turn]
            if not states_any(tuple(answers), other.title, passages[other]):
                chosen.append(other)
    return chosen


def context_rows(
    chosen: Sequence[Entity], gold: Collection[Entity], passages: Mapping[Entity, str]
) -> list[dict[str, Any]]:
    """Passages in IRCoT's fields."""
    return [
        {
            "idx": idx,
            "title": entity.title,
            "paragraph_text": passages[entity],
            "is_supporting": entity in gold,
        }
        for idx, entity in enumerate(chosen)
    ]


def _likeness(a: Entity, b: Entity) -> int:
    """Kind, name words and facts that two entities of one type share."""
    names = len(set(a.name.split()) & set(b.name.split()))
    facts = sum(b.facts.get(relation) is value for relation, value in a.facts.items())
    return 2 * (a.kind == b.kind) + 2 * names + facts
