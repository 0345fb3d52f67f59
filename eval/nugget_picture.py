"""Answer coverage against active tokens, as a picture, from the result of `coinrag nuggets`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.drawing import legend, panels, save_as
from eval.labels import arm_name
from eval.looks import arm_looks, style_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]


def draw_nuggets(result: Json, path: Path) -> list[Path]:
    """Draw a panel for each data set and a line for each arm, its star at what it selects.

    Dashed is the best nuggets, as many as one likes, where an arm selects otherwise.

    Raises:
        UserError: see `drawing.save_as`.
    """
    return save_as(lambda: _picture(result), path)


def _picture(result: Json) -> "Figure":
    from matplotlib.lines import Line2D

    names = {row["dataset"]: row["dataset"] or "all" for row in result["rows"]}
    figure, axes = panels(names.values(), f"{result['recipe']}: answers in the selected slices")
    looks = arm_looks({"arm": row["arm"], "system": "coinrag"} for row in result["rows"])
    keys: dict[tuple[str, str], Line2D] = {}
    others = {curve["arm"] for curve in result["curves"] if curve["kind"] == "selection"}
    for curve in result["curves"]:
        arm, kind = curve["arm"], curve["kind"]
        plain = kind == "top_k" and arm in others
        if plain and arm:
            # The recipe's alone: lines of many arms would hide each other.
            continue
        look = looks[arm, "coinrag"]
        style = style_of(look, "base" if plain else "fine_tuned") | {"markersize": 3}
        points = [point for point in curve["points"] if point["tokens"] is not None]
        axes[names[curve["dataset"]]].plot(
            [point["tokens"] for point in points],
            [100 * point["coverage"] for point in points],
            **style,
        )
        label = f"{arm_name(arm)}{': best nuggets' if plain else ''}"
        keys.setdefault((arm, kind), Line2D([], [], label=label, **style))
    for row in result["rows"]:
        if row["coverage"] is not None:
            star = style_of(looks[row["arm"], "coinrag"], "fine_tuned")
            star |= {"marker": "*", "markersize": 13}
            axes[names[row["dataset"]]].plot(row["tokens"], row["coverage"]["mean"], **star)
    for axis in axes.values():
        axis.set_xlabel("active tokens of slices (mean)")
        axis.set_ylabel("answers in words that they hold (%)")
        axis.set_ylim(bottom=0)
    legend(figure, list(keys.values()))
    return figure
