"""Coined names of eight invented cultures; no word is ever handed out twice."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

_CYRILLIC = dict(zip("abvgdeziklmnoprstufhcy", "абвгдезиклмнопрстуфхцы", strict=True))
_GREEK = dict(zip("abgdeziklmnoprstufhxy", "αβγδεζικλμνοπρστυφηξυ", strict=True))
_ARABIC = dict(zip("abtjhdrzsfqklmnwyieoug", "ابتجحدرزسفقكلمنويييووغ", strict=True))
_CJK = "安保千多衣恵富我波伊加来鹿久真美武野尾良理留佐世曽田知天和由"


class Culture(NamedTuple):
    """How one people builds words; the string fields are space-separated inventories."""

    onsets: str
    vowels: str
    codas: str
    towns: str
    female: str
    male: str
    script: str | None = None


CULTURES: tuple[Culture, ...] = (
    Culture(
        "b br d f fj g gr h hj k kv l m n r sk st sv t tr v", "a e i o u å ø ö y",
        "n r rd l ld m nd rk", "vik havn heim stad fjord", "a e hild", "ar un eif",
    ),
    Culture(
        "b v g d z k l m n p r s t h br dr kr st", "a e i o u", "n r v k l m s",
        "grad itsa ovo opol", "ina aya eva", "an imir oslav", "Cyrillic",
    ),
    Culture(
        "d f g k kl l m n p r s t x z pr th", "a e i o y", "n s r x",
        "polis onia ara ias", "e ia ara", "os on ides", "Greek",
    ),
    Culture(
        "b c ch d f g j l m n p r s t v br tr", "a e i o u é á í ó", "n r l s ñ",
        "ella ación ara uente eña", "ia ela ona", "o án iel",
    ),
    Culture(
        "k' t' q' ch' h k l m n p r s w y", "a i u aa ii", "q n k y t",
        "marka pampa tuqu llaqa", "lla kuy ma", "q ru ti",
    ),
    Culture(
        "ch h k m n r s sh t ts y w", "a i u e o ō", "n",
        "mori saki zawa hama", "ko mi ne", "ro ta ji", "Han",
    ),
    Culture(
        "b d f h j k l m n q r s t w z", "a i u", "r m n d l b s",
        "abad iyya an ur", "a iyah een", "ir an oud", "Arabic",
    ),
    Culture(
        "b d g k l m n p r s ş t y ç z", "a e i o ö u ü", "n r k l m z ş t",
        "köy şehir kale ova", "gül nur say", "han kut er",
    ),
)  # fmt: skip

# Strings that would read badly inside a coined word.
_AVOID = ("fuk", "kunt", "nazi", "nig", "shit", "kak", "ass", "sex", "rape", "dik", "tit", "kok")

ADJECTIVES = (
    "Silent", "Amber", "Hollow", "Crooked", "Winter", "Salt", "Paper", "Iron", "Drowned",
    "Golden", "Patient", "Distant", "Borrowed", "Painted", "Second", "Unlit", "Burning", "Narrow",
    "Copper", "Restless", "Velvet", "Broken", "Slow", "Inner", "Bitter", "Scarlet", "Wandering",
    "Quiet", "Northern", "Hidden", "Late", "Frozen", "Blind", "Glass", "Gentle", "Mended", "Pale",
    "Tidal", "Last", "Heavy",
)  # fmt: skip
NOUNS = (
    "Harbour", "Orchard", "Lantern", "Staircase", "Season", "Ferry", "Mirror", "Garden", "Letter",
    "Bell", "Window", "Shore", "Clock", "Bridge", "Winter", "Carriage", "Loom", "Meadow",
    "Anchor", "Feast", "Compass", "Threshold", "Sparrow", "Kiln", "Ledger", "Cellar",
    "Procession", "Hour", "Wharf", "Candle", "Quarry", "Vineyard", "Atlas", "Weaver",
    "Lighthouse", "Heron", "Causeway", "Ribbon",
)  # fmt: skip


@dataclass(frozen=True)
class Country:
    """One culture's country inside one world, with the given and family names in use there."""

    culture: Culture
    name: str
    demonym: str
    women: tuple[str, ...]
    men: tuple[str, ...]
    families: tuple[str, ...]


class NameSource:
    """Draws names from `rng`; every coined word and every title is new for this source.

    Only the words given out are remembered, some 100 bytes each.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def _syllable(self, culture: Culture) -> str:
        choice = self._rng.choice
        return choice(culture.onsets.split()) + choice(culture.vowels.split())

    def word(self, culture: Culture, endings: str = "") -> str:
        """A new capitalised word of two to four syllables, closed by one of `endings` if given."""
        rng = self._rng
        while True:
            stem = "".join(self._syllable(culture) for _ in range(rng.choice((1, 1, 1, 2))))
            if endings:
                word = stem + rng.choice(culture.codas.split())[0] + rng.choice(endings.split())
            else:
                word = stem + self._syllable(culture) + rng.choice(culture.codas.split())
            lower = word.casefold()
            if len(word) > 11 or lower in self._used or any(bad in lower for bad in _AVOID):
                continue
            self._used.add(lower)
            return word[0].upper() + word[1:]

    def country(self, culture: Culture, people: int) -> Country:
        """A country with enough given and family names for `people`, each name shared by a few."""
        name = self.word(culture)
        given = max(6, round(people**0.5))
        return Country(
            culture=culture,
            name=name,
            demonym=name.rstrip("aeiouyåøöéáíóōü'") + self._rng.choice(("ian", "ish", "ic", "ese")),
            women=tuple(self.word(culture, culture.female) for _ in range(given)),
            men=tuple(self.word(culture, culture.male) for _ in range(given)),
            families=tuple(self.word(culture) for _ in range(max(8, people // 3))),
        )

    def person(self, country: Country, female: bool) -> str:
        """A new full name; namesakes share a given or a family name, some add a middle one."""
        rng = self._rng
        pool = country.women if female else country.men
        while True:
            name = f"{rng.choice(pool)} {rng.choice(country.families)}"
            if rng.random() < 0.12 or name in self._used:
                given, family = name.split(" ")
                name = f"{given} {rng.choice('BDEHKLMRSTV')}. {family}"
            if name not in self._used:
                self._used.add(name)
                return name

    def title(self, country: Country) -> str:
        """A new title of a work: an English phrase used once, or one around a coined word."""
        rng = self._rng
        adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
        pair = f"{adjective} {noun}"
        if rng.random() < 0.5 and pair not in self._used and adjective != noun:
            self._used.add(pair)
            return f"The {pair}" if rng.random() < 0.7 else pair
        word = self.word(country.culture)
        pattern = rng.choice(("The {0} of {1}", "{0} for {1}", "{1}", "A {0} in {1}", "{1}'s {0}"))
        return pattern.format(noun, word)


def native_spelling(name: str, script: str, rng: Random) -> str:
    """The name in the culture's own script: letter by letter, or Han signs from `rng`."""
    if script == "Han":
        return "".join(rng.choice(_CJK) for _ in range(2 + len(name.split())))
    table = {"Cyrillic": _CYRILLIC, "Greek": _GREEK, "Arabic": _ARABIC}[script]
    words = ["".join(table.get(x, "") for x in part) for part in name.lower().split()]
    spelled = " ".join(word for word in words if word)
    return spelled.title()
