"""Nugget candidates: short phrases and clauses of a chunk that can stand alone as facts.

An extractor gets a chunk's text and gives candidates, verbatim or nearly so; `align` locates them.
`rules` is the offline one: sentences, and long sentences divided at clause boundaries, so that
candidates cover the prose once. It stands in for the CoinRAG paper's LLM extractor.
"""

import re
from collections.abc import Callable
from itertools import pairwise

Extractor = Callable[[str], list[str]]

MAX_WORDS = 25
MIN_WORDS = 6
SHORT_SENTENCE_WORDS = 3
MAX_TITLE_WORDS = 12

_TITLES = "mr mrs ms dr prof st gen col lt sgt capt maj cmdr rev hon gov sen rep pres fr ph"
_NOTES = "vs no nos vol pp ed eds ca cf fl op viz mt ft approx est sp spp feat"
_MONTHS = "jan feb mar apr jun jul aug sept sep oct nov dec"
_NEVER_FINAL = frozenset(f"{_TITLES} {_NOTES} {_MONTHS}".split())
_MAYBE_FINAL = frozenset("jr sr inc ltd co corp bros etc al".split())
_STARTERS = frozenset(
    "a after although among an and as at before both but by despite during each for from he her "
    "his however i if in it its many most on one other she since some that the their then there "
    "these they this those though under until when where while who with".split()
)
# A full stop with what closes over it; a missing space is allowed before a capital letter.
_STOP = re.compile(r"""(?P<stop>[.!?…]+|[。！？])(?P<close>["'”’»)\]]*)(?P<gap>\s*)""")
_NEXT_OPENS = re.compile(r"""["'“‘«(\[]*[^\W_]""")
_BREAKS = (
    # Not a hyphen between spaces ("six - year terms"), nor a dash after a number.
    re.compile(r";\s+|(?<!\d)\s+(?:[–—]|--)\s+|(?<!\d)—"),
    re.compile(
        r",\s+(?=(?:and|but|or|nor|yet|so|who|whom|whose|which|where|when|while|although|though|"
        r"because|since|after|before|until|whereas|including|with|as)\s)"
    ),
    re.compile(r"\s+(?=(?:while|because|although|after|before|until|whereas|which|where|who)\s)"),
    re.compile(r",\s+|:\s+|\s+(?=(?:and|but)\s)"),
)
_OPENERS = {"(": ")", "[": "]", "“": "”", "«": "»"}


def rules(text: str) -> list[str]:
    """Verbatim candidates in the order of the text, without overlap.

    Sentences of more than `MAX_WORDS` words are divided at clause boundaries into parts of at least
    `MIN_WORDS`, where boundaries allow it; runs of more than twice as many without a boundary are
    cut between words. Very short sentences stay with the one before. A title line goes with the
    candidate after it: alone it states nothing, and yet it would often score highest.
    """
    candidates = []
    for line in text.splitlines():
        for start, end in _merge_short(line, _sentences(line)):
            candidates += [part for part in map(_trim, _clauses(line[start:end])) if part]
    title = _trim(text.partition("\n")[0])
    if len(candidates) > 1 and candidates[0] == title and _is_title(title):
        first = text.index(candidates[1], text.index(title) + len(title))
        joined = text[text.index(title) : first + len(candidates[1])]
        candidates[:2] = [joined]
    return candidates


def _is_title(line: str) -> bool:
    return len(line.split()) <= MAX_TITLE_WORDS and not line.endswith((".", "!", "?"))


def _sentences(line: str) -> list[tuple[int, int]]:
    spans = []
    start = after_stop = 0
    for match in _STOP.finditer(line):
        word = re.split(r"\s", line[after_stop : match.start()])[-1]
        after_stop = match.end()
        if _ends_sentence(line, word, match):
            spans.append((start, match.end("close")))
            start = match.end()
    if line[start:].strip():
        spans.append((start, len(line)))
    return spans


def _ends_sentence(line: str, word: str, match: re.Match[str]) -> bool:
    following = line[match.end() :]
    if not following:
        return True
    if match["stop"] in "。！？":
        return True
    opens = _NEXT_OPENS.match(following)
    if not opens:
        return False
    first = opens[0][-1]
    word = word.lstrip("\"'“‘«([")
    if not match["gap"]:
        # "director.He", "1998.The" and "law).His" end a sentence; "U.S.A" and "3.5" do not.
        long_enough = len(word) > 1 and word.lower() not in _NEVER_FINAL
        lower_end = word[-1:].islower() or word[-1:].isdigit() or word[-1:] in ")]”\"'"
        return first.isupper() and (lower_end or bool(match["close"])) and long_enough
    if match["stop"] != ".":
        return not first.islower()
    if first.islower():
        return False
    lowered = word.lower()
    if lowered in _NEVER_FINAL:
        return False
    next_word = re.match(r"\w+", following.lstrip("\"'“‘«(["))
    starter = next_word is not None and next_word[0].lower() in _STARTERS
    # A last initial ("J.", the S of "U.S.") ends a sentence only before a typical first word.
    initial = len(word) == 1 and word.isalpha()
    return starter if initial or lowered in _MAYBE_FINAL else True


def _merge_short(line: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        words = len(line[start:end].split())
        if merged and words <= SHORT_SENTENCE_WORDS:
            before = merged[-1][0]
            if len(line[before:end].split()) <= MAX_WORDS:
                merged[-1] = (before, end)
                continue
        merged.append((start, end))
    return merged


def _clauses(sentence: str) -> list[str]:
    """The sentence divided, most clause-like boundaries first, nearest the middle among equals."""
    words = len(sentence.split())
    if words <= MAX_WORDS:
        return [sentence]
    depths = _bracket_depths(sentence)
    for boundary in _BREAKS:
        places = []
        for match in boundary.finditer(sentence):
            if depths[match.start()]:
                continue
            left = len(sentence[: match.start()].split())
            right = len(sentence[match.end() :].split())
            if min(left, right) >= MIN_WORDS:
                places.append((abs(left - right), match.end()))
        if places:
            _, place = min(places)
            return _clauses(sentence[:place]) + _clauses(sentence[place:])
    if words <= 2 * MAX_WORDS:
        return [sentence]
    # Lists and tables run on without any boundary: cut them between words.
    ends = [match.end() for match in re.finditer(r"\S+\s*", sentence)][MAX_WORDS - 1 :: MAX_WORDS]
    cuts = [0, *ends, len(sentence)]
    return [sentence[start:end] for start, end in pairwise(cuts)]


def _bracket_depths(sentence: str) -> list[int]:
    """How many brackets or quotation marks are open at each character; unclosed ones are none."""
    depths = [0] * len(sentence)
    open_at: list[tuple[str, int]] = []
    for index, character in enumerate(sentence):
        if character in _OPENERS:
            open_at.append((_OPENERS[character], index))
        elif open_at and character == open_at[-1][0]:
            _, begin = open_at.pop()
            for inside in range(begin, index):
                depths[inside] += 1
    return depths


def _trim(part: str) -> str:
    trimmed = part.strip().rstrip(",;:–—").strip()
    return trimmed if re.search(r"\w", trimmed) else ""


EXTRACTORS: dict[str, Extractor] = {"rules": rules}
