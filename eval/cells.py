"""The cells of a comparison: arms x checkpoints x systems x widths."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from eval.answers import Variant
from eval.checkpoints import Checkpoint
from eval.systems import SYSTEMS, Width
from recipes.arms import Arm, arms_of
from recipes.schema import Recipe


@dataclass(frozen=True)
class Cell:
    """One thing to be measured on every question."""

    arm: Arm
    checkpoint: Checkpoint
    system: str
    width: Width

    @property
    def variant(self) -> Variant:
        """As its answers name it."""
        return Variant(self.arm.name, self.checkpoint, self.system, self.width.k_c, self.width.k)


def cells_of(config: Recipe) -> list[Cell]:
    """Every cell of a recipe's comparison; a system of whole chunks is measured once a `k_c`.

    Raises:
        UserError: see `recipes.arms.arms_of`.
    """
    return [
        Cell(arm, checkpoint, system, width)
        for arm in arms_of(config)
        for checkpoint in config.eval.checkpoints
        for system, width in dict.fromkeys(_systems(arm))
    ]


def _systems(arm: Arm) -> Iterator[tuple[str, Width]]:
    retrieval = arm.config.retrieval
    widths = [Width(w.k_c, w.k) for w in arm.config.eval.widths]
    for width in widths or [Width(retrieval.k_c, retrieval.k)]:
        for name in arm.systems:
            yield name, width if SYSTEMS[name].selects_nuggets else replace(width, k=None)
