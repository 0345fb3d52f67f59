"""Comparisons of two entities: which is first, and is it so (yes or no)."""

from __future__ import annotations

from datetime import date
from random import Random

from data_builders.world.asking import Question, start_phrase, worded
from data_builders.world.entities import SCHEMA, Entity, World
from data_builders.world.prose import kind_words, load


def _pair(
    world: World, relation: str, rng: Random, same: bool | None = None
) -> tuple[Entity, Entity] | None:
    """Two entities of one kind (any two people) that have `relation`, with its `same` value or not.

    None if the first one drawn has no such partner.
    """
    first = rng.choice(world.by_type[SCHEMA[relation][0]])
    value = first.facts.get(relation)
    pool = [
        e
        for e in world.by_type[first.type]
        if e is not first
        and relation in e.facts
        and (e.kind == first.kind or e.type == "person")
        and (same is None or (e.facts[relation] is value) == same)
    ]
    return (first, rng.choice(pool)) if value is not None and pool else None


def _rank(entity: Entity, relation: str) -> float:
    value = entity.facts[relation]
    assert isinstance(value, date | int | float), f"{relation} cannot be compared"
    return float(value.toordinal()) if isinstance(value, date) else float(value)


def choice(turn: int, world: World, rng: Random) -> Question | None:
    """Which of two has the smaller or larger value; None if this draw fails."""
    table = load("questions.yaml")["compare"]
    relation = tuple(table)[turn % len(table)]
    pair = _pair(world, relation, rng)
    if pair is None or _rank(pair[0], relation) == _rank(pair[1], relation):
        return None
    return _comparison(pair, pair, "compare", (relation,), rng)


def bridge_choice(turn: int, world: World, rng: Random) -> Question | None:
    """Which of two has the maker, leader or founder born first or last; None if a draw fails."""
    table = load("questions.yaml")["bridge_compare"]
    relation = tuple(table)[turn % len(table)]
    pair = _pair(world, relation, rng)
    if pair is None:
        return None
    people = (pair[0].entity(relation), pair[1].entity(relation))
    if people[0] is people[1] or people[0].facts["birth_date"] == people[1].facts["birth_date"]:
        return None
    return _comparison(pair, people, "bridge_compare", (relation, "birth_date"), rng)


def _comparison(
    pair: tuple[Entity, Entity],
    ranked: tuple[Entity, Entity],
    table: str,
    path: tuple[str, ...],
    rng: Random,
) -> Question:
    """Ask which of the pair has the least or most of `path`; `ranked` carry the last relation."""
    wordings = load("questions.yaml")[table][path[0]]
    extreme = rng.choice(("least", "most"))
    best = (min if extreme == "least" else max)((0, 1), key=lambda i: _rank(ranked[i], path[-1]))
    a, b = (start_phrase(entity, rng) for entity in pair)
    slots = kind_words(pair[0].kind) | {"a": a, "b": b}
    return Question(
        text=rng.choice(wordings[extreme]).format_map(slots),
        type="comparison" if table == "compare" else "bridge_comparison",
        answers=(pair[best].name, *filter(None, [str(pair[best].facts.get("native", ""))])),
        starts=pair,
        path=(*path, extreme),
        gold=tuple(dict.fromkeys((*pair, *ranked))),
        source=pair[best],
    )


def yes_no(answer: str, turn: int, world: World, rng: Random) -> Question | None:
    """Is it the same, or before? `answer` says which truth is wanted; None if this draw fails."""
    tables = load("questions.yaml")
    keys = [(table, relation) for table in ("same", "order") for relation in tables[table]]
    table, relation = keys[turn % len(keys)]
    pair = _pair(world, relation, rng, same=answer == "yes" if table == "same" else None)
    if pair is None:
        return None
    if table == "order":
        first, second = (_rank(entity, relation) for entity in pair)
        if first == second:
            return None
        pair = pair if (first < second) == (answer == "yes") else (pair[1], pair[0])
    a, b = (start_phrase(entity, rng) for entity in pair)
    return Question(
        text=worded(table, relation, pair[0], rng, a=a, b=b),
        type="comparison",
        answers=(answer,),
        starts=pair,
        path=(relation, table),
        gold=pair,
        source=None,
    )
