"""The corpus statistics of builds, as the CoinRAG paper's Table 4 has them: table and picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]

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


def draw_statistics(report: Report, path: Path) -> None:
    """The histograms of a report as a PNG, one panel a quantity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    panels = zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True)
    for axes, (name, (counted, by)) in panels:
        pairs = report["histograms"][name]
        top = _upper(pairs)
        axes.hist(
            [min(value, top) for value, _ in pairs],
            # At most one bin a whole number.
            bins=min(40, top + 1),
            range=(-0.5, top + 0.5),
            weights=[times for _, times in pairs],
            color="#0072B2",
        )
        axes.set_xlabel(f"{by} ({top:,} or more in the last bin)")
        axes.set_ylabel(counted)
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
