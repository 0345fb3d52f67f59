"""Long sentences divided at clause boundaries, and the measure of length this needs.

Length is counted in words. Scripts that put no spaces between words are counted by letter: two Han
characters or kana make a word, and four letters (without vowel signs and tone marks) of Thai, Lao,
Burmese, Khmer or Tibetan.
"""

import math
import re
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, pairwise

MAX_WORDS = 25
MIN_WORDS = 6

_HAN_KANA = "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_HAN_KANA += "\uff66-\uff9f\U00020000-\U0003ffff"
_SOUTH_EAST = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"
# Letters that are read with the one before: Thai and Lao vowels, consonants under another.
_JOINED = "[\u0e30\u0e32\u0e33\u0e45\u0eb0\u0eb2\u0eb3]|[\u1039\u17d2]."
_TOKEN = re.compile(
    rf"(?P<han>[{_HAN_KANA}])"
    rf"|(?P<south_east>[\u0e40-\u0e44\u0ec0-\u0ec4]?[{_SOUTH_EAST}](?:{_JOINED})*)"
    rf"|[^\s{_HAN_KANA}{_SOUTH_EAST}]+"
)

_PREPOSITIONS = "in of by to at on for from with".split()
# A part does not end in these: "an award in", "and", "that".
_NOT_AFTER = "".join(rf"(?<!\b{word})" for word in [*_PREPOSITIONS, "and", "or", "but", "that"])
# Most clause-like first. White space is matched possessively from its first character: linear time.
_BOUNDARIES = (
    # Not a hyphen between spaces ("six - year terms"), nor a dash after a number.
    re.compile(
        r";\s+|[；؛፤]\s*|(?<![\d\s])\s++(?:[–—]|--)\s+|(?<!\d)—|(?<!\s)\s++\|\s|\t"
        r"|(?<!\s)\s++(?=\((?:\d{1,2}|[a-z]|[ivx]{1,4})\)\s)"
    ),
    re.compile(
        r":\s+|,\s+(?=(?:and|but|or|nor|yet|so|who|whom|whose|which|where|when|while|although|"
        r"though|because|since|after|before|until|whereas|including|with|as)\s)"
        rf"|(?<!\s)\s++(?=(?:{'|'.join(_PREPOSITIONS)})\s(?:which|whom|whose)\s)"
    ),
    re.compile(
        rf"(?<!\s){_NOT_AFTER}\s++(?=(?:while|because|although|after|before|until|whereas|which|"
        r"where|who|whose)\s)"
    ),
    # A comma before a phrase, before one that may only part the items of a list.
    re.compile(
        rf"{_NOT_AFTER},\s+(?=(?:the|an?|he|she|it|they|his|her|its|their|this|then|also|not|both|"
        rf"{'|'.join(_PREPOSITIONS)}|\w+ing|\w+ed)\s)|(?<!\d)[，：]|[，：](?!\d)"
    ),
    re.compile(
        r"[,،]\s++(?!\d|(?:Inc|Incorporated|Ltd|LLC|Jr|Sr|I{2,3})\b)|[、፣၊]\s*"
        rf"|(?<=[{_SOUTH_EAST}])\s++(?=[{_SOUTH_EAST}])"
        r"|(?<!\s)\s++(?=(?:and|but)\s)(?!and\s+\w+ed\s+by\s)"
    ),
)
_PAIRS = {
    **{"(": ")", "[": "]", "{": "}", "“": "”", "„": "“", "«": "»", "»": "«", '"': '"'},
    **{"``": "''", "「": "」", "『": "』", "（": "）", "【": "】", "《": "》", "〈": "〉"},
}
_MARK = re.compile("|".join(map(re.escape, sorted({*_PAIRS, *_PAIRS.values()}))))


