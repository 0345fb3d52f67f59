"""Score thresholds that keep most answer-bearing nuggets, found on the train split.

A nugget without the answer may still be the bridge to it, so what a threshold leaves out of gold
chunks is told apart from what it leaves out of distractors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data_builders.answers import in_words
from data_builders.nugget_recall import answer_nuggets
from data_builders.retrieval import SCORE_DECIMALS
from data_builders.tables import Chunk, Tables
from eval.nugget_outcomes import mean_or_none, measured
from eval.systems import Question
from recipes.retrieval import RetrievalConfig

KEPT_SHARES = (0.99, 0.95, 0.9)


@dataclass(frozen=True)
class Scored:
    """The scores of the nuggets of retrieved chunks, of questions whose answer is in words."""

    answering: list[float] = field(default_factory=list)
    """Of those in gold chunks that hold an answer."""
    gold: list[float] = field(default_factory=list)
    """Of the others in gold chunks."""
    distracting: list[float] = field(default_factory=list)

    def add(self, row: Mapping[str, Any], chunks: Sequence[Chunk]) -> None:
        """Sorts in the nuggets of a sample; see `data_builders.nugget_recall.answer_nuggets`."""
        wanted, gold = answer_nuggets(row, chunks), set(row["gold_chunk_ids"])
        for c, scores in enumerate(row["nugget_scores"]):
            others = self.gold if chunks[c].chunk_id in gold else self.distracting
            for n, score in enumerate(scores):
                (self.answering if (c, n) in wanted else others).append(score)


def calibrate(train: Tables, dev: Sequence[Question], config: RetrievalConfig) -> list[Any]:
    """For each share of `KEPT_SHARES` the highest threshold that keeps it, and what it does on dev.

    Questions that RAFT has noised have lost their answer and do not count.

    Returns:
        Rows of `kept`, `min_score` and, for `train` and `dev`, the shares that the threshold keeps
        of answer-bearing nuggets and leaves out of others. `selection` is what the recipe's
        selection has on dev with it: `coverage` and active `tokens`. Nothing where no nugget of the
        train split holds an answer.
    """
    found, on_dev = Scored(), Scored()
    for row in train.samples:
        if not row["noised"] and in_words(row["answers"]):
            found.add(row, [train.chunk(name) for name in row["chunk_ids"]])
    worded = [question for question in dev if in_words(question.answers)]
    for question in worded:
        on_dev.add(vars(question), question.chunks)
    best_first = sorted(found.answering, reverse=True)
    rows = []
    for share in KEPT_SHARES if best_first else ():
        least = best_first[math.ceil(share * len(best_first)) - 1]
        with_it = config.model_copy(update={"min_score": round(least, SCORE_DECIMALS)})
        selected = measured(worded, config.k, with_it)
        rows.append(
            {
                "kept": share,
                "min_score": with_it.min_score,
                "train": _effect(found, least),
                "dev": _effect(on_dev, least),
                "selection": {
                    "coverage": mean_or_none(selected.coverage.values()),
                    "tokens": mean_or_none(selected.tokens.values()),
                },
            }
        )
    return rows


def _effect(scored: Scored, least: float) -> dict[str, float | None]:
    def below(scores: Sequence[float]) -> float | None:
        return mean_or_none([float(score < least) for score in scores])

    lost = below(scored.answering)
    return {
        "answering_kept": None if lost is None else 1 - lost,
        "gold_left_out": below(scored.gold),
        "distracting_left_out": below(scored.distracting),
        "others_left_out": below([*scored.gold, *scored.distracting]),
    }
