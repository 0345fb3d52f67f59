"""Requests over cached prefixes: alone, together, prefix by prefix, against plain transformers."""

from copy import deepcopy

import pytest
import torch
from reference import prefix_cache
from tiny import ARCHITECTURES, ROPE_TYPES, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from cache_ops.assemble import gather
from cache_ops.cached import RequestCache, enable_cached, forward_cached
from cache_ops.encode import encode_chunk
from cache_ops.hf import restore_rope_tables
from cache_ops.plan import PROMPT, PrefixPlan, Span, plan_prefix
from cache_ops.records import RecordLayout, StoreDtype
from cache_ops.rope import Rope

PROMPT_IDS = [5, 6, 7]
CHUNKS = {PROMPT: PROMPT_IDS, "a": list(range(10, 60)), "b": list(range(70, 100))}
PLANS = {
    "nuggets": plan_prefix(
        [Span("b", 3, 9), Span("a", 20, 31), Span("a", 2, 7)],
        prompt_length=3,
        chunk_ranks=["b", "a"],
    ),
    "kept overlaps by score": plan_prefix(
        [Span("a", 30, 40), Span("a", 25, 35), Span("b", 0, 4)],
        prompt_length=3,
        chunk_ranks=["a", "b"],
        order="score",
        overlap="keep",
    ),
    "prompt alone": plan_prefix([], prompt_length=3, chunk_ranks=[]),
    "nothing": PrefixPlan(()),
}
QUERY = [101, 102, 103, 104]


def cache_of(model: PreTrainedModel, plan: PrefixPlan, room: int = 16) -> RequestCache:
    model.set_attn_implementation("sdpa")
    chunk_kv = {name: encode_chunk(model, ids) for name, ids in CHUNKS.items()}
    enable_cached(model)
    kv_TL2HD = gather(plan, chunk_kv) if plan.slices else None
    return RequestCache(plan, kv_TL2HD, Rope.from_config(model.config), room=room)


