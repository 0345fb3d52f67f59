"""The figures of a comparison: which numbers each one shows, kept as CSV beside its picture."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.budget import f1_of, rising, steps
from eval.drawing import save, write_csv
from eval.labels import ERROR_NAMES
from eval.pictures import draw_arm_points, draw_curves, draw_errors, draw_results, draw_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
Rows = list[dict[str, Any]]

_CELL = ("arm", "checkpoint", "system", "k_c", "k")


def draw_all(result: Json, folder: Path) -> list[Path]:
    """Write the figures of `compare.json` into a folder: PNG, SVG, and CSV of what is drawn.

    f1_under_budget: best F1 within a limit on P99 TTFT (the CoinRAG paper's Figure 2), with a star
    at the best without one. f1_against_tokens (its Figure 3): with the Pareto front. ablations (its
    Figure 4): best F1 of each arm within a limit where several widths were measured, else F1 with
    its interval; only where there are arms. errors: how many answers show each kind. budget.csv
    (its Table 3): the best cells within each limit. Figures that an earlier comparison left and
    this one has no numbers for are removed. P99 TTFT and tokens are those of all questions, also in
    a data set's panel. Returns the paths of what was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = [row for row in result["results"] if not row["arm"]]
    changed = {row["system"] for row in result["results"] if row["arm"]}
    compared = [row for row in result["results"] if row["system"] in changed]
    series = {(row["arm"], row["system"], row["checkpoint"]) for row in compared}
    several_widths = len(compared) > len(series)
    figures: dict[str, tuple[Rows, Callable[[Rows, str], Figure]]] = {
        "f1_under_budget": (_best_rows(result, recipe), draw_curves),
        "f1_against_tokens": (_token_rows(result, recipe), draw_tokens),
        "ablations": (
            (_best_rows if several_widths else _f1_rows)(result, compared),
            draw_curves if several_widths else draw_arm_points,
        ),
        "errors": (_error_rows(result), draw_errors),
    }
    written = []
    for name, (rows, draw) in figures.items():
        png, svg, table = (folder / f"{name}.{suffix}" for suffix in ("png", "svg", "csv"))
        if rows:
            save(partial(draw, rows, _title(result)), [png, svg])
            write_csv(table, rows)
            written += [png, svg, table]
        else:
            for path in (png, svg, table):
                path.unlink(missing_ok=True)
    write_csv(folder / "budget.csv", _budget_rows(result))
    return [*written, folder / "budget.csv"]


def draw_overview(result: Json, path: Path) -> None:
    """Draw the recipe's F1 against active tokens and against median TTFT, as a PNG."""
    recipe = [row for row in result["results"] if not row["arm"]]
    save(partial(draw_results, recipe, _title(result)), [path])


def _title(result: Json) -> str:
    return f"{result['recipe']}, {sum(result['questions_by_dataset'].values())} questions"


def _panels(result: Json) -> dict[str, str | None]:
    """All questions, and each data set where there are several."""
    datasets = list(result["questions_by_dataset"])
    return {"all questions": None} | (
        {name: name for name in datasets} if len(datasets) > 1 else {}
    )


def _point(panel: str, dataset: str | None, row: Json) -> dict[str, Any]:
    """One cell in one panel; intervals are known over all questions alone."""
    pooled = dataset is None
    return {
        "panel": panel,
        **{name: row[name] for name in _CELL},
        "f1": f1_of(row, dataset),
        "f1_low": row["f1_low"] if pooled else None,
        "f1_high": row["f1_high"] if pooled else None,
    }


def _best_rows(result: Json, cells: Iterable[Json]) -> Rows:
    found = list(cells)
    return [
        _point(panel, dataset, row)
        | {"ttft_p99_ms": row["ttft_p99_ms"], "best_without_limit": row is curve[-1]}
        for panel, dataset in _panels(result).items()
        for curve in steps(found, dataset).values()
        for row in curve
    ]


def _token_rows(result: Json, cells: Iterable[Json]) -> Rows:
    found = list(cells)
    rows = []
    for panel, dataset in _panels(result).items():
        front = rising(found, "active_tokens", dataset)
        rows += [
            _point(panel, dataset, row)
            | {"active_tokens": row["active_tokens"], "on_front": row in front}
            for row in found
            if f1_of(row, dataset) is not None
        ]
    return rows


def _f1_rows(result: Json, cells: Iterable[Json]) -> Rows:
    found = list(cells)
    return [
        _point(panel, dataset, row)
        for panel, dataset in _panels(result).items()
        for row in found
        if f1_of(row, dataset) is not None
    ]


def _error_rows(result: Json) -> Rows:
    return [
        {name: row[name] for name in (*_CELL, "questions", "wrong")}
        | {kind: row["errors"][kind] for kind in ERROR_NAMES}
        for row in result["results"]
    ]


def _budget_rows(result: Json) -> Rows:
    """`budget` without nesting; an empty limit is none, an empty difference has no CoinRAG cell."""
    rows = []
    for row in result["budget"]:
        difference = row["difference"] or {}
        against = difference.get("against", {})
        rows.append(
            {name: row[name] for name in row if name not in ("f1_by_dataset", "difference")}
            | {f"f1 {name}": f1_of(row, name) for name in result["questions_by_dataset"]}
            | {f"coinrag_{name}": against.get(name) for name in ("k_c", "k")}
            | {"paired_questions": difference.get("questions")}
            | {f"f1_points_{name}": difference.get(name) for name in ("mean", "low", "high")}
            | {"relative_percent": difference.get("relative_percent")}
        )
    return rows
