"""CacheBlend and EPIC against a decoder run row by row, and against their limits."""

import math
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layerwise import Pass, side_by_side, slow_pass
from tiny import ARCHITECTURES, VOCABULARY, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from cache_ops.assemble import gather
from cache_ops.cached import CACHED, RequestCache, enable_cached, forward_cached
from cache_ops.encode import encode_chunk
from cache_ops.layout import whole_chunks
from cache_ops.plan import PROMPT, PrefixPlan, Slice
from cache_ops.recompute import (
    CheckLayerError,
    ChosenRows,
    FixedRows,
    Recompute,
    RecomputingStep,
    first_rows,
    forward_recomputing,
)
from cache_ops.rope import Rope
from cache_ops.soft_tokens import add_soft_tokens

LAYERS = 4
QUERY = [101, 102, 103]
SEGMENTS = {PROMPT: [5, 6, 7], "a": [*range(10, 21)], "b": [60, 61], "c": [*range(70, 77)]}
CHUNKS = [(name, len(ids)) for name, ids in SEGMENTS.items() if name != PROMPT]
PLAN = whole_chunks(CHUNKS, 3).plan
TEXT = [token for ids in SEGMENTS.values() for token in ids]


@cache
def model_of(architecture: str, rope: str = "default") -> PreTrainedModel:
    model = tiny_model(architecture, rope, layers=LAYERS)
    enable_cached(model)
    return model


def cache_over(
    model: PreTrainedModel,
    plan: PrefixPlan = PLAN,
    segments: dict[str, list[int]] = SEGMENTS,
    positions: Sequence[int] = (),
) -> RequestCache:
    kv = {piece.chunk: encode_chunk(model, segments[piece.chunk]) for piece in plan.slices}
    kv_TL2HD = gather(plan, kv) if plan.slices else None
    rope = Rope.from_config(model.config)
    return RequestCache(plan, kv_TL2HD, rope, room=16, first_positions=positions)


def first_pass(
    model: PreTrainedModel, recompute: Recompute, plan: PrefixPlan = PLAN
) -> tuple[Tensor, RequestCache]:
    cached = cache_over(model, plan)
    prefix_ids = [t for p in plan.slices for t in SEGMENTS[p.chunk][p.start : p.end]]
    return forward_recomputing(model, cached, recompute, prefix_ids, QUERY)[0], cached


def slow_prefix(
    model: PreTrainedModel, plan: PrefixPlan = PLAN, segments: dict[str, list[int]] = SEGMENTS
) -> tuple[Pass, list[int], list[int]]:
    """Every whole slice computed alone where it stands, with all tokens and positions."""
    passes, ids, positions = [], [], []
    for piece in plan.slices:
        own = [*range(piece.position, piece.position + piece.end)]
        passes.append(slow_pass(model, segments[piece.chunk], own))
        ids += segments[piece.chunk]
        positions += own
    return side_by_side(passes), ids, positions


def deviating(counts: dict[int, int], metric: str, prefix: int) -> Callable[..., list[int]]:
    """CacheBlend's choice, from its definition."""

    def narrow(layer: int, rows: list[int], old: Pass, new: Pass) -> list[int]:
        if layer not in counts:
            return rows
        before, now = (p.values if metric == "v" else p.keys for p in (old, new))
        change = {
            row: float(((now[layer][row] - before[layer][row]) ** 2).sum())
            for row in rows
            if row < prefix
        }
        chosen = sorted(change, key=lambda row: (-change[row], row))[: counts[layer]]
        return [*sorted(chosen), *(row for row in rows if row >= prefix)]

    return narrow


def slow_blend(model: PreTrainedModel, counts: dict[int, int], metric: str) -> Pass:
    old, ids, positions = slow_prefix(model)
    following = range(len(ids), len(ids) + len(QUERY))
    narrow = deviating(counts, metric, len(ids))
    return slow_pass(model, ids + QUERY, [*positions, *following], cached=old, narrow=narrow)


