"""Whether weights were trained for what a recipe asks of them.

Other settings than those of the training are no mistake, as ablations show, but answers in which
they differ unnoticed measure something else than their reader thinks. What the weights themselves
hold is checked where they are loaded (`eval.checkpoints`).
"""

import json
import logging
from collections.abc import Iterator
from typing import Any

from eval.checkpoints import Weights, run_recipe
from eval.systems import SYSTEMS
from recipes.fields import leaves
from recipes.schema import Recipe

logger = logging.getLogger(__name__)

# Options or sections that decide what a prefix holds. How many chunks and nuggets is left out: they
# are the width of a comparison, and one model answers at many.
_ALL = ("data.chunk_tokens", "prompt", "retrieval.rerank_chunks")
_NUGGETS = (
    "nuggets.extractor",
    "nuggets.neighbour_sentences",
    "retrieval.selection",
    "retrieval.nugget_scorer",
    "retrieval.budget",
    "retrieval.min_score",
    "retrieval.order",
    "retrieval.overlap",
)
_COINRAG = ("context.encoding", "context.positions", "context.anchors")
_SHOWN = 40


def warn_of_other_training(config: Recipe, weights: Weights, system: str) -> None:
    """Logs the options in which a run's own recipe differs from the one at hand, in one line.

    Of a system that borrows another's weights, as CacheBlend does Standard RAG's, nothing is said.
    """
    trained = run_recipe(weights.run) if weights.run is not None else None
    if trained is None or trained.train.system != system:
        return
    differing = list(_differing(trained, config, system))
    if differing:
        logger.warning(
            "%s was trained with %s; this recipe has %s: no such prefix was learned from",
            weights.run,
            ", ".join(f"{name}={_short(then)}" for name, then, _ in differing),
            ", ".join(_short(now) for _, _, now in differing),
        )


def _differing(trained: Recipe, config: Recipe, system: str) -> Iterator[tuple[str, Any, Any]]:
    """(option, its value in the training, its value at hand) of what a system's prefix rests on."""
    names: tuple[str, ...] = _ALL
    if SYSTEMS[system].selects_nuggets:
        names += _NUGGETS
    if system == "coinrag":
        names += _COINRAG
    then, now = (dict(leaves(one.model_dump(mode="json"))) for one in (trained, config))
    for path in then | now:
        if any(path == name or path.startswith(f"{name}.") for name in names):
            values = then.get(path), now.get(path)
            if values[0] != values[1]:
                yield path, *values


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
