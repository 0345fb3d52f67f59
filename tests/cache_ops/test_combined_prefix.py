"""Anchors, means, packets and a contextualizer together, against a decoder run row by row."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from layerwise import Pass, slow_pass
from tiny import VOCABULARY, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from cache_ops.assemble import gather
from cache_ops.attention import enable_packed
from cache_ops.cached import RequestCache, enable_cached, forward_cached
from cache_ops.contextualizer import Contextualizer, ContextualizerSpec, new_contextualizer
from cache_ops.encode import encode_chunk
from cache_ops.layout import Layout
from cache_ops.packing import Example, pack, pack_over_prefix
from cache_ops.plan import MEAN_TOKEN, PROMPT, Span
from cache_ops.recompute import ChosenRows, forward_recomputing
from cache_ops.rope import Rope
from cache_ops.soft_tokens import add_soft_tokens, numbered
from data_builders.prefix import nugget_prefix
from recipes.resolve import resolve

QUERY, ANSWER = [101, 102, 103], [50, 51]
A = [*range(10, 22)]
# "b" is a single token, and "c" has the tokens of "a".
TEXTS = {PROMPT: [5, 6, 7], "a": A, "b": [60], "c": A}
SPANS = [Span("c", 4, 6), Span("a", 7, 9), Span("b", 0, 1), Span("a", 3, 5)]
PACKETS = {"packets_before": (1, 2), "packets_after": (1, 1)}
OPTIONS = {
    "packets": "context.packets={before_tokens: 2, after_tokens: 1}",
    "prefix": "context.anchors.prefix_tokens=2",
    "suffix": "context.anchors.suffix_tokens=1",
    "mean": "context.anchors.summary=mean",
}
Segments = Mapping[str, Sequence[int]]


def prefix_of(spans: Sequence[Span], *options: str) -> tuple[Layout, Segments]:
    config = resolve(["smollm2_135m/systems/coinrag", *options]).config
    soft_tokens = numbered(VOCABULARY, PACKETS)
    return nugget_prefix(config, spans, TEXTS, ["c", "a", "b"], soft_tokens)


def made(architecture: str, rope: str, layers: int = 2) -> tuple[PreTrainedModel, Contextualizer]:
    """A model with packet tokens, and a contextualizer that changes much."""
    model = tiny_model(architecture, rope, layers=layers)
    add_soft_tokens(model, PACKETS, seed=3)
    spec = ContextualizerSpec.of(model.config, "coinrag", width=24, layers=1, heads=3)
    contextualizer = new_contextualizer(spec, seed=3).requires_grad_(False)
    torch.manual_seed(4)
    for weight in contextualizer.parameters():
        weight.normal_(std=0.3) if weight.dim() == 2 else weight.uniform_(0.5, 1.5)
    return model, contextualizer


def slow_prefix(
    model: PreTrainedModel, contextualizer: Contextualizer, layout: Layout
) -> tuple[Pass, list[int]]:
    """Slices computed where they stand, a mean from its tokens there one by one, all corrected."""
    layers = range(model.config.num_hidden_layers)
    positions: list[int] = []
    rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    for piece in layout.plan.slices:
        ids = TEXTS[piece.chunk]
        for token in range(piece.start, piece.end):
            at = piece.position + token - piece.start
            positions.append(at)
            averaged = range(len(ids)) if token == len(ids) else [token]
            passes = [slow_pass(model, ids, range(at - t, at - t + len(ids))) for t in averaged]
            for layer in layers:
                there = list(zip(averaged, passes, strict=True))
                key = torch.stack([one.keys[layer][t] for t, one in there]).mean(0)
                value = torch.stack([one.values[layer][t] for t, one in there]).mean(0)
                rows[layer].append((key, value))
    prefix = Pass(torch.empty(0), [], [])
    for layer in layers:
        kept_1HPD = (
            torch.stack(kind).transpose(0, 1)[None] for kind in zip(*rows[layer], strict=True)
        )
        key_1HPD, value_1HPD = contextualizer(layer, *kept_1HPD, (len(positions),))
        prefix.keys.append(key_1HPD[0].transpose(0, 1))
        prefix.values.append(value_1HPD[0].transpose(0, 1))
    return prefix, positions


def slow_logits(model: PreTrainedModel, contextualizer: Contextualizer, layout: Layout) -> Tensor:
    """Logits that predict the answer's tokens, [tokens, vocabulary]."""
    prefix, positions = slow_prefix(model, contextualizer, layout)
    found = []
    for known in range(len(ANSWER)):
        own = [*QUERY, *ANSWER[:known]]
        ids = [*[0] * len(positions), *layout.online_ids, *own]
        places = [*positions, *layout.positions_with(len(own))]
        online = range(len(positions), len(ids))
        found.append(slow_pass(model, ids, places, rows=online, cached=prefix).logits)
    return torch.stack(found)


