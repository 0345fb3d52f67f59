"""Questions and the pieces they are worded from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from random import Random

from data_builders.world.entities import Entity
from data_builders.world.prose import kind_words, load


@dataclass(frozen=True)
class Question:
    """A question, its acceptable answers (best first) and where it comes from in the graph.

    `starts` are the entities it names and `path` the relations followed from each of them;
    `gold` are the entities whose passages are needed, `source` the one that states the answer
    (None for yes and no).
    """

    text: str
    type: str
    answers: tuple[str, ...]
    starts: tuple[Entity, ...]
    path: tuple[str, ...]
    gold: tuple[Entity, ...]
    source: Entity | None


def acceptable(entity: Entity, relation: str, *, year_only: bool = False) -> tuple[str, ...]:
    """The acceptable answers to "the `relation` of `entity`", as its passage states it first."""
    text, value = entity.text(relation), entity.facts[relation]
    if isinstance(value, Entity):
        native = value.facts.get("native")
        return (text, str(native)) if native else (text,)
    if isinstance(value, date):
        if year_only:
            return (str(value.year), text)
        flipped = f"{value:%B} {value.day}, {value.year}"
        return (text, flipped if entity.day_first else f"{value.day} {value:%B} {value.year}")
    if relation in ("length", "population"):
        return (text, f"{value:g}" if relation == "length" else str(value))
    return (text,)


def start_phrase(entity: Entity, rng: Random) -> str:
    """How a question names an entity: with or without what it is."""
    if entity.type == "work":
        return f"the {entity.kind} {entity.name}"
    if entity.type in ("event", "organisation"):
        return entity.mention
    if entity.type == "river":
        return rng.choice((entity.mention, f"the River {entity.name}"))
    described = f"the {entity.kind} " if entity.type == "person" else f"the {entity.kind} of "
    return rng.choice((entity.name, entity.name, described + entity.name))


def worded(table: str, key: str, entity: Entity, rng: Random, **slots: str) -> str:
    """One wording of `key`, filled with `slots` and the words of the entity's kind."""
    wordings = load("questions.yaml")[table][key]
    return str(rng.choice(wordings).format_map(kind_words(entity.kind) | slots))
