"""Selective repair of a prefix of slices, against a decoder run row by row and a plain forward."""

import math

import pytest
import torch
from layerwise import Pass, slow_pass
from reference import prefix_cache
from tiny import VOCABULARY, tiny_model
from transformers import PreTrainedModel

from cache_ops.assemble import gather
from cache_ops.cached import RequestCache, enable_cached, forward_cached
from cache_ops.encode import encode_chunk
from cache_ops.layout import wrapped
from cache_ops.plan import PROMPT, Anchors, Span, plan_prefix
from cache_ops.recompute import ChosenRows, forward_recomputing
from cache_ops.rope import Rope
from cache_ops.soft_tokens import add_soft_tokens

LAYERS = 3
QUERY = [101, 102, 103]
SEGMENTS = {PROMPT: [5, 6, 7], "a": [*range(10, 25)], "b": [60, 61, 62], "c": [*range(70, 79)]}
SPANS = [Span("c", 3, 5), Span("a", 8, 11), Span("b", 1, 2), Span("a", 4, 5)]
PLAN = plan_prefix(
    SPANS,
    prompt_length=3,
    chunk_ranks=["a", "b", "c"],
    anchors=Anchors(2, 1, {name: len(ids) for name, ids in SEGMENTS.items()}),
)
PLAIN = wrapped(PLAN, [], [])
WRAPPED = wrapped(PLAN, [VOCABULARY, VOCABULARY + 1], [VOCABULARY + 2])


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made = tiny_model(request.param, layers=LAYERS)
    add_soft_tokens(made, {"packets": (1, 3)}, seed=0)
    enable_cached(made)
    return made


def prefix_ids(layout) -> list[int]:
    return [t for p in layout.plan.slices for t in SEGMENTS[p.chunk][p.start : p.end]]


def first_pass(model, layout, recompute):
    kv = {name: encode_chunk(model, ids) for name, ids in SEGMENTS.items()}
    own = [*layout.online_ids, *QUERY]
    cache = RequestCache(
        layout.plan,
        gather(layout.plan, kv),
        Rope.from_config(model.config),
        room=len(own) + 1,
        first_positions=layout.positions_with(len(QUERY)),
    )
    if recompute is None:
        return forward_cached(model, [(cache, own)])[0]
    return forward_recomputing(model, cache, recompute, prefix_ids(layout), own)[0]


def alone(model, plan) -> tuple[Pass, list[int]]:
    """Every slice as its chunk alone gives it where the slice stands, and the slices' positions."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        layers = prefix_cache(model, plan, SEGMENTS).layers
    enable_cached(model)
    keys, values = (
        [states[0].transpose(0, 1) for states in kind]
        for kind in ([one.keys for one in layers], [one.values for one in layers])
    )
    positions = [p.position + at for p in plan.slices for at in range(p.end - p.start)]
    return Pass(torch.empty(0), keys, values), positions


def in_text_order(layout) -> list[int]:
    """All tokens before the answer by their positions, which have no gaps."""
    own = [*layout.online_ids, *QUERY]
    placed = dict(zip(layout.positions_with(len(QUERY)), own, strict=True))
    for piece in layout.plan.slices:
        ids = SEGMENTS[piece.chunk][piece.start : piece.end]
        placed |= {piece.position + at: token for at, token in enumerate(ids)}
    assert sorted(placed) == [*range(len(placed))]
    return [placed[at] for at in range(len(placed))]


def same(found, expected) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", [PLAIN, WRAPPED], ids=["slices", "packets"])
def test_repair_of_everything_is_a_plain_forward_over_the_slices(model, layout) -> None:
    found = first_pass(model, layout, ChosenRows(1.0, "v", 1, gradual=False))
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(torch.tensor([in_text_order(layout)])).logits[0, -1]
    enable_cached(model)
    same(found, expected)


def test_repair_of_nothing_refreshes_the_first_layers_alone(model) -> None:
    check_layer = 1
    found = first_pass(model, WRAPPED, ChosenRows(0.0, "v", check_layer, gradual=False))
    cached, positions = alone(model, WRAPPED.plan)
    ids = [*prefix_ids(WRAPPED), *WRAPPED.online_ids, *QUERY]
    places = [*positions, *WRAPPED.positions_with(len(QUERY))]
    together = slow_pass(model, ids, places)
    for layer in range(check_layer + 1):
        tokens = len(positions)
        cached.keys[layer] = together.keys[layer][:tokens]
        cached.values[layer] = together.values[layer][:tokens]
    online = range(len(positions), len(ids))
    same(found, slow_pass(model, ids, places, rows=online, cached=cached).logits)
    assert not torch.allclose(found, first_pass(model, WRAPPED, None), atol=1e-3)


@pytest.mark.parametrize(("layout", "metric"), [(PLAIN, "v"), (WRAPPED, "k")], ids=["v", "k"])
def test_repair_takes_the_rows_that_deviate_most(model, layout, metric) -> None:
    found = first_pass(model, layout, ChosenRows(0.4, metric, 1, gradual=False))
    cached, positions = alone(model, layout.plan)
    count = math.floor(0.4 * len(positions))

    def narrow(layer, rows, old, new):
        if layer != 1:
            return rows
        before, now = (p.values if metric == "v" else p.keys for p in (old, new))
        change = ((now[layer][: len(positions)] - before[layer]) ** 2).sum(dim=(1, 2))
        most = change.topk(count).indices.tolist()
        return [*sorted(most), *range(len(positions), len(places))]

    ids = [*prefix_ids(layout), *layout.online_ids, *QUERY]
    places = [*positions, *layout.positions_with(len(QUERY))]
    same(found, slow_pass(model, ids, places, cached=cached, narrow=narrow).logits)
