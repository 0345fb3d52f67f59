import re
from typing import Any

import pytest
from answering import answers_of

from eval.answers import Answer
from eval.report import render_table
from eval.summary import summarize

BASE = [0.0, 0.5, 0.0, 0.5]
TUNED = [0.5, 1.0, 0.5, 1.0]


def rendered(answers: list[Answer]) -> dict[str, list[str]]:
    """The parts of the text by their first words, as lines."""
    result = {"recipe": "tiny", **summarize(answers, resamples=50, seed=0)}
    parts = [part.split("\n") for part in render_table(result).split("\n\n")]
    return {re.split(r"[:,]", lines[0])[0]: lines for lines in parts}


def row(lines: list[str], *start: str) -> list[str]:
    """The cells of the one line that starts with these."""
    split = [re.split(r"\s{2,}", line) for line in lines]
    (found,) = [cells for cells in split if cells[: len(start)] == list(start)]
    return found


@pytest.fixture
def answers() -> list[Answer]:
    return [
        *answers_of(BASE),
        *answers_of(TUNED, checkpoint="fine_tuned", stopped=False),
        *answers_of(BASE, system="standard_rag", k=None, active_tokens=700),
    ]


def aligned(lines: list[str]) -> bool:
    """Whether every line ends where the head does, so that the last columns are to the right."""
    return len({len(line) for line in lines}) == 1


def test_the_table_is_aligned_and_complete(answers: list[Answer]) -> None:
    table = rendered(answers)["tiny"]
    assert table[0] == "tiny: 4 questions, F1 and EM x 100, TTFT in ms"
    assert len(table) == 1 + 1 + 3
    assert aligned(table[1:])
    tuned = row(table, "CoinRAG", "5/10", "fine-tuned")
    assert tuned[3] == "75.0"
    assert tuned[-5:] == ["25.0", "37.0", "39.7", "100", "0%"]
    assert tuned[5:8] == ["75.0", "75.0", "50.0"]
    assert "arm" not in table[1]
    assert "questions" not in table[1]


def test_retrieval_and_errors_have_a_table_of_their_own(answers: list[Answer]) -> None:
    asked = [
        *answers,
        *answers_of(BASE, system="online_nuggets", extract_ms=70.0, gold_recall=None),
    ]
    table = rendered(asked)["retrieval"]
    assert aligned(table[1:])
    assert row(table, "Standard RAG", "5/all", "base")[3:] == [
        "50%", "100%", "50%", "4", "0", "0", "0", "2.0", "0.0",
    ]  # fmt: skip
    assert row(table, "online nuggets", "5/10", "base")[3:6] == ["-", "100%", "-"]
    assert row(table, "online nuggets", "5/10", "base")[-1] == "70.0"
    assert "extract p50" not in rendered(answers)["retrieval"][1]


def test_points_and_percent_are_told_apart(answers: list[Answer]) -> None:
    parts = rendered(answers)
    tuned = row(parts["fine-tuned minus base"], "CoinRAG", "5/10", "fine-tuned")
    assert tuned[3:6] == ["4", "+50.0 [+50.0, +50.0]", "+200.0%"]
    system = row(
        parts["each system minus CoinRAG at the same k_c"], "Standard RAG", "5/all", "base"
    )
    assert system[3:7] == ["5/10", "4", "+0.0 [+0.0, +0.0]", "+0.0%"]
    budget = parts["best width of each system by P99 TTFT"]
    assert row(budget, "any time", "CoinRAG", "5/10", "base")[-2:] == ["-", "-"]
    assert row(budget, "any time", "Standard RAG", "5/all", "base")[-1] == "+0.0%"


def test_examples_show_the_recipe_at_its_largest_width(answers: list[Answer]) -> None:
    more = [*answers, *answers_of(TUNED, k=20, answer="wider"), *answers_of(TUNED, arm="isolated")]
    example = rendered(more)["[hotpotqa] Who?"]
    assert example[1] == "  gold: Ines Varga | Varga"
    assert [line.split()[0] for line in example[2:]] == ["Standard", "CoinRAG", "CoinRAG"]
    assert example[3].endswith("wider")
    # An answer stays on its line.
    assert example[4].endswith("Ines Varga")


def test_forty_cells_stay_readable() -> None:
    answers: list[Answer] = []
    for arm in ("", "isolated", "no_rotation", "isolated+no_rotation", "score_order"):
        for checkpoint in ("base", "fine_tuned"):
            for k in (5, 10, 20, 40):
                answers += answers_of(BASE, arm=arm, checkpoint=checkpoint, k=k)
    answers += answers_of([0.5], system="kvlink", k=None, ttft_ms=[12345.6], active_tokens=32000)
    parts = rendered(answers)
    tables = [lines for lines in parts.values() if "weights" in "".join(lines[1:2])]
    assert len(tables) == 7
    for lines in tables:
        assert aligned(lines[1:])
        assert max(map(len, lines)) <= 160
    assert len(parts["tiny"]) == 2 + 41
    # Not every cell was asked as many questions.
    assert row(parts["tiny"], "recipe", "KVLink", "5/all", "base")[4] == "1"
    assert row(parts["each arm minus the recipe"], "score_order", "CoinRAG", "5/40", "base")


def test_what_was_not_asked_is_a_dash() -> None:
    answers: list[Any] = [*answers_of(BASE), *answers_of(BASE[:1], system="epic", k=None)]
    parts = rendered(answers)
    assert row(parts["tiny"], "EPIC", "5/all", "base")[6:8] == ["0.0", "-"]
    system = row(parts["each system minus CoinRAG at the same k_c"], "EPIC", "5/all", "base")
    assert system[-3:] == ["-", "+0.0 [+0.0, +0.0]", "-"]
