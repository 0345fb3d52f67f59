"""Every layout, packed and served, against one dense forward whose mask is written out by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import ARCHITECTURES, VOCABULARY, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from cache_ops.assemble import gather
from cache_ops.attention import PACKED
from cache_ops.cached import RequestCache, enable_cached, forward_cached
from cache_ops.encode import encode_chunk, encode_chunks
from cache_ops.fingerprint import weights_digest
from cache_ops.layout import Layout, computed, linked_chunks, whole_chunks
from cache_ops.packing import Example, pack
from cache_ops.plan import PROMPT, PrefixPlan, Slice, Span, isolated, plan_prefix
from cache_ops.rope import Rope
from cache_ops.soft_tokens import (
    add_soft_tokens,
    numbered,
    soft_tokens_of,
    take_soft_tokens,
)
from data_builders.prefix import nugget_prefix
from recipes.resolve import resolve

LINKS = 2
DOCUMENTS = 3
PACKETS = {"packets_before": (1, 2), "packets_after": (1, 1)}
COMMON = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Row:
    """One token of the reference: what it is, where it stands, whom it may see."""

    token: int
    position: int
    block: str
    """Its document, or `global`: sees every earlier position."""
    hidden: bool = False
    """Only its own document sees it."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model with link tokens, and with packet tokens behind them."""
    made = tiny_model(request.param)
    add_soft_tokens(made, {"links": (DOCUMENTS, LINKS)} | PACKETS, seed=3)
    return made


def dense_logits(model: PreTrainedModel, rows: Sequence[Row], answer: int) -> Tensor:
    """Logits that predict the last `answer` rows, in one forward with an explicit 4D mask."""
    positions = torch.tensor([row.position for row in rows])
    may_see = torch.tensor(
        [
            [
                key.position <= query.position
                and ((query.block == "global" and not key.hidden) or key.block == query.block)
                for key in rows
            ]
            for query in rows
        ]
    )
    mask = torch.zeros(may_see.shape).masked_fill(~may_see, torch.finfo(torch.float32).min)
    linked = soft_tokens_of(model)
    assert linked is not None
    table = torch.cat((linked.vocabulary.weight, linked.soft_ND))
    embeddings = table[torch.tensor([row.token for row in rows])]
    model.set_attn_implementation("eager")
    logits = model(
        inputs_embeds=embeddings[None],
        position_ids=positions[None],
        attention_mask=mask[None, None],
    ).logits[0]
    model.set_attn_implementation("sdpa")
    return logits[-answer - 1 : -1]


def packed_logits(
    model: PreTrainedModel, example: Example, segments: dict[str, Sequence[int]]
) -> Tensor:
    model.set_attn_implementation(PACKED)
    batch = pack([example], segments, Rope.from_config(model.config))
    logits = model(**batch.model_inputs()).logits[0]
    model.set_attn_implementation("sdpa")
    return logits


def served_logits(
    model: PreTrainedModel,
    layout: Layout,
    segments: dict[str, Sequence[int]],
    query: Sequence[int],
    answer: Sequence[int],
) -> Tensor:
    """Encode, slice, rotate, compute the query, then the answer token by token."""
    chunk_kv = {name: encode_chunk(model, ids) for name, ids in segments.items() if ids}
    prefix = gather(layout.plan, chunk_kv) if layout.plan.slices else None
    enable_cached(model)
    own = [*layout.online_ids, *query]
    cache = RequestCache(
        layout.plan,
        prefix,
        Rope.from_config(model.config),
        room=len(own) + len(answer),
        first_positions=layout.positions_with(len(query)),
    )
    logits = [forward_cached(model, [(cache, own)])]
    logits += [forward_cached(model, [(cache, [token])]) for token in answer[:-1]]
    model.set_attn_implementation("sdpa")
    return torch.cat(logits)


def close(ours: Tensor, reference: Tensor, tolerance: float = 1e-4) -> None:
    worst = (ours - reference).abs().max() / reference.abs().max()
    assert worst < tolerance, f"relative difference {worst:.2e}"


texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)
situations = st.tuples(
    st.lists(st.integers(0, VOCABULARY - 1), max_size=4),
    st.lists(texts, min_size=1, max_size=DOCUMENTS),
    texts,
    texts,
)


