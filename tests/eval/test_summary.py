import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from answering import answers_of

from eval.answers import Answer, Variant
from eval.summary import summarize

BASE = [0.0, 0.5, 0.0, 0.5]
TUNED = [0.5, 1.0, 0.5, 1.0]


def summary(answers: list[Answer], **settings: Any) -> dict[str, Any]:
    return summarize(answers, resamples=300, seed=0, **settings)


def differences(answers: list[Answer], kind: str) -> dict[Any, dict[str, Any]]:
    """Rows of one kind by their cell and the cell that they are measured against."""
    found = [row for row in summary(answers)["differences"] if row["kind"] == kind]
    return {(Variant.of(row), Variant.of(row["against"])): row for row in found}


@pytest.fixture
def answers() -> list[Answer]:
    return [
        *answers_of(BASE),
        *answers_of(TUNED, checkpoint="fine_tuned", stopped=False),
        *answers_of(BASE, system="standard_rag", k=None, active_tokens=700),
    ]


def test_numbers_follow_from_the_answers(answers: list[Answer]) -> None:
    result = summary(answers)
    assert result["questions_by_dataset"] == {"hotpotqa": 2, "musique": 2}
    full, base, tuned = result["results"]
    assert [row["system"] for row in result["results"]] == ["standard_rag", "coinrag", "coinrag"]
    assert (full["active_tokens"], base["active_tokens"]) == (700, 100)
    assert (base["f1"], tuned["f1"]) == (25.0, 75.0)
    assert (base["em"], tuned["em"]) == (0.0, 50.0)
    assert (base["stop_rate"], tuned["stop_rate"]) == (1.0, 0.0)
    assert (base["wrong"], tuned["wrong"]) == (4, 2)
    assert tuned["f1_by_dataset"] == {"hotpotqa": 75.0, "musique": 75.0}
    assert base["f1_low"] < base["f1"] < base["f1_high"]
    # Systems share a question's chunks, so the offline cost is counted once a question.
    assert result["offline"]["base"] == {"chunk_tokens": 200, "seconds": 8.0}


def test_ttft_percentiles_are_over_all_repeats() -> None:
    repeats = [[10.0, 11.0, 30.0], [20.0, 21.0, 22.0]]
    made = [replace(a, ttft_ms=ms) for a, ms in zip(answers_of([0, 1]), repeats, strict=True)]
    (row,) = summary(made)["results"]
    flat = [10.0, 11.0, 20.0, 21.0, 22.0, 30.0]
    assert row["ttft_p50_ms"] == 20.5
    assert row["ttft_p90_ms"] == pytest.approx(np.percentile(flat, 90))
    assert row["ttft_p99_ms"] == pytest.approx(np.percentile(flat, 99))
    assert row["ttft_mean_ms"] == 19.0


def test_retrieval_is_measured_where_the_data_say_what_is_gold() -> None:
    known = answers_of([0.0, 1.0, 0.5])
    made = [
        replace(known[0], gold_recall=1.0, gold_tokens=90, context_tokens=100),
        replace(known[1], gold_recall=0.5, gold_tokens=10, context_tokens=300),
        replace(known[2], gold_recall=None, gold_tokens=0, answer_in_prefix=False),
    ]
    (row,) = summary(made)["results"]
    assert (row["gold_recall"], row["gold_share"]) == (0.75, 0.25)
    assert row["answer_coverage"] == pytest.approx(2 / 3)
    (row,) = summary(made[2:])["results"]
    assert (row["gold_recall"], row["gold_share"]) == (None, None)


def test_an_answer_counts_under_every_kind_of_error_that_it_shows() -> None:
    kinds = [["bridge_gap", "extraction_loss"], ["bridge_gap"], [], []]
    made = [
        replace(a, error_kinds=k) for a, k in zip(answers_of([0, 0, 0.4, 1]), kinds, strict=True)
    ]
    (row,) = summary(made)["results"]
    assert row["errors"] == {"bridge_gap": 2, "extraction_loss": 1, "distractor_bias": 0}
    assert row["wrong"] == 3


def test_rows_begin_with_the_recipe_and_keep_the_order_of_arms() -> None:
    made = [
        *answers_of(BASE, arm="one_stage"),
        *answers_of(BASE, arm="isolated", checkpoint="fine_tuned"),
        *answers_of(BASE, arm="isolated"),
        *answers_of(BASE, k=20),
        *answers_of(BASE),
        *answers_of(BASE, system="ape", k=None),
    ]
    rows = [(r["arm"], r["system"], r["k"], r["checkpoint"]) for r in summary(made)["results"]]
    assert rows == [
        ("", "ape", None, "base"),
        ("", "coinrag", 10, "base"),
        ("", "coinrag", 20, "base"),
        ("one_stage", "coinrag", 10, "base"),
        ("isolated", "coinrag", 10, "base"),
        ("isolated", "coinrag", 10, "fine_tuned"),
    ]


