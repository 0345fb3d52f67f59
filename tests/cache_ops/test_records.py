"""Records keep floats exactly, quantize within a bound known beforehand, and slice by token."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from cache_ops.encode import encode_chunk
from cache_ops.records import RecordLayout, RecordRangeError

DTYPES = ("float32", "bfloat16", "float16", "int8", "float8")
FLOATS = ("float32", "bfloat16", "float16")


@st.composite
def layouts(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> RecordLayout:
    return RecordLayout(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        2 * draw(st.integers(1, 5)),
        draw(st.sampled_from(dtypes)),
    )


def random_kv(layout: RecordLayout, tokens: int, seed: int) -> torch.Tensor:
    """Keys and values with vectors of very different size, zero vectors among them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, layout.layers, 2, layout.kv_heads, layout.head_dim)
    size = 10 ** torch.empty(shape[:-1]).uniform_(-4, 3, generator=generator)
    size *= torch.rand(shape[:-1], generator=generator) > 0.1
    return torch.randn(shape, generator=generator) * size[..., None]


@settings(max_examples=60, deadline=None)
@given(layouts(FLOATS), st.integers(1, 6), st.integers(0, 99))
def test_floats_come_back_exactly_and_without_a_copy(
    layout: RecordLayout, tokens: int, seed: int
) -> None:
    kv_TL2HD = random_kv(layout, tokens, seed).to(layout.torch_dtype)
    records_TR = layout.encode(kv_TL2HD)
    assert records_TR.shape == (tokens, layout.token_bytes)
    assert records_TR.is_contiguous()
    assert records_TR.dtype == torch.uint8
    back_TL2HD = layout.decode(records_TR, layout.torch_dtype)
    assert torch.equal(back_TL2HD, kv_TL2HD)
    assert back_TL2HD.data_ptr() == records_TR.data_ptr()
    assert records_TR.data_ptr() != kv_TL2HD.data_ptr()


@settings(max_examples=60, deadline=None)
@given(layouts(("int8", "float8")), st.integers(1, 6), st.integers(0, 99))
def test_quantizing_is_off_by_no_more_than_its_bound(
    layout: RecordLayout, tokens: int, seed: int
) -> None:
    kv_TL2HD = random_kv(layout, tokens, seed)
    back_TL2HD = layout.decode(layout.encode(kv_TL2HD), torch.float32)
    largest = kv_TL2HD.abs().amax(-1, keepdim=True)
    if layout.dtype == "int8":
        bound = largest / 127 / 2
    else:
        bound = torch.maximum(kv_TL2HD.abs() / 16, largest / 448 / 1024)
    assert ((back_TL2HD - kv_TL2HD).abs() <= bound * (1 + 1e-5) + 1e-38).all()


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 8), st.integers(0, 99), st.data())
def test_a_slice_of_records_is_a_slice_of_tokens(
    layout: RecordLayout, tokens: int, seed: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, tokens - 1))
    end = data.draw(st.integers(start + 1, tokens))
    kv_TL2HD = random_kv(layout, tokens, seed)
    records_TR = layout.encode(kv_TL2HD)
    whole = layout.decode(records_TR, torch.float32)
    assert torch.equal(layout.decode(records_TR[start:end], torch.float32), whole[start:end])
    assert torch.equal(layout.encode(kv_TL2HD[start:end]), records_TR[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layout_survives_json(dtype: str) -> None:
    layout = RecordLayout(2, 3, 4, dtype)
    assert RecordLayout.from_json(json.loads(json.dumps(layout.as_json()))) == layout


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", 2880), ("bfloat16", 1440), ("int8", 720 + 360), ("float8", 720 + 360)],
)
def test_a_record_has_the_bytes_of_its_vectors_and_scales(dtype: str, expected: int) -> None:
    assert RecordLayout(15, 3, 8, dtype).token_bytes == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_models_layout_fits_its_own_chunks(family: str) -> None:
    model = tiny_model(family)
    kv_TL2HD = encode_chunk(model, [3, 1, 4, 1, 5])
    layout = RecordLayout.from_model(model.config, "float32")
    assert torch.equal(layout.decode(layout.encode(kv_TL2HD), torch.float32), kv_TL2HD)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_the_dtype_cannot_hold_is_refused(dtype: str) -> None:
    layout = RecordLayout(1, 1, 2, dtype)
    kv_TL2HD = torch.zeros(2, 1, 2, 1, 2)
    kv_TL2HD[1, 0, 1, 0, 1] = 1e5 if dtype == "float16" else float("inf")
    with pytest.raises(RecordRangeError, match=f"stored as {dtype}"):
        layout.encode(kv_TL2HD)
    if dtype == "float16":
        kv_TL2HD[1, 0, 1, 0, 1] = 65504
        layout.encode(kv_TL2HD)
