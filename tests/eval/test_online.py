"""The path from evidence to answer, by system, against plain loops over transformers."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from tiny import ARCHITECTURES, tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache_ops.cached import enable_cached
from cache_ops.encode import encode_chunk
from cache_ops.memory_tier import MemoryTier
from cache_ops.records import RecordLayout
from cache_ops.supply import Supply
from data_builders.prompt import PromptTemplate
from eval.online import OnlinePath, OnlineRequest
from eval.systems import Question, Serving, Width
from recipes.schema import PromptConfig, Recipe

WIDTH = Width(k_c=3, k=4)
Path = Callable[..., OnlinePath]


def memory_supply(model: PreTrainedModel) -> Supply:
    return Supply(
        RecordLayout.from_model(model.config, "float32"),
        reader=None,
        memory=MemoryTier(2**30),
        encode=partial(encode_chunk, model),
        keep="chunks",
    )


@pytest.fixture
def path(tokenizer: PreTrainedTokenizerBase, recipe: Callable[..., Recipe]) -> Path:
    """A function from an architecture and options to the path of a tiny model."""

    def build(
        architecture: str = "qwen2",
        *,
        prompt: bool = True,
        stop_ids: frozenset[int] = frozenset(),
        max_new_tokens: int = 12,
    ) -> OnlinePath:
        model = tiny_model(architecture, seed=4)
        enable_cached(model)
        config = PromptConfig(before_passages="Answer. ", after_passages=" Question: {question}")
        template = PromptTemplate(tokenizer, config)
        template.stop_ids = stop_ids
        if not prompt:
            template.prompt_ids = []
        serving = Serving(recipe(max_new_tokens=max_new_tokens), template, tokenizer)
        return OnlinePath(serving, model, memory_supply(model))

    return build


def serve(path: OnlinePath, question: Question, system: str, width: Width = WIDTH) -> OnlineRequest:
    request = path.begin(question, system, width)
    path.fill(request)
    while not request.generation.done:
        path.advance([request])
    return request


def greedy_without_cache(model: PreTrainedModel, ids: Sequence[int], count: int) -> list[int]:
    """The plain way: every token by a forward over the whole text."""
    model.set_attn_implementation("sdpa")
    text = list(ids)
    for _ in range(count):
        with torch.no_grad():
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_standard_rag_decodes_as_a_plain_loop_does(
    architecture: str, question: Question, path: Path
) -> None:
    online = path(architecture)
    request = serve(online, question, "standard_rag")
    expected_ids = [
        *online.serving.template.prompt_ids,
        *(token for chunk in question.chunks for token in chunk.token_ids),
        *online.serving.template.query_ids(question.question),
    ]
    found = request.generation.token_ids
    assert request.online_tokens == len(expected_ids)
    assert found == greedy_without_cache(online.model, expected_ids, 12)
    assert len(set(found)) > 1, "a constant answer would prove little"
    assert not request.generation.stopped


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_cached_chunk_without_a_prompt_answers_as_full_prefill(
    architecture: str, question: Question, path: Path
) -> None:
    online = path(architecture, prompt=False)
    width = Width(k_c=1, k=None)
    cached, computed = (
        serve(online, question, name, width) for name in ("turborag", "standard_rag")
    )
    assert cached.served.layout.tokens == computed.served.layout.tokens
    assert cached.supplied is not None
    assert computed.supplied is None
    assert cached.generation.token_ids == computed.generation.token_ids


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(question: Question, path: Path) -> None:
    free = serve(path(), question, "coinrag").generation.token_ids
    stop = next(token for token in free if token != free[0])
    stopped = serve(path(stop_ids=frozenset({stop})), question, "coinrag").generation
    assert stopped.stopped
    assert stopped.token_ids == free[: free.index(stop)]
    at_once = serve(path(stop_ids=frozenset({free[0]})), question, "coinrag").generation
    assert (at_once.token_ids, at_once.stopped) == ([], True)
    limited = serve(path(max_new_tokens=1), question, "coinrag").generation
    assert (limited.token_ids, limited.stopped) == (free[:1], False)


def test_answers_do_not_depend_on_the_requests_beside_them(question: Question, path: Path) -> None:
    online = path()
    widths = [Width(3, 4), Width(1, 2), Width(2, 6)]
    alone = [serve(online, question, "coinrag", width).generation.token_ids for width in widths]
    alone.append(serve(online, question, "standard_rag").generation.token_ids)
    requests = [online.begin(question, "coinrag", width) for width in widths]
    requests.append(online.begin(question, "standard_rag", WIDTH))
    for request in requests:
        online.fill(request)
    # The first is ahead of the others, and the last joins late.
    online.advance(requests[:1])
    online.advance(requests[:3])
    while running := [request for request in requests if not request.generation.done]:
        online.advance(running)
    assert [request.generation.token_ids for request in requests] == alone
    assert requests[0].batch_requests == 1
    assert requests[1].batch_requests == 3


def test_sources_of_the_prefix_are_counted_and_stages_timed(question: Question, path: Path) -> None:
    online = path()
    first, second = (serve(online, question, "coinrag") for _ in range(2))
    assert first.supplied is not None
    assert second.supplied is not None
    active = first.served.layout.tokens
    assert (first.supplied.tokens_computed, first.supplied.tokens_memory) == (active, 0)
    assert (second.supplied.tokens_computed, second.supplied.tokens_memory) == (0, active)
    unused = {"compute", "extract", "contextualize"}
    stages = {"plan", "read", "copy", "rotate", "prefill"} | unused
    assert set(second.stage_ms) == stages
    assert second.stage_ms["extract"] == 0
    assert second.stage_ms["contextualize"] == 0
    assert all(second.stage_ms[stage] > 0 for stage in stages - unused)
    assert first.stage_ms["compute"] > 10 * second.stage_ms["compute"]
