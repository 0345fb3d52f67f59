"""CacheBlend (Yao et al., 2025): cached chunks, of which the tokens that deviate are recomputed."""

from dataclasses import replace

from cache_ops.recompute import CheckLayerError, ChosenRows
from eval.systems.chunks import cached_chunks
from eval.systems.interface import Question, Request, Serving, Width
from recipes.errors import UserError
from recipes.schema import Recipe


def check_blend(config: Recipe, layers: int) -> None:
    """Passes options that a model of so many layers can follow.

    Raises:
        UserError: there is no such check layer.
    """
    try:
        _chosen(config).going_on(1, layers)
    except CheckLayerError as error:
        raise UserError(f"systems.cacheblend.check_layer: {error}") from error


def request(question: Question, width: Width, serving: Serving) -> Request:
    """TurboRAG's reordered prefix; the first pass chooses and recomputes some of it."""
    return replace(cached_chunks(question, width, serving), recompute=_chosen(serving.config))


def _chosen(config: Recipe) -> ChosenRows:
    options = config.systems.cacheblend
    return ChosenRows(options.ratio, options.metric, options.check_layer, gradual=options.gradual)
