"""Plans: contiguous positions, no token twice under merge, order by rank and place or by score."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_ops.plan import (
    PROMPT,
    Anchors,
    PrefixPlan,
    Slice,
    Span,
    anchor_ranges,
    merge_spans,
    plan_prefix,
)

CHUNKS = ("a", "b", "c")
spans = st.lists(
    st.builds(
        lambda chunk, start, length: Span(chunk, start, start + length),
        st.sampled_from(CHUNKS),
        st.integers(0, 30),
        st.integers(1, 12),
    ),
    max_size=8,
)
ranks = st.permutations(CHUNKS)


def tokens(placed) -> list[tuple[str, int]]:
    return [(piece.chunk, token) for piece in placed for token in range(piece.start, piece.end)]


@given(spans=spans, ranks=ranks, prompt=st.integers(0, 5))
def test_merge_covers_the_same_tokens_once(spans, ranks, prompt) -> None:
    plan = plan_prefix(spans, prompt_length=prompt, chunk_ranks=ranks)
    covered = tokens(piece for piece in plan.slices if piece.chunk != PROMPT)
    assert len(covered) == len(set(covered))
    assert set(covered) == set(tokens(spans))
    assert covered == sorted(covered, key=lambda item: (ranks.index(item[0]), item[1]))


@given(
    spans=spans,
    ranks=ranks,
    prompt=st.integers(0, 5),
    order=st.sampled_from(["rank_then_document", "score"]),
    overlap=st.sampled_from(["merge", "keep"]),
)
def test_slices_follow_each_other_without_gaps(spans, ranks, prompt, order, overlap) -> None:
    plan = plan_prefix(spans, prompt_length=prompt, chunk_ranks=ranks, order=order, overlap=overlap)
    position = 0
    for piece in plan.slices:
        assert piece.position == position
        assert piece.delta == position - piece.start
        position += piece.end - piece.start
    assert plan.length == plan.tokens == position
    prompts = [piece for piece in plan.slices if piece.chunk == PROMPT]
    assert prompts == ([Slice(PROMPT, 0, prompt, 0)] if prompt else [])
    if overlap == "keep":
        assert sorted(tokens(spans)) == sorted(tokens(plan.slices[prompt > 0 :]))


@given(spans=spans)
def test_score_order_keeps_each_merged_span_at_its_best_part(spans) -> None:
    merged = merge_spans(spans)

    def first_part(whole: Span) -> int:
        return next(
            index
            for index, span in enumerate(spans)
            if span.chunk == whole.chunk and whole.start <= span.start < whole.end
        )

    firsts = [first_part(span) for span in merged]
    assert firsts == sorted(firsts)


def test_touching_spans_become_one_and_neighbours_with_a_gap_do_not() -> None:
    assert merge_spans([Span("a", 5, 9), Span("a", 2, 5)]) == [Span("a", 2, 9)]
    apart = [Span("a", 6, 9), Span("a", 2, 5)]
    assert merge_spans(apart) == apart


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="empty or negative"):
        Span("a", 3, 3)
    with pytest.raises(ValueError, match="not retrieved"):
        plan_prefix([Span("z", 0, 1)], prompt_length=0, chunk_ranks=["a"])
    with pytest.raises(ValueError, match="choose rank_then_document or score"):
        plan_prefix([], prompt_length=0, chunk_ranks=[], order="best")
    with pytest.raises(ValueError, match="choose merge or keep"):
        plan_prefix([], prompt_length=0, chunk_ranks=[], overlap="drop")


def test_the_empty_plan_starts_the_query_at_zero() -> None:
    assert plan_prefix([], prompt_length=0, chunk_ranks=[]) == PrefixPlan(())
    assert PrefixPlan(()).length == 0


LENGTH = 42
"""Of every chunk, its last span's end."""
sizes = st.integers(0, 50)


@given(
    spans=spans,
    ranks=ranks,
    first=sizes,
    last=sizes,
    order=st.sampled_from(["rank_then_document", "score"]),
    overlap=st.sampled_from(["merge", "keep"]),
)
def test_anchors_of_used_chunks_stand_once_and_where_they_belong(
    spans, ranks, first, last, order, overlap
) -> None:
    choices = {"prompt_length": 2, "chunk_ranks": ranks, "order": order, "overlap": overlap}
    anchors = Anchors(first, last, dict.fromkeys(CHUNKS, LENGTH))
    plain = plan_prefix(spans, **choices)
    plan = plan_prefix(spans, **choices, anchors=anchors)
    used = {span.chunk for span in spans}
    expected = {
        (chunk, token)
        for chunk in used
        for token in range(LENGTH)
        if token < first or token >= LENGTH - last
    }
    # Beside what was there already, each anchor's token once.
    added = expected - set(tokens(plain.slices))
    assert sorted(tokens(plan.slices)) == sorted([*tokens(plain.slices), *added])
    assert [piece.position for piece in plan.slices] == [
        sum(piece.end - piece.start for piece in plan.slices[:at]) for at in range(len(plan.slices))
    ]
    if order == "rank_then_document":
        starts = [(ranks.index(piece.chunk), piece.start) for piece in plan.slices[1:]]
        assert starts == sorted(starts)
    elif overlap == "keep":
        pieces = [(piece.chunk, piece.start, piece.end) for piece in plan.slices]
        scored = [(span.chunk, span.start, span.end) for span in spans]
        rest = iter(pieces)
        assert all(span in rest for span in scored), "spans keep the order of their scores"
    if overlap == "merge" and order == "rank_then_document":
        everything = [*spans, *(Span(c, t, t + 1) for c, t in expected)]
        assert plan == plan_prefix(everything, **choices)


@given(spans=spans, ranks=ranks, order=st.sampled_from(["rank_then_document", "score"]))
def test_anchors_of_no_tokens_are_none(spans, ranks, order) -> None:
    choices = {"prompt_length": 1, "chunk_ranks": ranks, "order": order}
    anchors = Anchors(0, 0, dict.fromkeys(CHUNKS, LENGTH))
    assert plan_prefix(spans, **choices, anchors=anchors) == plan_prefix(spans, **choices)


def test_under_score_anchors_stand_around_the_spans_of_their_chunk() -> None:
    best_first = [Span("b", 4, 6), Span("a", 7, 8), Span("b", 1, 2), Span("a", 3, 5)]
    plan = plan_prefix(
        best_first,
        prompt_length=0,
        chunk_ranks=["a", "b"],
        order="score",
        overlap="keep",
        anchors=Anchors(2, 1, {"a": 10, "b": 6}),
    )
    assert [(piece.chunk, piece.start, piece.end) for piece in plan.slices] == [
        ("b", 0, 1), ("b", 4, 6), ("a", 0, 2), ("a", 7, 8), ("b", 1, 2), ("a", 3, 5), ("a", 9, 10),
    ]  # fmt: skip


def test_anchors_of_a_short_chunk_do_not_overlap() -> None:
    assert anchor_ranges(5, 3, 4) == (range(3), range(3, 5))
    assert anchor_ranges(2, 3, 4) == (range(2), range(2, 2))
    assert anchor_ranges(9, 2, 3) == (range(2), range(6, 9))
