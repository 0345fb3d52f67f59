"""The fictional world as a graph: entities and the functional facts between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from random import Random

from data_builders.world.names import CULTURES, Country, NameSource, native_spelling

# relation -> (subject type, type of the value); every relation is functional.
SCHEMA: dict[str, tuple[str, str]] = {
    "birth_date": ("person", "date"),
    "birthplace": ("person", "town"),
    "mentor": ("person", "person"),
    "spouse": ("person", "person"),
    "notable_work": ("person", "work"),
    "region": ("town", "region"),
    "river": ("town", "river"),
    "population": ("town", "count"),
    "capital": ("region", "town"),
    "length": ("river", "km"),
    "creator": ("work", "person"),
    "released": ("work", "year"),
    "premiere": ("work", "town"),
    "leader": ("event", "person"),
    "place": ("event", "town"),
    "date": ("event", "date"),
    "founder": ("organisation", "person"),
    "founded": ("organisation", "year"),
    "seat": ("organisation", "town"),
}

# Who makes what; the first four occupations create works.
WORK_OF = {
    "novelist": "novel", "film director": "film", "songwriter": "song", "painter": "painting",
}  # fmt: skip
_OCCUPATIONS = (*WORK_OF, "general", "explorer", "botanist", "engineer", "physician", "historian")
_LEADERS = {"battle": ("general",), "expedition": ("explorer", "botanist"), "festival": ()}
_EVENT_NAMES = {
    "battle": ("Battle of {}", "Siege of {}", "Battle of {} Bridge"),
    "expedition": ("{} Expedition", "Second {} Expedition", "{} Polar Voyage"),
    "festival": ("{} Festival of Song", "{} Winter Fair", "{} Book Festival"),
}
_ORGANISATION_NAMES = {
    "academy": ("{} Academy of Arts", "Royal Academy of {}"),
    "society": ("{} Botanical Society", "Society of {} Printers"),
    "company": ("{} Shipping Company", "{} Glassworks", "{} Railway Company"),
    "museum": ("{} Museum of Clocks", "{} House Museum"),
    "observatory": ("{} Observatory", "{} Institute of Tides"),
}


@dataclass(eq=False, slots=True)
class Entity:
    """One thing of the world. `facts` maps a relation, or an unasked detail, to its value."""

    type: str
    kind: str
    name: str
    country: Country
    female: bool = False
    day_first: bool = True
    facts: dict[str, Entity | date | int | float | str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The passage's title; rivers and works say what they are, as an encyclopedia does."""
        return f"{self.name} ({self.kind})" if self.type in ("work", "river") else self.name

    @property
    def mention(self) -> str:
        """The name as it stands inside a sentence."""
        return f"the {self.name}" if self.type in ("event", "organisation", "river") else self.name

    def entity(self, relation: str) -> Entity:
        """The entity that `relation` leads to."""
        value = self.facts[relation]
        assert isinstance(value, Entity), f"{relation} of {self.name} is no entity"
        return value

    def year(self, relation: str) -> int:
        """The year of a date or year fact."""
        value = self.facts[relation]
        assert isinstance(value, date | int), f"{relation} of {self.name} has no year"
        return value.year if isinstance(value, date) else value

    def text(self, relation: str) -> str:
        """The value exactly as the entity's passage states it."""
        value = self.facts[relation]
        if isinstance(value, Entity):
            return value.name
        if isinstance(value, date):
            month = f"{value:%B}"
            if self.day_first:
                return f"{value.day} {month} {value.year}"
            return f"{month} {value.day}, {value.year}"
        if relation == "population":
            return f"{value:,}"
        return f"{value:g} km" if relation == "length" else str(value)


@dataclass(frozen=True)
class World:
    """Entities by type: person, town, region, river, work, event, organisation."""

    by_type: dict[str, list[Entity]]

    def entities(self) -> list[Entity]:
        """All entities, grouped by type."""
        return [entity for group in self.by_type.values() for entity in group]


