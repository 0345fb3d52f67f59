"""Locates nugget candidates in their chunk: exact, else fuzzy, else abandoned.

The method is the CoinRAG paper's: an exact substring; else the whole-word window of about the same
word count with the highest similarity, accepted at or above a threshold; else the candidate goes.

Exact is what differs only in how the same characters are encoded or set: see `folding.canonical`.
Case, accents and wording are a matter of similarity: see `folding.folded`.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from data_builders.nuggets.folding import Form, canonical, folded, form_text
from data_builders.nuggets.windows import Windows

Kind = Literal["exact", "fuzzy", "abandoned"]
Span = tuple[int, int]


@dataclass(frozen=True)
class Located:
    """A candidate's half-open character range in the original text."""

    candidate: int
    start: int
    end: int
    kind: Kind
    similarity: float


@dataclass(frozen=True)
class Alignment:
    """The located candidates, in candidate order, and how many were of each kind."""

    located: list[Located]
    counts: Counter[Kind] = field(default_factory=Counter)


class _Place(NamedTuple):
    start: int
    end: int
    kind: Kind
    similarity: float


def align(text: str, candidates: Sequence[str], threshold: float | None) -> Alignment:
    """Finds where each candidate occurs; ranges never cut a grapheme cluster.

    A candidate is located at whole words that equal it in canonical form (exact, similarity 1); or
    whose folded form equals its own (fuzzy, similarity 1); or inside words (exact); or in the
    whole-word window whose folded form is most similar, by normalized Indel similarity in [0, 1],
    if that is at least `threshold` (fuzzy). With `threshold=None` nothing is fuzzy.

    Where a candidate has several places as good, it takes the first free one that begins no earlier
    than the candidate before it, else the first free one: extractors tend to keep the text's order.
    A phrase that comes again takes another place; when none as good is left, it is abandoned.
    """
    places = _Places(text)
    phrases: dict[str, _Phrase] = {}
    taken: dict[str, list[Span]] = {}
    alignment = Alignment([])
    cursor = 0
    for index, candidate in enumerate(candidates):
        wanted = form_text(candidate, canonical)
        if wanted not in phrases:
            query = form_text(candidate, folded)
            tiers = places.tiers(wanted, query, threshold)
            # Spellings that fold to the same words are one phrase with the same places.
            phrases[wanted] = _Phrase(tiers, taken.setdefault(query or wanted, []))
        place = phrases[wanted].take(cursor)
        if place is None:
            alignment.counts["abandoned"] += 1
            continue
        alignment.counts[place.kind] += 1
        alignment.located.append(
            Located(index, place.start, place.end, place.kind, place.similarity)
        )
        cursor = place.start
    return alignment


class _Places:
    """Where phrases may be located in one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._canonical = Form(text, canonical)

    @cached_property
    def _folded(self) -> Form:
        return Form(self._text, folded)

    @cached_property
    def _windows(self) -> Windows:
        return Windows(self._folded.text)

    def tiers(self, wanted: str, query: str, threshold: float | None) -> Iterator[list[_Place]]:
        """Places of canonical text `wanted`, folded `query`: lists of equally good ones, in order.

        Places in a list are in text order and do not overlap. Worse places follow only where there
        were no better ones.
        """
        if not wanted:
            return
        whole = self._canonical.occurrences(wanted, whole_words=True)
        yield [_Place(start, end, "exact", 1.0) for start, end in whole]
        same = []
        if threshold is not None and query:
            same = self._folded.occurrences(query, whole_words=True)
        yield [_Place(start, end, "fuzzy", 1.0) for start, end in same]
        if whole or same:
            return
        inside = self._canonical.occurrences(wanted, whole_words=False)
        yield [_Place(start, end, "exact", 1.0) for start, end in inside]
        if inside or threshold is None or not query:
            return
        similarity, tiers = self._windows.best(query, threshold)
        for windows in tiers:
            origins = (self._folded.origin(at, stop) for at, stop in windows)
            yield [_Place(start, end, "fuzzy", similarity) for start, end in origins]


class _Phrase:
    """The places of one phrase that its mentions have not taken yet."""

    def __init__(self, tiers: Iterator[list[_Place]], taken: list[Span]) -> None:
        self._tiers = tiers
        self._tier: list[_Place] = []
        self._taken = taken

    def take(self, cursor: int) -> _Place | None:
        """The first free place at or after `cursor`, else the first free one; None if none is."""
        while True:
            while self._tier:
                at = bisect_left(self._tier, cursor, key=lambda place: place.start)
                place = self._tier.pop(at if at < len(self._tier) else 0)
                if self._is_free(place.start, place.end):
                    insort(self._taken, (place.start, place.end))
                    return place
            tier = next(self._tiers, None)
            if tier is None:
                return None
            self._tier = tier

    def _is_free(self, start: int, end: int) -> bool:
        at = bisect_left(self._taken, (start, end))
        after_one = at == 0 or self._taken[at - 1][1] <= start
        return after_one and (at == len(self._taken) or end <= self._taken[at][0])
