import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.budget import best_under, default_budgets, rising, steps


def cell(f1: float, p99_ms: float, tokens: float = 100, **fields: Any) -> dict[str, Any]:
    return {
        "arm": "",
        "checkpoint": "base",
        "system": "coinrag",
        "k_c": 5,
        "k": 10,
        "f1": f1,
        "f1_by_dataset": {"musique": 100 - f1},
        "ttft_p99_ms": p99_ms,
        "active_tokens": tokens,
        **fields,
    }


# Few values, so that ties happen.
cells = st.lists(
    st.builds(
        cell,
        st.integers(0, 4).map(float),
        st.integers(1, 6).map(float),
        st.integers(1, 4).map(float),
        arm=st.sampled_from(["", "", "isolated"]),
        system=st.sampled_from(["coinrag", "turborag"]),
        checkpoint=st.sampled_from(["base", "fine_tuned"]),
    ),
    min_size=1,
    max_size=12,
)


@given(cells, st.integers(0, 7))
def test_the_best_within_a_budget_is_that_of_trying_every_cell(
    rows: list[dict[str, Any]], budget: int
) -> None:
    found = best_under(rows, [float(budget), None])
    for limit in (float(budget), None):
        chosen = {
            (row["system"], row["checkpoint"]): row for row in found if row["budget_ms"] == limit
        }
        for system in ("coinrag", "turborag"):
            for checkpoint in ("base", "fine_tuned"):
                within = [
                    row
                    for row in rows
                    if (row["arm"], row["system"], row["checkpoint"]) == ("", system, checkpoint)
                    and row["ttft_p99_ms"] <= (math.inf if limit is None else limit)
                ]
                row = chosen.get((system, checkpoint))
                assert (row is None) == (not within)
                if row is not None:
                    assert row["f1"] == max(other["f1"] for other in within)
                    # Among the best the fastest.
                    best = [other for other in within if other["f1"] == row["f1"]]
                    assert row["ttft_p99_ms"] == min(other["ttft_p99_ms"] for other in best)


@given(cells)
def test_steps_rise_in_time_and_in_f1(rows: list[dict[str, Any]]) -> None:
    curves = steps(rows)
    assert set(curves) == {(row["arm"], row["system"], row["checkpoint"]) for row in rows}
    for curve in curves.values():
        for earlier, later in pairwise(curve):
            assert earlier["ttft_p99_ms"] < later["ttft_p99_ms"]
            assert earlier["f1"] < later["f1"]


@given(cells)
def test_the_front_holds_what_no_cell_beats(rows: list[dict[str, Any]]) -> None:
    front = rising(rows, "active_tokens")
    places = {(row["active_tokens"], row["f1"]) for row in front}
    assert len(places) == len(front)
    for row in rows:
        beaten = any(
            (other["active_tokens"], -other["f1"]) != (row["active_tokens"], -row["f1"])
            and other["active_tokens"] <= row["active_tokens"]
            and other["f1"] >= row["f1"]
            for other in rows
        )
        assert beaten == ((row["active_tokens"], row["f1"]) not in places)


def test_a_data_set_has_its_own_best() -> None:
    rows = [cell(20.0, 10.0), cell(30.0, 20.0), cell(10.0, 30.0, f1_by_dataset={})]
    (curve,) = steps(rows).values()
    assert [row["f1"] for row in curve] == [20.0, 30.0]
    (curve,) = steps(rows, "musique").values()
    assert [row["f1_by_dataset"]["musique"] for row in curve] == [80.0]


@given(cells)
def test_budgets_from_the_data_tell_some_cells_apart(rows: list[dict[str, Any]]) -> None:
    recipe = [row for row in rows if not row["arm"]]
    if not recipe:
        return
    for budget in default_budgets(rows):
        assert any(row["ttft_p99_ms"] <= budget for row in recipe)
        assert any(row["ttft_p99_ms"] > budget for row in recipe)


@pytest.mark.parametrize(
    ("p99_ms", "budgets"),
    [
        ([10.0, 1000.0], [32.0, 100.0, 320.0]),
        ([40.0, 90.0], [49.0, 60.0, 73.0]),
        ([90.0, 250.0], [100.0, 120.0, 150.0, 190.0]),
        ([100.0], []),
        ([300.0, 300.0], []),
    ],
)
def test_budgets_are_spread_over_what_was_measured(
    p99_ms: list[float], budgets: list[float]
) -> None:
    assert default_budgets([cell(1.0, ms) for ms in p99_ms]) == budgets


def test_one_width_a_system_leaves_the_papers_budget_alone() -> None:
    rows = [cell(1.0, 10.0), cell(1.0, 900.0, system="standard_rag"), cell(1.0, 5.0, arm="a")]
    assert default_budgets(rows) == [100.0]
    assert default_budgets(rows[:1]) == []
