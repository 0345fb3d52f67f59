"""Rows of a comparison as aligned text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from eval.labels import CHECKPOINT_NAMES, SYSTEM_NAMES, arm_name, width_label

Json = Mapping[str, Any]
# A column: its head, and what it shows of a row.
Column = tuple[str, Callable[[Json], str]]


def table(rows: Sequence[Json], columns: Sequence[Column], left: int | None = None) -> str:
    """Columns two spaces apart: those up to `weights`, or the first `left`, to the left.

    A line end in a cell, as a name may have one, becomes a space.
    """
    heads = [head for head, _ in columns]
    left = heads.index("weights") + 1 if left is None else left
    cells = [heads, *([show(row) for _, show in columns] for row in rows)]
    lines = [[" ".join(cell.split()) for cell in line] for line in cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def cell_columns(rows: Iterable[Json]) -> list[Column]:
    """What names a row's cell; the arm only where there are arms."""
    arm: list[Column] = [("arm", lambda row: arm_name(row["arm"]))]
    return [
        *(arm if any(row["arm"] for row in rows) else []),
        ("system", lambda row: SYSTEM_NAMES[row["system"]]),
        ("k_c/k", width_label),
        ("weights", lambda row: CHECKPOINT_NAMES[row["checkpoint"]]),
    ]


def number(value: float | None) -> str:
    """With one digit after the point; a dash for None."""
    return "-" if value is None else f"{value:.1f}"


def percent(share: float | None) -> str:
    """A share of 1 in whole percent; a dash for None."""
    return "-" if share is None else f"{100 * share:.0f}%"


def interval(difference: Json | None) -> str:
    """A signed mean with its interval; a dash for None."""
    if difference is None:
        return "-"
    return f"{difference['mean']:+.1f} [{difference['low']:+.1f}, {difference['high']:+.1f}]"


def relative(difference: Json | None) -> str:
    """The percentage of a difference, as such."""
    share = difference["relative_percent"] if difference else None
    return "-" if share is None else f"{share:+.1f}%"
