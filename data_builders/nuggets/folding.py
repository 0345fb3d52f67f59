"""Forms of a text in which spellings of the same words are equal, with their original characters.

A form is made cluster by cluster (the grapheme clusters of UAX #29), so that each of its characters
has an origin and a range of it never ends inside what a reader sees as one character.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate

import regex

# UAX #15's limit for the stream-safe text format: no language stacks more marks on one character,
# and normalization sorts longer stacks in quadratic time.
MAX_CLUSTER = 32

# Between two of these a line may break although no space is there (UAX #14): ideographs and kana,
# the scripts of South East Asia, emoji.
_UNSPACED = r"\p{lb=ID}\p{lb=CJ}\p{lb=SA}\p{lb=EB}\p{lb=RI}"
_UNSPACED_CHARACTER = regex.compile(f"[{_UNSPACED}]")
_WORD = regex.compile(rf"[{_UNSPACED}]\p{{M}}*|[^ {_UNSPACED}]+")
_IGNORABLE = regex.compile(r"\p{Default_Ignorable_Code_Point}")
# Those that may compose once the ignorable characters between them are gone are taken as one.
_CLUSTER = regex.compile(
    rf"""(?x) \X (?: \p{{Default_Ignorable_Code_Point}}{{0,{MAX_CLUSTER}}}+
    (?<=\p{{Default_Ignorable_Code_Point}})
    (?=[\p{{GCB=Extend}}\p{{GCB=SpacingMark}}\p{{GCB=V}}\p{{GCB=T}}]) \X )*"""
)
# What a form does not map character by character: white space before more of it, and what is not
# ASCII, with the characters around it, which may belong to its first and last clusters.
_IRREGULAR = re.compile(r"\s+(?=\s)|[ -~]?[^\x00-\x7f]+(?:[ -~][^\x00-\x7f]+)*[ -~]?")
# By code: blanks for white space, one style of quotation marks. Faster than a dict, which misses.
_ASCII_STYLES = "".join(
    " " if chr(code).isspace() else chr(code).replace("`", "'") for code in range(128)
)

_PRESENTATIONS = ("<wide>", "<narrow>", "<isolated>", "<initial>", "<medial>", "<final>")
_LIGATURES = range(0xFB00, 0xFB50)
_STYLES = {
    **dict.fromkeys("‘’‚‛‹›′`´", "'"),
    **dict.fromkeys("“”„‟«»″", '"'),
    **dict.fromkeys("‐‑‒–—―−﹘﹣", "-"),
    "…": "...",
}
# Letters with a stroke, and the Turkish dotless i, which have no decomposition.
_STROKES = str.maketrans("łøđħŧı", "lodhti")


Fold = Callable[[str], str]


class _Styles(dict[int, str]):
    """A table for `str.translate` that is filled as characters come."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        styled = _STYLES.get(character, character)
        decomposition = unicodedata.decomposition(character)
        if character.isspace():
            styled = " "
        elif _IGNORABLE.match(character):
            styled = ""
        elif decomposition.startswith(_PRESENTATIONS) or code in _LIGATURES:
            styled = unicodedata.normalize("NFKC", character)
        self[code] = styled
        return styled


_STYLE_TABLE = _Styles()


def canonical(part: str) -> str:
    """Equal for all encodings and typographic styles of the same characters.

    Canonical composition; full- and half-width forms, Arabic presentation forms and ligatures as
    plain letters; one style of quotation marks, dashes and dots; no soft hyphens, zero-width
    characters, direction marks or variation selectors.
    """
    return part.translate(_ASCII_STYLES) if part.isascii() else _canonical(part)


@lru_cache(maxsize=1 << 16)
def _canonical(cluster: str) -> str:
    composed = unicodedata.normalize("NFC", cluster)
    return unicodedata.normalize("NFC", composed.translate(_STYLE_TABLE))


def folded(part: str) -> str:
    """The canonical form without case, accents, vowel points and compatibility forms.

    Marks that spell another letter stay: kana voicing, nukta, virama, South East Asian signs.
    """
    return canonical(part).lower() if part.isascii() else _folded(part)


@lru_cache(maxsize=1 << 16)
def _folded(cluster: str) -> str:
    # Compatibility forms hide case ("™"), so case goes before and after.
    cased = _canonical(cluster).casefold()
    return " ".join(_unaccented(part) for part in cased.split(" "))


