"""The offline extractor: sentences, and long ones divided at clause boundaries.

It stands in for the CoinRAG paper's LLM extractor: the candidates are verbatim, mostly of 10 to 25
words, and together cover the text once.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain, groupby

from data_builders.nuggets.clauses import MAX_WORDS, Words, clauses
from data_builders.nuggets.sentences import sentences

# To be raised whenever the same text gives other candidates.
VERSION = 2

SHORT_SENTENCE_WORDS = 3
MAX_TITLE_WORDS = 12
# Lines of wrapped prose are about this long, in characters; longer ones are whole paragraphs.
WRAPPED_WIDTHS = range(50, 121)

Span = tuple[int, int]

_BULLET = re.compile(r"\s*[-*+•‣◦▪●○■□►➤✓✔☐–—|]+\s+")
_LIST_ITEM = re.compile(
    r"\s*(?:[-*+•‣◦▪●○■□►➤✓✔☐]|\d{1,3}\.|[(\[]?(?:\d{1,3}|[A-Za-z])[)\]])\s|.*[|\t]"
)
_SAYS_SOMETHING = re.compile(r"\w")
_TRAILING = ",;:–—،؛፣፤，、；：|"
_STOPS = (".", "!", "?", "…", "。", "！", "？", "।", "؟", "۔", "።", "។", "။")


def rules(text: str) -> list[str]:
    """Verbatim candidates in the order of the text, without overlap; linear time, or nearly.

    Together they hold every letter and digit of the text once. Sentences of more than `MAX_WORDS`
    words are divided at clause boundaries. Very short sentences stay with a neighbour. A title or
    heading goes with the candidate after it: alone it states nothing, and yet it would often score
    highest.
    """
    lines = lines_of(text)
    in_lines = [sentences(text, *line) for line in lines]
    words = Words(text, chain.from_iterable(in_lines))
    candidates: list[Span] = []
    heading: Span | None = None
    for index, spans in enumerate(in_lines):
        found = _candidates(text, words, spans)
        if heading and found:
            found[0] = (heading[0], found[0][1])
            heading = None
        is_short = len(found) == 1 and words.between(*found[0]) <= MAX_TITLE_WORDS
        if is_short and heading is None and _is_heading(text, lines, index):
            heading = found[0]
        else:
            candidates += found
    if heading:
        candidates.append(heading)
    return [text[start:end] for start, end in candidates]


def _candidates(text: str, words: Words, spans: Sequence[Span]) -> list[Span]:
    parts = (
        part
        for start, end in _merge_short(words, spans)
        for part in clauses(text, words, start, end)
    )
    trimmed = (_trim(text, start, end) for start, end in parts)
    return [(start, end) for start, end in trimmed if _SAYS_SOMETHING.search(text, start, end)]


def lines_of(text: str) -> list[Span]:
    """Lines with something on them; those of prose that was wrapped to a width are joined."""
    spans, start = [], 0
    for line in text.splitlines(keepends=True):
        spans.append((start, start + len(line)))
        start += len(line)
    found: list[Span] = []
    for blank, block in groupby(spans, key=lambda span: text[slice(*span)].isspace()):
        if not blank:
            found += _unwrapped(text, list(block))
    return found


def _unwrapped(text: str, block: Sequence[Span]) -> Iterator[Span]:
    """Joins lines whose successor's first word had no room on them, where some go on in lower case.

    `block` are lines without blank ones between.
    """
    lines = [text[start:end].strip() for start, end in block]
    width = max(map(len, lines))
    is_wrapped = (
        len(lines) > 2
        and width in WRAPPED_WIDTHS
        and any(line[0].islower() for line in lines[1:])
        and not any(map(_LIST_ITEM.match, lines[1:]))
    )
    begin = block[0][0]
    for index, (_, end) in enumerate(block[:-1]):
        room = width - len(lines[index]) - 1
        if not is_wrapped or len(lines[index + 1].split(maxsplit=1)[0]) <= room:
            yield begin, end
            begin = end
    yield begin, block[-1][1]


def _is_heading(text: str, lines: Sequence[Span], index: int) -> bool:
    """The text's first line, one marked up, or one that stands apart before a sentence."""
    start, end = lines[index]
    line = text[start:end].strip()
    if line.endswith(_STOPS) or index + 1 == len(lines):
        return False
    if index == 0:
        return not _BULLET.match(line)
    if line.startswith(("#", "==")):
        return True
    next_start, next_end = lines[index + 1]
    is_apart = lines[index - 1][1] < start
    is_item = bool(_LIST_ITEM.match(line)) or line[-1] in _TRAILING
    return is_apart and not is_item and text[next_start:next_end].rstrip().endswith(_STOPS)


def _merge_short(words: Words, spans: Sequence[Span]) -> list[Span]:
    """Joins very short sentences to the one before, the first to the one after, where room is."""
    merged: list[Span] = []
    for start, end in spans:
        if merged:
            before, middle = merged[-1]
            is_short = words.between(start, end) <= SHORT_SENTENCE_WORDS or (
                len(merged) == 1 and words.between(before, middle) < SHORT_SENTENCE_WORDS
            )
            if is_short and words.between(before, end) <= MAX_WORDS:
                merged[-1] = (before, end)
                continue
        merged.append((start, end))
    return merged


def _trim(text: str, start: int, end: int) -> Span:
    """Without surrounding white space, bullets before and separators after."""
    if bullet := _BULLET.match(text, start, end):
        start = bullet.end()
    kept = len(text[start:end].rstrip())
    while kept and (text[start + kept - 1] in _TRAILING or text[start + kept - 1].isspace()):
        kept -= 1
    leading = kept - len(text[start : start + kept].lstrip())
    return start + leading, start + kept