def documents(
    prompt: list[int], chunks: list[list[int]], starts: Sequence[int], links: list[list[int]]
) -> tuple[list[Row], int]:
    """The reference's rows before the query, and where the query starts."""
    rows = [Row(token, position, "global") for position, token in enumerate(prompt)]
    end = len(prompt)
    for number, (chunk, start, link) in enumerate(zip(chunks, starts, links, strict=True)):
        rows += [Row(t, start + at, f"document {number}") for at, t in enumerate(chunk)]
        after = start + len(chunk)
        rows += [Row(t, after + at, "global") for at, t in enumerate(link)]
        end = max(end, after + len(link))
    return rows, end


def check(
    model: PreTrainedModel,
    layout: Layout,
    segments: dict[str, Sequence[int]],
    before: tuple[list[Row], int],
    query: list[int],
    answer: list[int],
) -> None:
    rows, end = before
    own = [Row(t, end + at, "global") for at, t in enumerate([*query, *answer])]
    assert layout.length == end
    assert layout.tokens == len(rows)
    with torch.no_grad():
        reference = dense_logits(model, [*rows, *own], len(answer))
        close(packed_logits(model, Example.of(layout, query, answer), segments), reference)
        close(served_logits(model, layout, segments, query, answer), reference)


def keyed(prompt: list[int], chunks: list[list[int]]) -> dict[str, Sequence[int]]:
    return {PROMPT: prompt} | {f"chunk{number}": ids for number, ids in enumerate(chunks)}


def lengths(chunks: list[list[int]]) -> list[tuple[str, int]]:
    return [(f"chunk{number}", len(ids)) for number, ids in enumerate(chunks)]


def ends(prompt: list[int], chunks: list[list[int]], links: int = 0) -> list[int]:
    starts = [len(prompt)]
    for chunk in chunks:
        starts.append(starts[-1] + len(chunk) + links)
    return starts[:-1]


@COMMON
@given(situation=situations)
def test_reordered_chunks(model: PreTrainedModel, situation) -> None:
    prompt, chunks, query, answer = situation
    layout = whole_chunks(lengths(chunks), len(prompt))
    before = documents(prompt, chunks, ends(prompt, chunks), [[]] * len(chunks))
    check(model, layout, keyed(prompt, chunks), before, query, answer)


@COMMON
@given(situation=situations)
def test_composite_chunks(model: PreTrainedModel, situation) -> None:
    prompt, chunks, query, answer = situation
    layout = whole_chunks(lengths(chunks), len(prompt), "composite")
    before = documents(prompt, chunks, [len(prompt)] * len(chunks), [[]] * len(chunks))
    check(model, layout, keyed(prompt, chunks), before, query, answer)


@COMMON
@given(situation=situations)
def test_linked_chunks(model: PreTrainedModel, situation) -> None:
    prompt, chunks, query, answer = situation
    links = [
        [VOCABULARY + LINKS * n + offset for offset in range(LINKS)] for n in range(len(chunks))
    ]
    layout = linked_chunks(lengths(chunks), len(prompt), links)
    before = documents(prompt, chunks, ends(prompt, chunks, LINKS), links)
    check(model, layout, keyed(prompt, chunks), before, query, answer)


@COMMON
@given(situation=situations)
def test_no_links_are_reordered_chunks(model: PreTrainedModel, situation) -> None:
    prompt, chunks, *_ = situation
    unlinked = linked_chunks(lengths(chunks), len(prompt), [[]] * len(chunks))
    assert unlinked == whole_chunks(lengths(chunks), len(prompt))


@COMMON
@given(situation=situations)
def test_full_text_is_a_plain_forward(model: PreTrainedModel, situation) -> None:
    prompt, chunks, query, answer = situation
    text = [*prompt, *(token for chunk in chunks for token in chunk)]
    layout = computed(text)
    example = Example.of(layout, query, answer)
    with torch.no_grad():
        ids = torch.tensor([[*text, *query, *answer]])
        reference = model(input_ids=ids).logits[0][-len(answer) - 1 : -1]
        close(packed_logits(model, example, {}), reference)
        close(served_logits(model, layout, {}, query, answer), reference)


@COMMON
@given(situation=situations)
def test_one_whole_chunk_without_a_prompt_is_a_plain_forward(
    model: PreTrainedModel, situation
) -> None:
    _, chunks, query, answer = situation
    layout = whole_chunks(lengths(chunks[:1]), 0)
    with torch.no_grad():
        ids = torch.tensor([[*chunks[0], *query, *answer]])
        reference = model(input_ids=ids).logits[0][-len(answer) - 1 : -1]
        segments = keyed([], chunks[:1])
        close(packed_logits(model, Example.of(layout, query, answer), segments), reference)
        close(served_logits(model, layout, segments, query, answer), reference)


