from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerBase

from cache_ops.plan import PROMPT, Slice
from cache_ops.soft_tokens import SoftTokens
from data_builders.prompt import PromptTemplate
from eval.systems import SYSTEMS, Question, Serving, Width
from recipes.resolve import with_changes
from recipes.schema import Recipe


@pytest.fixture
def serving(tokenizer: PreTrainedTokenizerBase, recipe: Callable[..., Recipe]) -> Serving:
    config = recipe()
    return Serving(config, PromptTemplate(tokenizer, config.prompt), tokenizer)


def changed(serving: Serving, *changes: str) -> Serving:
    return replace(serving, config=with_changes(serving.config, changes))


def test_coinrag_over_whole_chunks_is_turborag(question: Question, serving: Serving) -> None:
    whole = replace(
        question,
        chunks=[replace(c, nuggets=[(0, len(c.token_ids))], nugget_texts=[c.text])
                for c in question.chunks],
        nugget_scores=[[0.1], [0.9], [0.5]],
    )  # fmt: skip
    coinrag = SYSTEMS["coinrag"].request(whole, Width(3, 3), serving)
    turborag = SYSTEMS["turborag"].request(whole, Width(3, None), serving)
    assert coinrag.layout == turborag.layout
    assert coinrag.segments == turborag.segments


def test_coinrag_serves_the_best_nuggets_of_the_best_chunks(
    question: Question, serving: Serving
) -> None:
    first, _, last = question.chunks
    request = SYSTEMS["coinrag"].request(question, Width(3, 4), serving)
    p = len(serving.template.prompt_ids)
    # The nuggets with score 1: 0 and 2 of chunk 0, 1 of chunk 1, 0 of chunk 2.
    middle = question.chunks[1]
    assert request.layout.plan.slices == (
        Slice(PROMPT, 0, p, 0),
        Slice(first.chunk_id, 0, 8, p),
        Slice(first.chunk_id, 16, 24, p + 8),
        Slice(middle.chunk_id, 8, 16, p + 16),
        Slice(last.chunk_id, 0, 8, p + 24),
    )
    assert [piece.text for piece in request.evidence] == [
        first.nugget_texts[0],
        first.nugget_texts[2],
        middle.nugget_texts[1],
        last.nugget_texts[0],
    ]
    assert request.layout.tokens == p + 32
    assert request.layout.online_ids == ()


def test_a_narrower_width_looks_at_fewer_chunks(question: Question, serving: Serving) -> None:
    narrow = SYSTEMS["coinrag"].request(question, Width(1, 2), serving)
    assert {piece.chunk for piece in narrow.layout.plan.slices} == {
        PROMPT,
        question.chunks[0].chunk_id,
    }
    assert [piece.start for piece in narrow.layout.plan.slices] == [0, 0, 16]
    whole = ("standard_rag", "turborag", "block_attention", "cacheblend", "epic", "ape", "kvlink")
    for name in whole:
        request = SYSTEMS[name].request(question, Width(2, None), serving)
        assert [piece.text for piece in request.evidence] == [c.text for c in question.chunks[:2]]
        tokens = sum(len(chunk.token_ids) for chunk in question.chunks[:2])
        assert request.layout.tokens == len(serving.template.prompt_ids) + tokens


def test_coinrag_follows_the_recipes_order_and_overlap(
    question: Question, serving: Serving
) -> None:
    chunk = replace(question.chunks[0], nuggets=[(0, 6), (4, 9)], nugget_texts=["one", "two"])
    overlapping = replace(question, chunks=[chunk], nugget_scores=[[0.2, 0.8]])

    def spans(**settings: str) -> list[tuple[int, int]]:
        changes = [f"retrieval.{name}={value}" for name, value in settings.items()]
        own = changed(serving, *changes)
        plan = SYSTEMS["coinrag"].request(overlapping, Width(1, 2), own).layout.plan
        return [(piece.start, piece.end) for piece in plan.slices[1:]]

    assert spans() == [(0, 9)]
    assert spans(overlap="keep") == [(0, 6), (4, 9)]
    assert spans(overlap="keep", order="score") == [(4, 9), (0, 6)]


def test_isolated_nuggets_are_chunks_of_their_own(question: Question, serving: Serving) -> None:
    own = changed(serving, "context.encoding=isolated")
    sliced = SYSTEMS["coinrag"].request(question, Width(3, 4), serving)
    alone = SYSTEMS["coinrag"].request(question, Width(3, 4), own)
    assert alone.prefix_ids() == sliced.prefix_ids()
    assert [p.position for p in alone.layout.plan.slices] == [
        p.position for p in sliced.layout.plan.slices
    ]
    for piece in alone.layout.plan.slices:
        assert (piece.start, piece.end) == (0, len(alone.segments[piece.chunk]))


def test_original_positions_leave_keys_as_they_are(question: Question, serving: Serving) -> None:
    own = changed(serving, "context.positions=original")
    plan = SYSTEMS["coinrag"].request(question, Width(3, 4), own).layout.plan
    assert {piece.delta for piece in plan.slices} == {0}


def test_composite_chunks_start_together(question: Question, serving: Serving) -> None:
    own = changed(serving, "systems.turborag.positions=composite")
    layout = SYSTEMS["turborag"].request(question, Width(3, None), own).layout
    prompt = len(serving.template.prompt_ids)
    assert [piece.position for piece in layout.plan.slices] == [0, prompt, prompt, prompt]
    assert layout.length == prompt + max(len(chunk.token_ids) for chunk in question.chunks)


def test_kvlink_computes_its_link_tokens_online(question: Question, serving: Serving) -> None:
    linked = replace(serving, soft_tokens={"links": SoftTokens(500, 3, 2)})
    layout = SYSTEMS["kvlink"].request(question, Width(3, None), linked).layout
    assert layout.online_ids == (500, 501, 502, 503, 504, 505)
    unlinked = SYSTEMS["kvlink"].request(question, Width(3, None), serving).layout
    assert unlinked == SYSTEMS["turborag"].request(question, Width(3, None), serving).layout
    assert layout.length == unlinked.length + 6
