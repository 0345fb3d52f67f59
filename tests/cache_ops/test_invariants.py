"""Training equals serving: a packed pass = encode -> slice -> rotate -> forward with cache."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import answer_logits
from tiny import ARCHITECTURES, ROPE_TYPES, VOCABULARY, tiny_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from cache_ops.assemble import assemble
from cache_ops.attention import PACKED
from cache_ops.encode import encode_chunk, encode_chunk_by_base
from cache_ops.packing import Example, PackedBatch, pack, pack_over_prefix
from cache_ops.plan import PROMPT, Span, plan_prefix
from cache_ops.rope import Rope

MODELS = [(architecture, rope) for architecture in ARCHITECTURES for rope in ROPE_TYPES]
Chunks = dict[str, list[int]]


@pytest.fixture(scope="module")
def model_of() -> Callable[..., PreTrainedModel]:
    built = {}

    def get(architecture: str, rope: str, seed: int = 0) -> PreTrainedModel:
        key = (architecture, rope, seed)
        if key not in built:
            built[key] = tiny_model(architecture, rope, seed)
        return built[key]

    return get


def draw_batch(draw: st.DrawFn) -> tuple[list[Example], Chunks]:
    """One to three examples over shared chunks: empty plans, whole chunks, overlaps, one token."""
    tokens = st.integers(0, VOCABULARY - 1)
    lengths = draw(st.lists(st.one_of(st.integers(1, 40), st.just(512)), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    chunks: Chunks = {
        f"chunk{i}": torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        for i, length in enumerate(lengths)
    }
    prompt = draw(st.lists(tokens, max_size=5))
    chunks[PROMPT] = prompt
    examples = []
    for _ in range(draw(st.integers(1, 3))):
        spans = []
        for _ in range(draw(st.integers(0, 4))):
            number = draw(st.integers(0, len(lengths) - 1))
            start = draw(st.integers(0, lengths[number] - 1))
            end = draw(st.integers(start + 1, lengths[number]))
            if draw(st.booleans()):
                start, end = 0, lengths[number]
            spans.append(Span(f"chunk{number}", start, end))
        ranks = draw(st.permutations([f"chunk{i}" for i in range(len(lengths))]))
        plan = plan_prefix(
            spans,
            prompt_length=len(prompt),
            chunk_ranks=ranks,
            order=draw(st.sampled_from(["rank_then_document", "score"])),
            overlap=draw(st.sampled_from(["merge", "keep"])),
        )
        query = draw(st.lists(tokens, min_size=1, max_size=6))
        answer = draw(st.lists(tokens, min_size=1, max_size=4))
        examples.append(Example(plan, query, answer))
    return examples, chunks


batches = st.composite(draw_batch)()
thorough = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def packed_logits(
    model: PreTrainedModel, examples: list[Example], chunks: Chunks, **options: bool
) -> list[Tensor]:
    return logits_of(model, pack(examples, chunks, Rope.from_config(model.config), **options))


def frozen_batch(encoder: PreTrainedModel, examples: list[Example], chunks: Chunks) -> PackedBatch:
    """The examples over a prefix that another model has computed."""
    encoded = {key: encode_chunk(encoder, ids) for key, ids in chunks.items() if ids}
    pieces = [piece for example in examples for piece in example.plan.slices]
    none = encode_chunk(encoder, [0])[:0]
    prefix = [encoded[piece.chunk][piece.start : piece.end] for piece in pieces]
    return pack_over_prefix(examples, torch.cat([none, *prefix]), Rope.from_config(encoder.config))


def logits_of(model: PreTrainedModel, batch: PackedBatch) -> list[Tensor]:
    model.set_attn_implementation(PACKED)
    try:
        logits = model(**batch.model_inputs()).logits[0]
    finally:
        model.set_attn_implementation("sdpa")
    return [logits[batch.examples_A == number] for number in range(len(batch.layout.own_lengths))]


def assert_equal(ours: Tensor, reference: Tensor, tolerance: float = 1e-4) -> None:
    """Equal up to `tolerance` of the reference's largest entry (fp32 rounding)."""
    scale = reference.abs().max().clamp(min=1e-6)
    worst = (ours - reference).abs().max() / scale
    assert worst < tolerance, f"relative difference {worst:.2e}"


@pytest.mark.parametrize(("architecture", "rope"), MODELS)
@thorough
@given(batch=batches)
def test_packed_pass_equals_two_passes(model_of, architecture, rope, batch) -> None:
    examples, chunks = batch
    model = model_of(architecture, rope)
    with torch.no_grad():
        ours = packed_logits(model, examples, chunks)
        for example, logits in zip(examples, ours, strict=True):
            assert_equal(logits, answer_logits(model, example, chunks))


