"""The result of `coinrag nuggets` as plain text."""

from collections.abc import Callable, Mapping
from typing import Any

from eval.labels import arm_name
from eval.nugget_figures import RECALLS
from eval.tables import Column, interval, number, percent, table

Json = Mapping[str, Any]

_FOUND = (
    "what retrieval and extractor leave, and, where a retrieved gold chunk has a nugget with the "
    "answer (answerable), whether one is among the best N; percent, 95% intervals"
)
_SELECTED = (
    "answers in the selected slices, percent with 95% intervals; in points, paired: minus the "
    "recipe, and minus the recipe's best nuggets at as many tokens"
)
_THRESHOLDS = (
    "thresholds that keep answer-bearing nuggets, found on train; of a nugget without the answer "
    "in a gold chunk nobody knows whether it is the bridge to it"
)


def render_nuggets(result: Json) -> str:
    """The tables of `nugget_figures.nugget_figures`."""
    rows = result["rows"]
    names, arms = _names(rows), any(row["arm"] for row in rows)
    parts = [
        f"{result['recipe']}: {result['questions']} dev questions, {result['in_words']} with an "
        f"answer in words\n{_FOUND}\n{table(rows, [*names, *_found(arms)], len(names))}",
        f"{_SELECTED}\n{table(rows, [*names, *_selected(arms)], len(names))}",
    ]
    if "no_thresholds" in result:
        parts.append(f"no thresholds: {result['no_thresholds']}")
    elif not result["thresholds"]:
        parts.append("no thresholds: no nugget of the train split holds an answer")
    else:
        shown = table(result["thresholds"], _threshold_columns(), 2)
        parts.append(f"{_THRESHOLDS}\nscorer: {result['scorer']}\n{shown}")
    return "\n\n".join(parts)


def _names(rows: list[Json]) -> list[Column]:
    datasets: list[Column] = [("data", lambda row: row["dataset"] or "all")]
    several = any(row["dataset"] for row in rows)
    return [*(datasets if several else []), ("arm", lambda row: arm_name(row["arm"]))]


def _found(arms: bool) -> list[Column]:
    return [
        ("gold found", lambda row: percent(row["gold_recall"])),
        ("answer in chunks", lambda row: percent(row["answer_in_chunks"])),
        ("in a nugget", lambda row: percent(row["answer_in_nuggets"])),
        ("tokens covered", lambda row: percent(row["tokens_covered"])),
        ("answerable", lambda row: str(row["answerable"])),
        *(column for name in RECALLS for column in _recall(name, arms)),
    ]


def _recall(name: str, arms: bool) -> list[Column]:
    minus: list[Column] = [("minus recipe", lambda row: interval(row["difference"][name]))]
    head = name.replace("recall_at_", "in best ")
    return [(head, lambda row: _bounds(row[name])), *(minus if arms else [])]


def _selected(arms: bool) -> list[Column]:
    minus: list[Column] = [("minus recipe", lambda row: interval(row["difference"]["coverage"]))]
    return [
        ("nuggets", lambda row: number(row["nuggets"])),
        ("active tokens", lambda row: number(row["tokens"])),
        ("gold in slices", lambda row: percent(row["gold_selected"])),
        ("coverage", lambda row: _bounds(row["coverage"])),
        *(minus if arms else []),
        ("at equal tokens", lambda row: interval(row["difference"]["at_equal_tokens"])),
    ]


def _threshold_columns() -> list[Column]:
    def share(split: str, name: str) -> Callable[[Json], str]:
        return lambda row: percent(row[split][name])

    return [
        ("keeps", lambda row: percent(row["kept"])),
        ("threshold", lambda row: f"retrieval.min_score={row['min_score']}"),
        ("others out", share("train", "others_left_out")),
        ("in gold chunks", share("train", "gold_left_out")),
        ("on dev: keeps", share("dev", "answering_kept")),
        ("others out", share("dev", "others_left_out")),
        ("in gold chunks", share("dev", "gold_left_out")),
        ("selected: coverage", lambda row: percent(row["selection"]["coverage"])),
        ("active tokens", lambda row: number(row["selection"]["tokens"])),
    ]


def _bounds(value: Json | None) -> str:
    if value is None:
        return "-"
    return f"{value['mean']:.1f} [{value['low']:.1f}, {value['high']:.1f}]"
