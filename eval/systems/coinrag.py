"""CoinRAG: the best nuggets of the best chunks, sliced from cached chunks and rotated."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from cache_ops.plan import MEAN_TOKEN, PROMPT, PrefixPlan, Span
from cache_ops.recompute import CheckLayerError, ChosenRows
from data_builders.prefix import nugget_prefix
from data_builders.selection import select
from eval.systems.interface import Evidence, Question, Request, Serving, Width
from recipes.context import RepairConfig
from recipes.errors import UserError
from recipes.schema import Recipe


def request(question: Question, width: Width, serving: Serving) -> Request:
    """The width's nuggets from the scores in the table; the query is computed online."""
    assert width.k is not None, "CoinRAG needs a number of nuggets"
    retrieval, context = serving.config.retrieval, serving.config.context
    # One-stage selection has no chunks to choose first.
    k_c = width.k_c if retrieval.selection == "two_stage" else None
    chunks = question.chunks[:k_c]
    selected = select(chunks, question.nugget_scores[:k_c], width.k, retrieval)
    spans = [Span(chunks[c].chunk_id, *chunks[c].nuggets[n]) for c, n in selected]
    layout, segments = nugget_prefix(
        serving.config,
        spans,
        serving.segments(chunks),
        [chunk.chunk_id for chunk in chunks],
        serving.soft_tokens,
    )
    evidence = [Evidence(chunks[c].chunk_id, chunks[c].slice_texts[n]) for c, n in selected]
    if "anchors" in context.asked():
        evidence += _anchored(layout.plan, spans, segments, serving.tokenizer)
    return Request(
        layout=layout,
        segments=segments,
        evidence=evidence,
        recompute=None if context.repair is None else _chosen(context.repair),
        contextualizer=serving.contextualizer_of("coinrag"),
    )


def check_repair(config: Recipe, layers: int) -> None:
    """Passes a `context.repair` that a model of so many layers can follow.

    Raises:
        UserError: there is no such check layer.
    """
    if config.context.repair is None:
        return
    try:
        _chosen(config.context.repair).going_on(1, layers)
    except CheckLayerError as error:
        raise UserError(f"context.repair.check_layer: {error}") from error


def _chosen(repair: RepairConfig) -> ChosenRows:
    return ChosenRows(repair.ratio, repair.metric, repair.check_layer, gradual=False)


def _anchored(
    plan: PrefixPlan,
    spans: Sequence[Span],
    segments: Mapping[str, Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Evidence]:
    """The slices that hold more than nuggets, whole and in their order."""
    nuggets = {(span.chunk, token) for span in spans for token in range(span.start, span.end)}
    evidence = []
    for piece in plan.slices:
        ids = list(segments[piece.chunk][piece.start : piece.end])
        if ids[-1] == MEAN_TOKEN:
            # It has no text.
            del ids[-1]
        places = range(piece.start, piece.start + len(ids))
        if piece.chunk != PROMPT and any((piece.chunk, at) not in nuggets for at in places):
            evidence.append(Evidence(piece.chunk, str(tokenizer.decode(ids))))
    return evidence
