"""The contextualizer: untrained it is not there; trained, packed rows, requests and loops agree."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from layerwise import Pass, side_by_side, slow_pass
from tiny import ARCHITECTURES, tiny_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import PreTrainedModel

from cache_ops import attention
from cache_ops.assemble import gather
from cache_ops.attention import PACKED_VARLEN, enable_packed
from cache_ops.cached import RequestCache, enable_cached, forward_cached
from cache_ops.contextualizer import (
    CONTEXTUALIZER_FILE,
    Contextualizer,
    ContextualizerError,
    ContextualizerSpec,
    contextualizer_of,
    contextualizer_saved_in,
    load_contextualizer,
    new_contextualizer,
    put_contextualizer,
    save_contextualizer,
    take_contextualizer,
)
from cache_ops.encode import encode_chunk
from cache_ops.layout import linked_chunks
from cache_ops.packing import Example, PackedBatch, pack, pack_over_prefix
from cache_ops.plan import PROMPT, PrefixPlan, Span, plan_prefix
from cache_ops.recompute import FixedRows, forward_recomputing
from cache_ops.rope import Rope

CHUNKS = {PROMPT: [5, 6, 7], "a": [*range(10, 40)], "b": [*range(70, 90)]}
QUERY, ANSWER = [101, 102, 103], [50, 51]
SPANS = (
    [Span("b", 3, 9), Span("a", 20, 27), Span("a", 2, 5)],
    [Span("a", 1, 3)],
    [],
    [Span("a", 4, 9), Span("a", 6, 14), Span("b", 0, 4)],
)


def plan_of(spans: Sequence[Span], overlap: str = "merge") -> PrefixPlan:
    return plan_prefix(spans, prompt_length=3, chunk_ranks=["b", "a"], overlap=overlap)


PLANS = [plan_of(spans, "keep" if at == 3 else "merge") for at, spans in enumerate(SPANS)]
EXAMPLES = [Example(plan, QUERY, ANSWER) for plan in PLANS]
NOTHING = Example(PrefixPlan(()), QUERY, ANSWER)


def untrained(model: PreTrainedModel, layers: int = 1) -> Contextualizer:
    spec = ContextualizerSpec.of(model.config, "coinrag", width=24, layers=layers, heads=3)
    return new_contextualizer(spec, seed=3)


def trained(model: PreTrainedModel, layers: int = 1) -> Contextualizer:
    """One whose changes are as large as what it changes."""
    contextualizer = untrained(model, layers)
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in contextualizer.parameters():
            weight.normal_(std=0.3) if weight.dim() == 2 else weight.uniform_(0.5, 1.5)
    return contextualizer


def normed(vector: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return vector / (vector.square().mean() + 1e-6).sqrt() * weight


def by_hand(
    contextualizer: Contextualizer, layer: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """The corrected keys and values [tokens, heads, dimensions], token by token."""
    state = dict(contextualizer.named_parameters())
    spec, tokens = contextualizer.spec, range(len(keys))
    hidden = []
    for token in tokens:
        heads = [normed(head) for head in (*keys[token], *values[token])]
        hidden.append(state[f"read.{layer}.weight"] @ torch.cat(heads))
    for number in range(spec.layers):
        weights = {
            name.removeprefix(f"blocks.{number}."): weight
            for name, weight in state.items()
            if name.startswith(f"blocks.{number}.")
        }
        query, key, value = weights["query_key_value.weight"].chunk(3)
        seen = [normed(one, weights["attention_norm.weight"]) for one in hidden]
        size = spec.width // spec.heads
        for token in tokens:
            parts = []
            for head in range(spec.heads):
                rows = slice(head * size, (head + 1) * size)
                own = query[rows] @ seen[token]
                scores = torch.stack([own @ (key[rows] @ other) for other in seen])
                shares = (scores / size**0.5).softmax(dim=0)
                parts.append(sum(s * (value[rows] @ o) for s, o in zip(shares, seen, strict=True)))
            hidden[token] = hidden[token] + weights["attended.weight"] @ torch.cat(parts)
        for token in tokens:
            inner = weights["up.weight"] @ normed(hidden[token], weights["mlp_norm.weight"])
            hidden[token] = hidden[token] + weights["down.weight"] @ (inner * inner.sigmoid())
    out = [state[f"write.{layer}.weight"] @ normed(one, state["norm.weight"]) for one in hidden]
    changes = torch.stack(out).view(len(keys), 2, *keys.shape[1:])
    return keys + changes[:, 0], values + changes[:, 1]


@torch.no_grad()
def corrected_prefix(model: PreTrainedModel, contextualizer: Contextualizer, plan: PrefixPlan):
    """Every slice computed alone where it stands, and all corrected; with all positions."""
    passes, positions = [], []
    for piece in plan.slices:
        first = piece.position - piece.start
        whole = slow_pass(model, CHUNKS[piece.chunk][: piece.end], range(first, first + piece.end))
        rows = slice(piece.start, piece.end)
        kept = ([layer[rows] for layer in part] for part in (whole.keys, whole.values))
        passes.append(Pass(torch.empty(0), *kept))
        positions += range(piece.position, piece.position + piece.end - piece.start)
    prefix = side_by_side(passes)
    layers = [
        by_hand(contextualizer, layer, keys, values)
        for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True))
    ]
    return Pass(prefix.logits, *map(list, zip(*layers, strict=True))), positions


def tokens_of(plan: PrefixPlan) -> list[int]:
    return [token for p in plan.slices for token in CHUNKS[p.chunk][p.start : p.end]]


def slow_logits(
    model: PreTrainedModel,
    contextualizer: Contextualizer,
    plan: PrefixPlan,
    own: Sequence[int],
    rows: Sequence[int] = (),
) -> Tensor:
    """Logits after the last of `own`; `rows` of the prefix are computed anew."""
    cached, positions = corrected_prefix(model, contextualizer, plan)
    ids = [*tokens_of(plan), *own]
    following = range(plan.length, plan.length + len(own))
    in_hand = [*rows, *range(plan.tokens, len(ids))]
    return slow_pass(model, ids, [*positions, *following], rows=in_hand, cached=cached).logits


def encoded(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: encode_chunk(model, ids) for name, ids in CHUNKS.items()}


def cache_over(
    model: PreTrainedModel, contextualizer: Contextualizer | None, plan: PrefixPlan
) -> RequestCache:
    kv_TL2HD = gather(plan, encoded(model)) if plan.slices else None
    rope = Rope.from_config(model.config)
    return RequestCache(plan, kv_TL2HD, rope, room=8, contextualizer=contextualizer)


def served_logits(
    model: PreTrainedModel, contextualizer: Contextualizer | None, plan: PrefixPlan
) -> Tensor:
    """Logits that predict the answer's tokens, [tokens, vocabulary]."""
    enable_cached(model)
    cache = cache_over(model, contextualizer, plan)
    return torch.cat([forward_cached(model, [(cache, ids)]) for ids in (QUERY, ANSWER[:1])])


