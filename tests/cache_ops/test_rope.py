"""Rotating by a difference equals computing at the new position, for every exact RoPE type."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ARCHITECTURES, ROPE_TYPES, tiny_model

from cache_ops.encode import encode_chunk
from cache_ops.hf import restore_rope_tables
from cache_ops.rope import Rope, rotate

MODELS = {(name, rope): tiny_model(name, rope) for name in ARCHITECTURES for rope in ROPE_TYPES}


@pytest.mark.parametrize(("architecture", "rope_type"), MODELS)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(delta=st.integers(-500, 1500))
def test_rotation_by_delta_is_computation_at_the_new_position(
    architecture, rope_type, delta
) -> None:
    model = MODELS[architecture, rope_type]
    ids = torch.arange(3, 20)[None]
    at_zero = encode_chunk(model, ids[0].tolist())[:, :, 0]
    positions = torch.arange(ids.shape[1])[None] + delta
    with torch.no_grad():
        moved = model(input_ids=ids, position_ids=positions, use_cache=True).past_key_values
    expected = torch.stack([layer.keys[0] for layer in moved.layers]).permute(2, 0, 1, 3)
    cosine, sine = Rope.from_config(model.config).tables(torch.full((ids.shape[1],), delta))
    rotated = rotate(at_zero, cosine[:, None, None], sine[:, None, None])
    # transformers forms its angles in fp32, which loses digits in proportion to the position.
    tolerance = 1e-5 + 2e-7 * abs(delta)
    assert (rotated - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize(("architecture", "rope_type"), MODELS)
def test_frequencies_are_the_model_s_own(architecture, rope_type) -> None:
    model = MODELS[architecture, rope_type]
    ours = Rope.from_config(model.config).inverse_frequencies
    assert torch.equal(ours, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_a_cast_to_bf16_leaves_the_tables_in_fp32(rope_type) -> None:
    model = tiny_model("llama", rope_type)
    exact = model.model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    assert not torch.equal(model.model.rotary_emb.inv_freq.float(), exact)
    restore_rope_tables(model)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)


def test_rotation_keeps_the_dtype_and_works_in_fp32() -> None:
    model = MODELS["llama", "default"]
    rope = Rope.from_config(model.config)
    keys = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    cosine, sine = rope.tables(torch.full((5,), 700))
    in_bf16 = rotate(keys.bfloat16(), cosine, sine)
    assert in_bf16.dtype == torch.bfloat16
    in_fp32 = rotate(keys.bfloat16().float(), cosine, sine)
    assert torch.equal(in_bf16, in_fp32.bfloat16())
