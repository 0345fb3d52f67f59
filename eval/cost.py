"""What each system of a comparison costs a month at equal F1, and from which volume it pays off.

A cell's cost is a line over the number of queries (`eval.cost_account`), and a system's the lowest
of the lines of its eligible cells: those that reach the target F1 within the latency budget.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import combinations
from typing import Any

from eval.cost_account import Account, Line, account
from eval.cost_cells import Figure, Served, given_cell
from eval.cost_measured import measured_cells, read_comparisons
from eval.labels import SYSTEM_NAMES
from recipes.errors import UserError
from recipes.scenario import Scenario

Json = dict[str, Any]

# Volumes nearer to each other than this share are one.
_SAME_VOLUME = 1e-9
# So are amounts of money, which two ways of adding up need not agree on to the last bit.
_SAME_AMOUNT = 1e-12


def cost(scenario: Scenario, measured: Sequence[str] = ()) -> Json:
    """Compare the systems of `compare.json` files, or else of the scenario's own cells.

    Returns what `eval.cost_report` shows: the target F1, each system's cheapest eligible cell at
    the scenario's volume with its amounts, all eligible cells' lines, and for each pair of systems
    which is cheaper from which volume on. An eligible cell reaches the target within the latency
    budget; a system without one says why. Of a cell in several files the last counts.

    Raises:
        UserError: there are no cells, a fine-tuned one has no price, or see `read_comparisons`.
    """
    comparisons = read_comparisons(measured, scenario)
    cells = [cell for one in comparisons for cell in measured_cells(one, scenario)]
    if not measured:
        cells = [given_cell(cell, scenario) for cell in scenario.cells]
    if not cells:
        raise UserError("nothing to compare: give comparisons (--measured FILE) or set cells")
    cells = list({(c.system, c.checkpoint, c.k_c, c.k): c for c in cells}.values())
    by_system: dict[str, list[Served]] = {}
    for name in SYSTEM_NAMES:
        if found := [cell for cell in cells if cell.system == name]:
            by_system[name] = found
    target = _target_f1(by_system.values(), scenario)
    systems = [_system(name, found, target, scenario) for name, found in by_system.items()]
    lines = {
        one["system"]: [Line(**cell["line"]) for cell in one["eligible"]]
        for one in systems
        if one["eligible"]
    }
    return {
        "scenario": scenario.name,
        "measured": list(measured),
        "hardware": comparisons[0].environment.hardware if comparisons else None,
        "target_f1": None if target is None else asdict(target),
        "p99_budget_ms": scenario.goal.p99_ttft_ms,
        "queries_a_month": scenario.queries.a_month,
        "systems": systems,
        "break_even": [
            {"systems": [a, b], "cheaper": _named(cheaper(lines[a], lines[b]), a, b)}
            for a, b in combinations(lines, 2)
        ],
        "arm_cells_left_out": sum(bool(row.arm) for one in comparisons for row in one.results),
        "setting": scenario.model_dump(mode="json"),
    }


def _target_f1(systems: Iterable[Sequence[Served]], scenario: Scenario) -> Figure | None:
    """The scenario's, or what every system with a known F1 reaches within the latency budget."""
    if scenario.goal.f1 is not None:
        return Figure(scenario.goal.f1, "given")
    best = [
        max(scores)
        for cells in systems
        if (scores := [c.f1.value for c in cells if c.f1 is not None and _fast(c, scenario)])
    ]
    return Figure(min(best), "derived") if best else None


def _fast(cell: Served, scenario: Scenario) -> bool:
    return cell.p99_ms.value <= (scenario.goal.p99_ttft_ms or math.inf)


