"""From per-question answers to the numbers of `compare.json`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np

from eval.answers import Answer
from eval.significance import bootstrap_interval, paired_bootstrap
from eval.systems import SYSTEMS

Json = dict[str, Any]


def summarize(answers: Sequence[Answer], *, resamples: int, seed: int, examples: int = 4) -> Json:
    """Everything of `compare.json` that follows from the answers alone.

    `results` has one row a checkpoint, system and width, in the order of their first answers'
    variants; `differences` has fine-tuned minus base, paired by question, where both ran; F1 and
    EM are times 100, TTFT in milliseconds, tokens are means over questions.
    """
    variants = {
        variant: {answer.question_id: answer for answer in group}
        for variant, group in groupby(sorted(answers, key=_order), key=lambda a: a.variant)
    }
    results = [_result(list(group.values()), resamples, seed) for group in variants.values()]
    differences = [
        _difference(tuned, variants[("base", *variant[1:])], resamples, seed)
        for variant, tuned in variants.items()
        if variant[0] == "fine_tuned" and ("base", *variant[1:]) in variants
    ]
    questions = {answer.question_id: answer.dataset for answer in answers}
    return {
        "questions_by_dataset": dict(Counter(questions.values())),
        "results": results,
        "differences": differences,
        "offline": _offline(answers),
        "notes": [*_slower_than_computing(results), *_beyond_context(answers)],
        "examples": _examples(answers, examples),
    }


_CHECKPOINTS = ("base", "fine_tuned")
_SYSTEMS = tuple(SYSTEMS)


def _order(answer: Answer) -> tuple[int, int, int, int]:
    return (
        _SYSTEMS.index(answer.system),
        answer.k_c,
        answer.k or 0,
        _CHECKPOINTS.index(answer.checkpoint),
    )


def _result(answers: Sequence[Answer], resamples: int, seed: int) -> Json:
    first = answers[0]
    f1 = bootstrap_interval([100 * a.f1 for a in answers], resamples=resamples, seed=seed)
    p50, p99 = np.percentile([a.ttft_ms for a in answers], [50, 99])
    return {
        "checkpoint": first.checkpoint,
        "system": first.system,
        "k_c": first.k_c,
        "k": first.k,
        "questions": len(answers),
        "f1": f1.mean,
        "f1_low": f1.low,
        "f1_high": f1.high,
        "em": 100 * _mean(a.em for a in answers),
        "ttft_p50_ms": float(p50),
        "ttft_p99_ms": float(p99),
        "load_p50_ms": float(np.median([a.load_ms for a in answers])),
        "bytes_read": _mean(a.bytes_read for a in answers),
        "active_tokens": _mean(a.active_tokens for a in answers),
        "stop_rate": _mean(a.stopped for a in answers),
        "f1_by_dataset": {
            dataset: 100 * _mean(a.f1 for a in answers if a.dataset == dataset)
            for dataset in _datasets(answers)
        },
    }


def _difference(
    tuned: dict[str, Answer], base: dict[str, Answer], resamples: int, seed: int
) -> Json:
    def interval(questions: Sequence[str]) -> Json:
        scores = [[100 * side[q].f1 for q in questions] for side in (tuned, base)]
        difference = paired_bootstrap(*scores, resamples=resamples, seed=seed)
        return {"questions": len(questions), **asdict(difference)}

    first = next(iter(tuned.values()))
    return {
        "system": first.system,
        "k_c": first.k_c,
        "k": first.k,
        "pooled": interval(list(tuned)),
        "by_dataset": {
            dataset: interval([q for q in tuned if tuned[q].dataset == dataset])
            for dataset in _datasets(tuned.values())
        },
    }


def _offline(answers: Iterable[Answer]) -> Json:
    """What encoding the chunks cost before the clock, by checkpoint, each question counted once."""
    cost: dict[str, dict[str, tuple[int, float]]] = {}
    for answer in answers:
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


def _slower_than_computing(results: Iterable[Json]) -> list[str]:
    """Says so where serving from the cache took longer than computing everything."""
    rows = list(results)
    full = {(r["checkpoint"], r["k_c"]): r for r in rows if r["system"] == "standard_rag"}
    notes = []
    for row in rows:
        computed = full.get((row["checkpoint"], row["k_c"]))
        if computed and row["ttft_p50_ms"] > computed["ttft_p50_ms"]:
            notes.append(
                f"{row['system']} ({row['checkpoint']}, k_c={row['k_c']}, k={row['k']}) is slower "
                f"from the cache than standard_rag without one: TTFT p50 {row['ttft_p50_ms']:.1f} "
                f"against {computed['ttft_p50_ms']:.1f} ms"
            )
    return notes


def _beyond_context(answers: Iterable[Answer]) -> list[str]:
    counts = Counter(answer.system for answer in answers if answer.beyond_context)
    return [
        f"{count} answers of {system} reach past the model's trained positions "
        "(max_position_embeddings): its scores suffer for it"
        for system, count in counts.items()
    ]


def _examples(answers: Iterable[Answer], count: int) -> list[Json]:
    """Evenly spaced questions, not chosen by result, with what every variant answered."""
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
                {name: getattr(a, name) for name in ("checkpoint", "system", "k_c", "k", "answer")}
                | {"f1": 100 * a.f1}
                for a in sorted(group, key=_order)
            ],
        }
        for group in (by_question[questions[place]] for place in places)
    ]


def _datasets(answers: Iterable[Answer]) -> list[str]:
    return list(dict.fromkeys(answer.dataset for answer in answers))


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
