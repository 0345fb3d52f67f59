"""Nuggets with the sentences around them: a slice may say whom a nugget's "she" means."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from data_builders.nuggets.rules import lines_of
from data_builders.nuggets.sentences import sentences

Span = tuple[int, int]


def widened(text: str, spans: Sequence[Span], count: int) -> list[Span]:
    """Character spans that also hold their own sentences whole, and `count` more on each side.

    A heading or title counts as a sentence. Nothing is taken from beyond the text.
    """
    in_lines = (span for line in lines_of(text) for span in sentences(text, *line))
    found = [_stripped(text, span) for span in in_lines]
    starts = [start for start, _ in found]
    ends = [end for _, end in found]
    wide = []
    for start, end in spans:
        # The first and the last sentence that share a character with the nugget.
        first, last = bisect_right(ends, start), bisect_left(starts, end) - 1
        first, last = max(first - count, 0), min(last + count, len(found) - 1)
        wide.append((min(start, starts[first]), max(end, ends[last])))
    return wide


def _stripped(text: str, span: Span) -> Span:
    start, end = span
    piece = text[start:end]
    return start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())
