"""The systems of a comparison, by their names in a recipe."""

from eval.systems import coinrag, standard_rag, turborag
from eval.systems.interface import Question, Request, System, Width

SYSTEMS: dict[str, System] = {
    "standard_rag": System(standard_rag.request, selects_nuggets=False),
    "turborag": System(turborag.request, selects_nuggets=False),
    "coinrag": System(coinrag.request, selects_nuggets=True),
}

__all__ = ["SYSTEMS", "Question", "Request", "System", "Width"]