@pytest.mark.parametrize(("architecture", "rope"), MODELS)
@thorough
@given(batch=batches)
def test_packed_pass_equals_serving(model_of, architecture, rope, batch) -> None:
    examples, chunks = batch
    model = model_of(architecture, rope)
    rope_of_model = Rope.from_config(model.config)
    encoded = {key: encode_chunk(model, ids) for key, ids in chunks.items() if ids}
    with torch.no_grad():
        for example, trained in zip(examples, packed_logits(model, examples, chunks), strict=True):
            cache = assemble(example.plan, encoded, rope_of_model)
            own = torch.tensor([[*example.query_ids, *example.answer_ids]])
            served = model(
                input_ids=own,
                position_ids=torch.arange(own.shape[1])[None] + example.plan.length,
                past_key_values=cache,
                use_cache=True,
            ).logits[0]
            first = len(example.query_ids) - 1
            assert_equal(trained, served[first : first + len(example.answer_ids)])


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


@pytest.mark.parametrize(("architecture", "rope"), MODELS)
@settings(parent=thorough, max_examples=4)
@given(batch=batches)
def test_gradients_equal_two_passes(model_of, architecture, rope, batch) -> None:
    examples, chunks = batch
    model = model_of(architecture, rope)
    labels = torch.cat([torch.tensor(example.answer_ids) for example in examples])
    ours = gradients(
        model, cross_entropy(torch.cat(packed_logits(model, examples, chunks)), labels)
    )
    two_passes = torch.cat([answer_logits(model, example, chunks) for example in examples])
    reference = gradients(model, cross_entropy(two_passes, labels))
    assert_same_gradients(ours, reference, examples)


def assert_same_gradients(
    ours: dict[str, Tensor], reference: dict[str, Tensor], examples: list[Example]
) -> None:
    assert ours.keys() == reference.keys()
    largest = max(gradient.abs().max() for gradient in reference.values())
    # The reference's angles are formed in fp32, so its error grows with the position.
    tolerance = 1e-4 * max(1, max(example.plan.length for example in examples) / 256)
    for name, gradient in reference.items():
        difference = (ours[name] - gradient).abs().max() / largest
        assert difference < tolerance, f"{name}: {difference:.2e}"


@pytest.mark.parametrize(("architecture", "rope"), MODELS)
@settings(parent=thorough, max_examples=4)
@given(batch=batches)
def test_prefix_of_another_model_equals_two_passes(model_of, architecture, rope, batch) -> None:
    examples, chunks = batch
    base, tuned = model_of(architecture, rope), model_of(architecture, rope, 1)
    labels = torch.cat([torch.tensor(example.answer_ids) for example in examples])
    frozen = frozen_batch(base, examples, chunks)
    assert frozen.tokens == sum(len(e.query_ids) + len(e.answer_ids) for e in examples)
    ours = torch.cat(logits_of(tuned, frozen))
    two_passes = torch.cat([answer_logits(tuned, example, chunks, base) for example in examples])
    assert_equal(ours, two_passes)
    ours_gradients = gradients(tuned, cross_entropy(ours, labels))
    reference = gradients(tuned, cross_entropy(two_passes, labels))
    assert_same_gradients(ours_gradients, reference, examples)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(parent=thorough, max_examples=4)
