"""What each system reaches within a latency budget, from the rows of `results`.

The budget is on the P99 time to first token of a cell, over all its questions. The best width is
chosen by the F1 of the very questions that it is then shown for, so a system measured at many
widths has more to choose from.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]
Series = tuple[str, str, str]

# The budget of the CoinRAG paper's tables.
PAPER_BUDGET_MS = 100.0


def f1_of(row: Row, dataset: str | None) -> float | None:
    """F1 of a cell, over all questions or of one data set; None where it was not asked any."""
    score: float | None = row["f1"] if dataset is None else row["f1_by_dataset"].get(dataset)
    return score


def steps(results: Iterable[Row], dataset: str | None = None) -> dict[Series, list[Row]]:
    """The cells at which F1 under a P99 budget rises, fastest first, by arm, system, checkpoint.

    A system's best F1 under a budget is that of the last of its cells whose `ttft_p99_ms` is
    within it (Figure 2 of the CoinRAG paper). Of two cells with the same F1 the faster counts.
    """
    by_series: dict[Series, list[Row]] = {}
    for row in results:
        by_series.setdefault((row["arm"], row["system"], row["checkpoint"]), []).append(row)
    return {name: rising(rows, "ttft_p99_ms", dataset) for name, rows in by_series.items()}


def best_under(results: Sequence[Row], budgets_ms: Iterable[float | None]) -> list[dict[str, Any]]:
    """The recipe's best cell of each system and checkpoint within each budget, None being no limit.

    A row is that of the cell with `budget_ms` before it (Table 3 of the CoinRAG paper); where no
    cell is fast enough there is none. Rows keep the order of `results` within a budget.
    """
    recipe = [row for row in results if not row["arm"]]
    best = []
    for budget in budgets_ms:
        limit = math.inf if budget is None else budget
        for curve in steps(recipe).values():
            if within := [row for row in curve if row["ttft_p99_ms"] <= limit]:
                best.append({"budget_ms": budget, **within[-1]})
    return best


def default_budgets(results: Sequence[Row]) -> list[float]:
    """Budgets (ms) between the fastest and the slowest P99 of the recipe's cells.

    Three at equal ratios, rounded to two digits, where some system was measured at several widths;
    and the paper's 100 ms where it is among them.
    """
    recipe = [row for row in results if not row["arm"]]
    low, high = (choose(row["ttft_p99_ms"] for row in recipe) for choose in (min, max))
    budgets = {PAPER_BUDGET_MS}
    if len(recipe) > len({(row["system"], row["checkpoint"]) for row in recipe}):
        budgets |= {float(f"{budget:.2g}") for budget in np.geomspace(low, high, 5)[1:-1]}
    return sorted(budget for budget in budgets if low <= budget < high)


def rising(rows: Iterable[Row], cost: str, dataset: str | None = None) -> list[Row]:
    """The cells that no other beats in F1 without costing more, cheapest first.

    With `active_tokens` as the cost it is the Pareto front of the CoinRAG paper's Figure 3.
    """
    scored = [(row[cost], -f1, row) for row in rows if (f1 := f1_of(row, dataset)) is not None]
    found: list[Row] = []
    best = -1.0
    for _, negative, row in sorted(scored, key=lambda entry: entry[:2]):
        if -negative > best:
            found.append(row)
            best = -negative
    return found
