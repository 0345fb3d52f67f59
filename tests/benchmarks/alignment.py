"""Alignment of perturbed candidates: the package's search against plain ones, and its growth.

    python tests/benchmarks/alignment.py [--data FOLDER] [--passages N] [--difflib-passages N]

Candidates are runs of 4 to 25 words of a passage, each perturbed in one way, or taken from another
passage (`absent`). All ways locate the same candidates, exact first and then over the same
whole-word windows of the same folded text, at or above the same threshold:

- `align`     the package's search, one call a passage;
- `rapidfuzz` every window, one call of `Indel.normalized_similarity` each;
- `difflib`   every window, `SequenceMatcher.ratio` (the first passages only; it is slow).

Spans are compared by their Indel similarity. Passages come from the IRCoT files under `--data`, or
from the sample world. Then one call's time from 500 to 50,000 words, the exponent of its growth,
and the time of hostile texts of 50,000 words. Prints tables.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from importlib.metadata import version
from math import log
from pathlib import Path
from random import Random

from rapidfuzz.distance import Indel

from data_builders.nuggets.align import align
from data_builders.nuggets.folding import Form, count_words, folded, form_text, words
from data_builders.nuggets.windows import widths
from data_builders.world import iter_passages
from eval.environment import environment

THRESHOLD = 0.7
SIZES = (500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)

Spans = list[tuple[int, int] | None]
Way = Callable[[str, Sequence[str]], Spans]
Score = Callable[[str], float]


def aligned(text: str, candidates: Sequence[str]) -> Spans:
    spans: Spans = [None] * len(candidates)
    for found in align(text, candidates, THRESHOLD).located:
        spans[found.candidate] = found.start, found.end
    return spans


def plain(text: str, candidates: Sequence[str], scorer: Callable[[str], Score]) -> Spans:
    """A search over every window, the candidate's own word count first."""
    form = Form(text, folded)
    starts, ends = words(form.text)
    spans: Spans = []
    for candidate in candidates:
        at = text.find(candidate)
        if at >= 0:
            spans.append((at, at + len(candidate)))
            continue
        query = Form(candidate, folded).text
        score = scorer(query)
        count = count_words(query)
        least, most = widths(count)
        best, highest = None, 0.0
        for width in sorted(range(least, most + 1), key=lambda width: abs(width - count)):
            for first in range(len(starts) - width + 1):
                start, end = starts[first], ends[first + width - 1]
                similarity = score(form.text[start:end])
                if similarity >= THRESHOLD and similarity > highest:
                    best, highest = (start, end), similarity
        spans.append(None if best is None else form.origin(*best))
    return spans


def indel(query: str) -> Score:
    return lambda window: Indel.normalized_similarity(query, window)


def ratcliff(query: str) -> Score:
    # SequenceMatcher keeps what it computes of the second sequence.
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(query)

    def score(window: str) -> float:
        matcher.set_seq1(window)
        return matcher.ratio()

    return score


WAYS: dict[str, Way] = {
    "align": aligned,
    "rapidfuzz": lambda text, candidates: plain(text, candidates, indel),
    "difflib": lambda text, candidates: plain(text, candidates, ratcliff),
}