@given(batch=batches)
def test_prefix_of_the_same_weights_is_detached_context(model_of, architecture, batch) -> None:
    examples, chunks = batch
    model = model_of(architecture, "default")
    labels = torch.cat([torch.tensor(example.answer_ids) for example in examples])
    frozen = torch.cat(logits_of(model, frozen_batch(model, examples, chunks)))
    detached = torch.cat(packed_logits(model, examples, chunks, detach_context=True))
    assert_equal(frozen, detached)
    assert_equal(frozen, torch.cat(packed_logits(model, examples, chunks)))
    ours = gradients(model, cross_entropy(frozen, labels))
    assert_same_gradients(ours, gradients(model, cross_entropy(detached, labels)), examples)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunks_are_encoded_by_the_base_under_an_adapter_in_training(architecture) -> None:
    from peft import LoraConfig, get_peft_model

    ids = list(range(40))
    expected = encode_chunk(tiny_model(architecture), ids)
    model = tiny_model(architecture)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.set_attn_implementation(PACKED)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.5)
    adapted = get_peft_model(model, lora).train()
    trainable = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    assert torch.equal(encode_chunk_by_base(adapted, ids), expected)
    assert all(module.training for module in adapted.modules())
    assert model.config._attn_implementation == PACKED
    assert trainable == {name for name, w in adapted.named_parameters() if w.requires_grad}
    by_adapter = encode_chunk(adapted.eval().get_base_model(), ids)
    assert not torch.allclose(by_adapter, expected, atol=1e-2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@thorough
@given(batch=batches)
def test_packed_batch_equals_single_examples(model_of, architecture, batch) -> None:
    examples, chunks = batch
    model = model_of(architecture, "default")
    with torch.no_grad():
        together = packed_logits(model, examples, chunks)
        for example, logits in zip(examples, together, strict=True):
            (alone,) = packed_logits(model, [example], chunks)
            assert_equal(logits, alone)


@pytest.mark.parametrize(("architecture", "rope"), MODELS)
@pytest.mark.parametrize("length", [1, 37, 512])
def test_one_whole_chunk_without_prompt_is_a_plain_forward(
    model_of, architecture, rope, length
) -> None:
    model = model_of(architecture, rope)
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(VOCABULARY, (length + 9,), generator=generator).tolist()
    chunk, query, answer = ids[:length], ids[length:-3], ids[-3:]
    plan = plan_prefix([Span("a", 0, length)], prompt_length=0, chunk_ranks=["a"])
    with torch.no_grad():
        (ours,) = packed_logits(model, [Example(plan, query, answer)], {"a": chunk})
        plain = model(input_ids=torch.tensor([ids])).logits[0]
    assert_equal(ours, plain[-4:-1])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("gradient", ["full", "detach", "frozen"])
def test_gradient_checkpointing_changes_nothing(architecture, gradient) -> None:
    model = tiny_model(architecture).train()
    chunks = {PROMPT: [1, 2, 3], "a": list(range(5, 60)), "b": list(range(60, 100))}
    spans = [Span("b", 4, 20), Span("a", 30, 41), Span("a", 35, 50)]
    plan = plan_prefix(spans, prompt_length=3, chunk_ranks=["a", "b"])
    examples = [Example(plan, [7, 8], [9, 10]), Example(plan, [11], [12])]
    if gradient == "frozen":
        batch = frozen_batch(tiny_model(architecture, seed=1), examples, chunks)
    else:
        rope = Rope.from_config(model.config)
        batch = pack(examples, chunks, rope, detach_context=gradient == "detach")
    model.set_attn_implementation(PACKED)

    def loss() -> Tensor:
        return cross_entropy(model(**batch.model_inputs()).logits[0], batch.labels_A)

    plain_loss = loss()
    plain = gradients(model, plain_loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed_loss = loss()
    checkpointed = gradients(model, checkpointed_loss)
    assert torch.equal(plain_loss, checkpointed_loss)
    for name, gradient in plain.items():
        assert torch.equal(gradient, checkpointed[name]), name


def test_detach_stops_the_gradient_at_the_slices(model_of) -> None:
    model = model_of("qwen2", "default")
    chunks = {PROMPT: [1, 2], "a": [20, 21, 22, 23]}
    plan = plan_prefix([Span("a", 1, 3)], prompt_length=2, chunk_ranks=["a"])
    example = Example(plan, [40, 41], [42])
    embedding = model.get_input_embeddings().weight
    touched = {}
    for detach in (False, True):
        (logits,) = packed_logits(model, [example], chunks, detach_context=detach)
        (gradient,) = torch.autograd.grad(cross_entropy(logits, torch.tensor([42])), embedding)
        # The tied head gives every row a gradient; the input side is what differs.
        touched[detach] = gradient
    difference = (touched[False] - touched[True]).abs().sum(1).nonzero().flatten().tolist()
    # Token 23 comes after the slice and is never encoded.
    assert difference == [1, 2, 20, 21, 22]


def test_detach_leaves_the_logits_as_they_are(model_of) -> None:
    model = model_of("llama", "yarn")
    chunks = {PROMPT: [1, 2], "a": list(range(20, 50))}
    plan = plan_prefix([Span("a", 3, 9)], prompt_length=2, chunk_ranks=["a"])
    example = Example(plan, [5, 6], [7])
    with torch.no_grad():
        (full,) = packed_logits(model, [example], chunks)
        (detached,) = packed_logits(model, [example], chunks, detach_context=True)
    assert torch.equal(full, detached)
