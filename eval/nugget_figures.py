"""`coinrag nuggets`: extractor, scorer and selection of a recipe and its arms, from built tables.

Arms are those of a comparison whose dev tables are others than the recipe's. Each figure of an arm
is compared with the recipe's on the questions that both have, by a paired bootstrap.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_builders.build import built_folder, load_built
from eval.nugget_outcomes import RECALL_AT, Outcomes, Point, at_tokens, mean_or_none, outcomes
from eval.questions import arm_questions
from eval.significance import bootstrap_intervals
from eval.systems import Question
from eval.thresholds import calibrate
from recipes.arms import Arm, arms_of
from recipes.errors import UserError
from recipes.retrieval import RetrievalConfig
from recipes.schema import Recipe

Json = dict[str, Any]
SHARES = ("gold_recall", "answer_in_chunks", "answer_in_nuggets", "tokens_covered", "gold_selected")
RECALLS = tuple(f"recall_at_{k}" for k in RECALL_AT)


@dataclass(frozen=True)
class Measured:
    """An arm with the figures of each of its dev questions."""

    arm: Arm
    outcomes: Outcomes
    datasets: Mapping[str, str]
    """Of each question by its id."""

    def ids(self, values: Iterable[str], dataset: str | None) -> list[str]:
        """Those of some questions that are of a data set; None: of any."""
        return [name for name in values if dataset in (None, self.datasets[name])]


def nugget_figures(config: Recipe) -> Json:
    """The figures of the recipe and of each of its arms that has dev tables of its own.

    Returns:
        `rows`, one for each arm and data set, None being all: shares in percent; recalls and
        `coverage`, with intervals; mean `tokens` and `nuggets` of the selection; and `difference`,
        in points, to the recipe and, for `at_equal_tokens`, from the coverage of the recipe's best
        nuggets, as many as have the same tokens. `curves`: coverage against mean tokens.
        `thresholds`: see `thresholds.calibrate`; or `no_thresholds`, why there are none.

    Raises:
        UserError: dev tables are not built, or an arm does not make a recipe.
    """
    found = {}
    for arm in arms_of(config):
        folder = built_folder(arm.config, "dev")
        if folder not in found and ("coinrag" in arm.systems or not arm.name):
            found[folder] = _measured(arm, config.eval.questions_per_dataset)
    arms = [measured for measured, _ in found.values()]
    questions = next(asked for _, asked in found.values())
    datasets = [None, *dict.fromkeys(arms[0].datasets.values())]
    datasets = datasets if len(datasets) > 2 else [None]
    return {
        "recipe": config.name,
        "questions": len(arms[0].datasets),
        "in_words": len(arms[0].outcomes.values["coverage"]),
        "rows": _rows(arms, datasets, config),
        "curves": [
            curve for one in arms for dataset in datasets for curve in _curves(one, dataset)
        ],
        **_thresholds(config, questions),
    }


def _measured(arm: Arm, limit: int | None) -> tuple[Measured, list[Question]]:
    asked = list(arm_questions(arm, limit).values())
    found = outcomes(asked, arm.config.retrieval)
    if not found.values["coverage"]:
        raise UserError(
            "no answer of the built dev data is in words: what yes and no stand on cannot be found"
        )
    return Measured(arm, found, {one.question_id: one.dataset for one in asked}), asked


def _thresholds(config: Recipe, questions: Sequence[Question]) -> Json:
    try:
        train = load_built(config, "train")
    except UserError as error:
        return {"no_thresholds": str(error)}
    return {
        "scorer": scorer_name(config.retrieval),
        "thresholds": calibrate(train, questions, config.retrieval),
    }


def scorer_name(config: RetrievalConfig) -> str:
    """What a threshold on scores belongs to."""
    weights = [f"{name} {value:g}" for name, value in config.weights.model_dump().items() if value]
    section = getattr(config, config.nugget_scorer, None)
    if section is None:
        return f"{config.nugget_scorer}, {config.encoder} ({', '.join(weights)})"
    return f"{config.nugget_scorer}, {section.path}"


class _Intervals:
    """Series whose intervals are found together: resamples are drawn once for all of one size."""

    def __init__(self) -> None:
        self._pending: list[tuple[Json, str, list[float]]] = []

    def put(self, row: Json, name: str, values: Iterable[float]) -> None:
        """Has `row[name]` become the mean, in percent, with its interval; None for no values."""
        found = [100 * value for value in values]
        row[name] = None
        if found:
            self._pending.append((row, name, found))

    def fill(self, resamples: int, seed: int) -> None:
        """Fills all rows."""
        series = [values for _, _, values in self._pending]
        found = bootstrap_intervals(series, resamples=resamples, seed=seed)
        for (row, name, _), interval in zip(self._pending, found, strict=True):
            row[name] = {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _rows(arms: Sequence[Measured], datasets: Sequence[str | None], config: Recipe) -> list[Json]:
    intervals, rows = _Intervals(), []
    for dataset in datasets:
        for one in arms:
            values = one.outcomes.values
            row: Json = {"arm": one.arm.name, "dataset": dataset}
            for name in (*SHARES, "tokens", "nuggets"):
                own = values.get(name, {})
                row[name] = mean_or_none([own[n] for n in one.ids(own, dataset)])
            row["answerable"] = len(one.ids(values.get(RECALLS[0], {}), dataset))
            row["difference"] = {}
            for name in (*RECALLS, "coverage"):
                own, before = values.get(name, {}), arms[0].outcomes.values.get(name, {})
                intervals.put(row, name, [own[n] for n in one.ids(own, dataset)])
                both = one.ids([n for n in own if n in before], dataset) if one.arm.name else []
                intervals.put(row["difference"], name, [own[n] - before[n] for n in both])
            equal = _at_equal_tokens(one, arms[0], dataset)
            intervals.put(row["difference"], "at_equal_tokens", equal)
            rows.append(row)
    intervals.fill(config.eval.bootstrap_resamples, config.seed)
    return rows


def _at_equal_tokens(one: Measured, recipe: Measured, dataset: str | None) -> list[float]:
    """The coverage of each question less that of the recipe's best nuggets, as many as cost that.

    Nothing for the best nuggets of the recipe themselves, and where those cannot cost so much.
    """
    if one is recipe and one.outcomes.selection is one.outcomes.top_k:
        return []
    coverage, tokens = one.outcomes.values["coverage"], one.outcomes.values["tokens"]
    shared = [name for name in coverage if name in recipe.outcomes.values["coverage"]]
    ids = one.ids(shared, dataset)
    if not ids:
        return []
    equal = at_tokens(recipe.outcomes.top_k, ids, sum(tokens[name] for name in ids) / len(ids))
    return [] if equal is None else [coverage[name] - equal[name] for name in ids]


def _curves(one: Measured, dataset: str | None) -> list[Json]:
    kinds = {"top_k": one.outcomes.top_k}
    if one.outcomes.selection is not one.outcomes.top_k:
        kinds["selection"] = one.outcomes.selection
    return [
        {
            "arm": one.arm.name,
            "dataset": dataset,
            "kind": kind,
            "points": [_drawn(one, point, dataset) for point in points],
        }
        for kind, points in kinds.items()
    ]


def _drawn(one: Measured, point: Point, dataset: str | None) -> Json:
    ids = one.ids(point.coverage, dataset)
    return {
        "limit": point.limit,
        "tokens": mean_or_none([point.tokens[name] for name in ids]),
        "coverage": mean_or_none([point.coverage[name] for name in ids]),
    }