def slow_fixed(model: PreTrainedModel, rows: Sequence[int], plan: PrefixPlan = PLAN) -> Pass:
    old, ids, positions = slow_prefix(model, plan)
    online = range(len(ids), len(ids) + len(QUERY))
    following = range(plan.length, plan.length + len(QUERY))
    in_hand = [*rows, *online]
    return slow_pass(model, ids + QUERY, [*positions, *following], rows=in_hand, cached=old)


def ordinary(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, -1]
    enable_cached(model)
    return logits


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def assert_cache_is(cached: RequestCache, expected: Pass) -> None:
    for layer in range(LAYERS):
        keys, values = cached.laid(layer, torch.empty(0), 0)
        assert_same(keys[0].transpose(0, 1), expected.keys[layer])
        assert_same(values[0].transpose(0, 1), expected.values[layer])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_slow_decoder_is_transformers(architecture: str) -> None:
    for rope in ("default", "yarn"):
        model = model_of(architecture, rope)
        ids = TEXT + QUERY
        assert_same(slow_pass(model, ids, range(len(ids))).logits, ordinary(model, ids))


@pytest.mark.parametrize("metric", ["v", "k"])
@pytest.mark.parametrize("check_layer", [1, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cacheblend_is_its_definition(architecture: str, check_layer: int, metric: str) -> None:
    model = model_of(architecture)
    for ratio in (0.15, 0.5):
        choice = ChosenRows(ratio, metric, check_layer, gradual=False)
        logits, cached = first_pass(model, choice)
        expected = slow_blend(model, {check_layer: math.floor(ratio * len(TEXT))}, metric)
        assert_same(logits, expected.logits)
        assert_cache_is(cached, expected)


@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_the_choice_by_keys_compares_them_where_they_now_stand(rope: str) -> None:
    model = model_of("qwen3", rope)
    logits, _ = first_pass(model, ChosenRows(0.3, "k", 1, gradual=False))
    assert_same(logits, slow_blend(model, {1: 6}, "k").logits)


@pytest.mark.parametrize("gradual", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cacheblend_of_everything_is_standard_rag(architecture: str, gradual: bool) -> None:
    model = model_of(architecture)
    expected = ordinary(model, TEXT + QUERY)
    for check_layer in range(LAYERS):
        for metric in ("v", "k"):
            logits, _ = first_pass(model, ChosenRows(1.0, metric, check_layer, gradual))
            assert_same(logits, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cacheblend_of_nothing_is_turborag_but_for_the_refreshed_layers(architecture: str) -> None:
    model = model_of(architecture)
    alone, _, _ = slow_prefix(model)
    together = slow_pass(model, TEXT, range(len(TEXT)))
    for check_layer in range(LAYERS):
        logits, cached = first_pass(model, ChosenRows(0.0, "v", check_layer, gradual=False))
        refreshed = check_layer + 1
        prefix = Pass(
            torch.empty(0),
            together.keys[:refreshed] + alone.keys[refreshed:],
            together.values[:refreshed] + alone.values[refreshed:],
        )
        ids, online = TEXT + QUERY, range(len(TEXT), len(TEXT) + len(QUERY))
        expected = slow_pass(model, ids, range(len(ids)), rows=online, cached=prefix)
        assert_same(logits, expected.logits)
        assert_cache_is(cached, expected)


@pytest.mark.parametrize("metric", ["v", "k"])
def test_gradual_filtering_chooses_again_among_the_rows_in_hand(metric: str) -> None:
    model = model_of("llama")
    choice = ChosenRows(0.4, metric, 1, gradual=True)
    counts = choice.going_on(len(TEXT), LAYERS)
    assert counts == {1: 11, 2: 6}
    logits, cached = first_pass(model, choice)
    expected = slow_blend(model, counts, metric)
    assert_same(logits, expected.logits)
    assert_cache_is(cached, expected)


@given(
    ratio=st.floats(0, 1),
    tokens=st.integers(0, 4000),
    layers=st.integers(1, 40),
    check_layer=st.integers(0, 39),
)
def test_gradual_shares_fall_and_have_the_ratio_as_their_mean(
    ratio: float, tokens: int, layers: int, check_layer: int
) -> None:
    choice = ChosenRows(ratio, "v", check_layer, gradual=True)
    if check_layer >= layers:
        with pytest.raises(CheckLayerError, match=f"last one is {layers - 1}"):
            choice.going_on(tokens, layers)
        return
    counts = choice.going_on(tokens, layers)
    assert [*counts] == [*range(check_layer, max(check_layer + 1, layers - 1))]
    found = [*counts.values()]
    assert found == sorted(found, reverse=True)
    assert 0 <= found[-1] <= found[0] <= tokens
    # Each count is rounded down.
    assert ratio * tokens - 1 <= sum(found) / len(found) <= ratio * tokens + 1e-6


def test_a_share_of_whole_tokens_is_not_rounded_below_them() -> None:
    for percent in range(101):
        choice = ChosenRows(percent / 100, "v", 1, gradual=False)
        assert choice.going_on(100, LAYERS) == {1: percent}


def test_of_equal_deviations_the_earlier_rows_go_on() -> None:
    rope = Rope.from_config(tiny_model().config)
    nothing_TL2HD = torch.zeros(len(TEXT), 1, 2, 2, 16)
    for largest, expected in ((None, [0, 1, 2, 3]), (7, [0, 1, 2, 7])):
        cached = RequestCache(PLAN, nothing_TL2HD, rope, room=1)
        step = RecomputingStep(cached, range(len(TEXT)), 1, {0: 4}, "v", torch.device("cpu"))
        query, key, value = (torch.ones(1, heads, len(TEXT) + 1, 16) for heads in (4, 2, 2))
        if largest is not None:
            value[:, :, largest] = 2
        step.attend(0, query, key, value, 1.0)
        assert step.rows_T.tolist() == [*expected, len(TEXT)]


def test_a_prompt_alone_is_a_plain_text() -> None:
    model = model_of("qwen2")
    plan = PrefixPlan(PLAN.slices[:1])
    for recompute in (ChosenRows(0.5, "v", 1, gradual=False), first_rows(plan, 4)):
        logits, _ = first_pass(model, recompute, plan)
        assert_same(logits, ordinary(model, SEGMENTS[PROMPT] + QUERY))


def test_a_prefix_of_nothing_is_a_plain_text() -> None:
    model = model_of("qwen2")
    for recompute in (ChosenRows(0.5, "v", 1, gradual=False), FixedRows(())):
        logits, _ = first_pass(model, recompute, PrefixPlan(()))
        assert_same(logits, ordinary(model, QUERY))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_epic_is_its_definition(architecture: str) -> None:
    model = model_of(architecture)
    for count in (1, 4):
        rows = first_rows(PLAN, count).rows
        logits, cached = first_pass(model, FixedRows(rows))
        expected = slow_fixed(model, rows)
        assert_same(logits, expected.logits)
        assert_cache_is(cached, expected)


def test_epic_takes_the_first_tokens_of_all_slices_but_the_first() -> None:
    assert first_rows(PLAN, 4).rows == (3, 4, 5, 6, 14, 15, 16, 17, 18, 19)
    without_prompt = whole_chunks(CHUNKS, 0).plan
    assert first_rows(without_prompt, 4).rows == (11, 12, 13, 14, 15, 16)
    assert first_rows(PrefixPlan(()), 4).rows == ()


@pytest.mark.parametrize("prompt", [0, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_epic_of_whole_chunks_is_standard_rag(architecture: str, prompt: int) -> None:
    model = model_of(architecture)
    plan = whole_chunks(CHUNKS, prompt).plan
    logits, _ = first_pass(model, first_rows(plan, 11), plan)
    assert_same(logits, ordinary(model, TEXT[3 - prompt :] + QUERY))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_rows_of_any_plan(data: st.DataObject) -> None:
    """Slices of one token, positions that overlap or leave gaps, any rows in any layout."""
    model = model_of("qwen3")
    token = st.integers(0, VOCABULARY - 1)
    segments, slices = {}, []
    for number in range(data.draw(st.integers(1, 4))):
        ids = data.draw(st.lists(token, min_size=1, max_size=6))
        segments[str(number)] = ids
        slices.append(Slice(str(number), 0, len(ids), data.draw(st.integers(0, 12))))
    plan = PrefixPlan(tuple(slices))
    old, ids, positions = slow_prefix(model, plan, segments)
    rows = sorted(data.draw(st.sets(st.sampled_from(range(len(ids))))))
    following = range(plan.length, plan.length + len(QUERY))
    found = forward_recomputing(
        model, cache_over(model, plan, segments), FixedRows(tuple(rows)), ids, QUERY
    )
    in_hand = [*rows, *range(len(ids), len(ids) + len(QUERY))]
    expected = slow_pass(model, ids + QUERY, [*positions, *following], rows=in_hand, cached=old)
    assert_same(found[0], expected.logits)


@pytest.mark.parametrize(
    "recompute", [ChosenRows(0.4, "v", 1, gradual=False), first_rows(PLAN, 2)], ids=str
)
def test_decoding_goes_on_from_what_was_recomputed(recompute: Recompute) -> None:
    model = model_of("mistral")
    logits, cached = first_pass(model, recompute)
    if isinstance(recompute, FixedRows):
        slow = slow_fixed(model, recompute.rows)
    else:
        slow = slow_blend(model, {1: 9}, "v")
    ids = TEXT + QUERY
    for _ in range(5):
        token = int(logits.argmax())
        assert token == int(slow.logits.argmax())
        ids = [*ids, token]
        logits = forward_cached(model, [(cached, [token])])[0]
        last = [len(ids) - 1]
        slow = slow_pass(model, ids, range(len(ids)), rows=last, cached=slow)
        assert_same(logits, slow.logits)


def test_nothing_recomputed_is_the_ordinary_first_pass_with_link_tokens_between() -> None:
    model = tiny_model("llama", layers=LAYERS)
    enable_cached(model)
    links = add_soft_tokens(model, {"links": (1, 2)}, seed=0)["links"].ids(1)[0]
    plan = PrefixPlan((Slice("a", 0, 11, 0), Slice("c", 0, 7, 13)))
    online, positions = [*links, *QUERY], [11, 12, 20, 21, 22]
    found = forward_recomputing(
        model,
        cache_over(model, plan, positions=positions),
        FixedRows(()),
        SEGMENTS["a"] + SEGMENTS["c"],
        online,
    )
    expected = forward_cached(model, [(cache_over(model, plan, positions=positions), online)])
    assert_same(found, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_is_near_float32(architecture: str) -> None:
    wide = model_of(architecture)
    narrow = tiny_model(architecture, layers=LAYERS).bfloat16()
    enable_cached(narrow)
    for recompute in (ChosenRows(1.0, "v", 1, gradual=False), first_rows(PLAN, 2)):
        expected, _ = first_pass(wide, recompute)
        found, _ = first_pass(narrow, recompute)
        assert found.dtype == torch.bfloat16
        assert (found.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_the_model_serves_other_requests_before_and_after() -> None:
    model = model_of("qwen2")
    expected = forward_cached(model, [(cache_over(model), QUERY)])
    first_pass(model, first_rows(PLAN, 2))
    assert model.config._attn_implementation == CACHED
    assert torch.equal(forward_cached(model, [(cache_over(model), QUERY)]), expected)
