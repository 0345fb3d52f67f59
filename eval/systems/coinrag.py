"""CoinRAG: the best nuggets of the best chunks, sliced from cached chunks and rotated."""

from cache_ops.layout import Layout
from cache_ops.plan import Span, isolated, plan_prefix
from data_builders.retrieval import select_nuggets
from eval.systems.interface import Evidence, Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """The width's nuggets from the scores in the table; only the query is computed online."""
    assert width.k is not None, "CoinRAG needs a number of nuggets"
    retrieval, context = serving.config.retrieval, serving.config.context
    # One-stage selection has no chunks to choose first.
    k_c = width.k_c if retrieval.selection == "two_stage" else None
    chunks = question.chunks[:k_c]
    selected = select_nuggets(
        question.nugget_scores[:k_c], [chunk.nuggets for chunk in chunks], width.k
    )
    plan = plan_prefix(
        [Span(chunks[c].chunk_id, *chunks[c].nuggets[n]) for c, n in selected],
        prompt_length=len(serving.template.prompt_ids),
        chunk_ranks=[chunk.chunk_id for chunk in chunks],
        order=retrieval.order,
        overlap=retrieval.overlap,
        positions=context.positions,
    )
    segments = serving.segments(chunks)
    if context.encoding == "isolated":
        plan, segments = isolated(plan, segments, context.positions)
    return Request(
        layout=Layout(plan),
        segments=segments,
        evidence=[Evidence(chunks[c].chunk_id, chunks[c].nugget_texts[n]) for c, n in selected],
    )
