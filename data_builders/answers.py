"""Finds answers in text by whole words."""

import re
import unicodedata
from collections.abc import Sequence


def answer_key(text: str) -> str:
    """Case-folded words between single spaces, for finding an answer in text by whole words."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return f" {' '.join(words)} "


def holds_answer(text_key: str, answers: Sequence[str]) -> bool:
    """Whether any answer occurs, word for word, in the text whose `answer_key` is given."""
    keys = [answer_key(answer) for answer in answers]
    return any(key.strip() and key in text_key for key in keys)
