"""What the pictures of a comparison share: panels, axes, legends, labels, and how they are kept.

Matplotlib is imported where it is used: tables and answers do without it.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.errors import UserError
from recipes.files import write_text

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import Container
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

# The same file for the same numbers; a $ in the name of a data set is no formula.
_SETTINGS: Any = {"svg.hashsalt": "coinrag", "text.parse_math": False}
_METADATA: dict[str, dict[str, Any]] = {".png": {"Software": None}, ".svg": {"Date": None}}

# Where a label may lie: its offset from the point (points of the page), and which end is there.
_PLACES = [
    (8, 6, "left"),
    (8, -7, "left"),
    (-8, 6, "right"),
    (-8, -7, "right"),
    (0, 11, "center"),
    (0, -12, "center"),
]


def save(draw: Callable[[], "Figure"], paths: Iterable[Path]) -> None:
    """Make a picture and write it as PNG or SVG, by each path's suffix, whole or not at all.

    The same numbers give the same SVG to the byte.
    """
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        figure = draw()
        for path in paths:
            temporary = path.with_name(f".{path.name}.tmp")
            metadata = _METADATA[path.suffix]
            try:
                figure.savefig(temporary, format=path.suffix[1:], dpi=150, metadata=metadata)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)


def save_as(draw: Callable[[], "Figure"], path: Path) -> list[Path]:
    """Make a picture and write it as PNG and as SVG; the files.

    Both have `path`'s name with their suffix; its folder is made.

    Raises:
        UserError: nothing can be written there.
    """
    if not path.name or path.is_dir():
        raise UserError(f"no picture: {path} is a folder; give a file's name")
    stem = path.name.removesuffix(".png").removesuffix(".svg")
    paths = [path.with_name(f"{stem}.{kind}") for kind in ("png", "svg")]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(draw, paths)
    except OSError as error:
        raise UserError(f"no picture: {path}: {error.strerror}") from error
    return paths


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of the same keys under a head; None is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def panels(
    names: Iterable[str], title: str = "", *, height: float = 3.6, width: float = 5.5
) -> tuple["Figure", dict[str, "Axes"]]:
    """A figure with a panel for each name, two in a row; sizes of a panel in inches."""
    from matplotlib.figure import Figure

    found = list(names)
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(width * columns + 1, rows * height + 1.2), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11)
    axes = {name: figure.add_subplot(rows, columns, n + 1) for n, name in enumerate(found)}
    for name, axis in axes.items():
        axis.set_title(name, fontsize=10, loc="left")
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def log_axis(axis: "Axes", values: Sequence[float]) -> tuple[float, float]:
    """Makes the x axis logarithmic around values, its ticks plain numbers; its limits.

    A value of 0, which no such axis has, lies beyond its lower end.
    """
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive) / 1.3, max(positive) * 1.6
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    ticks = (1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 4, 5, 7)
    axis.xaxis.set_major_locator(LogLocator(subs=ticks))
    axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.xaxis.set_minor_locator(NullLocator())
    return low, high


def vertical_room(axis: "Axes", values: Sequence[float]) -> None:
    """The y axis around values of at least 0, with room for a marker on both sides."""
    low, high = min(values), max(values)
    room = max(2.0, 0.12 * (high - low))
    axis.set_ylim(max(low - room, -room / 2), high + room)


def shift(axis: "Axes", points: float) -> "Transform":
    """Data coordinates moved to the right by points of the page."""
    from matplotlib.transforms import ScaledTranslation

    return axis.transData + ScaledTranslation(points / 72, 0, axis.figure.dpi_scale_trans)


def legend(figure: "Figure", keys: Sequence["Artist | Container"]) -> None:
    """The legend below all panels, in as many columns as its longest entry leaves room for."""
    longest = max(len(str(key.get_label())) for key in keys)
    # At least 11 characters go into an inch; a key and gaps take the place of 8.
    room = int(figure.get_figwidth() * 11 / (longest + 8))
    lines = -(-len(keys) // max(1, room))
    columns = -(-len(keys) // lines)
    figure.legend(handles=keys, loc="outside lower center", ncols=columns, frameon=False)


def place_labels(axis: "Axes", labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Write (x, y, text, colour) beside their points where room is; others stay unwritten.

    Comes last, for it freezes the layout of the figure.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    figure = axis.get_figure(root=True)
    assert figure is not None, "an axis belongs to a figure"
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    size = 5 * figure.dpi / 72
    points = [axis.transData.transform((x, y)) for x, y, _, _ in labels]
    taken = [Bbox([point - size, point + size]) for point in points]
    panel = axis.get_window_extent()
    for x, y, text, colour in labels:
        for across, up, side in _PLACES:
            written = axis.annotate(
                text,
                (x, y),
                xytext=(across, up),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=8,
                color=colour,
                # Lines that pass below do not touch it.
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )
            box = written.get_window_extent()
            fits = panel.contains(*box.min) and panel.contains(*box.max)
            if fits and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            written.remove()


def shortened(text: str, limit: int = 36) -> str:
    """A long name without its middle."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[half + 1 - limit :]}"
