"""How series of cells look in every picture of a comparison.

A system has one colour and one marker throughout, its arms have others; hollow and dashed is base,
filled and solid is fine-tuned.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from eval.drawing import shortened
from eval.labels import (
    CHECKPOINT_NAMES,
    SYSTEM_COLOURS,
    SYSTEM_MARKERS,
    SYSTEM_NAMES,
    arm_name,
)

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

Row = Mapping[str, Any]
Style = dict[str, Any]
# An arm of a system; a colour and a marker.
Arm = tuple[str, str]
Look = tuple[str, str]

_ARM_COLOURS = [colour for system, colour in SYSTEM_COLOURS.items() if system != "coinrag"]
# Seven have no common divisor with the colours: many arms pass before two look alike.
_ARM_MARKERS = "s^vDPX<"


def arm_of(row: Row) -> Arm:
    """The arm, "" being the recipe, and the system of a row."""
    return row["arm"], row["system"]


def arm_label(arm: Arm) -> str:
    """An arm with its system, where arms are shown."""
    name, system = arm
    return f"{SYSTEM_NAMES[system]}: {shortened(arm_name(name))}"


def arm_looks(rows: Iterable[Row]) -> dict[Arm, Look]:
    """A colour and a marker for every arm, those of its system for the recipe's."""
    others = zip(cycle(_ARM_COLOURS), cycle(_ARM_MARKERS), strict=False)
    return {
        (name, system): next(others) if name else (SYSTEM_COLOURS[system], SYSTEM_MARKERS[system])
        for name, system in dict.fromkeys(map(arm_of, rows))
    }


def style_of(look: Look, checkpoint: str) -> Style:
    """What Matplotlib takes to draw a line with markers in a look."""
    colour, marker = look
    tuned = checkpoint == "fine_tuned"
    return {
        "color": colour,
        "marker": marker,
        "markersize": 6,
        "markerfacecolor": colour if tuned else "white",
        "linestyle": "-" if tuned else (0, (4, 2)),
        "linewidth": 1.3,
    }


def series_of(rows: Iterable[Row], looks: Mapping[Arm, Look]) -> list[tuple[Style, list[Row]]]:
    """The cells of each arm and checkpoint, with how they are drawn."""
    series: dict[tuple[Arm, str], list[Row]] = {}
    for row in rows:
        series.setdefault((arm_of(row), row["checkpoint"]), []).append(row)
    return [
        (style_of(looks[arm], checkpoint), points) for (arm, checkpoint), points in series.items()
    ]


def arm_keys(rows: Sequence[Row], looks: Mapping[Arm, Look]) -> list["Line2D"]:
    """The legend's entries: an arm, or a system where there are no arms, then the checkpoints."""
    arms = any(name for name, _ in looks)
    return [
        *(
            _key(arm_label(arm) if arms else SYSTEM_NAMES[arm[1]], style_of(look, "fine_tuned"))
            for arm, look in looks.items()
        ),
        *checkpoint_keys(rows),
    ]


def checkpoint_keys(rows: Sequence[Row]) -> list["Line2D"]:
    """The legend's entries for hollow and filled."""
    return [
        _key(name, style_of(("#444444", "o"), checkpoint))
        for checkpoint, name in CHECKPOINT_NAMES.items()
        if any(row["checkpoint"] == checkpoint for row in rows)
    ]


def _key(label: str, style: Style) -> "Line2D":
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style)
