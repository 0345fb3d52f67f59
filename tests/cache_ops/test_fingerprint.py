"""The identity of what a store holds."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from cache_ops.encode import encode_chunk
from cache_ops.fingerprint import Fingerprint, describe_rope, weights_digest
from cache_ops.hf import UnsupportedModelError, load_model, restore_rope_tables
from cache_ops.rope import head_dim

FINGERPRINT = Fingerprint("w", "r", "t", "512 tokens", "none", "float32 model, float32 records")


def adapted(seed: int = 0, **options):
    """A tiny model under a LoRA adapter whose weights are not zero."""
    model = tiny_model()
    torch.manual_seed(seed)
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**(settings | options)))


def test_one_weight_changes_the_digest():
    model = tiny_model()
    before = weights_digest(model)
    assert before == weights_digest(tiny_model())
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    assert weights_digest(model) != before


def test_two_tensors_exchanged_change_the_digest():
    model = tiny_model("llama")
    before = weights_digest(model)
    layer = model.model.layers[0].self_attn
    layer.k_proj.weight, layer.v_proj.weight = layer.v_proj.weight, layer.k_proj.weight
    assert weights_digest(model) != before


def test_tensors_beyond_one_piece_are_hashed_whole(monkeypatch):
    model = tiny_model()
    before = weights_digest(model)
    monkeypatch.setattr("cache_ops.fingerprint._HASH_PIECE_BYTES", 1000)
    assert weights_digest(model) == before
    with torch.no_grad():
        model.model.embed_tokens.weight[-1, -1] += 1
    assert weights_digest(model) != before


@pytest.mark.parametrize(
    ("name", "value"),
    [("rms_norm_eps", 1e-3), ("num_attention_heads", 8), ("hidden_act", "gelu")],
)
def test_other_architecture_settings_on_the_same_weights_differ(name, value):
    model = tiny_model()
    # So that more heads do not mean smaller ones.
    model.config.head_dim = head_dim(model.config)
    before = weights_digest(model)
    setattr(model.config, name, value)
    assert weights_digest(model) != before


def test_the_files_and_their_sharding_do_not_matter(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    digests = {
        weights_digest(load_model(str(tmp_path / name), "float32")) for name in "one many".split()
    }
    assert digests == {weights_digest(model)}


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["norm"]}, {"use_dora": True}])
def test_an_adapter_has_its_own_digest_and_the_base_reading_that_of_the_base(options):
    model = adapted(**options)
    base = weights_digest(tiny_model())
    assert weights_digest(model) != base
    assert weights_digest(model, base=True) == base
    with model.disable_adapter():
        assert weights_digest(model) == base


def test_the_digest_changes_just_where_the_keys_and_values_do():
    plain, model = tiny_model(), adapted()
    expected, digest = encode_chunk(plain, [1, 2, 3]), weights_digest(plain)
    with model.disable_adapter():
        assert torch.equal(encode_chunk(model, [1, 2, 3]), expected)
        assert weights_digest(model) == digest
    assert not torch.equal(encode_chunk(model, [1, 2, 3]), expected)
    assert weights_digest(model) != digest


def test_every_adapter_and_every_scaling_differs():
    digests = [weights_digest(adapted(**options)) for options in (
        {}, {"seed": 1}, {"lora_alpha": 32}, {"use_rslora": True}, {"target_modules": ["q_proj"]}
    )]  # fmt: skip
    assert len(set(digests)) == len(digests)


def test_only_the_active_adapter_counts():
    model = adapted()
    alone = weights_digest(model)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    assert weights_digest(model) == alone
    model.set_adapter("other")
    assert weights_digest(model) != alone
    assert weights_digest(model, base=True) == weights_digest(tiny_model())


def test_a_merged_model_has_its_own_digest():
    model = adapted()
    active = weights_digest(model)
    merged = weights_digest(model.merge_and_unload())
    assert len({active, merged, weights_digest(tiny_model())}) == 3


def test_an_adapter_merged_for_now_is_refused():
    model = adapted()
    model.merge_adapter()
    with pytest.raises(UnsupportedModelError, match="unmerge_adapter"):
        weights_digest(model, base=True)


def test_weights_that_are_not_here_are_refused():
    model = tiny_model()
    model.model.norm.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(UnsupportedModelError, match=r"norm\.weight are not in this process"):
        weights_digest(model)
    with pytest.raises(UnsupportedModelError, match="not in this process"):
        weights_digest(model.to("meta"))


def test_a_cast_to_bf16_differs_in_weights_and_dtype():
    wide = Fingerprint.from_model(tiny_model(), "bfloat16", tokenizer="t", chunking="c")
    model = tiny_model().bfloat16()
    with pytest.raises(UnsupportedModelError, match="restore_rope_tables"):
        weights_digest(model)
    restore_rope_tables(model)
    narrow = Fingerprint.from_model(model, "bfloat16", tokenizer="t", chunking="c")
    weights, dtype = wide.differences(narrow)
    assert weights.startswith("weights: the store has ")
    assert dtype.startswith(
        "dtype: the store has float32 model, bfloat16 records, "
        "this run bfloat16 model, bfloat16 records; set model.dtype"
    )


def test_another_rope_differs_under_the_same_weights():
    plain, scaled = (
        Fingerprint.from_model(tiny_model(rope=rope), "float32", tokenizer="t", chunking="c")
        for rope in ("default", "linear")
    )
    (only,) = plain.differences(scaled)
    assert only.startswith("rope: the store has ")
    assert '"factor": 3.0' in only
    assert describe_rope(tiny_model(rope="yarn").config) != plain.rope


def test_each_part_that_differs_is_named_with_what_to_do():
    other = Fingerprint("w2", "r2", "t2", "256 tokens", "bos", "bfloat16 model", 2)
    found = FINGERPRINT.differences(other)
    names = [line.partition(":")[0] for line in found]
    assert names == "weights,rope,tokenizer,chunking,prompt visibility,dtype,format".split(",")
    assert (
        "chunking: the store has 512 tokens, this run 256 tokens; set the chunk length" in found[3]
    )
    assert FINGERPRINT.differences(FINGERPRINT) == []
    assert FINGERPRINT.digest != replace(FINGERPRINT, chunking="256 tokens").digest


def test_json_round_trip():
    assert Fingerprint.from_json(FINGERPRINT.as_json()) == FINGERPRINT
