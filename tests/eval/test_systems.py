from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerBase

from cache_ops.plan import PROMPT, Slice
from data_builders.prompt import PromptTemplate
from eval.systems import SYSTEMS, Question, Width
from recipes.building import RetrievalConfig
from recipes.schema import PromptConfig

RETRIEVAL = RetrievalConfig(encoder="none")


@pytest.fixture(scope="module")
def template(tokenizer: PreTrainedTokenizerBase) -> PromptTemplate:
    return PromptTemplate(tokenizer, PromptConfig())


def test_coinrag_over_whole_chunks_is_turborag(
    question: Question, template: PromptTemplate
) -> None:
    whole = replace(
        question,
        chunks=[replace(c, nuggets=[(0, len(c.token_ids))], nugget_texts=[c.text])
                for c in question.chunks],
        nugget_scores=[[0.1], [0.9], [0.5]],
    )  # fmt: skip
    coinrag = SYSTEMS["coinrag"].request(whole, Width(3, 3), template, RETRIEVAL)
    turborag = SYSTEMS["turborag"].request(whole, Width(3, None), template, RETRIEVAL)
    assert coinrag.plan == turborag.plan
    assert coinrag.context_ids == turborag.context_ids == []
    assert coinrag.active_tokens == turborag.active_tokens


def test_coinrag_serves_the_best_nuggets_of_the_best_chunks(
    question: Question, template: PromptTemplate
) -> None:
    first, _, last = question.chunks
    request = SYSTEMS["coinrag"].request(question, Width(3, 4), template, RETRIEVAL)
    p = len(template.prompt_ids)
    # The nuggets with score 1: 0 and 2 of chunk 0, 1 of chunk 1, 0 of chunk 2.
    middle = question.chunks[1]
    assert request.plan.slices == (
        Slice(PROMPT, 0, p, 0),
        Slice(first.chunk_id, 0, 8, p),
        Slice(first.chunk_id, 16, 24, p + 8),
        Slice(middle.chunk_id, 8, 16, p + 16),
        Slice(last.chunk_id, 0, 8, p + 24),
    )
    assert request.evidence == [
        first.nugget_texts[0],
        first.nugget_texts[2],
        middle.nugget_texts[1],
        last.nugget_texts[0],
    ]
    assert request.active_tokens == p + 32
    assert request.context_ids == []


def test_a_narrower_width_looks_at_fewer_chunks(
    question: Question, template: PromptTemplate
) -> None:
    narrow = SYSTEMS["coinrag"].request(question, Width(1, 2), template, RETRIEVAL)
    assert {piece.chunk for piece in narrow.plan.slices} == {PROMPT, question.chunks[0].chunk_id}
    assert [piece.start for piece in narrow.plan.slices] == [0, 0, 16]
    for name in ("standard_rag", "turborag"):
        request = SYSTEMS[name].request(question, Width(2, None), template, RETRIEVAL)
        assert request.evidence == ["Ines Varga", "Lower Tarn"]
        tokens = sum(len(chunk.token_ids) for chunk in question.chunks[:2])
        assert request.active_tokens == len(template.prompt_ids) + tokens


def test_coinrag_follows_the_recipes_order_and_overlap(
    question: Question, template: PromptTemplate
) -> None:
    chunk = replace(question.chunks[0], nuggets=[(0, 6), (4, 9)], nugget_texts=["one", "two"])
    overlapping = replace(question, chunks=[chunk], nugget_scores=[[0.2, 0.8]])

    def spans(**settings: str) -> list[tuple[int, int]]:
        retrieval = RetrievalConfig(encoder="none", **settings)
        plan = SYSTEMS["coinrag"].request(overlapping, Width(1, 2), template, retrieval).plan
        return [(piece.start, piece.end) for piece in plan.slices[1:]]

    assert spans() == [(0, 9)]
    assert spans(overlap="keep") == [(0, 6), (4, 9)]
    assert spans(overlap="keep", order="score") == [(4, 9), (0, 6)]