def test_fine_tuned_is_compared_with_base_of_the_same_arm_and_width(answers: list[Answer]) -> None:
    made = [
        *answers,
        *answers_of(BASE, arm="isolated"),
        *answers_of(BASE, arm="isolated", checkpoint="fine_tuned"),
        *answers_of(TUNED, k=20, checkpoint="fine_tuned"),
    ]
    found = differences(made, "fine_tuning")
    tuned, base = Variant("", "fine_tuned", "coinrag", 5, 10), Variant("", "base", "coinrag", 5, 10)
    isolated = [cell._replace(arm="isolated") for cell in (tuned, base)]
    assert set(found) == {(tuned, base), tuple(isolated)}
    row = found[tuned, base]
    assert (row["mean"], row["low"], row["high"]) == (50.0, 50.0, 50.0)
    assert (row["questions"], row["relative_percent"]) == (4, 200.0)
    assert row["by_dataset"]["musique"] == {
        "questions": 2, "mean": 50.0, "low": 50.0, "high": 50.0, "relative_percent": 200.0,
    }  # fmt: skip
    assert found[tuple(isolated)]["mean"] == 0.0


def test_pairs_are_formed_by_question_and_not_by_place(answers: list[Answer]) -> None:
    turned = [*answers[:4], *reversed(answers[4:8])]
    (row,) = differences(turned, "fine_tuning").values()
    assert (row["low"], row["high"]) == (50.0, 50.0)


def test_only_common_questions_are_compared_and_counted() -> None:
    made = [
        *answers_of([0.0, 0.0, 1.0, 0.0]),
        *answers_of([1.0, 0.5, 0.0], checkpoint="fine_tuned"),
    ]
    made = [a for a in made if (a.question_id, a.checkpoint) != ("q0", "base")]
    result = summary(made)
    (row,) = result["differences"]
    assert (row["questions"], row["mean"]) == (2, -25.0)
    # In percent of the base's F1 on those two questions, not on all of its own.
    assert row["relative_percent"] == -50.0
    assert result["notes"] == []
    apart = [a for a in made if a.question_id in {"base": "q3", "fine_tuned": "q0"}[a.checkpoint]]
    assert summary(apart)["differences"] == []


def test_cells_of_different_counts_are_pointed_out() -> None:
    (note,) = summary([*answers_of(BASE), *answers_of([1.0], k=20)])["notes"]
    assert "1 to 4 questions" in note


def test_a_gain_over_nothing_has_no_percentage() -> None:
    made = [*answers_of([0.0, 0.0]), *answers_of([1.0, 0.0], checkpoint="fine_tuned")]
    (row,) = differences(made, "fine_tuning").values()
    assert (row["mean"], row["relative_percent"]) == (50.0, None)


def test_arms_are_compared_with_the_recipe_and_pairs_with_their_parts() -> None:
    made = [
        *answers_of([1.0, 0.8, 0.6, 0.4]),
        *answers_of([0.5, 0.8, 0.6, 0.4], arm="a"),
        *answers_of([1.0, 0.4, 0.6, 0.4], arm="b"),
        *answers_of([0.5, 0.4, 0.2, 0.4], arm="a+b"),
        *answers_of([0.5, 0.4, 0.2, 0.4], arm="a+c"),
        # No pair: the part would count twice.
        *answers_of([0.5, 0.8, 0.6, 0.4], arm="a+a"),
    ]
    recipe = Variant("", "base", "coinrag", 5, 10)
    found = differences(made, "ablation")
    arms = ("a", "b", "a+b", "a+c", "a+a")
    assert set(found) == {(recipe._replace(arm=arm), recipe) for arm in arms}
    assert found[recipe._replace(arm="a"), recipe]["mean"] == pytest.approx(-12.5)
    ((cells, row),) = differences(made, "interaction").items()
    assert cells == (recipe._replace(arm="a+b"), recipe)
    # Of the four questions the third alone loses more from both than from each: 40 points.
    assert row["mean"] == pytest.approx(-10.0)
    assert row["by_dataset"]["hotpotqa"]["mean"] == pytest.approx(0.0)
    assert row["relative_percent"] == pytest.approx(100 * -10 / 70)


def test_an_arm_that_changes_the_width_is_compared_with_the_one_width_of_the_recipe() -> None:
    made = [*answers_of(BASE), *answers_of(TUNED, arm="k=20", k=20)]
    (row,) = differences(made, "ablation").values()
    assert (row["k"], row["against"]["k"], row["mean"]) == (20, 10, 50.0)
    assert not differences([*made, *answers_of(BASE, k=5)], "ablation")


