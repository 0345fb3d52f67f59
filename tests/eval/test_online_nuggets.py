"""Online nuggets: laid out as they are read, encoded alone inside the clock, and never cached."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import ARCHITECTURES, tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache_ops.cached import enable_cached
from cache_ops.encode import encode_chunk
from cache_ops.memory_tier import MemoryTier
from cache_ops.plan import PROMPT, PrefixPlan, Slice
from cache_ops.records import RecordLayout
from cache_ops.supply import Supply
from data_builders.nuggets.online import OnlineNugget
from data_builders.prompt import PromptTemplate
from data_builders.tables import Chunk
from eval.online import OnlinePath
from eval.systems import SYSTEMS, Question, Request, Serving, Width, online_nuggets
from recipes.resolve import with_changes
from recipes.schema import PromptConfig, Recipe

# Best first: the extractor's order, which is not that of the text.
FOUND = [
    OnlineNugget(1, "Its mayor is Bela Kun.", 31),
    OnlineNugget(0, "she painted the harbour", 42),
    OnlineNugget(0, "Ines Varga was born in Lower Tarn", 12),
    OnlineNugget(2, "The Oss rises in the Grey Hills", 4),
]


@pytest.fixture
def serving(tokenizer: PreTrainedTokenizerBase, recipe: Callable[..., Recipe]) -> Serving:
    def extract(question: str, chunks: Sequence[Chunk]) -> list[OnlineNugget]:
        assert question == "Where was the painter born?"
        return [nugget for nugget in FOUND if nugget.chunk < len(chunks)]

    prompt = PromptConfig(before_passages="Answer. ", after_passages=" Question: {question}")
    template = PromptTemplate(tokenizer, prompt)
    return Serving(recipe(max_new_tokens=8), template, tokenizer, extractor=extract)


def texts_of(request: Request, serving: Serving) -> list[str]:
    """The texts of the plan's slices after the prompt, in its order."""
    pieces = request.layout.plan.slices[1:]
    return [
        serving.tokenizer.decode(request.segments[piece.chunk], skip_special_tokens=True).strip()
        for piece in pieces
    ]


def test_nuggets_stand_alone_in_the_order_of_ranks_and_texts(
    question: Question, serving: Serving
) -> None:
    request = SYSTEMS["online_nuggets"].request(question, Width(3, 4), serving)
    order = [FOUND[2], FOUND[1], FOUND[0], FOUND[3]]
    assert texts_of(request, serving) == [nugget.text for nugget in order]
    position = 0
    for piece in request.layout.plan.slices:
        ids = request.segments[piece.chunk]
        assert (piece.start, piece.end, piece.position) == (0, len(ids), position)
        position += len(ids)
    assert request.layout.plan.slices[0].chunk == PROMPT
    assert request.online_segments == request.segments.keys() - {PROMPT}
    assert [(piece.chunk_id, piece.text) for piece in request.evidence] == [
        (question.chunks[nugget.chunk].chunk_id, nugget.text) for nugget in FOUND
    ]


def test_the_width_bounds_chunks_and_nuggets_and_the_recipe_orders_them(
    question: Question, serving: Serving
) -> None:
    narrow = SYSTEMS["online_nuggets"].request(question, Width(1, 4), serving)
    assert texts_of(narrow, serving) == [FOUND[2].text, FOUND[1].text]
    few = SYSTEMS["online_nuggets"].request(question, Width(3, 2), serving)
    assert texts_of(few, serving) == [FOUND[1].text, FOUND[0].text]
    config = with_changes(serving.config, ["retrieval.order=score"])
    best_first = replace(serving, config=config)
    scored = SYSTEMS["online_nuggets"].request(question, Width(3, 4), best_first)
    assert texts_of(scored, serving) == [nugget.text for nugget in FOUND]


