"""A small comparison for the page: two systems, an arm, texts that try to leave their place."""

from dataclasses import replace
from typing import Any

from answering import ANSWER

from eval.answers import Answer

Json = dict[str, Any]

HOSTILE = "</script><script>hit=1</script><!--<img src=/hit onerror=hit=1>\u2028'\"&amp;"
CHUNKS = {
    "tarn": {
        "title": "Lower Tarn",
        "text": "Lower Tarn\n🎉 Lower Tarn is a town on the river Oss. Its mayor is Bela Kun.\n",
    },
    "oss": {"title": "Oss", "text": f"Oss\nThe Oss rises in the Grey Hills. {HOSTILE}\n"},
    "عسل": {"title": "عسل", "text": "عسل\nالعسل مادة حلوة. Made by bees.\n"},
}
CELLS: list[Json] = [
    {"arm": arm, "checkpoint": checkpoint, "system": system, "k_c": 3, "k": k}
    for arm, checkpoint, system, k in [
        ("", "base", "standard_rag", None),
        ("", "base", "coinrag", 4),
        ("", "fine_tuned", "coinrag", 4),
        ("isolated", "fine_tuned", "coinrag", 4),
    ]
]
ERRORS: list[list[str]] = [
    [],
    ["bridge_gap"],
    ["extraction_loss"],
    ["bridge_gap", "distractor_bias"],
    [],
]
NUGGETS = [
    ("tarn", "is a town on the river Oss."),
    ("tarn", "river Oss. Its mayor is Bela Kun."),
    ("oss", "The Oss rises in the Grey Hills."),
    ("oss", "a paraphrase that no chunk holds"),
]


def answers(questions: int = 6) -> list[Answer]:
    """Every cell's answers; question n is right (F1 1) where n and the cell's number agree."""
    made = []
    for number in range(questions):
        for place, cell in enumerate(CELLS):
            right = (number + place) % len(ERRORS) == 0
            evidence = [(name, None) for name in CHUNKS] if cell["k"] is None else NUGGETS
            made.append(
                replace(
                    ANSWER,
                    **cell,
                    question_id=f"q {number}",
                    dataset=("hotpotqa", "musique")[number % 2],
                    question=f"Which river is number {number}? {HOSTILE if number == 1 else ''}",
                    chunk_ids=list(CHUNKS),
                    evidence=[{"chunk_id": name, "text": text} for name, text in evidence],
                    answer="the Oss" if right else ("", HOSTILE, "نهر 🎉")[number % 3],
                    gold=["Oss", "Bela Kun"],
                    f1=float(right),
                    em=float(right),
                    ttft_ms=[9.0, 10.0 + place, 200.0],
                    gold_recall=None,
                    error_kinds=ERRORS[(number + place) % len(ERRORS)],
                )
            )
    return made


def result() -> Json:
    """The content of `compare.json` as far as the page reads it, and a secret that it must not."""
    rows = [
        {
            **cell,
            "questions": 6,
            "f1": 20.0 + 10 * place,
            "f1_low": 15.0 + 10 * place,
            "f1_high": 25.0 + 10 * place,
            "em": 10.0,
            "ttft_p50_ms": 40.0 - 10 * place,
            "ttft_p90_ms": 50.0,
            "ttft_p99_ms": 60.0,
            "active_tokens": 700.0 - 200 * place,
            "f1_by_dataset": {"hotpotqa": 21.0 + place, "musique": 19.0 + place},
            "gold_recall": None,
            "answer_coverage": 0.5,
            "gold_share": 0.25,
            "errors": {"bridge_gap": 2, "extraction_loss": 1, "distractor_bias": 1},
            "wrong": 5,
        }
        for place, cell in enumerate(CELLS)
    ]
    came = {"attacked": 6, "retrieved": 1.0, "in_nugget": None, "target_in_nugget": None}
    came |= {"in_prefix": 0.5, "success": 0.25, "success_low": 0.0456, "success_high": 0.6994}
    difference = {"questions": 6, "mean": 10.0, "low": 1.0, "high": 19.0, "relative_percent": 33.3}
    return {
        "recipe": f"tiny {HOSTILE}",
        "questions_by_dataset": {"hotpotqa": 3, "musique": 3},
        "environment": {
            "hardware": "a machine",
            "cpus": 2,
            "threads": 1,
            "date": "2026-11-30T14:20:00+00:00",
            "commit": None,
            "torch": "2.13.0",
        },
        "notes": [f"a note {HOSTILE}"],
        "results": rows,
        "differences": [
            {**CELLS[2], "kind": "fine_tuning", "against": CELLS[1], **difference}
            | {"by_dataset": {"hotpotqa": difference}},
            {**CELLS[3], "kind": "ablation", "against": CELLS[2], **difference}
            | {"mean": -10.0, "low": -19.0, "high": -1.0, "by_dataset": {}},
        ],
        "budget": [
            {"budget_ms": 100.0, **rows[0], "difference": difference},
            {"budget_ms": None, **rows[2], "difference": None},
        ],
        "injection": [
            {**CELLS[1], **came, "success_in_prefix": 0.5, "f1": 12.5, "clean": difference}
            | {"by": {"kind": {HOSTILE: came}, "place": {"end": came}, "carrier": {}}},
            {**CELLS[2], **came, "success_in_prefix": None, "f1": 7.5, "clean": None}
            | {"by": {"kind": {"clause": came}, "place": {}, "carrier": {}}},
        ],
        "config": {"nuggets": {"url": "https://secret.example"}},
    }
