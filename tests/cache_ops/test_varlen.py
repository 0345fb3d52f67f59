"""The flash form of packed attention: its rows and bounds against SDPA, and when it cannot be.

The kernel needs a GPU. Without one a slow stand-in with its signature and its bottom-right
causality takes its place, which proves everything but the kernel itself.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import ARCHITECTURES, VOCABULARY, tiny_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from cache_ops import varlen
from cache_ops.attention import PACKED_VARLEN, enable_packed
from cache_ops.encode import encode_chunk
from cache_ops.layout import Layout, computed, linked_chunks, whole_chunks
from cache_ops.packing import Example, PackedBatch, pack, pack_over_prefix
from cache_ops.plan import PROMPT, PrefixPlan, Slice, Span, isolated, plan_prefix
from cache_ops.rope import Rope

CPU = torch.device("cpu")
KERNEL = varlen.varlen_attn
ROPE = Rope.from_config(tiny_model().config)
KINDS = ("nuggets", "original", "isolated", "whole", "composite", "computed", "linked")
Rows = tuple[list[Example], dict[str, list[int]]]


def by_hand(
    query_TQD: Tensor,
    key_SHD: Tensor,
    value_SHD: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = True,
) -> Tensor:
    """Sequence by sequence: query i of Q sees keys up to i + K - Q of K."""
    assert window_size == (-1, 0)
    assert enable_gqa
    assert query_TQD.dtype == key_SHD.dtype == value_SHD.dtype
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    assert (int(query_bounds[-1]), int(key_bounds[-1])) == (len(query_TQD), len(key_SHD))
    assert longest_query == int(query_bounds.diff().max())
    assert longest_key == int(key_bounds.diff().max())
    repeats = query_TQD.shape[1] // key_SHD.shape[1]
    outputs = []
    for number in range(len(query_bounds) - 1):
        query = query_TQD[query_bounds[number] : query_bounds[number + 1]]
        keys = slice(int(key_bounds[number]), int(key_bounds[number + 1]))
        key = key_SHD[keys].repeat_interleave(repeats, dim=1)
        value = value_SHD[keys].repeat_interleave(repeats, dim=1)
        scores_QTS = torch.einsum("tqd,sqd->qts", query, key) * scale
        last_seen = torch.arange(len(query)) + len(key) - len(query)
        hidden = torch.arange(len(key)) > last_seen[:, None]
        weights_QTS = scores_QTS.masked_fill(hidden.to(query.device), -torch.inf).softmax(-1)
        outputs.append(torch.einsum("qts,sqd->tqd", weights_QTS, value))
    return torch.cat(outputs)


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    """The kernel's stand-in; tests on a GPU put the kernel back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", by_hand)
        yield


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model."""
    return tiny_model(request.param)


def layout_of(
    draw: st.DrawFn, kind: str, chunks: dict[str, list[int]]
) -> tuple[Layout, dict[str, list[int]]]:
    """A layout of one kind over some chunks, and the segments that it adds to them."""
    prompt = len(chunks[PROMPT])
    lengths = [(name, len(ids)) for name, ids in chunks.items() if name != PROMPT]
    if kind == "computed":
        return computed(chunks[PROMPT] + chunks["a"]), {}
    if kind == "linked":
        return linked_chunks(lengths, prompt, [[1, 2]] * len(lengths)), {}
    if kind in ("whole", "composite"):
        positions = "reordered" if kind == "whole" else "composite"
        return Layout(whole_chunks(lengths, prompt, positions).plan), {}
    spans = []
    for _ in range(draw(st.integers(0, 3))):
        name, length = draw(st.sampled_from(lengths))
        start = draw(st.integers(0, length - 1))
        spans.append(Span(name, start, draw(st.integers(start + 1, length))))
    plan = plan_prefix(
        spans,
        prompt_length=prompt,
        chunk_ranks=[name for name, _ in lengths],
        positions="original" if kind == "original" else "contiguous",
        overlap=draw(st.sampled_from(["merge", "keep"])),
    )
    if kind != "isolated":
        return Layout(plan), {}
    plan, alone = isolated(plan, chunks)
    return Layout(plan), {name: list(ids) for name, ids in alone.items()}


@st.composite
def row(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> Rows:
    """One to three examples of different layouts over shared chunks."""
    tokens = st.integers(0, VOCABULARY - 1)
    chunks = {
        PROMPT: draw(st.lists(tokens, min_size=1, max_size=4)),
        "a": draw(st.lists(tokens, min_size=1, max_size=20)),
        "b": draw(st.lists(tokens, min_size=1, max_size=20)),
    }
    segments = dict(chunks)
    examples = []
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3)):
        layout, more = layout_of(draw, kind, chunks)
        segments |= more
        query = draw(st.lists(tokens, min_size=1, max_size=6))
        answer = draw(st.lists(tokens, min_size=1, max_size=4))
        examples.append(Example.of(layout, query, answer))
    return examples, segments


COMMON = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def over_prefix(model: PreTrainedModel, rows: Rows) -> PackedBatch:
    """The same examples over slices that the model has computed before."""
    examples, segments = rows
    encoded = {name: encode_chunk(model, ids) for name, ids in segments.items()}
    none = encode_chunk(model, [0])[:0]
    pieces = [piece for example in examples for piece in example.plan.slices]
    kv = torch.cat([none, *(encoded[p.chunk][p.start : p.end] for p in pieces)])
    return pack_over_prefix(examples, kv, Rope.from_config(model.config))


def logits_and_gradients(
    model: PreTrainedModel, batch: PackedBatch, kernel: str
) -> tuple[Tensor, dict[str, Tensor]]:
    enable_packed(model, kernel)
    model.zero_grad()
    try:
        logits = model(**batch.model_inputs()).logits[0]
        cross_entropy(logits.float(), batch.labels_A).backward()
    finally:
        model.set_attn_implementation("sdpa")
    found = {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}
    return logits.detach(), found


def assert_same(ours: Tensor, reference: Tensor, tolerance: float, scale: Tensor) -> None:
    worst = float((ours - reference).abs().max() / scale.clamp(min=1e-6))
    assert worst < tolerance, f"relative difference {worst:.1e}"


def assert_kernels_agree(
    model: PreTrainedModel, batch: PackedBatch, tolerance: float = 1e-4
) -> None:
    reference, expected = logits_and_gradients(model, batch, "sdpa")
    ours, gradients = logits_and_gradients(model, batch, "varlen")
    assert_same(ours, reference, tolerance, reference.abs().max())
    assert gradients.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert_same(gradients[name], gradient, tolerance, largest)


@pytest.mark.parametrize("context", ["full", "detach", "frozen"])
@COMMON
@given(rows=row())
def test_varlen_equals_sdpa_in_logits_and_gradients(
    model: PreTrainedModel, context: str, rows: Rows
) -> None:
    if context == "frozen":
        batch = over_prefix(model, rows)
    else:
        batch = pack(*rows, Rope.from_config(model.config), detach_context=context == "detach")
    assert_kernels_agree(model, batch)


@settings(COMMON, max_examples=40)
@given(rows=row())
def test_the_kernel_takes_examples_only_where_it_sees_what_positions_say(rows: Rows) -> None:
    layout = pack(*rows, ROPE).layout
    plain = []
    for own, prefix, visible in zip(
        layout.own_lengths, layout.prefix_lengths, layout.visible, strict=True
    ):
        seen = [[key <= prefix + query for key in range(prefix + own)] for query in range(own)]
        plain.append(visible.tolist() == seen)
    assert layout.own_is_causal == all(plain)


@pytest.mark.parametrize("kind", KINDS)
@settings(COMMON, max_examples=10)
@given(data=st.data())
def test_only_link_tokens_need_a_mask(kind: str, data: st.DataObject) -> None:
    layout = pack(*data.draw(row((kind,))), ROPE).layout
    assert layout.own_is_causal == (kind != "linked")


def test_tokens_between_and_on_prefix_positions_are_not_plainly_causal() -> None:
    plan = PrefixPlan((Slice("a", 0, 3, 0), Slice("a", 3, 5, 6)))
    chunks = {"a": [1, 2, 3, 4, 5]}

    def plain(*positions: int) -> bool:
        example = Example(plan, [7] * len(positions), [], list(positions))
        return pack([example], chunks, ROPE).layout.own_is_causal

    assert plain(8, 9)
    assert plain(7, 8)
    assert not plain(6, 8)
    assert not plain(4, 8)
    # Two tokens at one position see each other.
    assert not plain(8, 8)


def two_examples(model: PreTrainedModel) -> PackedBatch:
    chunks = {PROMPT: [1, 2, 3], "a": list(range(5, 40)), "b": list(range(60, 80))}
    plan = plan_prefix(
        [Span("b", 4, 18), Span("a", 20, 31)], prompt_length=3, chunk_ranks=["a", "b"]
    )
    examples = [Example(plan, [7, 8, 9], [9, 10]), Example(PrefixPlan(()), [11], [12])]
    return pack(examples, chunks, Rope.from_config(model.config))


def test_checkpointing_changes_nothing() -> None:
    model = tiny_model("qwen3").train()
    batch = two_examples(model)
    logits, plain = logits_and_gradients(model, batch, "varlen")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, checkpointed = logits_and_gradients(model, batch, "varlen")
    assert torch.equal(logits, again)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_autocast_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def kernel(query: Tensor, *others: Tensor, **options: object) -> Tensor:
        seen.append(query.dtype)
        return by_hand(query, *others, **options)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    model = tiny_model("llama")
    enable_packed(model, "varlen")
    with torch.autocast("cpu", torch.bfloat16):
        model(**two_examples(model).model_inputs())
    assert seen == [torch.bfloat16] * 4


def test_bounds_move_with_the_layout() -> None:
    batch = two_examples(tiny_model())
    layout = batch.layout
    assert layout.segment_bounds_N.tolist() == [0, 3, 34, 52]
    assert layout.own_bounds_N.tolist() == [0, 5, 7]
    assert layout.key_bounds_N.tolist() == [0, 33, 35]
    moved = batch.to(torch.device("meta")).layout
    for bounds in (moved.segment_bounds_N, moved.own_bounds_N, moved.key_bounds_N):
        assert bounds.device.type == "meta"
        assert bounds.dtype == torch.int32


def test_chunks_are_encoded_in_the_ordinary_way_meanwhile() -> None:
    model = tiny_model()
    expected = encode_chunk(model, [1, 2, 3, 4])
    enable_packed(model, "varlen")
    assert torch.equal(encode_chunk(model, [1, 2, 3, 4]), expected)
    assert model.config._attn_implementation == PACKED_VARLEN


def test_mistakes_are_refused() -> None:
    model = tiny_model("llama").train()
    enable_packed(model, "varlen")
    with pytest.raises(ValueError, match="takes packed batches only"):
        model(input_ids=torch.tensor([[1, 2]]))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="has no dropout"):
        model(**two_examples(model).model_inputs())


def test_what_stands_against_the_kernel_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(head_dim=128, attention_dropout=0.0)
    half, gpu = torch.bfloat16, torch.device("cuda")
    assert "needs a CUDA GPU, and this runs on cpu" in varlen.why_not_varlen(config, half, CPU)

    machine = {"flash": True, "capability": (9, 0)}
    monkeypatch.setattr(
        torch.backends.cuda, "is_flash_attention_available", lambda: machine["flash"]
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: machine["capability"])
    ask: Callable[..., str | None] = varlen.why_not_varlen
    assert ask(config, half, gpu) is None
    assert "not in float32" in ask(config, torch.float32, gpu)
    assert "has 260" in ask(SimpleNamespace(head_dim=260), half, gpu)
    assert "has 12" in ask(SimpleNamespace(head_dim=12), half, gpu)
    assert "asks for 0.1" in ask(SimpleNamespace(head_dim=64, attention_dropout=0.1), half, gpu)
    machine["capability"] = (7, 5)
    assert "this one has 7.x" in ask(config, half, gpu)
    machine["flash"] = False
    assert "this build of torch lacks" in ask(config, half, gpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@settings(COMMON, max_examples=20)
@given(rows=row())
def test_the_kernel_itself_agrees_in_bf16(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, rows: Rows
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", KERNEL)
    model = tiny_model(model.config.model_type).to("cuda", torch.bfloat16)
    batch = pack(*rows, Rope.from_config(model.config)).to(torch.device("cuda"))
    assert_kernels_agree(model, batch, tolerance=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_is_bottom_right_causal() -> None:
    torch.manual_seed(0)
    own, keys = torch.tensor([0, 5, 6, 300]), torch.tensor([0, 40, 41, 999])
    query = torch.randn(300, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key = torch.randn(999, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    value = torch.randn_like(key).requires_grad_()
    results = []
    for attend in (KERNEL, by_hand):
        bounds = (own.int().cuda(), keys.int().cuda(), 294, 958)
        options = {"scale": 0.125, "window_size": (-1, 0), **varlen._SHARES_HEADS}
        output = attend(query, key, value, *bounds, **options)
        loss = output.float().square().sum()
        results.append([output, *torch.autograd.grad(loss, (query, key, value))])
    for ours, reference in zip(*results, strict=True):
        assert_same(ours, reference, 0.02, reference.abs().max())
