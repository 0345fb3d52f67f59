"""The arms of a comparison: the recipe itself, and the recipe with changes.

A change is an ablation of `recipes.ablations` or a setting of the user's own, `eval.arms`.
"""

from dataclasses import dataclass

from recipes.ablations import ABLATIONS, changes_of
from recipes.errors import UserError
from recipes.resolve import with_changes
from recipes.schema import Recipe

# What all arms of a comparison must share, or what has no meaning inside one.
_FIXED = ("name", "seed", "model", "store", "eval", "build")


@dataclass(frozen=True, eq=False)
class Arm:
    """The recipe with changes; `name` is empty for the recipe itself."""

    name: str
    config: Recipe
    systems: tuple[str, ...]


def arms_of(config: Recipe) -> list[Arm]:
    """The recipe itself, then its ablations, then its own arms.

    Raises:
        UserError: an arm's changes do not make a recipe, or touch what all arms share.
    """
    named: list[tuple[str, tuple[str, ...], list[str]]] = [
        (name, ("coinrag",), changes_of(name)) for name in config.eval.ablations
    ]
    named += [(arm.name, tuple(arm.systems), list(arm.set)) for arm in config.eval.arms]
    arms = [Arm("", config, tuple(config.eval.systems))]
    for name, systems, changes in named:
        if name not in config.eval.ablations and ("+" in name or name in (*ABLATIONS, "recipe")):
            raise UserError(
                f"arm {name!r}: recipe, the names of ablations, and + between two are taken"
            )
        for change in changes:
            section = change.partition("=")[0].partition(".")[0]
            if section in _FIXED and not change.startswith("eval.runs."):
                raise UserError(
                    f"arm {name!r}: {change} cannot differ between the arms of a comparison; "
                    "compare in two runs"
                )
        # What an arm's systems need is checked with its other settings.
        own = [f"eval.systems=[{','.join(systems)}]", "eval.ablations=[]", "eval.arms=[]"]
        try:
            changed = with_changes(config, [*changes, *own])
        except UserError as error:
            raise UserError(f"arm {name!r}: {error}") from error
        arms.append(Arm(name, changed, systems))
    return arms
