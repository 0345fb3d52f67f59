"""A comparison for the reader: a plain-text table and a picture."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Json = Mapping[str, Any]

_WEIGHTS = {"base": "base", "fine_tuned": "fine-tuned"}
_NAMES = {"standard_rag": "Standard RAG", "turborag": "TurboRAG", "coinrag": "CoinRAG"}
# Okabe and Ito's palette, which readers with any colour vision can tell apart.
_COLOURS = {"standard_rag": "#555555", "turborag": "#D55E00", "coinrag": "#0072B2"}

# Where series would lie on each other: both weights everywhere, whole chunks at equal tokens.
_SHIFT_POINTS = {"base": -3, "fine_tuned": 3, "standard_rag": -6, "turborag": 6, "coinrag": 0}


def render_table(result: Json) -> str:
    """The content of `compare.json` as aligned text: results, gains, sample answers, notes."""
    rows = result["results"]
    datasets = list(rows[0]["f1_by_dataset"])
    head = ["system", "k_c/k", "weights", "F1", "95% interval", "EM"]
    head += [*datasets, "TTFT p50 ms", "p99 ms", "load p50", "active tokens", "stopped"]
    table = [
        [
            _NAMES[row["system"]],
            _width(row),
            _WEIGHTS[row["checkpoint"]],
            f"{row['f1']:.1f}",
            f"[{row['f1_low']:.1f}, {row['f1_high']:.1f}]",
            f"{row['em']:.1f}",
            *(f"{row['f1_by_dataset'][name]:.1f}" for name in datasets),
            f"{row['ttft_p50_ms']:.1f}",
            f"{row['ttft_p99_ms']:.1f}",
            f"{row['load_p50_ms']:.1f}",
            f"{row['active_tokens']:.0f}",
            f"{100 * row['stop_rate']:.0f}%",
        ]
        for row in rows
    ]
    title = f"{result['recipe']}: {rows[0]['questions']} questions, F1 and EM x 100"
    parts = [f"{title}\n{_align([head, *table], left=3)}"]
    if result["differences"]:
        parts.append(_render_differences(result["differences"], datasets))
    parts += [_render_example(example) for example in result["examples"]]
    parts += [f"note: {note}" for note in result["notes"]]
    offline = ", ".join(
        f"{_WEIGHTS[name]} {cost['chunk_tokens']} chunk tokens in {cost['seconds']:.1f} s"
        for name, cost in result["offline"].items()
    )
    parts.append(f"encoded before the clock: {offline}")
    return "\n\n".join(parts)


def _render_differences(differences: Sequence[Json], datasets: Sequence[str]) -> str:
    table = [
        [
            _NAMES[row["system"]],
            _width(row),
            _interval(row["pooled"]),
            *(_interval(row["by_dataset"][name]) for name in datasets),
        ]
        for row in differences
    ]
    head = ["system", "k_c/k", "pooled", *datasets]
    title = "F1 of fine-tuned minus base, with the 95% interval of a paired bootstrap"
    return f"{title}\n{_align([head, *table], left=2)}"


def _render_example(example: Json) -> str:
    lines = [
        f"[{example['dataset']}] {example['question'].strip()}",
        f"  gold: {' | '.join(example['gold'])}",
    ]
    table = [
        [
            _NAMES[answer["system"]],
            _width(answer),
            _WEIGHTS[answer["checkpoint"]],
            f"F1 {answer['f1']:.0f}",
            _one_line(answer["answer"]),
        ]
        for answer in example["answers"]
    ]
    lines += [f"  {line}" for line in _align(table, left=5).split("\n")]
    return "\n".join(lines)


def _width(row: Json) -> str:
    return f"{row['k_c']}/{'all' if row['k'] is None else row['k']}"


def _interval(difference: Json) -> str:
    return f"{difference['mean']:+.1f} [{difference['low']:+.1f}, {difference['high']:+.1f}]"


def _one_line(text: str, limit: int = 70) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _align(rows: Sequence[Sequence[str]], left: int) -> str:
    """Columns two spaces apart, the first `left` of them to the left and the rest to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def plot(result: Json, path: Path) -> None:
    """Draw F1 against active tokens and against median TTFT, as a PNG, whole or not at all.

    A colour a system; hollow is base and filled is fine-tuned; bars are 95% bootstrap intervals of
    the F1; the widths of one system and checkpoint are joined by a line and named. Series are
    set apart by a few points of the page, so that bars at the same place stay readable.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(10.5, 5), layout="constrained")
    tokens, ttft = figure.subplots(1, 2, sharey=True)
    _draw(tokens, result["results"], "active_tokens", name_widths=True)
    _draw(ttft, result["results"], "ttft_p50_ms", name_widths=False)
    # Shifted artists do not count for automatic limits.
    rows = result["results"]
    slowest, fastest = (choose(row["ttft_p50_ms"] for row in rows) for choose in (max, min))
    ttft.set_xlim(fastest / 1.6, slowest * 1.6)
    tokens.set_xlim(0, 1.15 * max(row["active_tokens"] for row in rows))
    tokens.set_ylim(0, 1.08 * max(1.0, *(row["f1_high"] for row in rows)))
    tokens.set_xlabel("active prefix tokens (mean)")
    tokens.set_ylabel("token F1 (x 100)")
    # Full prefill is several times slower than a cached prefix, and often many times.
    ttft.set_xscale("log")
    ttft.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ttft.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    ttft.xaxis.set_minor_locator(NullLocator())
    ttft.set_xlabel("time to first token (ms, median, log scale)")
    handles, labels = tokens.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_NAMES), frameon=False)
    questions = result["results"][0]["questions"]
    figure.suptitle(
        f"{result['recipe']}: {questions} questions; bars are 95% intervals; points set apart"
    )

    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=150)
    temporary.replace(path)


def _draw(axis: "Axes", rows: Iterable[Json], field: str, *, name_widths: bool) -> None:
    from matplotlib.transforms import ScaledTranslation

    series: dict[tuple[str, str], list[Json]] = {}
    for row in rows:
        series.setdefault((row["system"], row["checkpoint"]), []).append(row)
    for (system, checkpoint), points in series.items():
        points.sort(key=lambda row: row[field])
        x, f1 = [row[field] for row in points], [row["f1"] for row in points]
        below = [row["f1"] - row["f1_low"] for row in points]
        above = [row["f1_high"] - row["f1"] for row in points]
        colour, tuned = _COLOURS[system], checkpoint == "fine_tuned"
        shift_points = _SHIFT_POINTS[checkpoint] + _SHIFT_POINTS[system]
        shift = ScaledTranslation(shift_points / 72, 0, axis.figure.dpi_scale_trans)
        shifted = axis.transData + shift
        axis.errorbar(
            x,
            f1,
            yerr=[below, above],
            label=f"{_NAMES[system]}, {_WEIGHTS[checkpoint]}",
            transform=shifted,
            color=colour,
            marker="o",
            markersize=7,
            markerfacecolor=colour if tuned else "white",
            linestyle="-" if tuned else "--",
            linewidth=1.2,
            capsize=3,
        )
        if name_widths and len(points) > 1:
            for row in points:
                axis.annotate(
                    _width(row),
                    (row[field], row["f1"]),
                    xycoords=shifted,
                    xytext=(6, 5),
                    textcoords="offset points",
                    fontsize=8,
                    color=colour,
                )
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
