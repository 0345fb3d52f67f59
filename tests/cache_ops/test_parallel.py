"""APE's attention against an explicit softmax, alone, decoding, and among ordinary requests."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layerwise import Pass, slow_pass
from tiny import ARCHITECTURES, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from cache_ops.assemble import gather
from cache_ops.cached import RequestCache, enable_cached, forward_cached
from cache_ops.encode import encode_chunk
from cache_ops.parallel import ParallelAttention, attend_in_parallel
from cache_ops.plan import PROMPT, PrefixPlan, Slice
from cache_ops.rope import Rope

PROMPT_IDS = [5, 6, 7]
CHUNKS = {"a": [*range(10, 21)], "b": [60, 61], "c": [*range(70, 77)]}
SEGMENTS = {PROMPT: PROMPT_IDS} | {name: PROMPT_IDS + ids for name, ids in CHUNKS.items()}
PLAN = PrefixPlan(
    (
        Slice(PROMPT, 0, 3, 0),
        *(Slice(name, 3, 3 + len(ids), 3) for name, ids in CHUNKS.items()),
    )
)
QUERY = [101, 102, 103]
APE = ParallelAttention(shared_tokens=3, temperature=0.7, scale=0.8)


def weights(logits: Tensor, chunks: slice, temperature: float, scale: float) -> Tensor:
    """Attention weights over the last dimension, by each part's own softmax and log-sum-exp."""
    of_chunks = logits[..., chunks] / temperature
    before, after = logits[..., : chunks.start], logits[..., chunks.stop :]
    of_others = torch.cat((before, after), dim=-1)
    both = torch.stack((scale * of_chunks.logsumexp(-1), of_others.logsumexp(-1))).softmax(0)
    shares = both[0, ..., None] * of_chunks.softmax(-1)
    others = both[1, ..., None] * of_others.softmax(-1)
    first = before.shape[-1]
    return torch.cat((others[..., :first], shares, others[..., first:]), dim=-1)


def cache_over(
    model: PreTrainedModel,
    parallel: ParallelAttention | None,
    plan: PrefixPlan = PLAN,
    positions: Sequence[int] = (),
) -> RequestCache:
    kv = {piece.chunk: encode_chunk(model, SEGMENTS[piece.chunk]) for piece in plan.slices}
    kv_TL2HD = gather(plan, kv) if plan.slices else None
    rope = Rope.from_config(model.config)
    return RequestCache(plan, kv_TL2HD, rope, room=16, first_positions=positions, parallel=parallel)


def serving(architecture: str, rope: str = "default") -> PreTrainedModel:
    model = tiny_model(architecture, rope)
    enable_cached(model)
    return model


def slow_cache(model: PreTrainedModel) -> tuple[Pass, list[int], list[int]]:
    """Prompt and chunks, each chunk computed behind the prompt, at positions from 3 on."""
    shared = slow_pass(model, PROMPT_IDS, range(3))
    keys, values = [*shared.keys], [*shared.values]
    ids, positions = [*PROMPT_IDS], [*range(3)]
    for name, chunk in CHUNKS.items():
        alone = slow_pass(model, SEGMENTS[name], range(3 + len(chunk)))
        keys = [torch.cat(pair) for pair in zip(keys, (k[3:] for k in alone.keys), strict=True)]
        values = [
            torch.cat(pair) for pair in zip(values, (v[3:] for v in alone.values), strict=True)
        ]
        ids += chunk
        positions += range(3, 3 + len(chunk))
    return Pass(torch.empty(0), keys, values), ids, positions