class Words:
    """The words of a text's sentences, or the letters that count as parts of words."""

    def __init__(self, text: str, sentences: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        sizes: list[float] = []
        tokens = (token for span in sentences for token in _TOKEN.finditer(text, *span))
        for match in tokens:
            letter = match["han"] or match["south_east"]
            if letter:
                is_mark = unicodedata.category(letter[0])[0] not in "LN"
                size = 0.0 if is_mark else 0.5 if match["han"] else 0.25
            else:
                # A dash between spaces is counted as by `str.split`; a full-width comma is not.
                stands_apart = not text[match.start() - 1 : match.start()].strip()
                size = float(stands_apart or any(map(str.isalnum, match[0])))
            if size:
                self._starts.append(match.start())
                sizes.append(size)
        self._before = list(accumulate(sizes, initial=0.0))

    def before(self, position: int) -> float:
        """How many words start before a character position."""
        return self._before[bisect_left(self._starts, position)]

    def between(self, start: int, end: int) -> float:
        """How many words start in the half-open range of characters."""
        return self.before(end) - self.before(start)

    def even_cuts(self, start: int, end: int, parts: int) -> list[int]:
        """Positions of word starts that divide the range into about equal parts."""
        first, words = self.before(start), self.between(start, end)
        shares = (first + words * part / parts for part in range(1, parts))
        return [self._starts[bisect_left(self._before, share)] for share in shares]


def clauses(text: str, words: Words, start: int, end: int) -> list[tuple[int, int]]:
    """Spans that partition the sentence `text[start:end]`, of about `MAX_WORDS` words at most.

    Parts that are longer are divided at the most clause-like boundary, nearest the middle among
    equals, into parts of at least `MIN_WORDS` words; brackets and quotations of up to `MAX_WORDS`
    words stay whole. What is more than twice as long and has no boundary, such as a list or table,
    is cut between words. Time is n log n in the length at most.
    """
    if words.between(start, end) <= MAX_WORDS:
        return [(start, end)]
    boundaries = _boundaries(text, words, start, end)
    spans: list[tuple[int, int]] = []
    undivided = [(start, end)]
    while undivided:
        begin, stop = undivided.pop()
        length = words.between(begin, stop)
        place = None
        if length > MAX_WORDS:
            place = _best_place(boundaries, words.before(begin), words.before(stop))
        if place is not None:
            undivided += [(place, stop), (begin, place)]
        elif length > 2 * MAX_WORDS:
            parts = math.ceil(length / MAX_WORDS)
            spans += pairwise([begin, *words.even_cuts(begin, stop, parts), stop])
        else:
            spans.append((begin, stop))
    return spans


def _best_place(
    boundaries: list[tuple[list[float], list[int]]], first: float, last: float
) -> int | None:
    for counts, places in boundaries:
        near = bisect_left(counts, (first + last) / 2)
        found = [
            (abs(first + last - 2 * counts[index]), places[index])
            for index in (near - 1, near)
            if 0 <= index < len(counts)
            and min(counts[index] - first, last - counts[index]) >= MIN_WORDS
        ]
        if found:
            return min(found)[1]
    return None


def _boundaries(
    text: str, words: Words, start: int, end: int
) -> list[tuple[list[float], list[int]]]:
    """For each kind of boundary, the words before each place, and the places."""
    enclosed = _enclosed(text, words, start, end)
    found = []
    for boundary in _BOUNDARIES:
        places = [
            match.end()
            for match in boundary.finditer(text, start, end)
            if not enclosed[match.start() - start]
        ]
        found.append(([words.before(place) for place in places], places))
    return found


def _enclosed(text: str, words: Words, start: int, end: int) -> list[int]:
    """In how many short brackets or quotations each character is; unclosed ones are none."""
    changes = [0] * (end - start + 1)
    open_at: list[tuple[str, int]] = []
    awaited: Counter[str] = Counter()
    for match in _MARK.finditer(text, start, end):
        mark, at = match[0], match.start()
        if awaited[mark]:
            closer = ""
            while closer != mark:
                closer, begin = open_at.pop()
                awaited[closer] -= 1
            if words.between(begin, at) <= MAX_WORDS:
                changes[begin - start] += 1
                changes[at - start] -= 1
        elif mark in _PAIRS and not (mark == '"' and text[at - 1 : at].isdigit()):
            open_at.append((_PAIRS[mark], at))
            awaited[_PAIRS[mark]] += 1
    return list(accumulate(changes))
