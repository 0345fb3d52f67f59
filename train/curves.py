"""The picture of a run: its loss, gradient norm, learning rate and evaluations over its steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE, _MARK = "#0072B2", "#D55E00"
_PANELS = {
    "loss": "loss, nats an answer token",
    "gradient_norm": "gradient norm before clipping",
    "learning_rate": "learning rate",
}


def draw_curves(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the lines of a run's metrics as a PNG, whole or not at all; nothing without a step."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    steps = [line for line in lines if "loss" in line]
    spikes = [line for line in lines if "spike" in line]
    evaluations = [line for line in lines if "evaluation" in line]
    if not steps:
        return
    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(11, 7), layout="constrained")
        for number, (name, title) in enumerate(_PANELS.items(), start=1):
            axes = figure.add_subplot(2, 2, number)
            _prepare(axes, title)
            marker = "." if len(steps) < 30 else ""
            places = [line["step"] for line in steps]
            axes.plot(places, [line[name] for line in steps], _LINE, marker=marker, linewidth=1.2)
            if high := [line for line in spikes if name in line["spike"]]:
                values = [line["spike"][name]["value"] for line in high]
                at = [line["step"] for line in high]
                axes.plot(at, values, "x", color=_MARK, label=f"{len(high)} spikes")
                axes.legend(frameon=False)
        axes = figure.add_subplot(2, 2, 4)
        _prepare(axes, "dev F1, %" if evaluations else "no evaluation so far")
        _draw_evaluations(axes, evaluations)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _prepare(axes: "Axes", title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("optimizer steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_evaluations(axes: "Axes", evaluations: Sequence[Mapping[str, Any]]) -> None:
    """F1 over all questions, and thin lines for each data set where there are several."""
    if not evaluations:
        axes.set_axis_off()
        return
    at = [line["step"] for line in evaluations]
    by_dataset = [line["evaluation"]["f1_by_dataset"] for line in evaluations]
    if len(by_dataset[0]) > 1:
        for number, name in enumerate(by_dataset[0], start=1):
            f1 = [found[name] for found in by_dataset]
            axes.plot(at, f1, f"C{number}--", linewidth=0.9, label=name)
    f1 = [line["evaluation"]["f1"] for line in evaluations]
    axes.plot(at, f1, _LINE, marker="o", linewidth=2, label="all questions")
    best = max(range(len(f1)), key=lambda place: (f1[place], place))
    axes.plot(at[best], f1[best], "*", color=_MARK, markersize=14, label=f"best: {f1[best]:.1f}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