def expected(model: PreTrainedModel, plan: PrefixPlan, tokens: list[int]) -> Tensor:
    """Logits after all of `tokens`, in one pass over chunks encoded at their new positions."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.arange(len(tokens))[None] + plan.length,
            past_key_values=prefix_cache(model, plan, CHUNKS),
        ).logits[0]
    enable_cached(model)
    return logits


def assert_steps_are_one_pass(model: PreTrainedModel) -> None:
    """A query and then single tokens, over every plan, against one pass of transformers."""
    more = [55, 66, 77]
    for plan in PLANS.values():
        whole = expected(model, plan, QUERY + more)
        cache = cache_of(model, plan)
        steps = [forward_cached(model, [(cache, QUERY)])]
        steps += [forward_cached(model, [(cache, [token])]) for token in more]
        torch.testing.assert_close(torch.cat(steps), whole[len(QUERY) - 1 :], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("rope", ROPE_TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_query_then_single_tokens_equal_one_pass_of_transformers(
    architecture: str, rope: str
) -> None:
    assert_steps_are_one_pass(tiny_model(architecture, rope))


@pytest.mark.parametrize("key_value_heads", [1, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_head_for_all_queries_and_one_for_each_with_biases(
    architecture: str, key_value_heads: int
) -> None:
    grouped = tiny_model(architecture, "yarn")
    config = deepcopy(grouped.config)
    config.num_key_value_heads, config.attention_bias = key_value_heads, True
    model = type(grouped)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2) if weight.dim() == 2 else weight.uniform_(0.5, 1.5)
    assert_steps_are_one_pass(model)


def test_requests_of_all_lengths_do_not_see_each_other() -> None:
    model = tiny_model()
    alone = []
    for plan in PLANS.values():
        cache = cache_of(model, plan)
        alone.append(
            torch.cat([forward_cached(model, [(cache, ids)]) for ids in (QUERY, [9], [8, 7])])
        )
    caches = [cache_of(model, plan) for plan in PLANS.values()]
    # The first request is ahead of the others by its query.
    first = forward_cached(model, [(caches[0], QUERY)])
    mixed = forward_cached(model, [(caches[0], [9]), *((cache, QUERY) for cache in caches[1:])])
    second = forward_cached(model, [(cache, [9]) for cache in caches[1:]])
    last = forward_cached(model, [(cache, [8, 7]) for cache in caches])
    together = [torch.stack([first[0], mixed[0], last[0]])] + [
        torch.stack([mixed[n], second[n - 1], last[n]]) for n in (1, 2, 3)
    ]
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_several_tokens_over_a_filled_cache_are_causal_by_position() -> None:
    model = tiny_model("qwen3", "yarn")
    plan = PLANS["kept overlaps by score"]
    cache = cache_of(model, plan)
    forward_cached(model, [(cache, QUERY)])
    found = forward_cached(model, [(cache, [1, 2, 3])])
    torch.testing.assert_close(
        found[0], expected(model, plan, [*QUERY, 1, 2, 3])[-1], atol=2e-4, rtol=1e-4
    )


def test_a_bfloat16_model_takes_a_wider_prefix() -> None:
    model = tiny_model().bfloat16()
    plan = PLANS["nuggets"]
    chunk_kv = {name: encode_chunk(model, ids) for name, ids in CHUNKS.items()}
    kv_TL2HD = gather(plan, chunk_kv)
    enable_cached(model)
    logits = [
        forward_cached(
            model, [(RequestCache(plan, prefix, Rope.from_config(model.config), room=4), QUERY)]
        )
        for prefix in (kv_TL2HD, kv_TL2HD.float())
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("model_dtype", "stored", "tolerance"),
    [
        (torch.float32, "float32", 0.0),
        (torch.float32, "bfloat16", 2e-2),
        (torch.float32, "float16", 5e-3),
        (torch.float32, "int8", 5e-2),
        (torch.float32, "float8", 0.2),
        (torch.bfloat16, "float32", 0.0),
        (torch.bfloat16, "bfloat16", 0.0),
        (torch.bfloat16, "float16", 1e-2),
        (torch.bfloat16, "int8", 0.1),
        (torch.bfloat16, "float8", 0.2),
    ],
)
def test_records_of_every_dtype_under_a_model_of_either(
    architecture: str, model_dtype: torch.dtype, stored: StoreDtype, tolerance: float
) -> None:
    model = tiny_model(architecture).to(model_dtype)
    restore_rope_tables(model)
    plan = PLANS["kept overlaps by score"]
    layout = RecordLayout.from_model(model.config, stored)
    own = gather(plan, {name: encode_chunk(model, ids) for name, ids in CHUNKS.items()})
    enable_cached(model)
    expected_BV, found_BV = (
        forward_cached(
            model, [(RequestCache(plan, prefix, Rope.from_config(model.config), room=4), QUERY)]
        ).float()
        for prefix in (own, layout.decode(layout.encode(own), model_dtype))
    )
    assert (found_BV - expected_BV).abs().max() <= tolerance * expected_BV.abs().max()


def test_more_tokens_than_room_and_calls_of_another_kind_are_refused() -> None:
    model = tiny_model()
    cache = cache_of(model, PLANS["nuggets"], room=3)
    with pytest.raises(AssertionError, match="room"):
        forward_cached(model, [(cache, QUERY)])
    with pytest.raises(ValueError, match="forward_cached"):
        model(torch.tensor([[1, 2]]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rope", ROPE_TYPES)
def test_layers_laid_ahead_on_a_stream_of_their_own_equal_the_cpu(rope: str) -> None:
    model = tiny_model("qwen2", rope)
    plan = PLANS["nuggets"]
    expected_BV = forward_cached(model, [(cache_of(model, plan), QUERY)])
    prefix = gather(plan, {name: encode_chunk(model, ids) for name, ids in CHUNKS.items()})
    model.cuda()
    cache = RequestCache(plan, prefix.cuda(), Rope.from_config(model.config), room=16)
    cache.lay_ahead(torch.float32, torch.cuda.Stream())
    found_BV = forward_cached(model, [(cache, QUERY)])
    torch.testing.assert_close(found_BV.cpu(), expected_BV, atol=1e-3, rtol=1e-3)
