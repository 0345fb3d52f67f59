"""From per-question answers to the numbers of `compare.json`."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, get_args

import numpy as np

from eval.answers import Answer, Variant
from eval.budget import best_under, default_budgets
from eval.differences import contrasts_among, measure, versus
from eval.labels import ERROR_NAMES, SYSTEM_NAMES, cell_label
from eval.metrics import normalize_answer
from eval.significance import Interval, bootstrap_intervals
from recipes.systems import SystemName

Json = dict[str, Any]
Cells = Mapping[Variant, Mapping[str, Answer]]

# What the table at a budget has of a cell's results.
_OF_A_BUDGET = ("questions", "f1", "f1_by_dataset", "ttft_mean_ms", "ttft_p99_ms", "active_tokens")
_CHECKPOINTS = ("base", "fine_tuned")
_SYSTEMS = get_args(SystemName)


def summarize(
    answers: Sequence[Answer],
    *,
    resamples: int,
    seed: int,
    examples: int = 4,
    budgets_ms: Sequence[float] = (),
) -> Json:
    """Everything of `compare.json` that follows from the answers alone.

    `results` has one row a cell, the recipe's first and then each arm's, in the order of their
    first answers. F1 and EM are times 100; TTFT is in milliseconds, its percentiles and mean over
    all repeats of all questions; tokens and bytes are means over questions. `differences` is as
    `eval.differences` says. `budget` has the best cell of each system and checkpoint within each of
    `budgets_ms` (none: those of `eval.budget.default_budgets`) and without a limit, with the paired
    `difference` from CoinRAG's best cell within the same.
    """
    order = _order(answers)
    cells: Cells = {
        cell: {answer.question_id: answer for answer in group}
        for cell, group in groupby(sorted(answers, key=order), key=lambda a: a.variant)
    }
    intervals = bootstrap_intervals(
        [[100 * answer.f1 for answer in group.values()] for group in cells.values()],
        resamples=resamples,
        seed=seed,
    )
    results = [
        _result(cell, list(group.values()), f1)
        for (cell, group), f1 in zip(cells.items(), intervals, strict=True)
    ]
    budgets = [*sorted(set(budgets_ms) or default_budgets(results)), None]
    datasets = {answer.question_id: answer.dataset for answer in answers}
    return {
        "questions_by_dataset": dict(Counter(datasets.values())),
        "results": results,
        "differences": measure(contrasts_among(cells), cells, resamples=resamples, seed=seed),
        "budget": _against_coinrag(best_under(results, budgets), cells, resamples, seed),
        "offline": _offline(answers),
        "notes": [
            *_unequal_questions(results),
            *_slower_than_computing(results),
            *_count_by_system(
                "reach past the model's trained positions (max_position_embeddings): its scores "
                "suffer for it",
                (answer for answer in answers if answer.beyond_context),
            ),
            *_count_by_system(
                "left out the middle of a context too long for the prompt",
                (answer for answer in answers if answer.cut_tokens),
            ),
            *_unscorable(answers),
        ],
        "examples": _examples(answers, examples, order),
    }


def _order(answers: Iterable[Answer]) -> Callable[[Answer], tuple[int, ...]]:
    """Sorts by arm, the recipe without changes first, then by system, width and checkpoint."""
    arms = {arm: place for place, arm in enumerate(dict.fromkeys(["", *(a.arm for a in answers)]))}

    def key(answer: Answer) -> tuple[int, ...]:
        return (
            arms[answer.arm],
            _SYSTEMS.index(answer.system),
            answer.k_c,
            answer.k or 0,
            _CHECKPOINTS.index(answer.checkpoint),
        )

    return key


def _result(cell: Variant, answers: Sequence[Answer], f1: Interval) -> Json:
    ttft_ms = [ms for a in answers for ms in a.ttft_ms]
    p50, p90, p99 = map(float, np.percentile(ttft_ms, [50, 90, 99]))
    # Some data do not say which chunks are gold.
    known = [(a, a.gold_recall) for a in answers if a.gold_recall is not None]
    context_tokens = sum(a.context_tokens for a, _ in known)
    gold_tokens = sum(a.gold_tokens for a, _ in known)
    return {
        **cell._asdict(),
        "questions": len(answers),
        "f1": f1.mean,
        "f1_low": f1.low,
        "f1_high": f1.high,
        "em": 100 * _mean(a.em for a in answers),
        "ttft_p50_ms": p50,
        "ttft_p90_ms": p90,
        "ttft_p99_ms": p99,
        "ttft_mean_ms": _mean(ttft_ms),
        "load_p50_ms": float(np.median([a.load_ms for a in answers])),
        "extract_p50_ms": float(np.median([a.extract_ms for a in answers])),
        "bytes_read": _mean(a.bytes_read for a in answers),
        "active_tokens": _mean(a.active_tokens for a in answers),
        "stop_rate": _mean(a.stopped for a in answers),
        "f1_by_dataset": {
            dataset: 100 * _mean(a.f1 for a in answers if a.dataset == dataset)
            for dataset in dict.fromkeys(a.dataset for a in answers)
        },
        "gold_recall": _mean(recall for _, recall in known) if known else None,
        "answer_coverage": _mean(a.answer_in_prefix for a in answers),
        "gold_share": gold_tokens / context_tokens if context_tokens else None,
        "errors": {kind: sum(kind in a.error_kinds for a in answers) for kind in ERROR_NAMES},
        "wrong": sum(a.f1 < 1 for a in answers),
    }


def _against_coinrag(chosen: Iterable[Json], cells: Cells, resamples: int, seed: int) -> list[Json]:
    """Rows of cells chosen for a budget, with the difference from the one chosen for CoinRAG."""
    rows = [(row["budget_ms"], Variant.of(row), row) for row in chosen]
    coinrag = {
        (budget, cell.checkpoint): cell for budget, cell, _ in rows if cell.system == "coinrag"
    }
    contrasts = dict.fromkeys(
        versus("budget", cell, coinrag[budget, cell.checkpoint])
        for budget, cell, _ in rows
        if cell.system != "coinrag" and (budget, cell.checkpoint) in coinrag
    )
    differences: dict[tuple[Variant, Variant | None], Json] = {
        (Variant.of(row), Variant.of(row["against"])): row
        for row in measure([*contrasts], cells, resamples=resamples, seed=seed)
    }
    return [
        {
            "budget_ms": budget,
            **cell._asdict(),
            **{name: row[name] for name in _OF_A_BUDGET},
            "difference": differences.get((cell, coinrag.get((budget, cell.checkpoint)))),
        }
        for budget, cell, row in rows
    ]


def _offline(answers: Iterable[Answer]) -> Json:
    """What the recipe's chunks cost before the clock, by checkpoint, a question counted once."""
    cost: dict[str, dict[str, tuple[int, float]]] = {}
    for answer in answers:
        if answer.arm:
            continue
        by_question = cost.setdefault(answer.checkpoint, {})
        # A resumed question may have encoded nothing for a system that caches nothing.
        spent = (answer.offline_tokens, answer.offline_ms)
        by_question[answer.question_id] = max(spent, by_question.get(answer.question_id, spent))
    return {
        checkpoint: {
            "chunk_tokens": sum(tokens for tokens, _ in by_question.values()),
            "seconds": sum(ms for _, ms in by_question.values()) / 1e3,
        }
        for checkpoint, by_question in cost.items()
    }