@COMMON
@given(situation=situations, data=st.data())
def test_isolated_nuggets_are_chunks_that_are_nuggets(
    model: PreTrainedModel, situation, data: st.DataObject
) -> None:
    prompt, chunks, query, answer = situation
    spans = []
    for name, tokens in lengths(chunks):
        start = data.draw(st.integers(0, tokens - 1))
        spans.append(Span(name, start, data.draw(st.integers(start + 1, tokens))))
    ranks = [name for name, _ in lengths(chunks)]
    plan = plan_prefix(spans, prompt_length=len(prompt), chunk_ranks=ranks)
    alone, segments = isolated(plan, keyed(prompt, chunks))
    nuggets = [chunk[span.start : span.end] for chunk, span in zip(chunks, spans, strict=True)]
    before = documents(prompt, nuggets, ends(prompt, nuggets), [[]] * len(nuggets))
    check(model, Layout(alone), dict(segments), before, query, answer)


def nugget_rows(
    layout: Layout, segments: dict[str, Sequence[int]], before: list[int], after: list[int]
) -> tuple[list[Row], int]:
    """A whole chunk of its own for each slice, of which the slice alone is seen from outside."""
    rows: list[Row] = []
    end = 0
    for number, piece in enumerate(layout.plan.slices):
        around = ([], []) if piece.chunk == PROMPT else (before, after)
        rows += [Row(t, end + at, "global") for at, t in enumerate(around[0])]
        end += len(around[0])
        block = "global" if piece.chunk == PROMPT else f"slice {number}"
        rows += [
            Row(t, end + at - piece.start, block, not piece.start <= at < piece.end)
            for at, t in enumerate(segments[piece.chunk])
        ]
        end += piece.end - piece.start
        rows += [Row(t, end + at, "global") for at, t in enumerate(around[1])]
        end += len(around[1])
    return rows, end


def nugget_layout(
    segments: dict[str, Sequence[int]], spans: list[Span], *options: str
) -> tuple[Layout, list[int], list[int]]:
    """The layout of nuggets under options of a recipe, and the soft tokens around slices."""
    config = resolve(["smollm2_135m/systems/coinrag", *options]).config
    groups = numbered(VOCABULARY + DOCUMENTS * LINKS, PACKETS)
    layout, _ = nugget_prefix(config, spans, segments, [*segments], groups)
    around = ([], [])
    if config.context.packets is not None:
        around = tuple(groups[name].ids(1)[0] for name in PACKETS)
    return layout, *around


@COMMON
@given(situation=situations, data=st.data())
def test_nuggets_with_anchors_and_packets(
    model: PreTrainedModel, situation, data: st.DataObject
) -> None:
    prompt, chunks, query, answer = situation
    spans = []
    for name, tokens in lengths(chunks) * 2:
        start = data.draw(st.integers(0, tokens - 1))
        spans.append(Span(name, start, data.draw(st.integers(start + 1, tokens))))
    size = st.integers(0, 3)
    options = [
        f"context.anchors.prefix_tokens={data.draw(size)}",
        f"context.anchors.suffix_tokens={data.draw(size)}",
        f"retrieval.order={data.draw(st.sampled_from(['rank_then_document', 'score']))}",
        f"retrieval.overlap={data.draw(st.sampled_from(['merge', 'keep']))}",
    ]
    if data.draw(st.booleans()):
        options.append("context.packets={before_tokens: 2, after_tokens: 1}")
    segments = keyed(prompt, chunks)
    layout, before, after = nugget_layout(segments, spans, *options)
    rows, end = nugget_rows(layout, segments, before, after)
    own = [Row(t, end + at, "global") for at, t in enumerate([*query, *answer])]
    assert layout.length == end
    assert layout.tokens == sum(not row.hidden for row in rows)
    with torch.no_grad():
        reference = dense_logits(model, [*rows, *own], len(answer))
        close(packed_logits(model, Example.of(layout, query, answer), segments), reference)
        close(served_logits(model, layout, segments, query, answer), reference)


def test_original_positions_are_not_rotated() -> None:
    spans = [Span("a", 5, 9), Span("b", 0, 3), Span("a", 1, 2)]
    plan = plan_prefix(spans, prompt_length=2, chunk_ranks=["b", "a"], positions="original")
    assert [(piece.chunk, piece.position) for piece in plan.slices] == [
        (PROMPT, 0), ("b", 0), ("a", 1), ("a", 5),
    ]  # fmt: skip
    assert all(piece.delta == 0 for piece in plan.slices)
    assert plan.length == 9
    alone, _ = isolated(plan, {PROMPT: [0] * 2, "a": [0] * 9, "b": [0] * 3}, "original")
    assert {piece.delta for piece in alone.slices} == {0}


