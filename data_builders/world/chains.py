"""Chains: each relation leads to the next entity, and the last one is asked for."""

from __future__ import annotations

from functools import cache
from random import Random

from data_builders.world.asking import Question, acceptable, start_phrase, worded
from data_builders.world.entities import SCHEMA, Entity, World
from data_builders.world.prose import load

_TYPES = {1: "single_hop", 2: "bridge"}


@cache
def _paths(hops: int, last: str) -> tuple[tuple[str, ...], ...]:
    """All chains of `hops` different relations that end in `last`."""
    found: list[tuple[str, ...]] = [(last,)]
    nested = load("questions.yaml")["phrase"]
    for _ in range(hops - 1):
        found = [
            (relation, *path)
            for path in found
            for relation in nested
            if relation not in path and SCHEMA[relation][1] == SCHEMA[path[0]][0]
        ]
    return tuple(found)


def chain(hops: int, turn: int, world: World, rng: Random) -> Question | None:
    """A question of `hops` relations, or None if this draw fails; `turn` walks the last ones."""
    asks = load("questions.yaml")["ask"]
    ask = tuple(asks)[turn % len(asks)]
    last = ask.removesuffix("_year")
    paths = _paths(hops, last)
    if not paths:
        return None
    path = rng.choice(paths)
    start = rng.choice(world.by_type[SCHEMA[path[0]][0]])
    return follow(start, path[:-1], ask, rng)


def follow(start: Entity, relations: tuple[str, ...], ask: str, rng: Random) -> Question | None:
    """Asks for `ask`, a key of the wordings, of where `relations` lead to from `start`.

    None if there is no such relation or fact, or if the way comes to one entity twice.
    """
    gold = [start]
    phrase = start_phrase(start, rng)
    for relation in relations:
        if relation not in gold[-1].facts:
            return None
        phrase = worded("phrase", relation, gold[-1], rng, x=phrase)
        gold.append(gold[-1].entity(relation))
    source, last = gold[-1], ask.removesuffix("_year")
    repeats = len(set(gold)) < len(gold)
    if repeats or last not in source.facts or source.facts[last] in gold:
        return None
    return Question(
        text=worded("ask", ask, source, rng, x=phrase),
        type=_TYPES.get(len(gold), "compositional"),
        answers=acceptable(source, last, year_only=ask != last),
        starts=(start,),
        path=(*relations, last),
        gold=tuple(gold),
        source=source,
    )