def _unequal_questions(results: Iterable[Json]) -> list[str]:
    counts = sorted({row["questions"] for row in results})
    if len(counts) == 1:
        return []
    return [
        f"cells were asked {counts[0]} to {counts[-1]} questions: differences are taken on the "
        "common ones, and F1 of different counts should not be compared"
    ]


def _slower_than_computing(results: Iterable[Json]) -> list[str]:
    """Says so where serving from the cache took longer than computing everything."""
    rows = list(results)
    full = {(r["arm"], r["checkpoint"], r["k_c"]): r for r in rows if r["system"] == "standard_rag"}
    notes = []
    for row in rows:
        cell = row["checkpoint"], row["k_c"]
        computed = full.get((row["arm"], *cell)) or full.get(("", *cell))
        if computed and row["ttft_p50_ms"] > computed["ttft_p50_ms"]:
            notes.append(
                f"{cell_label(row)} is slower than computing everything: TTFT p50 "
                f"{row['ttft_p50_ms']:.1f} against {computed['ttft_p50_ms']:.1f} ms"
            )
    return notes


def _count_by_system(what: str, answers: Iterable[Answer]) -> list[str]:
    counts = Counter(answer.system for answer in answers)
    return [f"{count} answers of {SYSTEM_NAMES[name]} {what}" for name, count in counts.items()]


def _unscorable(answers: Iterable[Answer]) -> list[str]:
    """Says so where F1 is 0 by its definition, as for the gold answer "The The"."""
    questions = {a.question_id for a in answers if not any(map(normalize_answer, a.gold))}
    if not questions:
        return []
    return [
        f"of the gold answers of {len(questions)} questions scoring leaves nothing, for it deletes "
        "articles and punctuation: their F1 is 0 whatever is answered"
    ]


def _examples(
    answers: Iterable[Answer], count: int, order: Callable[[Answer], tuple[int, ...]]
) -> list[Json]:
    """Evenly spaced questions, not chosen by result, with what every cell answered."""
    by_question: dict[str, list[Answer]] = {}
    for answer in answers:
        by_question.setdefault(answer.question_id, []).append(answer)
    questions = list(by_question)
    places = np.linspace(0, len(questions) - 1, min(count, len(questions)), dtype=int)
    return [
        {
            "dataset": group[0].dataset,
            "question": group[0].question,
            "gold": group[0].gold,
            "answers": [
                {**a.variant._asdict(), "answer": a.answer, "f1": 100 * a.f1}
                for a in sorted(group, key=order)
            ],
        }
        for group in (by_question[questions[place]] for place in places)
    ]


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