def _system(name: str, cells: Sequence[Served], target: Figure | None, scenario: Scenario) -> Json:
    """A system's cheapest eligible cell, all eligible ones, or why there is none."""
    fast = [cell for cell in cells if _fast(cell, scenario)]
    goal = 0.0 if target is None else target.value
    eligible = [
        account(cell, scenario) for cell in fast if cell.f1 is None or cell.f1.value >= goal
    ]
    volume = scenario.queries.a_month
    why = None
    if not fast:
        fastest = min(cell.p99_ms.value for cell in cells)
        budget = scenario.goal.p99_ttft_ms
        why = f"no cell within {budget:g} ms P99: the fastest takes {fastest:.1f} ms"
    elif not eligible:
        best = max(cell.f1.value for cell in fast if cell.f1 is not None)
        why = f"does not reach F1 {goal:.1f}: the best cell within the budget has {best:.1f}"
    chosen = min(eligible, key=lambda one: one.line.usd_a_month(volume), default=None)
    return {
        "system": name,
        "not_eligible": why,
        "chosen": None if chosen is None else _as_json(chosen, volume),
        "eligible": [_as_json(one, volume) for one in eligible],
        "cells": len(cells),
        "too_slow": len(cells) - len(fast),
        "below_target": len(fast) - len(eligible),
    }


def _as_json(one: Account, queries: float) -> Json:
    return {
        **asdict(one),
        "machine_hours_a_month": queries * one.cell.machine_ms / 3.6e6,
        "queries_usd_a_month": one.line.usd_a_query * queries,
        "total_usd_a_month": one.line.usd_a_month(queries),
    }


def cheaper(a: Sequence[Line], b: Sequence[Line]) -> list[tuple[float, int]]:
    """From how many queries a month on which of two systems is cheaper, by their cells' lines.

    Each entry is the volume from which it holds, the first 0, and -1 for `a`, 1 for `b` or 0 for
    neither. Systems cost the lowest of their lines, so they may cross more than once.
    """
    starts = [0.0]
    for volume in sorted(v for p in a for q in b if (v := _crossing(p, q)) is not None):
        if volume > starts[-1] * (1 + _SAME_VOLUME):
            starts.append(volume)
    found: list[tuple[float, int]] = []
    # Between two crossings of any lines the order of the lowest does not change.
    for start, end in zip(starts, [*starts[1:], math.inf], strict=True):
        sign = _dearer(a, b, _between(start, end))
        if not found or found[-1][1] != sign:
            found.append((start, sign))
    return found


def _crossing(p: Line, q: Line) -> float | None:
    """The volume above 0 at which two lines cost the same; None without one."""
    if _same(p.usd_a_query, q.usd_a_query):
        return None
    steeper = q.usd_a_query - p.usd_a_query
    volume = (p.fixed_usd_a_month - q.fixed_usd_a_month) / steeper
    return volume if 0.0 < volume < math.inf else None


def _dearer(a: Sequence[Line], b: Sequence[Line], volume: float) -> int:
    """1 where `a` costs more at a volume, -1 where `b` does, else 0.

    In fractions, for floats lose a small fixed cost beside many queries.
    """
    at = Fraction(volume)
    p, q = (
        min(of, key=lambda x: Fraction(x.fixed_usd_a_month) + at * Fraction(x.usd_a_query))
        for of in (a, b)
    )
    apart = Fraction(0)
    if not _same(p.fixed_usd_a_month, q.fixed_usd_a_month):
        apart += Fraction(p.fixed_usd_a_month) - Fraction(q.fixed_usd_a_month)
    if not _same(p.usd_a_query, q.usd_a_query):
        apart += at * (Fraction(p.usd_a_query) - Fraction(q.usd_a_query))
    return (apart > 0) - (apart < 0)


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SAME_AMOUNT)


def _between(start: float, end: float) -> float:
    if end == math.inf:
        return 2 * start or 1.0
    return math.sqrt(start) * math.sqrt(end) if start else end / 2


def _named(found: Sequence[tuple[float, int]], a: str, b: str) -> list[Json]:
    names = {-1: a, 0: None, 1: b}
    return [{"from_queries_a_month": volume, "system": names[sign]} for volume, sign in found]
