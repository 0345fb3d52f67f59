"""How the figures of a comparison are drawn, each from its rows; see `eval.figures`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eval.budget import PAPER_BUDGET_MS, rising
from eval.drawing import legend, log_axis, panels, place_labels, shift, shortened, vertical_room
from eval.labels import ERROR_NAMES, SYSTEM_NAMES, cell_label, width_label
from eval.looks import (
    Style,
    arm_keys,
    arm_label,
    arm_looks,
    arm_of,
    checkpoint_keys,
    series_of,
    style_of,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import Container
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
_F1 = "token F1 (x 100)"
_ERROR_COLOURS = ("#0072B2", "#E69F00", "#CC79A7")


def draw_curves(rows: Sequence[Row], title: str) -> "Figure":
    """Steps of the best F1 within a limit on P99 TTFT; the star is the best without one."""
    what = f"{title}\nbest F1 within a limit on P99 TTFT; the star is the best without one"
    figure, axes = panels(_by_panel(rows), what)
    looks = arm_looks(rows)
    for name, found in _by_panel(rows).items():
        axis = axes[name]
        low, high = log_axis(axis, [row["ttft_p99_ms"] for row in found])
        for style, points in series_of(found, looks):
            x = [row["ttft_p99_ms"] for row in points]
            f1 = [row["f1"] for row in points]
            axis.step([*x, high], [*f1, f1[-1]], where="post", markevery=range(len(x)), **style)
            axis.plot(x[-1], f1[-1], **(style | {"marker": "*", "markersize": 14}))
        if low <= PAPER_BUDGET_MS <= high:
            axis.axvline(PAPER_BUDGET_MS, color="#444444", linewidth=1, linestyle="--")
        vertical_room(axis, [row["f1"] for row in found])
        axis.set_ylabel(_F1)
        axis.set_xlabel("limit on P99 TTFT over all questions (ms, log scale)")
    legend(figure, arm_keys(rows, looks))
    return figure


def draw_tokens(rows: Sequence[Row], title: str) -> "Figure":
    """F1 against active prefix tokens, over the front of the cells that none beats in both."""
    what = f"{title}\nF1 against prefix length; the grey line is the Pareto front"
    figure, axes = panels(_by_panel(rows), what)
    looks = arm_looks(rows)
    for name, found in _by_panel(rows).items():
        axis = axes[name]
        _, high = log_axis(axis, [row["active_tokens"] for row in found])
        front = [(row["active_tokens"], row["f1"]) for row in rising(found, "active_tokens")]
        x, f1 = zip(*front, (high, front[-1][1]), strict=True)
        axis.step(x, f1, where="post", color="#cccccc", linewidth=6)
        for style, points in series_of(found, looks):
            _with_intervals(axis, points, "active_tokens", style)
        vertical_room(axis, _ends(found))
        axis.set_ylabel(_F1)
        axis.set_xlabel("active prefix tokens (mean over all questions, log scale)")
    legend(figure, arm_keys(rows, looks))
    for name, found in _by_panel(rows).items():
        # Among many cells only those of the front are named.
        named = [row for row in found if row["on_front"] or len(found) <= 16]
        place_labels(
            axes[name],
            [
                (row["active_tokens"], row["f1"], width_label(row), style["color"])
                for style, points in series_of(named, looks)
                for row in points
            ],
        )
    return figure


def draw_arm_points(rows: Sequence[Row], title: str) -> "Figure":
    """F1 of each arm with its interval; a thin line leads down from the recipe's."""
    arms = sorted(dict.fromkeys(map(arm_of, rows)), key=lambda arm: [*SYSTEM_NAMES].index(arm[1]))
    what = f"{title}\nF1 of each arm; bars are 95% intervals"
    figure, axes = panels(_by_panel(rows), what, height=1 + 0.35 * len(arms))
    looks = arm_looks(rows)
    for number, (name, found) in enumerate(_by_panel(rows).items()):
        axis = axes[name]
        for row in found:
            # The two checkpoints of an arm lie one above the other.
            place = arms.index(arm_of(row)) + (-0.14 if row["checkpoint"] == "base" else 0.14)
            if not row["arm"]:
                last = max(n for n, (_, system) in enumerate(arms) if system == row["system"])
                axis.vlines(row["f1"], place, last + 0.4, color="#aaaaaa", linewidth=0.8)
            style = style_of(looks[arm_of(row)], row["checkpoint"])
            axis.errorbar(row["f1"], place, xerr=_bars([row]), capsize=3, **style)
        # Names at the left panels hold for the right ones too.
        names = ["" if number % 2 else arm_label(arm) for arm in arms]
        axis.set_yticks(range(len(arms)), names)
        axis.set_ylim(len(arms) - 0.5, -0.5)
        axis.set_xlabel(_F1)
    legend(figure, checkpoint_keys(rows))
    return figure


