"""Encyclopedia prose: one paragraph that states every fact of an entity once, and some colour."""

from __future__ import annotations

from bisect import bisect_left
from calendar import month_name
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random
from string import Formatter
from typing import Any, NamedTuple

import yaml

from data_builders.world.entities import SCHEMA, Entity, World

MIN_WORDS, MAX_WORDS = 60, 160
LAST_YEAR = 2015

# Details that a passage states and no question asks for.
_UNASKED = {"death_date", "native", "area"}
_STATED = set(SCHEMA) | _UNASKED
_SUBJECT = ("S", "s", "P", "p", "o")


class Sentence(NamedTuple):
    """A wording with what it needs: the facts it states, its colour slots, its first subject."""

    text: str
    facts: frozenset[str]
    colour: tuple[str, ...]
    subject: str | None
    names_person: bool


class Bank(NamedTuple):
    """The wordings for one kind of entity."""

    intro: tuple[Sentence, ...]
    facts: tuple[Sentence, ...]
    filler: tuple[Sentence, ...]


@cache
def load(name: str) -> dict[str, Any]:
    """A table of wordings that lies beside this file."""
    return yaml.safe_load(files(__package__).joinpath(name).read_text(encoding="utf-8"))


@cache
def kind_words(kind: str) -> dict[str, str]:
    """Verbs and roles that go with a kind, such as `maker: author` for a novel."""
    words = load("wordings.yaml")["kinds"].get(kind, {})
    return words | ({"appeared_cap": words["appeared"].capitalize()} if "appeared" in words else {})


def _sentence(text: str) -> Sentence:
    slots = [slot for _, slot, _, _ in Formatter().parse(text) if slot]
    people = {"person", "mentor", "spouse"}
    return Sentence(
        text,
        frozenset(slots) & _STATED,
        tuple(slot for slot in dict.fromkeys(slots) if slot in _COLOUR),
        next((slot for slot in slots if slot in _SUBJECT), None),
        not people.isdisjoint(slots),
    )


@cache
def _bank(type_: str, kind: str) -> Bank:
    def compiled(part: str) -> tuple[Sentence, ...]:
        found = load("wordings.yaml")[type_][part]
        return tuple(map(_sentence, found[kind] if isinstance(found, dict) else found))

    return Bank(compiled("intro"), compiled("facts"), compiled("filler"))


@dataclass(frozen=True)
class Scene:
    """What colour is drawn from: the world around the subject, and the years it can speak of."""

    rng: Random
    towns: list[Entity]
    people: list[Entity]  # in order of birth
    births: list[int]
    first_year: int
    last_year: int
    own: frozenset[str]  # names that colour must not repeat

    def town(self) -> str:
        """A town that the subject has nothing to do with."""
        while (name := self.rng.choice(self.towns).name) in self.own:
            pass
        return name

    def person(self) -> str:
        """Somebody of about the same time as the subject, and not otherwise connected with it."""
        middle = bisect_left(self.births, self.first_year - 30)
        low = max(0, min(middle - 8, len(self.people) - 16))
        while (name := self.people[low + self.rng.randrange(16)].name) in self.own:
            pass
        return name

    def year(self) -> int:
        """A year in which the subject existed."""
        return self.rng.randint(self.first_year, self.last_year)

    def word(self, inventory: str) -> str:
        """One entry of an inventory of colour words."""
        return self.rng.choice(load("wordings.yaml")["colour"][inventory])

    def listed(self, inventory: str) -> str:
        """Two to four entries of an inventory as a list."""
        entries = load("wordings.yaml")["colour"][inventory]
        *head, last = self.rng.sample(entries, self.rng.randint(2, 4))
        return f"{', '.join(head)}{',' if len(head) > 1 else ''} and {last}"

    def quote(self) -> str:
        """A short phrase with its article."""
        phrase = f"{self.word('quote_adjective')} {self.word('quote_noun')}"
        return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


_COLOUR: dict[str, Callable[[Scene], object]] = {
    "town": Scene.town,
    "person": Scene.person,
    "year": Scene.year,
    "early_year": lambda scene: scene.first_year + scene.rng.randint(0, 6),
    "month": lambda scene: scene.rng.choice(month_name[1:]),
    "few": lambda scene: scene.word("few"),
    "few_cap": lambda scene: scene.word("few").capitalize(),
    "few_more": lambda scene: scene.rng.randint(8, 45),
    "hundreds": lambda scene: f"{scene.rng.randint(120, 3900):,}",
    "small_dec": lambda scene: round(scene.rng.uniform(1.1, 9.8), 1),
    "height": lambda scene: f"{scene.rng.uniform(1.55, 1.98):.2f}",
    "height_m": lambda scene: scene.rng.randint(24, 48),
    "topic": lambda scene: scene.word("topic"),
    "trade": lambda scene: scene.word("trade"),
    "compass": lambda scene: scene.word("compass"),
    "quote_long": lambda scene: scene.word("quote_long"),
    "goods": lambda scene: scene.listed("goods"),
    "foods": lambda scene: scene.listed("foods"),
    "quote": Scene.quote,
}