def slow_logits(
    model: PreTrainedModel, tokens: Sequence[int], temperature: float, scale: float
) -> Tensor:
    cached, ids, positions = slow_cache(model)
    after = range(PLAN.length, PLAN.length + len(tokens))
    return slow_pass(
        model,
        [*ids, *tokens],
        [*positions, *after],
        rows=range(len(ids), len(ids) + len(tokens)),
        cached=cached,
        weigh=lambda logits: weights(logits, slice(3, len(ids)), temperature, scale),
    ).logits


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 4),
    shared=st.integers(0, 3),
    chunk=st.integers(1, 9),
    temperature=st.floats(0.2, 2),
    scale=st.floats(0.2, 2),
    seed=st.integers(0, 2**20),
)
def test_one_softmax_is_the_merge_of_two(
    tokens: int, shared: int, chunk: int, temperature: float, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = shared + chunk + tokens
    query, key, value = (
        torch.randn(1, heads, rows, 8, generator=generator)
        for heads, rows in ((6, tokens), (2, keys), (2, keys))
    )
    positions = torch.arange(keys)
    visible = None if tokens == 1 else positions[None] <= positions[-tokens:, None]
    chunks = slice(shared, shared + chunk)
    parallel = ParallelAttention(shared, temperature, scale)
    found = attend_in_parallel(query, key, value, visible, 0.4, parallel, chunks)
    for row in range(tokens):
        seen = keys - tokens + row + 1
        for head in range(6):
            logits = 0.4 * key[0, head // 3, :seen] @ query[0, head, row]
            merged = weights(logits, chunks, temperature, scale) @ value[0, head // 3, :seen]
            torch.testing.assert_close(found[0, row, head], merged, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rope", ["default", "yarn"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_query_and_answer_attend_as_defined(architecture: str, rope: str) -> None:
    model = serving(architecture, rope)
    cached = cache_over(model, APE)
    tokens = QUERY
    found = forward_cached(model, [(cached, QUERY)])[0]
    for _ in range(3):
        assert_same(found, slow_logits(model, tokens, APE.temperature, APE.scale))
        tokens = [*tokens, int(found.argmax())]
        found = forward_cached(model, [(cached, tokens[-1:])])[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_temperature_and_scale_of_one_are_plain_attention(architecture: str) -> None:
    model = serving(architecture)
    neutral = ParallelAttention(shared_tokens=3, temperature=1.0, scale=1.0)
    plain, found = (cache_over(model, parallel) for parallel in (None, neutral))
    for ids in (QUERY, [9], [8, 7]):
        assert_same(forward_cached(model, [(found, ids)]), forward_cached(model, [(plain, ids)]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_chunk_that_saw_the_prompt_is_standard_rag(architecture: str) -> None:
    model = serving(architecture)
    plan = PrefixPlan(PLAN.slices[:2])
    neutral = ParallelAttention(shared_tokens=3, temperature=1.0, scale=1.0)
    found = forward_cached(model, [(cache_over(model, neutral, plan), QUERY)])[0]
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(torch.tensor([SEGMENTS["a"] + QUERY])).logits[0, -1]
    assert_same(found, expected)


def test_a_prefix_without_chunks_is_attended_to_plainly() -> None:
    model = serving("qwen2")
    for plan in (PrefixPlan(PLAN.slices[:1]), PrefixPlan(())):
        parallel = ParallelAttention(plan.tokens, 0.5, 0.5)
        caches = [cache_over(model, one, plan) for one in (None, parallel)]
        plain, found = (forward_cached(model, [(one, QUERY)]) for one in caches)
        assert torch.equal(plain, found)


def test_requests_beside_a_reweighted_one_are_not_touched() -> None:
    model = serving("llama")
    alone = [forward_cached(model, [(cache_over(model, one), QUERY)])[0] for one in (None, APE)]
    together = forward_cached(model, [(cache_over(model, one), QUERY) for one in (None, APE, None)])
    for found, expected in zip(together, [*alone, alone[0]], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (alone[0] - alone[1]).abs().max() > 1e-2


def test_bfloat16_is_near_float32() -> None:
    wide, narrow = serving("llama"), serving("llama").bfloat16()
    expected = forward_cached(wide, [(cache_over(wide, APE), QUERY)])
    found = forward_cached(narrow, [(cache_over(narrow, APE), QUERY)])
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_tokens_between_parallel_chunks_are_refused() -> None:
    model = serving("llama")
    cache_over(model, APE, positions=range(PLAN.length, PLAN.length + len(QUERY)))
    with pytest.raises(AssertionError, match="before what is computed"):
        cache_over(model, APE, positions=[PLAN.length - 1])
