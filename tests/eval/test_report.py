import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from eval.answers import Answer
from eval.report import plot, render_table
from eval.summary import summarize

ANSWER = Answer(
    key="k",
    checkpoint="base",
    system="coinrag",
    k_c=5,
    k=10,
    question_id="q0",
    dataset="hotpotqa",
    question="Who?",
    evidence=["a nugget"],
    answer="Ines\nVarga",
    gold=["Ines Varga", "Varga"],
    f1=0.0,
    em=0.0,
    ttft_ms=10.0,
    load_ms=2.0,
    bytes_read=4096,
    active_tokens=100,
    new_tokens=3,
    stopped=True,
    beyond_context=False,
    offline_tokens=50,
    offline_ms=2000.0,
)


def answers_of(checkpoint: str, f1: list[float], **fields: Any) -> list[Answer]:
    return [
        replace(
            ANSWER,
            checkpoint=checkpoint,
            question_id=f"q{number}",
            dataset="hotpotqa" if number < 2 else "musique",
            f1=score,
            em=float(score == 1),
            ttft_ms=10.0 * (number + 1),
            **fields,
        )
        for number, score in enumerate(f1)
    ]


@pytest.fixture
def answers() -> list[Answer]:
    base = [0.0, 0.5, 0.0, 0.5]
    tuned = [0.5, 1.0, 0.5, 1.0]
    return [
        *answers_of("base", base),
        *answers_of("fine_tuned", tuned, stopped=False),
        *answers_of("base", base, system="standard_rag", k=None, active_tokens=700),
    ]


def summary(answers: list[Answer]) -> dict[str, Any]:
    return {"recipe": "tiny", **summarize(answers, resamples=300, seed=0)}


def test_numbers_follow_from_the_answers(answers: list[Answer]) -> None:
    result = summary(answers)
    assert result["questions_by_dataset"] == {"hotpotqa": 2, "musique": 2}
    full, base, tuned = result["results"]
    assert [row["system"] for row in result["results"]] == ["standard_rag", "coinrag", "coinrag"]
    assert (full["active_tokens"], base["active_tokens"]) == (700, 100)
    assert (base["f1"], tuned["f1"]) == (25.0, 75.0)
    assert (base["em"], tuned["em"]) == (0.0, 50.0)
    assert (base["stop_rate"], tuned["stop_rate"]) == (1.0, 0.0)
    assert base["ttft_p50_ms"] == 25.0
    assert base["ttft_p99_ms"] == pytest.approx(39.7)
    assert tuned["f1_by_dataset"] == {"hotpotqa": 75.0, "musique": 75.0}
    assert base["f1_low"] < base["f1"] < base["f1_high"]
    (difference,) = result["differences"]
    assert difference["pooled"] == {"questions": 4, "mean": 50.0, "low": 50.0, "high": 50.0}
    assert difference["by_dataset"]["musique"]["questions"] == 2
    # Systems share a question's chunks, so the offline cost is counted once a question.
    assert result["offline"]["base"] == {"chunk_tokens": 200, "seconds": 8.0}


def test_pairs_are_formed_by_question_and_not_by_place(answers: list[Answer]) -> None:
    turned = [*answers[:4], *reversed(answers[4:8])]
    difference = summary(turned)["differences"][0]["pooled"]
    assert (difference["low"], difference["high"]) == (50.0, 50.0)


def test_a_cache_slower_than_computing_is_said(answers: list[Answer]) -> None:
    assert summary(answers)["notes"] == []
    slow = [replace(a, ttft_ms=99.0) if a.system == "coinrag" else a for a in answers]
    notes = summary(slow)["notes"]
    assert len(notes) == 1
    assert "coinrag (base, k_c=5, k=10) is slower" in notes[0]


def test_answers_past_the_trained_positions_are_counted(answers: list[Answer]) -> None:
    far = [replace(a, beyond_context=a.question_id == "q1") for a in answers]
    assert [note.split(" reach")[0] for note in summary(far)["notes"]] == [
        "2 answers of coinrag",
        "1 answers of standard_rag",
    ]


def test_the_table_is_aligned_and_complete(answers: list[Answer]) -> None:
    text = render_table(summary(answers))
    table = text.split("\n\n")[0].split("\n")
    assert table[0] == "tiny: 4 questions, F1 and EM x 100"
    assert len(table) == 1 + 1 + 3
    assert len({len(line) for line in table[1:]}) == 1
    tuned = re.split(r"\s{2,}", table[4])
    assert tuned[:4] == ["CoinRAG", "5/10", "fine-tuned", "75.0"]
    assert tuned[-4:] == ["39.7", "2.0", "100", "0%"]
    assert "+50.0 [+50.0, +50.0]" in text
    assert "gold: Ines Varga | Varga" in text
    assert "Ines Varga\n" in text, "an answer stays on its line"


def test_the_picture_is_readable_and_replaces_the_old_one(
    answers: list[Answer], tmp_path: Path
) -> None:
    path = tmp_path / "compare.png"
    path.write_bytes(b"old")
    plot(summary(answers), path)
    with Image.open(path) as image:
        assert image.size[0] >= 1200
        # Both systems' colours are on the canvas.
        colours = {colour for _, colour in image.convert("RGB").getcolors(2**24) or []}
    assert {(0x00, 0x72, 0xB2), (0x55, 0x55, 0x55)} <= colours
    assert [child.name for child in tmp_path.iterdir()] == ["compare.png"]