def write_passages(world: World, rng: Random) -> dict[Entity, str]:
    """Write one paragraph of 60 to 160 words for every entity of the world."""
    people = sorted(world.by_type["person"], key=lambda person: person.year("birth_date"))
    births = [person.year("birth_date") for person in people]
    return {
        entity: _write(entity, _scene(entity, world, people, births, rng))
        for entity in world.entities()
    }


def _scene(
    entity: Entity, world: World, people: list[Entity], births: list[int], rng: Random
) -> Scene:
    first, last = 1740, 1980
    if entity.type == "person":
        first = entity.year("birth_date") + 22
        end = entity.year("death_date") - 1 if "death_date" in entity.facts else LAST_YEAR
        last = min(first + 40, end)
    elif dated := next((r for r in ("released", "date", "founded") if r in entity.facts), None):
        first = entity.year(dated) + 2
        last = max(first, min(first + 50, LAST_YEAR))
    own = {value.name for value in entity.facts.values() if isinstance(value, Entity)}
    return Scene(
        rng, world.by_type["town"], people, births, first, last, frozenset(own | {entity.name})
    )


def _write(entity: Entity, scene: Scene) -> str:
    rng, bank = scene.rng, _bank(entity.type, entity.kind)
    slots = _slots(entity, scene)
    left = _STATED & entity.facts.keys()
    intro = rng.choice([s for s in bank.intro if s.facts <= left])
    paragraph = [_render(intro, entity, slots, scene, pronoun=False)]
    left -= intro.facts
    words, target = len(paragraph[0].split()), rng.randint(MIN_WORDS + 8, 130)
    fillers = rng.sample(bank.filler, len(bank.filler))
    previous = intro
    while left or words < target:
        # A passage closes with whatever it still owes; colour fills the places between.
        colour = not left or (rng.random() < 0.35 and words < target - 15 * len(left))
        if colour:
            sentence = fillers.pop()
        else:
            sentence = rng.choice([s for s in bank.facts if s.facts and s.facts <= left])
        text = _render(sentence, entity, slots, scene, pronoun=not previous.names_person)
        paragraph.append(text)
        left -= sentence.facts
        words += len(text.split())
        previous = sentence
    return " ".join(paragraph)


def _render(
    sentence: Sentence, entity: Entity, slots: dict[str, object], scene: Scene, pronoun: bool
) -> str:
    for slot in sentence.colour:
        slots[slot] = _COLOUR[slot](scene)
    if sentence.subject is None:
        return sentence.text.format_map(slots)
    # Only the first reference to the subject varies; the rest of the sentence uses pronouns.
    draw = scene.rng.random()
    if draw < 0.5 and (pronoun or entity.type != "person"):
        return sentence.text.format_map(slots)
    name = slots["short"] if draw < 0.78 else f"the {entity.kind}"
    form = f"{name}\N{RIGHT SINGLE QUOTATION MARK}s" if sentence.subject in "Pp" else str(name)
    if sentence.subject in "SP":
        form = form[0].upper() + form[1:]
    return sentence.text.format_map(slots | {sentence.subject: form})


def _slots(entity: Entity, scene: Scene) -> dict[str, object]:
    """Everything about the subject that a wording may name; pronouns included."""
    subject, possessive, obj = "it", "its", "it"
    if entity.type == "person":
        subject, possessive, obj = ("she", "her", "her") if entity.female else ("he", "his", "him")
    mention, demonym = entity.mention, entity.country.demonym
    return {
        **{relation: entity.text(relation) for relation in entity.facts},
        **kind_words(entity.kind),
        "S": subject.capitalize(), "s": subject,
        "P": possessive.capitalize(), "p": possessive, "o": obj,
        "Name": mention[0].upper() + mention[1:], "name": mention,
        "short": entity.name.split()[-1] if entity.type == "person" else mention,
        "kind": entity.kind,
        "dem": demonym, "a_dem": f"{'an' if demonym[0] in 'AEIOUÉÁÍÓÅØÖÜ' else 'a'} {demonym}",
        "country": entity.country.name,
        "century": f"{(scene.first_year + 8) // 100 + 1}th",
        "spouse_word": "wife" if entity.female else "husband",
    }  # fmt: skip
