"""How well nuggets are ranked: whether one that holds the answer is among the best.

Only the retrieved chunks of a question are looked at: what retrieval has missed no scorer can
find. An answer of "yes" or "no" stands in no passage as the answer, so such a question has no
answer-bearing nugget, and no recall.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from data_builders.answers import answer_key, holds_answer, in_words
from data_builders.retrieval import select_nuggets
from data_builders.tables import Chunk


def answer_nuggets(row: Mapping[str, Any], chunks: Sequence[Chunk]) -> set[tuple[int, int]]:
    """The nuggets of retrieved gold chunks that hold an answer, as (chunk index, nugget index).

    Args:
        row: of the samples table; its `answers` and `gold_chunk_ids` are looked at.
        chunks: the question's retrieved chunks, in rank order.
    """
    answers = in_words(row["answers"])
    gold = set(row["gold_chunk_ids"])
    return {
        (at, nugget)
        for at, chunk in enumerate(chunks)
        if chunk.chunk_id in gold
        for nugget, text in enumerate(chunk.nugget_texts)
        if holds_answer(answer_key(text), answers)
    }


def recall_at(
    nugget_scores: Sequence[Sequence[float]],
    chunks: Sequence[Chunk],
    wanted: set[tuple[int, int]],
    k: int,
) -> float:
    """1.0 if one of the best `k` nuggets, as a build would choose them, is `wanted`; else 0.0.

    Args:
        nugget_scores: for each retrieved chunk in rank order, a score for each of its nuggets.
        chunks: those chunks.
        wanted: as of `answer_nuggets`; a question without any has no recall.
        k: how many nuggets are chosen.
    """
    assert wanted, "no nugget to be recalled"
    best = select_nuggets(nugget_scores, [chunk.nuggets for chunk in chunks], k)
    return float(not wanted.isdisjoint(best))