def typos(run: list[str], rng: Random) -> list[str]:
    changed = list(" ".join(run))
    for _ in range(1 + len(changed) // 20):
        at = rng.randrange(len(changed))
        letter = rng.choice("abcdefghijklmnopqrstuvwxyz")
        changed[at] = rng.choice([letter, "", changed[at] + letter])
    return "".join(changed).split()


def dropped(run: list[str], rng: Random) -> list[str]:
    gone = set(rng.sample(range(len(run)), 1 + len(run) // 8))
    return [word for at, word in enumerate(run) if at not in gone]


def replaced(run: list[str], rng: Random) -> list[str]:
    changed = set(rng.sample(range(len(run)), 1 + len(run) // 8))
    return [rng.choice(run)[::-1] if at in changed else word for at, word in enumerate(run)]


def other_case(run: list[str], rng: Random) -> list[str]:
    return [rng.choice([word.upper(), word.title(), word.swapcase()]) for word in run]


def no_accents(run: list[str], rng: Random) -> list[str]:
    return [folded(word) if not word.isascii() else word.capitalize() for word in run]


def punctuation(run: list[str], rng: Random) -> list[str]:
    return [word.strip(".,;:()\"'") or word for word in run[:-1]] + [run[-1] + rng.choice(".,;")]


def reordered(run: list[str], rng: Random) -> list[str]:
    at = rng.randint(1, max(1, len(run) // 4))
    return run[at:] + run[:at]


PERTURBATIONS = (typos, dropped, replaced, other_case, no_accents, punctuation, reordered)


def candidates_of(texts: Sequence[str], number: int) -> list[str]:
    """Distinct candidates of one passage in text order, one of each perturbation, one absent."""
    rng = Random(f"candidates {number}")
    kinds = [*PERTURBATIONS, None]
    rng.shuffle(kinds)
    source = texts[number].split()
    other = texts[(number + 1) % len(texts)].split()
    found: dict[str, str] = {}
    for kind, first in zip(
        kinds, sorted(rng.choices(range(max(1, len(source) - 4)), k=len(kinds))), strict=True
    ):
        size = rng.randint(4, 25)
        run = source[first : first + size]
        candidate = " ".join(kind(run, rng) if kind else other[:size])
        # A phrase that comes again would have to take another place.
        found.setdefault(form_text(candidate, folded), candidate)
    return [candidate for folding, candidate in found.items() if folding]


def read_passages(data: Path | None, count: int) -> tuple[str, list[str]]:
    """The source's name and `count` distinct passages in seeded order."""
    files = sorted(data.rglob("*.jsonl")) if data else []
    if files:
        rows = (json.loads(line) for file in files for line in file.open(encoding="utf-8"))
        contexts = (context for row in rows for context in row["contexts"])
        texts = dict.fromkeys(f"{c['title']}\n{c['paragraph_text']}\n" for c in contexts)
        return str(data), Random(0).sample(list(texts), count)
    return "the sample world", [f"{title}\n{text}\n" for title, text in iter_passages(0, count)]


def similarity(text: str, candidate: str, span: tuple[int, int] | None) -> float:
    if span is None:
        return 0.0
    return Indel.normalized_similarity(
        Form(candidate, folded).text, Form(text[slice(*span)], folded).text
    )


def compare(texts: Sequence[str], shown: dict[str, int]) -> Iterator[str]:
    """The table of ways: `shown` says on how many of the first passages each one runs."""
    candidates = [candidates_of(texts, number) for number in range(len(texts))]
    results: dict[str, list[Spans]] = {way: [] for way in shown}
    seconds: dict[str, list[float]] = {way: [] for way in shown}
    for number, (text, wanted) in enumerate(zip(texts, candidates, strict=True)):
        for way, count in shown.items():
            if number < count:
                results[way].append(WAYS[way](text, wanted))
                calls = 1 if way == "difflib" else 3
                seconds[way].append(seconds_of(text, wanted, way, calls))
    yield (
        f"{'way':<11}{'passages':>9}{'us a candidate':>16}{'times slower':>14}"
        f"{'same span':>11}{'as similar':>12}{'align better':>14}{'align worse':>13}"
    )
    for way, count in shown.items():
        took, ours = sum(seconds[way]), sum(seconds["align"][:count])
        each = took / sum(map(len, candidates[:count])) * 1e6
        verdicts: Counter[str] = Counter()
        for text, wanted, mine, theirs in zip(
            texts[:count], candidates, results["align"], results[way], strict=False
        ):
            verdicts.update(map(verdict, [text] * len(wanted), wanted, mine, theirs))
        yield (
            f"{way:<11}{count:>9}{each:>16.1f}"
            f"{took / ours:>14.1f}{verdicts['same']:>11}{verdicts['tie']:>12}"
            f"{verdicts['better']:>14}{verdicts['worse']:>13}"
        )


def verdict(
    text: str, candidate: str, mine: tuple[int, int] | None, theirs: tuple[int, int] | None
) -> str:
    if mine == theirs:
        return "same"
    gain = similarity(text, candidate, mine) - similarity(text, candidate, theirs)
    return "tie" if abs(gain) < 1e-9 else "better" if gain > 0 else "worse"


def seconds_of(text: str, candidates: Sequence[str], way: str = "align", calls: int = 3) -> float:
    """The least processor time of some calls."""
    times = []
    for _ in range(calls):
        start = time.thread_time()
        WAYS[way](text, candidates)
        times.append(time.thread_time() - start)
    return min(times)


def growth(texts: Sequence[str]) -> Iterator[str]:
    """One call's time with the same candidates in ever longer texts."""
    source = (" ".join(texts).split() * (1 + SIZES[-1] // 1000))[: SIZES[-1]]
    candidates = candidates_of(texts, 0)
    times = {size: seconds_of(" ".join(source[:size]), candidates) for size in SIZES}
    yield f"{'words':>7}{'ms':>9}{'us a 1000 words':>17}{'ns / (n log2 n)':>17}"
    for size, took in times.items():
        scaled = took / (size * log(size, 2)) * 1e9
        yield f"{size:>7}{took * 1e3:>9.1f}{took / size * 1e9:>17.0f}{scaled:>17.1f}"
    small, large = SIZES[0], SIZES[-1]
    yield f"exponent {log(times[large] / times[small]) / log(large / small):.3f}"


def hostile(words_: int) -> dict[str, tuple[str, str]]:
    """Texts of the size of `words_` words, each with a candidate."""
    return {
        "one word repeated": ("word " * words_, "word wurd word werd word"),
        "two words in turn": ("ab ba " * (words_ // 2), "ab ab ba ba ab ab"),
        "no spaces": ("abcde" * words_, "abcdd abcee abc"),
        "one letter": ("a" * 5 * words_, "aa"),
        "only spaces": (" " * 5 * words_, "a word"),
        "combining marks": ("e" + "\u0301\u0316" * (2 * words_), "e\u0316e e"),
        "ideographs": ("日本語文字" * words_, "日本誤字日本語"),
        "emoji": ("👨‍👩‍👧👍🏽" * words_, "👍👨‍👩‍👧👨"),
        "zero-width": ("a\u200b" * 2 * words_, "aba a"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--passages", type=int, default=2000)
    parser.add_argument("--difflib-passages", type=int, default=50)
    options = parser.parse_args()
    source, texts = read_passages(options.data, options.passages)
    versions = {name: version(name) for name in ("rapidfuzz", "regex")}
    print(environment() | versions)
    print(f"{len(texts)} passages of {source}, up to {len(PERTURBATIONS) + 1} candidates each")
    print("difflib: one call for the first passages only, and the factor for those; else best of 3")
    few = min(options.difflib_passages, len(texts))
    for line in compare(texts, {"align": len(texts), "rapidfuzz": len(texts), "difflib": few}):
        print(line)
    print()
    for line in growth(texts):
        print(line)
    print(f"\n{'50,000 words of':<20}{'ms at 5,000':>12}{'ms':>9}")
    fifth, full = hostile(5_000), hostile(50_000)
    for name, (text, candidate) in full.items():
        less, took = seconds_of(fifth[name][0], [candidate]), seconds_of(text, [candidate])
        print(f"{name:<20}{less * 1e3:>12.1f}{took * 1e3:>9.1f}")


if __name__ == "__main__":
    main()
