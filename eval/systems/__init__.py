"""The systems of a comparison, by their names in a recipe."""

from eval.systems import (
    ape,
    block_attention,
    cacheblend,
    coinrag,
    epic,
    kvlink,
    online_nuggets,
    standard_rag,
    turborag,
)
from eval.systems.interface import Evidence, Question, Request, Serving, System, Width

SYSTEMS: dict[str, System] = {
    "standard_rag": System(standard_rag.request, selects_nuggets=False),
    "turborag": System(turborag.request, selects_nuggets=False),
    "block_attention": System(block_attention.request, selects_nuggets=False),
    "cacheblend": System(cacheblend.request, selects_nuggets=False),
    "epic": System(epic.request, selects_nuggets=False),
    "ape": System(ape.request, selects_nuggets=False),
    "kvlink": System(kvlink.request, selects_nuggets=False),
    "online_nuggets": System(online_nuggets.request, selects_nuggets=True, extracts=True),
    "coinrag": System(coinrag.request, selects_nuggets=True),
}

__all__ = ["SYSTEMS", "Evidence", "Question", "Request", "Serving", "System", "Width"]