def frozen_batch(model: PreTrainedModel, examples: Sequence[Example] = EXAMPLES) -> PackedBatch:
    kv = encoded(model)
    prefix_PL2HD = torch.cat([gather(one.plan, kv) for one in examples])
    return pack_over_prefix(examples, prefix_PL2HD, Rope.from_config(model.config))


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: weight.grad for name, weight in module.named_parameters()}


def learn(model: PreTrainedModel, batch: PackedBatch, contextualizer: Contextualizer | None):
    model.zero_grad()
    if contextualizer is not None:
        contextualizer.zero_grad()
    logits = model(**batch.model_inputs(contextualizer)).logits[0]
    cross_entropy(logits, batch.labels_A).backward()
    return logits.detach()


@contextmanager
def varlen_by_sdpa() -> Iterator[None]:
    """Takes the flash kernel's place: sequence by sequence, bottom-right causal."""

    def attend(query_TQD, key_SHD, value_SHD, query_bounds, key_bounds, longest, scaling):
        outputs = []
        for at in range(len(query_bounds) - 1):
            query = query_TQD[query_bounds[at] : query_bounds[at + 1]].transpose(0, 1)
            rows = slice(key_bounds[at], key_bounds[at + 1])
            key, value = (states[rows].transpose(0, 1) for states in (key_SHD, value_SHD))
            seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool)
            seen = seen.tril(key.shape[1] - query.shape[1])
            states = (one[None] for one in (query, key, value))
            found = scaled_dot_product_attention(
                *states, attn_mask=seen, scale=scaling, enable_gqa=True
            )
            outputs.append(found[0].transpose(0, 1))
        return torch.cat(outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "causal_attention", attend)
        yield