def build_world(rng: Random, names: NameSource, scale: int) -> World:
    """Build a world of about 4 x `scale` entities (`scale` people, at least 40).

    Two worlds built from one `names` share no coined word, so no name and no fact.
    """
    scale = max(40, scale)
    # Two cultures with a script of their own and two without, in every world.
    scripted = [culture for culture in CULTURES if culture.script]
    plain = [culture for culture in CULTURES if not culture.script]
    cultures = [*rng.sample(scripted, 2), *rng.sample(plain, 2)]
    countries = [names.country(culture, scale // 4) for culture in cultures]
    world = World({kind: [] for kind in ("person", "town", "region", "river", "work", "event")})
    world.by_type["organisation"] = []
    _add_places(world, rng, names, countries, scale)
    _add_people(world, rng, names, countries, scale)
    _add_works(world, rng, names)
    _add_events(world, rng, names, scale // 2)
    _add_organisations(world, rng, names, scale // 2)
    for entity in world.entities():
        script = entity.country.culture.script
        if script and entity.type in ("person", "town", "region") and rng.random() < 0.4:
            entity.facts["script"] = script
            entity.facts["native"] = native_spelling(entity.name, script, rng)
        entity.day_first = rng.random() < 0.6
    return world


def _date(rng: Random, year: int) -> date:
    return date(year, rng.randint(1, 12), rng.randint(1, 28))


def _add_places(
    world: World, rng: Random, names: NameSource, countries: list[Country], scale: int
) -> None:
    for country in countries:
        culture = country.culture
        rivers = [
            Entity("river", "river", names.word(culture), country)
            for _ in range(max(4, scale // 8))
        ]
        regions = [
            Entity("region", "region", names.word(culture), country)
            for _ in range(max(4, scale // 12))
        ]
        towns = [
            Entity("town", "town", names.word(culture, culture.towns), country)
            for _ in range(max(8, scale // 5))
        ]
        for number, town in enumerate(towns):
            # Region i's first town is its capital, so every region has one inside itself.
            town.facts["region"] = regions[number % len(regions)]
            town.facts["river"] = rng.choice(rivers)
            town.facts["population"] = round(10 ** rng.uniform(3.2, 5))
        for region, town in zip(regions, towns, strict=False):
            region.facts["capital"] = town
            region.facts["area"] = f"{rng.uniform(800, 9_000):,.1f}"
        for river in rivers:
            decimal = rng.random() < 0.3
            km = rng.uniform(60, 990)
            river.facts["length"] = round(km, 1) if decimal else round(km)
        for group in (rivers, regions, towns):
            world.by_type[group[0].type].extend(group)


def _add_people(
    world: World, rng: Random, names: NameSource, countries: list[Country], scale: int
) -> None:
    people = world.by_type["person"]
    homes = {
        country.name: [t for t in world.by_type["town"] if t.country is country]
        for country in countries
    }
    for number in range(scale):
        country, occupation = rng.choice(countries), _OCCUPATIONS[number % len(_OCCUPATIONS)]
        female = rng.random() < 0.5
        person = Entity("person", occupation, names.person(country, female), country, female)
        # Cinema is young: its directors are born late.
        year = rng.randint(1885 if occupation == "film director" else 1770, 1945)
        person.facts["birth_date"] = _date(rng, year)
        person.facts["birthplace"] = rng.choice(homes[country.name])
        if year < 1930 and rng.random() < 0.6:
            person.facts["death_date"] = _date(rng, year + rng.randint(62, 90))
        people.append(person)
    people.sort(key=lambda person: person.year("birth_date"))
    for number, person in enumerate(people):
        if number >= 3 and rng.random() < 0.55:
            person.facts["mentor"] = people[rng.randrange(max(0, number - 25), number - 1)]
        later = people[number + 1 : number + 9]
        free = [p for p in later if "spouse" not in p.facts and p.female != person.female]
        if "spouse" not in person.facts and free and rng.random() < 0.7:
            partner = rng.choice(free)
            person.facts["spouse"], partner.facts["spouse"] = partner, person


def _add_works(world: World, rng: Random, names: NameSource) -> None:
    for person in world.by_type["person"]:
        if person.kind not in WORK_OF:
            continue
        for number in range(rng.choice((1, 2, 2, 3))):
            work = Entity("work", WORK_OF[person.kind], names.title(person.country), person.country)
            work.facts["creator"] = person
            work.facts["released"] = person.year("birth_date") + rng.randint(24, 60)
            work.facts["premiere"] = rng.choice(world.by_type["town"])
            world.by_type["work"].append(work)
            if number == 0 and rng.random() < 0.6:
                person.facts["notable_work"] = work


def _add_events(world: World, rng: Random, names: NameSource, count: int) -> None:
    people = world.by_type["person"]
    for number in range(count):
        kind = tuple(_EVENT_NAMES)[number % len(_EVENT_NAMES)]
        leader = rng.choice([p for p in people if not _LEADERS[kind] or p.kind in _LEADERS[kind]])
        coined = names.word(leader.country.culture)
        event = Entity("event", kind, rng.choice(_EVENT_NAMES[kind]).format(coined), leader.country)
        event.facts["leader"] = leader
        event.facts["place"] = rng.choice(world.by_type["town"])
        event.facts["date"] = _date(rng, leader.year("birth_date") + rng.randint(26, 60))
        world.by_type["event"].append(event)


def _add_organisations(world: World, rng: Random, names: NameSource, count: int) -> None:
    for number in range(count):
        kind = tuple(_ORGANISATION_NAMES)[number % len(_ORGANISATION_NAMES)]
        founder = rng.choice(world.by_type["person"])
        coined = names.word(founder.country.culture)
        name = rng.choice(_ORGANISATION_NAMES[kind]).format(coined)
        organisation = Entity("organisation", kind, name, founder.country)
        organisation.facts["founder"] = founder
        organisation.facts["founded"] = founder.year("birth_date") + rng.randint(26, 60)
        organisation.facts["seat"] = rng.choice(world.by_type["town"])
        world.by_type["organisation"].append(organisation)
