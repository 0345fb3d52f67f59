"""Token F1 and exact match by LongBench's definition (its `metrics.py`, `qa_f1_score`)."""

import re
import string
from collections import Counter
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Lower-case, delete ASCII punctuation, remove the words a, an and the, collapse spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(prediction: str, answers: Iterable[str]) -> float:
    """The best overlap F1 of the prediction with any gold answer, in [0, 1].

    Tokens are the space-separated words of the normalized texts, compared as multisets. Without
    a common token, which includes a text that normalizes to nothing, the score is 0.
    """
    predicted = Counter(normalize_answer(prediction).split())
    return max((_overlap_f1(predicted, answer) for answer in answers), default=0.0)


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """1.0 where the normalized prediction equals any normalized gold answer, else 0.0."""
    predicted = normalize_answer(prediction)
    return float(any(predicted == normalize_answer(answer) for answer in answers))


def _overlap_f1(predicted: Counter[str], answer: str) -> float:
    gold = Counter(normalize_answer(answer).split())
    common = (predicted & gold).total()
    if common == 0:
        return 0.0
    precision, recall = common / predicted.total(), common / gold.total()
    return 2 * precision * recall / (precision + recall)