def draw_errors(rows: Sequence[Row], title: str) -> "Figure":
    """How many answers of each cell show each kind of error; the tick is how many are wrong."""
    what = f"{title}\nwhy answers are wrong"
    figure, axes = panels([""], what, height=0.6 + 0.25 * len(rows), width=10)
    axis, places, left = axes[""], range(len(rows)), [0] * len(rows)
    keys: list[Artist | Container] = []
    for (kind, name), colour in zip(ERROR_NAMES.items(), _ERROR_COLOURS, strict=True):
        counts = [row[kind] for row in rows]
        keys.append(axis.barh(places, counts, 0.7, left, color=colour, label=name))
        left = [start + count for start, count in zip(left, counts, strict=True)]
    wrong = [row["wrong"] for row in rows]
    keys += axis.plot(wrong, places, "|", color="black", markersize=11, label="wrong")
    for place, row in enumerate(rows):
        axis.annotate(
            f"{row['wrong']} of {row['questions']} wrong",
            (max(left[place], row["wrong"]), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(places, [shortened(cell_label(row), 60) for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(0, 1.25 * max(1, *left, *wrong))
    axis.set_xlabel("answers, counted once for every kind of error they show")
    legend(figure, keys)
    return figure


def draw_results(rows: Sequence[Row], title: str) -> "Figure":
    """F1 against active tokens and against median TTFT; bars are 95% intervals.

    Series are set apart by a few points of the page, so that bars at one place stay readable.
    """
    fields = {"active prefix tokens (mean)": "active_tokens", "median TTFT (ms)": "ttft_p50_ms"}
    figure, axes = panels(fields, f"{title}\nF1 with 95% intervals; points are set apart")
    looks = arm_looks(rows)
    for name, field in fields.items():
        axis = axes[name]
        log_axis(axis, [row[field] for row in rows])
        series = series_of(rows, looks)
        for place, (style, points) in enumerate(series):
            apart = shift(axis, 2.5 * (place - (len(series) - 1) / 2))
            _with_intervals(axis, points, field, style | {"transform": apart})
        vertical_room(axis, _ends(rows))
        axis.set_ylabel(_F1)
        axis.set_xlabel("log scale")
    legend(figure, arm_keys(rows, looks))
    return figure


def _by_panel(rows: Iterable[Row]) -> dict[str, list[Row]]:
    by_panel: dict[str, list[Row]] = {}
    for row in rows:
        by_panel.setdefault(row["panel"], []).append(row)
    return by_panel


def _with_intervals(axis: "Axes", points: Sequence[Row], field: str, style: Style) -> None:
    """Cells with their intervals; a line joins those that no other of them beats for less."""
    x, f1 = [row[field] for row in points], [row["f1"] for row in points]
    axis.errorbar(x, f1, yerr=_bars(points), capsize=3, **(style | {"linestyle": "none"}))
    front = rising(points, field)
    x, f1 = [row[field] for row in front], [row["f1"] for row in front]
    axis.plot(x, f1, **(style | {"marker": "none"}), zorder=1)


def _bars(points: Sequence[Row]) -> list[list[float]] | None:
    """How far the intervals reach below and above, None in a panel without."""
    if points[0]["f1_low"] is None:
        return None
    # Rounding may put the mean of equal values beyond the ends of its interval.
    return [
        [max(0.0, row["f1"] - row["f1_low"]) for row in points],
        [max(0.0, row["f1_high"] - row["f1"]) for row in points],
    ]


def _ends(rows: Iterable[Row]) -> list[float]:
    return [
        row[name] for row in rows for name in ("f1_low", "f1", "f1_high") if row[name] is not None
    ]
