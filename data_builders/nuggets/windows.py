"""The most similar whole-word windows of a text, found by branch and bound.

A window's longest common subsequence with the query is no longer than that of any text around it.
So the windows that begin in the same few words share a bound, from one comparison of the query with
the block of text that holds them all, and only blocks whose bound reaches the best similarity so
far are looked into. The result is that of a search over all windows.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain, repeat

from rapidfuzz import process
from rapidfuzz.distance import Indel, LCSseq

from data_builders.nuggets.folding import count_words, words

GROUP = 4
# rapidfuzz drops scores that equal its cutoff, or exceed it by less than single precision shows.
MARGIN = 1e-5
Window = tuple[int, int]  # Its first and its last word.


def widths(count: int) -> tuple[int, int]:
    """The least and most words of a window for `count` words: one and a fifth fewer and more."""
    slack = 1 + count // 5
    return max(1, count - slack), count + slack


class Windows:
    """Whole-word windows of `text`, which is a form's text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._starts, self._ends = words(text)

    def best(self, query: str, threshold: float) -> tuple[float, list[list[tuple[int, int]]]]:
        """The highest similarity that is at least `threshold`, and the windows that have it.

        Similarity is the normalized Indel similarity in [0, 1]. Windows are ranges of `text` in
        lists of equal word count, that of the query first; each list is in text order and without
        overlap. There are no lists when no window reaches the threshold.
        """
        count = count_words(query)
        highest = threshold
        found: list[Window] = []
        for _, common, group in self._groups(query, threshold):
            shortest, longest = _lengths(len(query), common, highest)
            if longest < shortest:
                break
            windows = self._windows(group, widths(count), (shortest, longest))
            if not windows:
                continue
            for _, similarity, index in self._similar(query, windows, highest):
                if similarity < highest:
                    break
                if similarity > highest:
                    highest, found = similarity, []
                found.append(windows[index])
        return highest, self._apart(found, count)

    def _groups(self, query: str, threshold: float) -> list[tuple[str, int, int]]:
        """Groups of windows by first word that may reach `threshold`, most promising first.

        Each is the text that its windows cover, the length of the longest common subsequence with
        the query, and the group's number.
        """
        least, most = widths(count_words(query))
        firsts = max(0, len(self._starts) - least + 1)
        ends = chain(self._ends[GROUP + most - 2 :: GROUP], repeat(len(self._text)))
        blocks = [
            self._text[start:end]
            for start, end in zip(self._starts[:firsts:GROUP], ends, strict=False)
        ]
        needed = int(threshold * len(query) / (2 - threshold))
        return process.extract(
            query, blocks, scorer=LCSseq.similarity, score_cutoff=needed, limit=None
        )

    def _windows(
        self, group: int, counts: tuple[int, int], lengths: tuple[float, float]
    ) -> list[Window]:
        """The group's windows with these least and most words and characters."""
        starts, ends = self._starts, self._ends
        (fewest, most), (shortest, longest) = counts, lengths
        return [
            (first, last)
            for first in range(group * GROUP, min((group + 1) * GROUP, len(starts)))
            for last in range(
                max(first + fewest - 1, bisect_left(ends, starts[first] + shortest)),
                min(first + most, bisect_right(ends, starts[first] + longest)),
            )
        ]

    def _similar(
        self, query: str, windows: Sequence[Window], threshold: float
    ) -> list[tuple[str, float, int]]:
        """Text, similarity and index of the windows of about `threshold` or more, best first."""
        starts, ends, text = self._starts, self._ends, self._text
        return process.extract(
            query,
            [text[starts[first] : ends[last]] for first, last in windows],
            scorer=Indel.normalized_similarity,
            score_cutoff=max(0.0, threshold - MARGIN),
            limit=None,
        )

    def _apart(self, found: Sequence[Window], count: int) -> list[list[tuple[int, int]]]:
        """Ranges of the windows by word count, the nearest to `count` first, without overlap."""
        tiers: dict[int, list[tuple[int, int]]] = {}
        for width, first in sorted((last - first + 1, first) for first, last in found):
            tier = tiers.setdefault(width, [])
            span = self._starts[first], self._ends[first + width - 1]
            if not tier or tier[-1][1] <= span[0]:
                tier.append(span)
        return [tiers[width] for width in sorted(tiers, key=lambda width: abs(width - count))]


def _lengths(length: int, common: int, threshold: float) -> tuple[float, float]:
    """The least and most characters of a text that may have at least `threshold` similarity.

    It is compared with a text of `length` characters and has at most `common` in common with it:
    2 min(common, n) / (length + n) >= threshold. The most is below the least when none may.
    """
    least = threshold * length / (2 - threshold) - MARGIN
    most = 2 * common / threshold - length + MARGIN if threshold else math.inf
    return least, most
