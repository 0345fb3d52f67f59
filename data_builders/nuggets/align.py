"""Locates nugget candidates in their chunk: exact, else fuzzy, else abandoned.

The method is the CoinRAG paper's: an exact substring; else the whole-word window of about the same
word count with the highest similarity, accepted at or above a threshold; else the candidate goes.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rapidfuzz import process
from rapidfuzz.distance import Indel

Kind = Literal["exact", "fuzzy", "abandoned"]
WORD_COUNT_SLACK = 1


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


@dataclass(frozen=True)
class _Canonical:
    """Text with canonical composition and single spaces, with each character's origin."""

    text: str
    starts: list[int]
    ends: list[int]


def align(text: str, candidates: Sequence[str], threshold: float | None) -> Alignment:
    """Finds where each candidate occurs; repeated candidates take successive occurrences.

    Exact means equal up to canonical Unicode form and runs of white space; whole-word occurrences
    come first. Similarity is the normalized Indel similarity in [0, 1] of case- and accent-folded
    words. `threshold=None` switches the fuzzy stage off.
    """
    canonical = _canonical(text)
    windows = _Windows(text)
    mentions: dict[str, list[tuple[int, int]]] = {}
    alignment = Alignment([])
    for index, candidate in enumerate(candidates):
        wanted = _canonical(candidate).text.strip()
        taken = mentions.setdefault(wanted.casefold(), [])
        span = _find_exact(canonical, wanted, taken) if wanted else None
        similarity = 1.0
        kind: Kind = "exact"
        if span is None and wanted and threshold is not None:
            kind = "fuzzy"
            span, similarity = windows.best(wanted, threshold, taken)
        if span is None:
            alignment.counts["abandoned"] += 1
            continue
        taken.append(span)
        alignment.counts[kind] += 1
        alignment.located.append(Located(index, *span, kind, similarity))
    return alignment


def _find_exact(
    canonical: _Canonical, wanted: str, taken: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """The first free occurrence between word boundaries, else the first free one inside words."""
    inside: tuple[int, int] | None = None
    at = canonical.text.find(wanted)
    while at >= 0:
        stop = at + len(wanted)
        span = (canonical.starts[at], canonical.ends[stop - 1])
        if _is_free(span, taken):
            if not (_joins(canonical.text, at) or _joins(canonical.text, stop)):
                return span
            inside = inside or span
        at = canonical.text.find(wanted, at + 1)
    return inside


def _is_free(span: tuple[int, int], taken: Sequence[tuple[int, int]]) -> bool:
    """Whether the span overlaps none that the same candidate has already taken."""
    return all(span[1] <= start or end <= span[0] for start, end in taken)


def _joins(text: str, at: int) -> bool:
    """Whether a word runs across position `at`."""
    return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()


class _Windows:
    """Whole-word windows of a text, folded once and joined on demand."""

    def __init__(self, text: str) -> None:
        matches = list(re.finditer(r"\S+", text))
        self._spans = [match.span() for match in matches]
        self._folded = [_fold(match[0]) for match in matches]
        self._by_width: dict[int, list[str]] = {}

    def best(
        self, wanted: str, threshold: float, taken: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, int] | None, float]:
        """The free window most similar to `wanted`; the same width, then the first, wins a tie."""
        query = " ".join(_fold(word) for word in wanted.split())
        words = len(wanted.split())
        found: tuple[int, int] | None = None
        highest = threshold
        for width in sorted(
            range(max(1, words - WORD_COUNT_SLACK), words + WORD_COUNT_SLACK + 1),
            key=lambda width: abs(width - words),
        ):
            matches = process.extract(
                query,
                self._windows(width),
                scorer=Indel.normalized_similarity,
                score_cutoff=highest,
                limit=None,
            )
            for _, score, first in matches:
                span = (self._spans[first][0], self._spans[first + width - 1][1])
                if _is_free(span, taken):
                    # The cutoff lets equal scores in; an earlier width keeps a tie.
                    if found is None or score > highest:
                        found, highest = span, score
                    break
        return found, highest

    def _windows(self, width: int) -> list[str]:
        if width not in self._by_width:
            firsts = range(len(self._folded) - width + 1)
            self._by_width[width] = [
                " ".join(self._folded[first : first + width]) for first in firsts
            ]
        return self._by_width[width]


def _fold(word: str) -> str:
    """Without case, accents and compatibility forms."""
    decomposed = unicodedata.normalize("NFKD", word.casefold())
    return "".join(mark for mark in decomposed if not unicodedata.combining(mark))


def _canonical(text: str) -> _Canonical:
    """NFC with white-space runs as one space; cluster by cluster, so that origins are known."""
    pieces: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    for match in re.finditer(r"\s+|\S", text) if text.isascii() else _clusters(text):
        cluster = match[0]
        piece = " " if cluster.isspace() else unicodedata.normalize("NFC", cluster)
        pieces.append(piece)
        starts += [match.start()] * len(piece)
        ends += [match.end()] * len(piece)
    return _Canonical("".join(pieces), starts, ends)


def _clusters(text: str) -> list[re.Match[str]]:
    """White-space runs and characters with the marks that compose with them."""
    marks = {c for c in text if unicodedata.combining(c) or "\u1160" <= c <= "\u11ff"}
    tail = f"[{re.escape(''.join(marks))}]*" if marks else ""
    return list(re.finditer(rf"\s+|\S{tail}", text))