def test_the_extractors_time_is_told(
    question: Question, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([5.0, 5.25])
    monkeypatch.setattr(online_nuggets.time, "perf_counter", lambda: next(now))
    request = SYSTEMS["online_nuggets"].request(question, Width(3, 4), serving)
    assert request.extract_ms == 250


def test_a_nugget_that_spells_a_special_token_is_plain_text(
    question: Question, serving: Serving
) -> None:
    odd = replace(serving, extractor=lambda *_: [OnlineNugget(0, "Tarn<|im_end|>", 0)])
    request = SYSTEMS["online_nuggets"].request(question, Width(3, 4), odd)
    [name] = request.online_segments
    assert serving.tokenizer.eos_token_id not in request.segments[name]


def open_path(serving: Serving, model: PreTrainedModel) -> OnlinePath:
    enable_cached(model)
    supply = Supply(
        RecordLayout.from_model(model.config, "float32"),
        reader=None,
        memory=MemoryTier(2**30),
        encode=partial(encode_chunk, model),
        keep="chunks",
    )
    return OnlinePath(serving, model, supply)


def answer(path: OnlinePath, question: Question) -> list[int]:
    request = path.begin(question, "online_nuggets", Width(3, 4))
    path.fill(request)
    while not request.generation.done:
        path.advance([request])
    request.release()
    assert request.supplied is None or request.supplied.tokens_computed == 0
    return request.generation.token_ids


def masked_answer(
    model: PreTrainedModel, blocks: Sequence[Sequence[int]], query_ids: Sequence[int], count: int
) -> list[int]:
    """Greedy tokens by plain forwards whose mask keeps each block to itself; no cache."""
    model.set_attn_implementation("sdpa")
    owner = [number for number, block in enumerate(blocks) for _ in block]
    ids = [token for block in blocks for token in block] + [*query_ids]
    for _ in range(count):
        size = len(ids)
        block_of = torch.tensor([*owner, *[len(blocks)] * (size - len(owner))])
        sees = (block_of[:, None] == block_of[None]) | (block_of[:, None] == len(blocks))
        mask = (sees & torch.ones(size, size, dtype=torch.bool).tril())[None, None]
        with torch.no_grad():
            logits = model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_are_those_of_one_masked_pass_over_independent_texts(
    architecture: str, question: Question, serving: Serving
) -> None:
    serving.template.stop_ids = frozenset()
    path = open_path(serving, tiny_model(architecture, seed=4))
    prompt_ids = serving.template.prompt_ids
    path.supply.fetch(PrefixPlan((Slice(PROMPT, 0, len(prompt_ids), 0),)), {PROMPT: prompt_ids})
    assert path.supply.memory is not None
    cached = path.supply.memory.counts().bytes
    found = answer(path, question)
    # Nothing of the nuggets is kept, whatever it cost to encode them.
    assert path.supply.memory.counts().bytes == cached
    request = SYSTEMS["online_nuggets"].request(question, Width(3, 4), serving)
    blocks = [request.segments[piece.chunk] for piece in request.layout.plan.slices]
    query_ids = serving.template.query_ids(question.question)
    assert found == masked_answer(path.model, blocks, query_ids, 8)
    assert len(set(found)) > 1, "a constant answer would prove little"


def test_where_nothing_is_found_the_prompt_alone_is_answered_from(
    question: Question, serving: Serving
) -> None:
    nothing = replace(serving, extractor=lambda *_: [])
    nothing.template.stop_ids = frozenset()
    path = open_path(nothing, tiny_model("qwen2", seed=4))
    prompt_ids = nothing.template.prompt_ids
    path.supply.fetch(PrefixPlan((Slice(PROMPT, 0, len(prompt_ids), 0),)), {PROMPT: prompt_ids})
    query_ids = nothing.template.query_ids(question.question)
    expected = masked_answer(path.model, [], [*prompt_ids, *query_ids], 8)
    enable_cached(path.model)
    assert answer(path, question) == expected
    nothing.template.prompt_ids = []
    expected = masked_answer(path.model, [], query_ids, 8)
    enable_cached(path.model)
    assert answer(path, question) == expected
