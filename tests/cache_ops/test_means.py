"""The mean of a chunk as one of its tokens: encoded, packed, and sliced, against its definition."""

from collections.abc import Sequence

import pytest
import torch
from reference import prefix_cache
from tiny import tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cache_ops.assemble import gather
from cache_ops.attention import PACKED
from cache_ops.cached import RequestCache, enable_cached, forward_cached
from cache_ops.encode import encode_chunk
from cache_ops.layout import wrapped
from cache_ops.packing import Example, pack, pack_over_prefix
from cache_ops.plan import MEAN_TOKEN, PROMPT, Anchors, PrefixPlan, Slice, Span, plan_prefix
from cache_ops.rope import Rope

TEXTS = {PROMPT: [5, 6, 7], "a": [*range(10, 22)], "b": [60, 61]}
SEGMENTS = {name: ids if name == PROMPT else [*ids, MEAN_TOKEN] for name, ids in TEXTS.items()}
SPANS = [Span("b", 0, 1), Span("a", 4, 6)]
QUERY, ANSWER = [101, 102], [103, 104, 105]


def plan_of(suffix: int, order="rank_then_document") -> PrefixPlan:
    anchors = Anchors(1, suffix, {name: len(ids) for name, ids in TEXTS.items()}, mean=True)
    return plan_prefix(SPANS, prompt_length=3, chunk_ranks=["a", "b"], order=order, anchors=anchors)


def layers_of(model: PreTrainedModel, ids: Sequence[int], start: int) -> list:
    cache = DynamicCache()
    positions = torch.arange(len(ids))[None] + start
    model.model(
        input_ids=torch.tensor([list(ids)]),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    )
    return cache.layers


def mean_of(model: PreTrainedModel, ids: Sequence[int], at: int) -> list[tuple[Tensor, Tensor]]:
    """Each layer's mean key and value, from forwards in which each token in turn stands at `at`."""
    turned = [layers_of(model, ids, at - token) for token in range(len(ids))]
    return [
        (
            torch.stack([turned[t][n].keys[:, :, t] for t in range(len(ids))], 2).mean(2, True),
            layer.values.mean(2, keepdim=True),
        )
        for n, layer in enumerate(turned[0])
    ]


def reference_logits(model: PreTrainedModel, plan: PrefixPlan) -> Tensor:
    prefix = DynamicCache()
    for piece in plan.slices:
        ids = TEXTS[piece.chunk]
        if piece.start < len(ids):
            own = Slice(piece.chunk, piece.start, min(piece.end, len(ids)), piece.position)
            for n, layer in enumerate(prefix_cache(model, PrefixPlan((own,)), TEXTS).layers):
                prefix.update(layer.keys, layer.values, n)
        if piece.end > len(ids):
            for n, states in enumerate(mean_of(model, ids, piece.delta + len(ids))):
                prefix.update(*states, n)
    own_ids = torch.tensor([[*QUERY, *ANSWER]])
    positions = torch.arange(own_ids.shape[1])[None] + plan.length
    logits = model(
        input_ids=own_ids, position_ids=positions, past_key_values=prefix, use_cache=True
    ).logits[0]
    return logits[len(QUERY) - 1 : -1]


def packed_logits(model: PreTrainedModel, plans: Sequence[PrefixPlan], **options) -> Tensor:
    examples = [Example(plan, QUERY, ANSWER) for plan in plans]
    model.set_attn_implementation(PACKED)
    batch = pack(examples, SEGMENTS, Rope.from_config(model.config), **options)
    logits = model(**batch.to(torch.device("cpu")).model_inputs()).logits[0]
    model.set_attn_implementation("sdpa")
    return logits


def close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("architecture", "rope", "suffix"),
    [("llama", "default", 0), ("qwen2", "llama3", 2), ("qwen3", "yarn", 0), ("qwen3", "linear", 2)],
)
@torch.no_grad()
def test_packed_and_served_means_are_their_definition(architecture, rope, suffix) -> None:
    model = tiny_model(architecture, rope)
    plan = plan_of(suffix)
    expected = reference_logits(model, plan)
    close(packed_logits(model, [plan]), expected)
    # Beside another example that uses the same chunks in another way.
    both = packed_logits(model, [plan_of(5, "score"), plan])
    close(both[len(ANSWER) :], expected)

    kv = {name: encode_chunk(model, ids) for name, ids in SEGMENTS.items()}
    assert [len(kv[name]) for name in SEGMENTS] == [3, 13, 3]
    prefix_PL2HD = gather(plan, kv)
    own_rope = Rope.from_config(model.config)
    batch = pack_over_prefix([Example(plan, QUERY, ANSWER)], prefix_PL2HD, own_rope)
    model.set_attn_implementation(PACKED)
    close(model(**batch.model_inputs()).logits[0], expected)
    enable_cached(model)
    cache = RequestCache(plan, prefix_PL2HD, own_rope, room=8)
    logits = [forward_cached(model, [(cache, QUERY)])]
    logits += [forward_cached(model, [(cache, [token])]) for token in ANSWER[:-1]]
    close(torch.cat(logits), expected)


def test_the_answer_trains_the_chunk_through_its_mean() -> None:
    model = tiny_model("qwen2")
    plan = plan_of(0)
    labels = torch.tensor(ANSWER)

    def gradients(logits: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels).backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    expected = gradients(reference_logits(model, plan))
    found = gradients(packed_logits(model, [plan]))
    for name, gradient in expected.items():
        worst = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert worst < 1e-3, name
    detached = gradients(packed_logits(model, [plan], detach_context=True))
    name = "model.layers.0.self_attn.v_proj.weight"
    assert not detached[name].allclose(expected[name], rtol=1e-2)


def test_a_mean_stands_at_the_end_of_its_chunk_once() -> None:
    assert plan_of(0).slices == (
        Slice(PROMPT, 0, 3, 0), Slice("a", 0, 1, 3), Slice("a", 4, 6, 4), Slice("a", 12, 13, 6),
        Slice("b", 0, 1, 7), Slice("b", 2, 3, 8),
    )  # fmt: skip
    assert plan_of(2).slices[-2:] == (Slice("a", 10, 13, 6), Slice("b", 0, 3, 9))
    packets = wrapped(plan_of(0), [200], [])
    assert packets.plan.slices[-1] == Slice("b", 2, 3, 13)
