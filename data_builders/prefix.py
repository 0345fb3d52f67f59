"""From selected nuggets to CoinRAG's prefix, as a recipe says: one way for training and serving."""

from collections.abc import Mapping, Sequence

from cache_ops.layout import Layout, wrapped
from cache_ops.plan import MEAN_TOKEN, PROMPT, Anchors, Span, isolated, plan_prefix
from cache_ops.soft_tokens import SoftTokens
from recipes.context import AnchorsConfig
from recipes.schema import Recipe


def with_mean_token(token_ids: Sequence[int]) -> list[int]:
    """A chunk's tokens as they are encoded and stored where `context.anchors.summary` is mean."""
    return [*token_ids, MEAN_TOKEN]


def nugget_prefix(
    config: Recipe,
    spans: Sequence[Span],
    segments: Mapping[str, Sequence[int]],
    chunk_ranks: Sequence[str],
    soft_tokens: Mapping[str, SoftTokens],
) -> tuple[Layout, Mapping[str, Sequence[int]]]:
    """The layout of some nuggets, and the tokens of every chunk of its plan.

    Without anchors and packets it is their slices alone.

    Args:
        config: the recipe.
        spans: the selected nuggets, best score first.
        segments: the tokens of their chunks, and those of the static prompt under `PROMPT`.
        chunk_ranks: chunk keys, best retrieved first.
        soft_tokens: those of the model at hand, `recipes.soft_tokens` among them.
    """
    retrieval, context = config.retrieval, config.context
    anchors, options = None, context.anchors
    if options != AnchorsConfig():
        lengths = {name: len(ids) for name, ids in segments.items()}
        mean = options.summary == "mean"
        anchors = Anchors(options.prefix_tokens, options.suffix_tokens, lengths, mean)
        if mean:
            segments = {
                name: ids if name == PROMPT else with_mean_token(ids)
                for name, ids in segments.items()
            }
    plan = plan_prefix(
        spans,
        prompt_length=len(segments[PROMPT]),
        chunk_ranks=chunk_ranks,
        order=retrieval.order,
        overlap=retrieval.overlap,
        positions=context.positions,
        anchors=anchors,
    )
    if context.encoding == "isolated":
        plan, segments = isolated(plan, segments, context.positions)
    if (packets := context.packets) is None:
        return Layout(plan), segments
    before_ids = soft_tokens["packets_before"].ids(1)[0] if packets.before_tokens else []
    after_ids = soft_tokens["packets_after"].ids(1)[0] if packets.after_tokens else []
    return wrapped(plan, before_ids, after_ids), segments