@pytest.mark.parametrize("mode", ["full", "detach", "frozen", "autocast", "bfloat16"])
def test_an_untrained_one_changes_no_bit(mode: str) -> None:
    model = tiny_model("qwen2").to(torch.bfloat16 if mode == "bfloat16" else torch.float32)
    contextualizer = untrained(model, layers=2)
    rope = Rope.from_config(model.config)
    examples = EXAMPLES if mode == "frozen" else [*EXAMPLES, NOTHING]
    if mode == "frozen":
        batch = frozen_batch(model)
    else:
        batch = pack(examples, CHUNKS, rope, detach_context=mode == "detach")
    enable_packed(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        without = learn(model, batch, None)
        plainly = {name: grad.clone() for name, grad in gradients(model).items()}
        assert torch.equal(learn(model, batch, contextualizer), without)
    assert all(torch.equal(grad, plainly[name]) for name, grad in gradients(model).items())
    # What is written has a gradient from the first step on; a ZeRO of the others is none.
    assert all(grad is not None for grad in gradients(contextualizer).values())
    assert all(linear.weight.grad.any() for linear in contextualizer.write)
    for plan in (*PLANS, NOTHING.plan):
        served = [served_logits(model, one, plan) for one in (None, contextualizer)]
        assert torch.equal(*served)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_rows_requests_and_plain_loops_agree(architecture: str) -> None:
    model = tiny_model(architecture, "yarn")
    contextualizer = trained(model, layers=2)
    # As in training: chunks are encoded as if it were not there.
    put_contextualizer(model, contextualizer)
    served = torch.cat([served_logits(model, contextualizer, plan) for plan in PLANS])
    plainly = torch.cat([served_logits(model, None, plan) for plan in PLANS])
    assert (served - plainly).abs().amax(dim=1).min() > 1e-3, "every prefix was corrected"
    for at, plan in enumerate(PLANS):
        by_loops = slow_logits(model, contextualizer, plan, [*QUERY, ANSWER[0]])
        torch.testing.assert_close(served[2 * at + 1], by_loops, atol=2e-4, rtol=1e-4)
    segments = pack(EXAMPLES, CHUNKS, Rope.from_config(model.config))
    for batch in (segments, frozen_batch(model)):
        enable_packed(model)
        with torch.no_grad():
            packed = model(**batch.model_inputs(contextualizer)).logits[0]
            torch.testing.assert_close(packed, served, atol=1e-5, rtol=1e-5)
            model.set_attn_implementation(PACKED_VARLEN)
            with varlen_by_sdpa():
                packed = model(**batch.model_inputs(contextualizer)).logits[0]
            torch.testing.assert_close(packed, served, atol=1e-5, rtol=1e-5)


def test_tokens_computed_between_slices_see_corrected_ones() -> None:
    model = tiny_model("mistral")
    contextualizer = trained(model)
    layout = linked_chunks([("a", 30), ("b", 20)], 3, [[1, 2], [3]])
    examples = [Example.of(layout, QUERY, ANSWER), EXAMPLES[0]]
    rope = Rope.from_config(model.config)
    batch = pack(examples, CHUNKS, rope)
    enable_packed(model)
    with torch.no_grad():
        packed = model(**batch.model_inputs(contextualizer)).logits[0]
    enable_cached(model)
    cache = RequestCache(
        layout.plan,
        gather(layout.plan, encoded(model)),
        rope,
        room=10,
        first_positions=layout.positions_with(len(QUERY)),
        contextualizer=contextualizer,
    )
    online = [*layout.online_ids, *QUERY]
    linked = torch.cat([forward_cached(model, [(cache, ids)]) for ids in (online, ANSWER[:1])])
    served = torch.cat((linked, served_logits(model, contextualizer, PLANS[0])))
    torch.testing.assert_close(packed, served, atol=1e-5, rtol=1e-5)


def test_rows_computed_anew_take_the_place_of_corrected_ones() -> None:
    model = tiny_model("qwen3")
    contextualizer, plan = trained(model), PLANS[0]
    enable_cached(model)
    for rows in ((), (3, 4, 11), tuple(range(plan.tokens))):
        cache = cache_over(model, contextualizer, plan)
        found = forward_recomputing(model, cache, FixedRows(rows), tokens_of(plan), QUERY)
        expected = slow_logits(model, contextualizer, plan, QUERY, rows)
        torch.testing.assert_close(found[0], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("gradient", ["full", "detach", "frozen"])
def test_gradients_with_checkpointing_and_by_differences(gradient: str) -> None:
    model = tiny_model("llama").double().train()
    contextualizer = trained(model).double()
    if gradient == "frozen":
        batch = frozen_batch(model)
    else:
        rope = Rope.from_config(model.config)
        batch = pack(EXAMPLES, CHUNKS, rope, detach_context=gradient == "detach")
    enable_packed(model)
    learn(model, batch, contextualizer)
    found = deepcopy([gradients(module) for module in (model, contextualizer)])

    model.gradient_checkpointing_enable({"use_reentrant": False})
    learn(model, batch, contextualizer)
    for before, module in zip(found, (model, contextualizer), strict=True):
        for name, grad in gradients(module).items():
            torch.testing.assert_close(grad, before[name])

    def loss() -> float:
        with torch.no_grad():
            logits = model(**batch.model_inputs(contextualizer)).logits[0]
            return float(cross_entropy(logits, batch.labels_A))

    for name in ("read.0.weight", "blocks.0.query_key_value.weight", "write.1.weight"):
        weight, grad = contextualizer.get_parameter(name), found[1][name]
        assert grad is not None
        # Along the gradient, the loss rises by the square of its norm.
        step = 1e-3 * grad / grad.norm()
        with torch.no_grad():
            weight.add_(step)
            above = loss()
            weight.sub_(2 * step)
            below = loss()
            weight.add_(step)
        # Rotations and norms are computed in fp32.
        assert (above - below) / 2e-3 == pytest.approx(float(grad.norm()), rel=2e-3)


def test_a_bfloat16_request_is_corrected_in_its_dtype() -> None:
    model = tiny_model("llama").bfloat16()
    enable_cached(model)
    contextualizer = trained(model).bfloat16()
    cache = cache_over(model, contextualizer, PLANS[0])
    wide = cache_over(model.float(), contextualizer.float(), PLANS[0])
    keys, values = cache.laid(1, torch.empty(1, 2, 0, 16, dtype=torch.bfloat16), 0)
    assert keys.dtype == values.dtype == torch.bfloat16
    for narrow, exact in zip(
        (keys, values), wide.laid(1, torch.empty(1, 2, 0, 16), 0), strict=True
    ):
        torch.testing.assert_close(narrow.float(), exact, atol=0.1, rtol=0.05)
    assert cache.contextualize_seconds > 0


def test_saved_and_loaded_it_is_the_same_and_the_model_is_a_plain_one(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    names = set(model.state_dict())
    contextualizer = trained(model)
    put_contextualizer(model, contextualizer)
    assert contextualizer_of(model) is contextualizer
    assert sum(one.numel() for one in contextualizer.parameters()) == contextualizer.spec.parameters
    assert take_contextualizer(model) is contextualizer
    assert take_contextualizer(model) is contextualizer_of(model) is None
    assert set(model.state_dict()) == names
    assert contextualizer_saved_in(tmp_path) is None
    save_contextualizer(tmp_path, contextualizer)
    assert contextualizer_saved_in(tmp_path) == contextualizer.spec
    loaded = load_contextualizer(tmp_path, model.config)
    pairs = zip(contextualizer.parameters(), loaded.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_one_that_does_not_fit_says_so(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    with pytest.raises(ContextualizerError, match=r"was it trained with context\.context"):
        load_contextualizer(tmp_path, model.config)
    save_contextualizer(tmp_path, untrained(model))
    with pytest.raises(ContextualizerError, match=r"is of another model: .*head_dim=24"):
        load_contextualizer(tmp_path, tiny_model("llama").config)
    path = tmp_path / CONTEXTUALIZER_FILE
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ContextualizerError, match="is damaged"):
        load_contextualizer(tmp_path, model.config)