def cache_over(
    model: PreTrainedModel,
    contextualizer: Contextualizer | None,
    layout: Layout,
    segments: Segments,
) -> RequestCache:
    kv = {name: encode_chunk(model, ids) for name, ids in segments.items()}
    return RequestCache(
        layout.plan,
        gather(layout.plan, kv),
        Rope.from_config(model.config),
        room=len(layout.online_ids) + 8,
        first_positions=layout.positions_with(len(QUERY)),
        contextualizer=contextualizer,
    )


def served_logits(
    model: PreTrainedModel,
    contextualizer: Contextualizer | None,
    layout: Layout,
    segments: Segments,
) -> Tensor:
    enable_cached(model)
    cache = cache_over(model, contextualizer, layout, segments)
    first = [*layout.online_ids, *QUERY]
    return torch.cat([forward_cached(model, [(cache, ids)]) for ids in (first, ANSWER[:1])])


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("architecture", "rope", "order"),
    [("llama", "default", "rank_then_document"), ("qwen3", "yarn", "score")],
)
@torch.no_grad()
def test_packed_rows_requests_and_plain_loops_agree(architecture, rope, order) -> None:
    model, contextualizer = made(architecture, rope)
    options = {"order": f"retrieval.order={order}", **OPTIONS}
    # One question has no nuggets, and so neither anchors nor packets.
    layouts = [prefix_of(spans, *options.values()) for spans in (SPANS, [])]
    expected = torch.cat([slow_logits(model, contextualizer, layout) for layout, _ in layouts])
    served = [served_logits(model, contextualizer, *one) for one in layouts]
    same(torch.cat(served), expected)

    enable_packed(model)
    examples = [Example.of(layout, QUERY, ANSWER) for layout, _ in layouts]
    segments = layouts[0][1]
    rope_ = Rope.from_config(model.config)
    kv = {name: encode_chunk(model, ids) for name, ids in segments.items()}
    over_slices = torch.cat([gather(example.plan, kv) for example in examples])
    for batch in (pack(examples, segments, rope_), pack_over_prefix(examples, over_slices, rope_)):
        same(model(**batch.model_inputs(contextualizer)).logits[0], expected)

    # Each part is in it.
    assert segments["b"] == [60, MEAN_TOKEN]
    assert (served_logits(model, None, *layouts[0]) - served[0]).abs().max() > 1e-2
    for left_out in OPTIONS:
        others = [option for name, option in options.items() if name != left_out]
        without = served_logits(model, contextualizer, *prefix_of(SPANS, *others))
        assert (without - served[0]).abs().max() > 1e-2, left_out


@torch.no_grad()
def test_repair_of_everything_is_a_plain_forward_whatever_the_prefix_was_corrected_to() -> None:
    model, contextualizer = made("qwen2", "default", layers=3)
    layout, segments = prefix_of(
        SPANS, *[OPTIONS[name] for name in ("packets", "prefix", "suffix")]
    )
    text = dict(zip(layout.positions_with(len(QUERY)), [*layout.online_ids, *QUERY], strict=True))
    prefix_ids = []
    for piece in layout.plan.slices:
        ids = segments[piece.chunk][piece.start : piece.end]
        prefix_ids += ids
        text |= {piece.position + at: token for at, token in enumerate(ids)}
    plainly = model(torch.tensor([[text[at] for at in range(len(text))]])).logits[0, -1]
    enable_cached(model)
    found = {}
    for ratio in (0.0, 1.0):
        cache = cache_over(model, contextualizer, layout, segments)
        chosen = ChosenRows(ratio, "v", 1, gradual=False)
        online = [*layout.online_ids, *QUERY]
        found[ratio] = forward_recomputing(model, cache, chosen, prefix_ids, online)[0]
    same(found[1.0], plainly)
    assert (found[0.0] - plainly).abs().max() > 1e-2
