"""The corpus statistics of builds, as the CoinRAG paper's Table 4 has them: table and picture."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]

_MOST_BINS = 40

# For each histogram of a report, what is counted and what it is counted by.
_PANELS = {
    "passage_words": ("passages", "words a passage"),
    "nugget_words": ("nuggets", "words a nugget"),
    "nuggets_a_chunk": ("chunks", "nuggets a chunk"),
    "nuggets_a_question": ("questions", "candidate nuggets a question"),
}


def render_statistics(reports: Mapping[str, Report]) -> str:
    """The statistics of each split's report side by side, as aligned text."""
    rows = {name: _figures(report) for name, report in reports.items()}
    labels = list(next(iter(rows.values())))
    width = max(map(len, labels))
    columns = {name: max(len(name), *map(len, row.values())) for name, row in rows.items()}
    head = "".join(f"  {name:>{columns[name]}}" for name in rows)
    lines = [f"{'':<{width}}{head}"]
    for label in labels:
        cells = "".join(f"  {row[label]:>{columns[name]}}" for name, row in rows.items())
        lines.append(f"{label:<{width}}{cells}")
    return "\n".join(lines)


def _figures(report: Report) -> dict[str, str]:
    corpus, found = report["corpus"], report["alignment"]
    candidates = sum(found.values())
    shares = {f"candidates {kind}": _percent(found[kind], candidates) for kind in found}
    return {
        "questions": f"{report['questions']:,}",
        "distinct passages": f"{corpus['passages']:,}",
        "words a passage": _mean(corpus["passage_words"]),
        "chunks": f"{corpus['chunks']:,}",
        "nuggets": f"{corpus['nuggets']:,}",
        "words a nugget": _mean(corpus["nugget_words"]),
        "candidate nuggets a question": _mean(corpus["nuggets_a_question"]),
        "overlap between neighbours": _share(corpus["neighbour_overlap"]),
        "tokens covered": _share(corpus["tokens_covered"]),
        **shares,
    }


def draw_statistics(report: Report, title: str, path: Path) -> None:
    """The histograms of a report as a PNG, one panel a quantity that was counted."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counted = {name: pairs for name, pairs in report["histograms"].items() if pairs}
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    figure.suptitle(title)
    for panel, (name, pairs) in enumerate(counted.items(), start=1):
        axes = figure.add_subplot(2, 2, panel)
        what, by = _PANELS[name]
        top = _upper(pairs)
        # Bins of equally many whole numbers; the last takes what is beyond it.
        width = math.ceil((top + 1) / _MOST_BINS)
        edges = [at * width - 0.5 for at in range(top // width + 2)]
        last = edges[-1] - 0.5
        times = [count for _, count in pairs]
        axes.hist([min(v, last) for v, _ in pairs], bins=edges, weights=times, color="#0072B2")
        mean = sum(value * count for value, count in pairs) / sum(times)
        axes.axvline(mean, color="#D55E00", linewidth=1.2)
        axes.text(mean, 1.0, f" mean {mean:,.1f}", transform=axes.get_xaxis_transform(), va="top")
        beyond = f" (last bin: {edges[-2] + 0.5:,.0f} and more)" if pairs[-1][0] > last else ""
        axes.set_xlabel(f"{by}{beyond}")
        axes.set_ylabel(what)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def _upper(pairs: list[tuple[int, int]]) -> int:
    """The 99th percentile of counted values: beyond it a panel would be mostly empty."""
    left = 0.99 * sum(times for _, times in pairs)
    for value, times in pairs:
        left -= times
        if left <= 0:
            return max(1, value)
    return 1


def _mean(quantiles: Mapping[str, float]) -> str:
    return f"{quantiles['mean']:,.1f}" if quantiles else "-"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _percent(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.2f}%)" if whole else "0"