def test_systems_are_compared_with_coinrag_at_the_same_chunks() -> None:
    made = [
        *answers_of(BASE, k=5),
        *answers_of(BASE, k=10),
        *answers_of(BASE, k_c=2, k=40),
        *answers_of(TUNED, system="turborag", k=None),
        *answers_of(TUNED, system="turborag", k=None, arm="composite"),
        *answers_of(TUNED, system="online_nuggets", k=5),
        *answers_of(TUNED, system="kvlink", k=None, k_c=3),
        *answers_of(TUNED, system="ape", k=None, checkpoint="fine_tuned"),
    ]
    assert {
        (cell.system, cell.k_c, cell.k): (against.k_c, against.k)
        for cell, against in differences(made, "system")
    } == {("turborag", 5, None): (5, 10), ("online_nuggets", 5, 5): (5, 5)}


def test_intervals_are_those_of_resampled_questions() -> None:
    generator = np.random.default_rng(1)
    base, tuned = generator.uniform(size=(2, 30))
    made = [*answers_of(base), *answers_of(tuned, checkpoint="fine_tuned")]
    result = summarize(made, resamples=200, seed=3)
    (row,) = result["differences"]
    drawn = np.random.default_rng(3).integers(30, size=(200, 30))
    means = sorted(100 * np.mean([tuned[q] - base[q] for q in rows]) for rows in drawn)
    assert (row["low"], row["high"]) == pytest.approx(np.quantile(means, [0.025, 0.975]))
    means = [100 * base[rows].mean() for rows in drawn]
    assert result["results"][0]["f1_low"] == pytest.approx(np.quantile(means, 0.025))
    drawn = np.random.default_rng(3).integers(15, size=(200, 15))
    means = [100 * np.mean(tuned[15:][rows] - base[15:][rows]) for rows in drawn]
    assert row["by_dataset"]["musique"]["high"] == pytest.approx(np.quantile(means, 0.975))


def test_the_table_within_a_budget_has_each_systems_best_and_its_distance_from_coinrag() -> None:
    made = [
        *answers_of(BASE, k=5, ttft_ms=[20.0]),
        *answers_of(TUNED, k=10, ttft_ms=[60.0]),
        *answers_of([0.5] * 4, system="turborag", k=None, k_c=2, ttft_ms=[50.0]),
        *answers_of([1.0] * 4, system="turborag", k=None, k_c=4, ttft_ms=[90.0]),
        *answers_of([0.9] * 4, arm="isolated", ttft_ms=[1.0]),
    ]
    rows = summary(made, budgets_ms=[55.0, 19.0])["budget"]
    assert [(r["budget_ms"], r["system"], r["k_c"], r["k"], r["f1"]) for r in rows] == [
        (55.0, "turborag", 2, None, 50.0),
        (55.0, "coinrag", 5, 5, 25.0),
        (None, "turborag", 4, None, 100.0),
        (None, "coinrag", 5, 10, 75.0),
    ]
    assert rows[1]["difference"] is None
    assert (rows[0]["difference"]["mean"], rows[0]["difference"]["relative_percent"]) == (25, 100)
    assert rows[2]["difference"]["against"]["k"] == 10
    assert rows[2]["difference"]["mean"] == 25.0
    assert rows[2]["difference"]["relative_percent"] == pytest.approx(100 / 3)


def test_a_system_without_coinrag_within_the_budget_has_no_distance() -> None:
    made = [*answers_of(BASE, system="epic", k=None), *answers_of(BASE, checkpoint="fine_tuned")]
    rows = summary(made)["budget"]
    assert [(row["system"], row["difference"]) for row in rows] == [
        ("epic", None),
        ("coinrag", None),
    ]


def test_a_cache_slower_than_computing_is_said(answers: list[Answer]) -> None:
    assert summary(answers)["notes"] == []
    slow = [replace(a, ttft_ms=[99.0]) if a.system == "coinrag" else a for a in answers]
    (note,) = summary(slow)["notes"]
    assert note.startswith("CoinRAG 5/10, base is slower than computing everything: TTFT p50 99.0")


def test_answers_past_trained_positions_and_cut_contexts_are_counted(answers: list[Answer]) -> None:
    far = [replace(a, beyond_context=a.question_id == "q1") for a in answers]
    far[-1] = replace(far[-1], cut_tokens=7)
    assert [" ".join(note.split()[:5]) for note in summary(far)["notes"]] == [
        "2 answers of CoinRAG reach",
        "1 answers of Standard RAG",
        "1 answers of Standard RAG",
    ]
    assert "left out the middle" in summary(far)["notes"][-1]


def test_examples_do_not_depend_on_how_good_answers_are() -> None:
    scores = [random.Random(0).random() for _ in range(20)]
    first = summary(answers_of(scores), examples=3)["examples"]
    second = summary(answers_of(scores[::-1]), examples=3)["examples"]
    assert [e["dataset"] for e in first] == ["hotpotqa", "hotpotqa", "musique"]
    assert [e["question"] for e in first] == [e["question"] for e in second]
    assert first[0]["answers"][0]["f1"] == 100 * scores[0]
