"""Token F1 once more from LongBench's definition: no regular expressions, no counters.

`normalize_answer` lower-cases, deletes the characters of `string.punctuation`, puts a space in
place of each whole word a, an or the, and splits at white space; `qa_f1_score` is the harmonic mean
of precision and recall of the common words, each counted as often as it is in both; a question's
score is the best over its answers.
"""

import random
import unicodedata
from collections.abc import Iterable
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from eval.metrics import exact_match, normalize_answer, token_f1

# Written out from the ASCII table, 33 to 126 without digits and letters.
PUNCTUATION = {chr(code) for code in range(33, 127)} - set(
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)
ARTICLES = {"a", "an", "the"}


def in_word(character: str) -> bool:
    """Whether a regular expression's \\b takes it for a part of a word: letters and numerals.

    A combining mark is none, so that an accent written apart ends a word.
    """
    return unicodedata.category(character)[0] in "LN" or character == "_"


def words(text: str) -> list[str]:
    """The normalized words, read character by character."""
    kept = [character for character in text.lower() if character not in PUNCTUATION]
    # Runs of word characters, each of which may be an article as a whole, and what is between.
    pieces: list[str] = []
    before = None
    for character in kept:
        if in_word(character) and before is True:
            pieces[-1] += character
        else:
            pieces.append(character)
        before = in_word(character)
    pieces = [" " if piece in ARTICLES else piece for piece in pieces]
    found = [""]
    for character in "".join(pieces):
        if character.isspace():
            found.append("")
        else:
            found[-1] += character
    return [word for word in found if word]


def f1(prediction: str, answer: str) -> Fraction:
    """Exact, by walking through both sorted lists of words."""
    left, right = sorted(words(prediction)), sorted(words(answer))
    common = place = other = 0
    while place < len(left) and other < len(right):
        if left[place] == right[other]:
            common, place, other = common + 1, place + 1, other + 1
        elif left[place] < right[other]:
            place += 1
        else:
            other += 1
    if not common:
        return Fraction(0)
    precision, recall = Fraction(common, len(left)), Fraction(common, len(right))
    return 2 * precision * recall / (precision + recall)


def score(prediction: str, answers: Iterable[str]) -> Fraction:
    return max((f1(prediction, answer) for answer in answers), default=Fraction(0))


# What normalization is easily wrong about, beside ordinary words.
WORDS = (
    "a A an AN the The THE the, a. (an) theatre another anthem Athens banana cathedral bathe "
    "U.S. U.S U S us it's its don't e.g. 1,234 1234 3.14 314 50% $5 5 2nd #1 1990s 1990-1995 "
    "New York new-york NEW_YORK red red red fox _the_ a_b C++ a+b & é É cafe\u0301 café Ångström "
    "“a” “the” ‘an’ the… a— —the a·b İstanbul istanbul Aİ İ ı I SS ß straße STRASSE ΣΑΣ σας "
    "Ａ ａ ｔｈｅ ｔｈｅ， １２ １２３ 東京 東京。 。 ， the東京 a東 ½ a½ ² x² Ⅳ 𝐚 𝟏 "
    "a\u0301 an\u0327 \u0301 "
    "no yes \u200ba \u2060the 'a' \"a\" a's an' the- -- ... _ ́"
).split()
SPACES = [*"     \n\t\xa0\u3000\u2028\x1c\x85-", "  ", "\r\n", ""]
EMPTY = ["", " ", "\n", "\xa0", ".", "the", "A an", "“”", "...", "\u200b"]


def tricky_text(choose: random.Random) -> str:
    if choose.random() < 0.08:
        return choose.choice(EMPTY)
    text = "".join(
        choose.choice(WORDS) + choose.choice(SPACES) for _ in range(choose.randint(1, 7))
    )
    return choose.choice([text, text, text.strip(), text.upper(), f"\n{text}", f"“{text}”"])


def tricky_pair(choose: random.Random) -> tuple[str, list[str]]:
    """A prediction, and up to four answers, of which some are the prediction written otherwise."""
    prediction = tricky_text(choose)
    answers = [tricky_text(choose) for _ in range(choose.choice([0, 1, 1, 1, 2, 3]))]
    if choose.random() < 0.6:
        parts = prediction.split()
        choose.shuffle(parts)
        answers.insert(choose.randint(0, len(answers)), " ".join(parts[: choose.randint(1, 6)]))
    return prediction, answers


def check(prediction: str, answers: list[str]) -> None:
    assert normalize_answer(prediction) == " ".join(words(prediction))
    assert abs(Fraction(token_f1(prediction, answers)) - score(prediction, answers)) < 1e-12
    assert exact_match(prediction, answers) == any(words(prediction) == words(a) for a in answers)


def test_a_thousand_tricky_pairs_score_as_by_the_definition() -> None:
    choose = random.Random(20240229)
    pairs = [tricky_pair(choose) for _ in range(1000)]
    for prediction, answers in pairs:
        check(prediction, answers)
    # The pairs are of every kind: wrong, partly and wholly right, empty, with several answers.
    scores = [score(*pair) for pair in pairs]
    assert min(scores.count(Fraction(0)), scores.count(Fraction(1))) >= 50
    assert sum(0 < found < 1 for found in scores) >= 250
    assert sum(not words(prediction) for prediction, _ in pairs) >= 50
    assert sum(len(answers) > 1 for _, answers in pairs) >= 300


def test_every_tricky_word_alone_and_beside_an_article() -> None:
    for word in [*WORDS, *EMPTY]:
        for text in (word, f"a {word}", f"{word} the", f"a{word}", f"{word}a", f"{word}\xa0{word}"):
            check(text, [word, "a"])


@given(st.text(max_size=30), st.lists(st.text(max_size=30), max_size=3))
def test_any_text_scores_as_by_the_definition(prediction: str, answers: list[str]) -> None:
    check(prediction, answers)
