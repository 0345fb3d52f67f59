"""The differences that a comparison was made for, paired by question.

Each is in F1 points (F1 times 100) and, apart from that, in percent of the F1 that it is measured
against; the two are never the same number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eval.answers import Answer, Variant
from eval.significance import bootstrap_intervals

Json = dict[str, Any]


@dataclass(frozen=True)
class Contrast:
    """A signed sum of cells' F1; `against` is the one whose F1 a percentage refers to."""

    kind: str
    cell: Variant
    against: Variant
    plus: tuple[Variant, ...]
    minus: tuple[Variant, ...]


def versus(kind: str, cell: Variant, against: Variant) -> Contrast:
    """One cell minus another."""
    return Contrast(kind, cell, against, (cell,), (against,))


def contrasts_among(cells: Iterable[Variant]) -> list[Contrast]:
    """Every difference that follows from which cells there are, by kind.

    fine_tuning: fine-tuned minus base, all else equal. ablation: an arm minus the recipe.
    interaction: what two changes together do beyond the sum of what each does alone; only ablations
    may be joined so, and an arm `a+b` is known by its name. system: another system minus CoinRAG at
    the same k_c, and at the same k or else CoinRAG's largest.
    """
    found = list(cells)
    made = [
        *(versus("fine_tuning", cell, base) for cell in found if (base := _base(cell, found))),
        *(versus("ablation", cell, recipe) for cell in found if (recipe := _recipe(cell, found))),
    ]
    for cell in found:
        if cell.arm.count("+") == 1:
            first, second = (cell._replace(arm=arm) for arm in cell.arm.split("+"))
            recipe = cell._replace(arm="")
            if len({first, second, recipe}.intersection(found)) == 3:
                made.append(Contrast("interaction", cell, recipe, (cell, recipe), (first, second)))
    made += [versus("system", cell, other) for cell in found if (other := _coinrag(cell, found))]
    return made


def measure(
    contrasts: Sequence[Contrast],
    cells: Mapping[Variant, Mapping[str, Answer]],
    *,
    resamples: int,
    seed: int,
) -> list[Json]:
    """The contrasts as rows of `differences`, on the questions that all their cells answered.

    `cells` has each cell's answers by question. Contrasts without a common question are left out.
    `mean`, `low` and `high` are F1 points with a 95% interval; `relative_percent` is the mean in
    percent of the F1 of `against` on those questions, None where that is 0.
    """
    parts: list[tuple[Contrast, str | None, list[str]]] = []
    for contrast in contrasts:
        others = [cells[cell] for cell in (*contrast.plus, *contrast.minus)]
        answers = cells[contrast.cell]
        common = [q for q in answers if all(q in other for other in others)]
        if not common:
            continue
        parts.append((contrast, None, common))
        for dataset in dict.fromkeys(answers[q].dataset for q in common):
            parts.append((contrast, dataset, [q for q in common if answers[q].dataset == dataset]))

    def f1(cell: Variant, questions: Sequence[str]) -> np.ndarray:
        return np.array([100 * cells[cell][q].f1 for q in questions])

    series = [
        sum(f1(cell, questions) for cell in contrast.plus)
        - sum(f1(cell, questions) for cell in contrast.minus)
        for contrast, _, questions in parts
    ]
    rows: list[Json] = []
    intervals = bootstrap_intervals(series, resamples=resamples, seed=seed)
    for (contrast, part, questions), interval in zip(parts, intervals, strict=True):
        against = float(f1(contrast.against, questions).mean())
        figures = {
            "questions": len(questions),
            **asdict(interval),
            "relative_percent": 100 * interval.mean / against if against else None,
        }
        if part is None:
            head = {"kind": contrast.kind, **contrast.cell._asdict()}
            rows.append({**head, "against": contrast.against._asdict(), **figures})
            rows[-1]["by_dataset"] = {}
        else:
            rows[-1]["by_dataset"][part] = figures
    return rows


def _base(cell: Variant, found: Sequence[Variant]) -> Variant | None:
    base = cell._replace(checkpoint="base")
    return base if cell.checkpoint == "fine_tuned" and base in found else None


def _recipe(cell: Variant, found: Sequence[Variant]) -> Variant | None:
    """The recipe at an arm's width; at its one width where the arm has changed it."""
    if not cell.arm:
        return None
    same = [c for c in found if (c.arm, *c[1:3]) == ("", *cell[1:3])]
    if (recipe := cell._replace(arm="")) in same:
        return recipe
    return same[0] if len(same) == 1 else None


def _coinrag(cell: Variant, found: Sequence[Variant]) -> Variant | None:
    if cell.arm or cell.system == "coinrag":
        return None
    others = [c for c in found if c[:4] == ("", cell.checkpoint, "coinrag", cell.k_c)]
    return max(others, key=lambda c: (c.k == cell.k, c.k or 0), default=None)
