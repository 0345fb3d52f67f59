"""A comparison as plain text: tables, sample answers, notes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from eval.injection import render
from eval.labels import CHECKPOINT_NAMES, ERROR_NAMES, width_label
from eval.tables import Column, cell_columns, interval, number, percent, relative, table

Json = Mapping[str, Any]

_RESULTS = "F1 and EM x 100, TTFT in ms"
_RETRIEVAL = "retrieval, and wrong answers (F1 below 100) by every kind of error they show"
_BUDGET = (
    "best width of each system by P99 TTFT, chosen on these very questions; "
    "F1 points (95% interval, paired) and percent against CoinRAG"
)
_DIFFERENCES = {
    "fine_tuning": "fine-tuned minus base",
    "ablation": "each arm minus the recipe",
    "interaction": "both changes at once minus each alone: a+b - a - b + recipe",
    "system": "each system minus CoinRAG at the same k_c",
}
_PAIRED = "F1 points (95% interval of a paired bootstrap), and percent of the F1 compared with"


def render_table(result: Json) -> str:
    """The content of `compare.json` as aligned text: results, differences, sample answers, notes.

    Tables give every cell of the comparison; sample answers are those of the recipe at each
    system's largest width.
    """
    rows, datasets = result["results"], list(result["questions_by_dataset"])
    questions = sum(result["questions_by_dataset"].values())
    parts = [
        f"{result['recipe']}: {questions} questions, {_RESULTS}\n"
        + table(rows, [*cell_columns(rows), *_results(rows, datasets)]),
        f"{_RETRIEVAL}\n{table(rows, [*cell_columns(rows), *_retrieval(rows)])}",
        f"{_BUDGET}\n{_render_budget(result['budget'], datasets)}",
    ]
    for kind, group in groupby(result["differences"], key=lambda row: row["kind"]):
        found = list(group)
        shown = table(found, [*cell_columns(found), *_differences(kind, datasets)])
        parts.append(f"{_DIFFERENCES[kind]}: {_PAIRED}\n{shown}")
    if "injection" in result:
        parts.append(render(result["injection"]))
    parts += [_render_example(example) for example in result["examples"]]
    parts += [f"note: {note}" for note in result["notes"]]
    offline = ", ".join(
        f"{CHECKPOINT_NAMES[name]} {cost['chunk_tokens']} chunk tokens in {cost['seconds']:.1f} s"
        for name, cost in result["offline"].items()
    )
    parts.append(f"encoded before the clock: {offline}")
    return "\n\n".join(parts)


def _results(rows: Sequence[Json], datasets: Iterable[str]) -> list[Column]:
    asked: list[Column] = [("questions", lambda row: str(row["questions"]))]
    return [
        *(asked if len({row["questions"] for row in rows}) > 1 else []),
        ("F1", lambda row: number(row["f1"])),
        ("95% interval", lambda row: f"[{row['f1_low']:.1f}, {row['f1_high']:.1f}]"),
        *_f1_by_dataset(datasets),
        ("EM", lambda row: number(row["em"])),
        ("TTFT p50", lambda row: number(row["ttft_p50_ms"])),
        ("p90", lambda row: number(row["ttft_p90_ms"])),
        ("p99", lambda row: number(row["ttft_p99_ms"])),
        ("active tokens", lambda row: f"{row['active_tokens']:.0f}"),
        ("stopped", lambda row: percent(row["stop_rate"])),
    ]


def _retrieval(rows: Iterable[Json]) -> list[Column]:
    extract: list[Column] = [("extract p50 ms", lambda row: number(row["extract_p50_ms"]))]
    return [
        ("gold found", lambda row: percent(row["gold_recall"])),
        ("answer in prefix", lambda row: percent(row["answer_coverage"])),
        ("gold tokens", lambda row: percent(row["gold_share"])),
        ("wrong", lambda row: str(row["wrong"])),
        *((name, _error_count(kind)) for kind, name in ERROR_NAMES.items()),
        ("load p50 ms", lambda row: number(row["load_p50_ms"])),
        *(extract if any(row["extract_p50_ms"] for row in rows) else []),
    ]


def _render_budget(rows: Iterable[Json], datasets: Sequence[str]) -> str:
    found = list(rows)
    limits: list[Column] = [("P99 within", lambda row: _limit(row["budget_ms"]))]
    columns: list[Column] = [
        ("F1", lambda row: number(row["f1"])),
        *_f1_by_dataset(datasets),
        ("TTFT mean", lambda row: number(row["ttft_mean_ms"])),
        ("p99", lambda row: number(row["ttft_p99_ms"])),
        ("active tokens", lambda row: f"{row['active_tokens']:.0f}"),
        ("F1 points", lambda row: interval(row["difference"])),
        ("relative", lambda row: relative(row["difference"])),
    ]
    return table(found, [*limits, *cell_columns(found), *columns])


def _differences(kind: str, datasets: Iterable[str]) -> list[Column]:
    against: list[Column] = [("CoinRAG", lambda row: width_label(row["against"]))]
    return [
        *(against if kind == "system" else []),
        ("questions", lambda row: str(row["questions"])),
        ("F1 points", interval),
        ("relative", relative),
        *((name, _difference_within(name)) for name in datasets),
    ]


def _f1_by_dataset(datasets: Iterable[str]) -> list[Column]:
    def column(dataset: str) -> Column:
        return dataset, lambda row: number(row["f1_by_dataset"].get(dataset))

    return [column(dataset) for dataset in datasets]


def _difference_within(dataset: str) -> Callable[[Json], str]:
    return lambda row: interval(row["by_dataset"].get(dataset))


def _error_count(kind: str) -> Callable[[Json], str]:
    return lambda row: str(row["errors"][kind])


def _render_example(example: Json) -> str:
    lines = [
        f"[{example['dataset']}] {example['question'].strip()}",
        f"  gold: {' | '.join(example['gold'])}",
    ]
    # Answers are in the order of their widths, so that the widest stays.
    widest = {(a["system"], a["checkpoint"]): a for a in example["answers"] if not a["arm"]}
    answers = list(widest.values())
    columns: list[Column] = [
        *cell_columns(answers),
        ("F1", lambda row: f"F1 {row['f1']:.0f}"),
        ("answer", lambda row: _one_line(row["answer"])),
    ]
    shown = table(answers, columns, left=len(columns)).split("\n")
    return "\n".join([*lines, *(f"  {line}" for line in shown[1:])])


def _limit(budget_ms: float | None) -> str:
    return "any time" if budget_ms is None else f"{budget_ms:g} ms"


def _one_line(text: str, limit: int = 70) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
