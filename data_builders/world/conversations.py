"""Conversations: questions in turn that come back to the same few passages.

A conversation follows a chain of two or three entities. It asks a fact of the first one; a fact of
each next one, then the question that leads there from the first; at last another fact of a passage
seen. Every turn can be answered alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from random import Random

from data_builders.world.asking import Question
from data_builders.world.chains import follow
from data_builders.world.contexts import CONTEXTS, distractors
from data_builders.world.entities import SCHEMA, Entity, World
from data_builders.world.prose import load
from data_builders.world.questions import well_stated
from recipes.errors import UserError

_ATTEMPTS = 1000


@dataclass(frozen=True)
class Conversation:
    """Turns, each a question of one or more hops, and the passages that all of them share."""

    turns: tuple[Question, ...]
    contexts: tuple[Entity, ...]


def make_conversations(
    world: World,
    passages: Mapping[Entity, str],
    titles: Collection[str],
    count: int,
    rng: Random,
) -> list[Conversation]:
    """Draws `count` conversations about different chains, by turns of two and three entities.

    Of the shared passages exactly one states the answer of a turn, word for word, and it is gold.

    Args:
        world: the entities.
        passages: what is written about each.
        titles: the passages that may be used.
        count: how many.
        rng: decides all else.

    Raises:
        UserError: the passages are not enough for so many.
    """
    pool = {
        kind: [entity for entity in group if entity.title in titles]
        for kind, group in world.by_type.items()
    }
    starts = [entity for group in pool.values() for entity in group]
    made: dict[tuple[Entity, ...], Conversation] = {}
    while len(made) < count:
        for _ in range(_ATTEMPTS):
            chain = _chain(rng.choice(starts), 2 + len(made) % 2, titles, rng)
            conversation = chain and _converse(chain, pool, passages, rng)
            if conversation and (golds := conversation.turns[-2].gold) not in made:
                made[golds] = conversation
                break
        else:
            raise UserError(
                f"{len(titles)} passages of dev questions are too few for {count} conversations; "
                "ask for fewer, or for more dev questions"
            )
    return list(made.values())


def _chain(
    start: Entity, length: int, titles: Collection[str], rng: Random
) -> list[tuple[str, Entity]] | None:
    """Entities, each with the relation that leads to it from the one before; None if none is."""
    nested = load("questions.yaml")["phrase"]
    chain = [("", start)]
    while len(chain) < length:
        here = chain[-1][1]
        ways = [(r, here.facts[r]) for r in SCHEMA if r in nested and r in here.facts]
        onward = [(r, e) for r, e in ways if isinstance(e, Entity) and e.title in titles]
        if not onward:
            return None
        chain.append(rng.choice(onward))
    return chain


def _converse(
    chain: list[tuple[str, Entity]],
    pool: Mapping[str, list[Entity]],
    passages: Mapping[Entity, str],
    rng: Random,
) -> Conversation | None:
    """The turns along a chain with their passages; None if this draw fails."""
    relations = tuple(relation for relation, _ in chain[1:])
    gold = [entity for _, entity in chain]
    asked: set[tuple[Entity, str]] = set()
    turns = [_ask(gold[0], (), gold[0], asked, rng)]
    for hops in range(1, len(chain)):
        turns.append(_ask(gold[hops], (), gold[hops], asked, rng))
        turns.append(_ask(gold[0], relations[:hops], gold[hops], asked, rng))
    seen = rng.choice(gold)
    turns.append(_ask(seen, (), seen, asked, rng))
    questions = [turn for turn in turns if turn is not None]
    # What holds for a question's own gold passages must hold for all that the turns share.
    together = [replace(question, gold=tuple(gold)) for question in questions]
    if len(questions) < len(turns) or not all(well_stated(q, passages) for q in together):
        return None
    answers = [answer for question in questions for answer in question.answers]
    contexts = [*gold, *distractors(gold, answers, pool, passages, rng)]
    if len(contexts) < CONTEXTS:
        return None
    rng.shuffle(contexts)
    return Conversation(tuple(questions), tuple(contexts))


def _ask(
    start: Entity,
    relations: tuple[str, ...],
    source: Entity,
    asked: set[tuple[Entity, str]],
    rng: Random,
) -> Question | None:
    """Asks for a fact of `source`, where `relations` lead to, that was not `asked` for before."""
    facts = [
        ask
        for ask in load("questions.yaml")["ask"]
        if (last := ask.removesuffix("_year")) in source.facts and (source, last) not in asked
    ]
    if not facts:
        return None
    ask = rng.choice(facts)
    asked.add((source, ask.removesuffix("_year")))
    return follow(start, relations, ask, rng)
