"""A month's cost of each system against the number of queries, as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.cost_account import Line
from eval.cost_report import goal_text, volume_text
from eval.drawing import legend, panels, save_as
from eval.labels import SYSTEM_COLOURS, SYSTEM_NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]

_POINTS = 200
# A crossing so many times off the scenario's volume is in the legend alone.
_FAR = 1e4


def draw_cost(result: Json, path: Path) -> list[Path]:
    """Draw a line a system over the queries of a month, both axes logarithmic, as PNG and as SVG.

    A system's line is the lowest of its eligible cells' lines. Crossings are marked, those with
    Standard RAG's filled and named below. Nothing is drawn where no system is eligible.

    Raises:
        UserError: see `drawing.save_as`.
    """
    if not any(one["eligible"] for one in result["systems"]):
        return []
    return save_as(lambda: _picture(result), path)


def _picture(result: Json) -> "Figure":
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    lines = {
        one["system"]: [Line(**cell["line"]) for cell in one["eligible"]]
        for one in result["systems"]
        if one["eligible"]
    }
    volume = result["queries_a_month"]
    crossings = [
        (at, pair["systems"])
        for pair in result["break_even"]
        for part in pair["cheaper"][1:]
        if 1 / _FAR < (at := part["from_queries_a_month"]) / volume < _FAR
    ]
    shown = [volume, *(at for at, _ in crossings)]
    low, high = min(shown) / 30, max(shown) * 30
    ratio = (high / low) ** (1 / (_POINTS - 1))
    queries = [low * ratio**place for place in range(_POINTS)]

    def usd(system: str, at: float) -> float:
        return min(line.usd_a_month(at) for line in lines[system])

    title = f"{result['scenario']}: cost of a month, over {result['setting']['months']} months"
    figure, axes = panels([goal_text(result)], title, height=4 + 0.2 * len(lines), width=7.5)
    (axis,) = axes.values()
    axis.set_xscale("log")
    axis.set_yscale("log")
    for system in lines:
        colour = SYSTEM_COLOURS[system]
        axis.plot(queries, [usd(system, at) for at in queries], color=colour, linewidth=1.6)
    axis.axvline(volume, color="#888888", linewidth=1, linestyle=":")
    for at, systems in crossings:
        against = "standard_rag" in systems
        colour = SYSTEM_COLOURS[systems[1]]
        y = usd(systems[0], at)
        fill = colour if against else "white"
        axis.plot([at], [y], "o", color=colour, markerfacecolor=fill, markersize=6, zorder=3)
    axis.set_xlim(low, high)
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_locator(LogLocator(numticks=9))
        one.set_minor_locator(NullLocator())
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_xlabel(f"queries a month (dotted: the scenario's {volume_text(volume)})")
    axis.set_ylabel("USD a month")
    versus_standard = {
        pair["systems"][1]: _below_standard(pair)
        for pair in result["break_even"]
        if pair["systems"][0] == "standard_rag"
    }
    labels = {name: SYSTEM_NAMES[name] + versus_standard.get(name, "") for name in lines}
    keys = [
        Line2D([], [], color=SYSTEM_COLOURS[name], label=label, linewidth=1.6)
        for name, label in labels.items()
    ]
    legend(figure, keys)
    return figure


def _below_standard(pair: Json) -> str:
    """At which volumes a system is cheaper than Standard RAG, for its entry in the legend."""
    parts = pair["cheaper"]
    ranges = []
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        if part["system"] != pair["systems"][1]:
            continue
        start = part["from_queries_a_month"]
        words = [f"from {volume_text(start)}"] if start else []
        words += [f"up to {volume_text(after['from_queries_a_month'])}"] if after else []
        ranges.append(" ".join(words) or "at any volume")
    return f", cheaper than Standard RAG {' and '.join(ranges)}" if ranges else ""
