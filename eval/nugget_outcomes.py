"""What extractor, scorer and selection do with each dev question, from built tables alone.

No generator is asked. An answer is looked for word for word, so a question whose answer is yes or
no counts for gold recall alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

from data_builders.answers import answer_key, holds_answer, in_words
from data_builders.nugget_recall import answer_nuggets, recall_at
from data_builders.selection import active_tokens, select, selected_texts
from eval.systems import Question
from recipes.retrieval import RetrievalConfig

RECALL_AT = (1, 5, 10)
# Of a budget's tokens, where its curve is measured.
_BUDGET_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)

# Most slices of a chunk are the same from one point of a curve to the next, and from arm to arm.
_key = lru_cache(maxsize=32768)(answer_key)

# A value for each question that has one, by its id.
Series = dict[str, float]


@dataclass(frozen=True)
class Point:
    """A selection's figures for each question under one limit, of nuggets or of tokens."""

    limit: int
    tokens: Series
    nuggets: Series
    coverage: Series
    gold: Series
    """Share of the gold chunks, where there are any, that some selected nugget is from."""


@dataclass(frozen=True)
class Outcomes:
    """The figures of one arm's tables for each question; shares are 0 or 1 or between."""

    values: Mapping[str, Series]
    """`gold_recall`, `answer_in_chunks`, `answer_in_nuggets`, `tokens_covered`, `recall_at_N` of
    questions with an answer-bearing nugget; the selection's `coverage`, `tokens`, `nuggets` and
    `gold_selected`."""
    top_k: list[Point]
    """The best 0, 1, ... nuggets, up to all."""
    selection: list[Point]
    """The recipe's selection with more and with fewer tokens or nuggets; `top_k` if it is that."""


def outcomes(questions: Iterable[Question], config: RetrievalConfig) -> Outcomes:
    """Measures the questions of one recipe's built dev data.

    Args:
        questions: with the chunks and nugget scores of their tables.
        config: the retrieval section that the tables were built with.
    """
    values: defaultdict[str, Series] = defaultdict(dict)
    worded: list[Question] = []
    for question in questions:
        gold = set(question.gold_chunk_ids)
        if gold:
            found = gold & {chunk.chunk_id for chunk in question.chunks}
            values["gold_recall"][question.question_id] = len(found) / len(gold)
        if in_words(question.answers):
            worded.append(question)
            for name, value in _figures(question):
                values[name][question.question_id] = value
    here = measured(worded, config.k, config)
    plain = config.model_copy(update={"budget": None, "min_score": None})
    top_k = [measured(worded, k, plain) for k in _nugget_limits(worded, config.k)]
    return Outcomes(
        values={
            **values,
            "coverage": here.coverage,
            "tokens": here.tokens,
            "nuggets": here.nuggets,
            "gold_selected": here.gold,
        },
        top_k=top_k,
        selection=top_k if plain == config else list(_curve(worded, config)),
    )


def at_tokens(curve: Iterable[Point], ids: Iterable[str], tokens: float) -> Series | None:
    """The coverage of some questions where a curve spends so many tokens on them in the mean.

    Between two points each question's coverage is interpolated, so the mean of the result lies on
    the line between them. None beyond the curve's ends.
    """
    asked = list(ids)
    spent = [(sum(point.tokens[name] for name in asked) / len(asked), point) for point in curve]
    below = [(mean, point) for mean, point in spent if mean <= tokens]
    above = [(mean, point) for mean, point in spent if mean >= tokens]
    if not below or not above:
        return None
    (low, before), (high, after) = max(below, key=itemgetter(0)), min(above, key=itemgetter(0))
    share = (tokens - low) / (high - low) if high > low else 0.0
    return {n: (1 - share) * before.coverage[n] + share * after.coverage[n] for n in asked}


def mean_or_none(values: Iterable[float]) -> float | None:
    """Their mean; None of none."""
    found = list(values)
    return sum(found) / len(found) if found else None


def _figures(question: Question) -> Iterator[tuple[str, float]]:
    """What does not depend on the selection, of a question whose answer is in words."""
    chunks, answers = question.chunks, in_words(question.answers)
    slices = [text for chunk in chunks for text in chunk.slice_texts]
    yield "answer_in_chunks", _held(answers, [chunk.text for chunk in chunks])
    yield "answer_in_nuggets", _held(answers, slices)
    everything = [(c, n) for c, chunk in enumerate(chunks) for n in range(len(chunk.nuggets))]
    total = sum(len(chunk.token_ids) for chunk in chunks)
    yield "tokens_covered", active_tokens(chunks, everything) / total if total else 0.0
    row = {"answers": question.answers, "gold_chunk_ids": question.gold_chunk_ids}
    if wanted := answer_nuggets(row, chunks):
        for k in RECALL_AT:
            yield f"recall_at_{k}", recall_at(question.nugget_scores, chunks, wanted, k)


def measured(questions: Iterable[Question], k: int, config: RetrievalConfig) -> Point:
    """The selection of at most `k` nuggets, for questions whose answers are in words."""
    point = Point(k, {}, {}, {}, {})
    for question in questions:
        chosen = select(question.chunks, question.nugget_scores, k, config)
        name, texts = question.question_id, selected_texts(question.chunks, chosen)
        point.tokens[name] = active_tokens(question.chunks, chosen)
        point.nuggets[name] = len(chosen)
        if gold := set(question.gold_chunk_ids):
            shown = gold & {question.chunks[c].chunk_id for c, _ in chosen}
            point.gold[name] = len(shown) / len(gold)
        point.coverage[name] = _held(in_words(question.answers), texts)
    return point


def _curve(questions: list[Question], config: RetrievalConfig) -> Iterator[Point]:
    """The recipe's selection under other limits: of its budget, or without one of nuggets."""
    if config.budget is None:
        for k in _nugget_limits(questions, config.k):
            yield measured(questions, k, config)
        return
    for tokens in sorted({max(1, round(share * config.budget.tokens)) for share in _BUDGET_SHARES}):
        budget = config.budget.model_copy(update={"tokens": tokens})
        point = measured(questions, config.k, config.model_copy(update={"budget": budget}))
        yield replace(point, limit=tokens)


def _nugget_limits(questions: Iterable[Question], k: int) -> list[int]:
    """0, the recipe's k, and numbers at growing distances up to the nuggets of any question."""
    most = max((sum(map(len, question.nugget_scores)) for question in questions), default=0)
    limits = {0, k, most}
    at = 1
    while at < most:
        limits.add(at)
        at += max(1, at // 6)
    return sorted(limits)


def _held(answers: list[str], texts: Iterable[str]) -> float:
    return float(any(holds_answer(_key(text), answers) for text in texts))
