"""Finds answers in text by whole words."""

import unicodedata
from collections.abc import Sequence

import regex

# Scripts that are written without spaces between words, as a regex set.
UNSPACED = r"\p{scx=Han}\p{scx=Hira}\p{scx=Kana}\p{scx=Thai}\p{scx=Laoo}\p{scx=Khmr}\p{scx=Mymr}"
_VERDICTS = (" yes ", " no ")
_WORD = regex.compile(rf"[\w&&[{UNSPACED}]]|[\w--[{UNSPACED}]]+", regex.V1)


def answer_key(text: str) -> str:
    """Case-folded words between single spaces, for finding an answer in text by whole words.

    In scripts without spaces each character is a word.
    """
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return f" {' '.join(words)} "


def in_words(answers: Sequence[str]) -> list[str]:
    """Those that a text can hold: where the answer is yes or no, the word says nothing."""
    return [answer for answer in answers if answer_key(answer) not in _VERDICTS]


def holds_answer(text_key: str, answers: Sequence[str]) -> bool:
    """Whether any answer occurs, word for word, in the text whose `answer_key` is given."""
    keys = [answer_key(answer) for answer in answers]
    return any(key.strip() and key in text_key for key in keys)