def _unaccented(part: str) -> str:
    decomposed = unicodedata.normalize("NFKD", part).casefold()
    kept = "".join(character for character in decomposed if not _is_accent(character))
    # A spacing accent decomposes to a blank and a mark.
    return unicodedata.normalize("NFC", kept.translate(_STROKES)).strip()


def _is_accent(character: str) -> bool:
    """By canonical combining class: overlays, points of Semitic scripts, marks around a letter."""
    kind = unicodedata.combining(character)
    return kind == 1 or 10 <= kind <= 36 or kind >= 200


def form_text(text: str, fold: Fold) -> str:
    """The `text` of `Form(text, fold)`."""
    return " ".join(fold(text).split()) if text.isascii() else Form(text, fold).text


class Form:
    """A form of a text, made by `canonical` or `folded`; `text` has single blanks, none outside."""

    def __init__(self, original: str, fold: Fold) -> None:
        parts: list[str] = []
        # Where each piece begins in `text`, its range in the original, and whether it is a cluster;
        # the characters of other pieces correspond one to one.
        self._ats: list[int] = []
        self._pieces: list[tuple[int, int, bool]] = []
        length = 0
        blank = True
        for start, end in _pieces(original):
            source = original[start:end]
            part = " " if source.isspace() else fold(source)
            cluster = (len(source) > 1 and not source.isascii()) or len(part) != len(source)
            if blank and part.startswith(" "):
                part, start = part[1:], start + (not cluster)
            if not part:
                continue
            blank = part.endswith(" ")
            self._ats.append(length)
            self._pieces.append((start, end, cluster))
            parts.append(part)
            length += len(part)
        self.text = "".join(parts).rstrip(" ")

    def origin(self, at: int, stop: int) -> tuple[int, int]:
        """The half-open range of the original that `text[at:stop]`, not empty, comes from."""
        piece = bisect_right(self._ats, at) - 1
        start, _, cluster = self._pieces[piece]
        if not cluster:
            start += at - self._ats[piece]
        piece = bisect_right(self._ats, stop - 1) - 1
        first, end, cluster = self._pieces[piece]
        if not cluster:
            end = first + stop - self._ats[piece]
        return start, end

    def occurrences(self, wanted: str, whole_words: bool) -> list[tuple[int, int]]:
        """Where `wanted` stands in the original, from the left without overlap."""
        found = []
        at = self.text.find(wanted)
        while at >= 0:
            stop = at + len(wanted)
            if whole_words and (self._joins(at) or self._joins(stop)):
                at = self.text.find(wanted, at + 1)
                continue
            found.append(self.origin(at, stop))
            at = self.text.find(wanted, stop)
        return found

    def _joins(self, at: int) -> bool:
        """Whether a word or a cluster runs across position `at`."""
        if not 0 < at < len(self.text):
            return False
        before, after = self.text[at - 1], self.text[at]
        word = _in_word(before) and _in_word(after)
        if word and not (_UNSPACED_CHARACTER.match(before) or _UNSPACED_CHARACTER.match(after)):
            return True
        return self._cuts_cluster(at)

    def _cuts_cluster(self, at: int) -> bool:
        piece = bisect_right(self._ats, at) - 1
        return self._pieces[piece][2] and self._ats[piece] < at


def words(text: str) -> tuple[list[int], list[int]]:
    """Where the words of a form's text start and end; in unspaced scripts, its characters."""
    if not text:
        return [], []
    if text.isascii():
        ends = list(accumulate((len(word) + 1 for word in text.split(" ")), initial=-1))
        return [end + 1 for end in ends[:-1]], ends[1:]
    spans = [match.span() for match in _WORD.finditer(text)]
    return [start for start, _ in spans], [end for _, end in spans]


def count_words(text: str) -> int:
    """How many words a form's text has, which is not empty."""
    return text.count(" ") + 1 if text.isascii() else len(words(text)[0])


def _in_word(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character).startswith("M")


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Ranges that together are the text: runs of ASCII, of white space, and single clusters."""
    if text.isascii() and "  " not in text.translate(_ASCII_STYLES):
        yield 0, len(text)
        return
    done = 0
    for match in _IRREGULAR.finditer(text):
        start, end = match.span()
        if start > done:
            yield done, start
        done = end
        if match[0].isspace():
            yield start, end
            continue
        for cluster in _CLUSTER.finditer(text, start, end):
            for first in range(cluster.start(), cluster.end(), MAX_CLUSTER):
                yield first, min(first + MAX_CLUSTER, cluster.end())
    if done < len(text):
        yield done, len(text)
