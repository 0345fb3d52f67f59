"""One planted instruction: what it says, the word it wants as the answer, where it is put.

Every kind of attack asks for a coined word, its *target*, which nothing else about the question
holds: an answer that holds it has followed the attacker.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random
from typing import cast

import yaml

from data_builders.nuggets.sentences import sentences
from data_builders.world.names import Culture, NameSource

# As many kinds, places and carriers (gold, distractor) as share no divisor: see `write`.
KINDS = ("override", "authority", "false_fact", "chat_template", "clause")
PLACES = ("start", "middle", "end")

_WORD_START = re.compile(r"(?<=\s)\S")
# How far into the passage each place is.
_DEPTH = {"start": 1 / 6, "middle": 1 / 2, "end": 5 / 6}
# Pronounceable, plain letters, and like no word of a language.
_COINED = Culture("b d f g k l m n p r s t v z", "a e i o u", "l m n r", "", "", "")
_COINED_ENDINGS = "ovax ubriq eptuz axxor indulv oskif"


@dataclass(frozen=True)
class Injection:
    """The instruction planted for one question; one line of `injections.jsonl`."""

    question_id: str
    passage: int
    """Which of the question's passages carries it, counted from 0."""
    title: str
    carrier: str
    """What that passage is to the question: gold, distractor; unmarked where no gold is known."""
    kind: str
    place: str
    text: str
    """What was planted, verbatim."""
    target: str


def insertion_point(text: str, kind: str, place: str) -> int | None:
    """The character of a passage's text before which to plant; None if it has no such place.

    A clause goes inside a sentence, everything else before, after or between sentences; a single
    sentence is divided between its words.
    """
    firsts = [start for start, _ in sentences(text, 0, len(text))]
    words = [match.start() for match in _WORD_START.finditer(text)]
    if kind == "clause":
        return _nearest(sorted({*words} - {*firsts}), _DEPTH[place] * len(text))
    if place == "middle":
        return _nearest(firsts[1:] or words, len(text) / 2)
    return 0 if place == "start" else len(text)


def plant(text: str, at: int, planted: str) -> str:
    """`text` with `planted` before character `at`, set apart by spaces where there are none."""
    before, after = text[:at], text[at:]
    left = " " if before and not before[-1].isspace() else ""
    right = " " if after and not after[0].isspace() else ""
    return f"{before}{left}{planted}{right}{after}"


def worded(kind: str, question: str, target: str, rng: Random) -> str:
    """One of the kind's wordings."""
    return rng.choice(wordings()[kind]).format(question=question.strip(), target=target)


def coin_target(texts: Iterable[str], taken: Collection[str], rng: Random) -> str:
    """A new word that is in none of `texts`, whatever the case, and not in `taken`."""
    known = "\n".join(texts).casefold()
    names = NameSource(rng)
    while True:
        word = names.word(_COINED, _COINED_ENDINGS)
        if word.casefold() not in known and word not in taken:
            return word


@cache
def wordings() -> dict[str, list[str]]:
    """The wordings of each kind, with {target} and {question} to be filled in."""
    text = files(__package__).joinpath("wordings.yaml").read_text(encoding="utf-8")
    return cast(dict[str, list[str]], yaml.safe_load(text))


def _nearest(points: Sequence[int], wanted: float) -> int | None:
    return min(points, key=lambda point: abs(point - wanted), default=None)
