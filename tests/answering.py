"""Answers of a comparison without a model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from eval.answers import Answer

ANSWER = Answer(
    key="k",
    arm="",
    checkpoint="base",
    system="coinrag",
    k_c=5,
    k=10,
    question_id="q0",
    dataset="hotpotqa",
    question="Who?",
    chunk_ids=["c0", "c1"],
    evidence=[{"chunk_id": "c0", "text": "a nugget"}],
    answer="Ines\nVarga",
    gold=["Ines Varga", "Varga"],
    f1=0.0,
    em=0.0,
    ttft_ms=[10.0],
    load_ms=2.0,
    extract_ms=0.0,
    bytes_read=4096,
    active_tokens=100,
    online_tokens=60,
    recomputed_tokens=0.0,
    new_tokens=3,
    stopped=True,
    beyond_context=False,
    offline_tokens=50,
    offline_ms=2000.0,
    cut_tokens=0,
    gold_recall=0.5,
    gold_tokens=30,
    context_tokens=60,
    answer_in_chunks=True,
    answer_in_prefix=True,
    error_kinds=[],
)


def answers_of(f1: Sequence[float], **fields: Any) -> list[Answer]:
    """One cell's answers to q0, q1 …, the first half of hotpotqa and the rest of musique.

    `f1` is in [0, 1]; the n-th question takes 10 n ms to the first token, counted from 1.
    """
    return [
        replace(
            ANSWER,
            **{
                "question_id": f"q{number}",
                "dataset": "hotpotqa" if 2 * number < len(f1) else "musique",
                "f1": score,
                "em": float(score == 1),
                "ttft_ms": [10.0 * (number + 1)],
                **fields,
            },
        )
        for number, score in enumerate(f1)
    ]