def gradients(loss: Callable[[], Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    model.zero_grad()
    loss().backward()
    found = {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}
    model.zero_grad()
    return found


def same_gradients(
    model: PreTrainedModel,
    rows: list[Row],
    example: Example,
    segments: dict[str, Sequence[int]],
) -> None:
    labels = torch.tensor(example.answer_ids)

    def loss(logits: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, labels)

    reference = gradients(lambda: loss(dense_logits(model, rows, len(labels))), model)
    ours = gradients(lambda: loss(packed_logits(model, example, segments)), model)
    assert ours.keys() == reference.keys()
    assert any("soft" in name for name in ours)
    for name, gradient in reference.items():
        worst = (ours[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-6)
        assert worst < 1e-3, name


def test_gradients_of_linked_chunks(model: PreTrainedModel) -> None:
    prompt, chunks, query, answer = (
        [1, 2, 3],
        [[4, 5, 6, 7], [8, 9], [10, 11, 12]],
        [13, 14],
        [15, 16],
    )
    links = [[VOCABULARY + LINKS * n + offset for offset in range(LINKS)] for n in range(3)]
    layout = linked_chunks(lengths(chunks), len(prompt), links)
    rows, end = documents(prompt, chunks, ends(prompt, chunks, LINKS), links)
    own = [Row(t, end + at, "global") for at, t in enumerate([*query, *answer])]
    example = Example.of(layout, query, answer)
    same_gradients(model, [*rows, *own], example, keyed(prompt, chunks))


def test_gradients_of_nuggets_with_anchors_and_packets(model: PreTrainedModel) -> None:
    segments = keyed([1, 2, 3], [[*range(20, 29)], [8, 9]])
    layout, before, after = nugget_layout(
        segments,
        [Span("chunk0", 4, 6), Span("chunk1", 1, 2)],
        "context.anchors={prefix_tokens: 1, suffix_tokens: 2}",
        "context.packets={before_tokens: 2, after_tokens: 1}",
    )
    rows, end = nugget_rows(layout, segments, before, after)
    own = [Row(t, end + at, "global") for at, t in enumerate([13, 14, 15, 16])]
    same_gradients(model, [*rows, *own], Example.of(layout, [13, 14], [15, 16]), segments)


def test_link_ids_lie_beyond_every_row_of_the_vocabulary() -> None:
    model = tiny_model("qwen2")
    plain = model.get_input_embeddings()
    links = add_soft_tokens(model, {"links": (3, 5)}, seed=0)["links"]
    ids = [link for document in links.ids(3) for link in document]
    assert ids == list(range(VOCABULARY, VOCABULARY + 15))
    assert model.get_output_embeddings().weight.shape[0] == VOCABULARY
    rows = model.get_input_embeddings()(torch.tensor(ids))
    assert len(torch.unique(rows, dim=0)) == 15, "every link token is distinct"
    assert take_soft_tokens(model)["links"].shape[:2] == (3, 5)
    assert model.get_input_embeddings() is plain


def test_links_leave_the_identity_of_the_weights() -> None:
    plain, linked = tiny_model("qwen2"), tiny_model("qwen2")
    add_soft_tokens(linked, {"links": (2, 1)}, seed=0)
    assert weights_digest(linked) == weights_digest(plain)


def test_links_are_kept_in_fp32() -> None:
    model = tiny_model("qwen2").bfloat16()
    links = add_soft_tokens(model, {"links": (1, 2)}, seed=0)["links"]
    linked = soft_tokens_of(model)
    assert linked is not None
    assert linked.soft_ND.dtype == torch.float32
    assert linked(torch.tensor([[1, *links.ids(1)[0]]])).dtype == torch.bfloat16


def test_chunks_encoded_together_are_those_encoded_alone(model: PreTrainedModel) -> None:
    chunks = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
    for together, ids in zip(encode_chunks(model, chunks), chunks, strict=True):
        close(together, encode_chunk(model, ids), 1e-5)


def test_a_slice_between_link_tokens_stays_in_order() -> None:
    layout = linked_chunks([("a", 2), ("b", 3)], 1, [[100, 101], [102, 103]])
    assert layout.plan == PrefixPlan(
        (Slice(PROMPT, 0, 1, 0), Slice("a", 0, 2, 1), Slice("b", 0, 3, 5))
    )
    assert layout.online_positions == (3, 4, 8, 9)
    assert layout.positions_with(2) == [3, 4, 8, 9, 10, 11]
