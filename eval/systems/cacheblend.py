"""CacheBlend (Yao et al., 2025): cached chunks, of which the tokens that deviate are recomputed."""

from dataclasses import replace

from cache_ops.recompute import ChosenRows
from eval.systems.chunks import cached_chunks
from eval.systems.interface import Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """TurboRAG's reordered prefix; the first pass chooses and recomputes some of it."""
    options = serving.config.systems.cacheblend
    chosen = ChosenRows(options.ratio, options.metric, options.check_layer, gradual=options.gradual)
    return replace(cached_chunks(question, width, serving), recompute=chosen)
