"""What loads, and what is refused with its reason."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import tiny_tokenizer
from tiny import tiny_model
from transformers import (
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from cache_ops.hf import (
    ModelNotFoundError,
    UnsupportedModelError,
    check_supported,
    check_vocabulary,
    load_model,
    load_tokenizer,
)

LONG = {"rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "model type 'gpt2' is not supported; supported are llama, mistral"),
        (Gemma2Config(), "model type 'gemma2'"),
        (Phi3Config(), "model type 'phi3'"),
        (MistralConfig(sliding_window=4096), "sliding_attention"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=1), "sliding_attention"),
        (Qwen3Config(use_sliding_window=True, max_window_layers=0), "sliding_attention"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", **LONG}), "RoPE type 'dynamic'"),
        (
            LlamaConfig(
                rope_parameters={
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 64,
                    "long_factor": [2.0] * 64,
                    "original_max_position_embeddings": 1024,
                    **LONG,
                }
            ),
            "RoPE type 'longrope'",
        ),
        (
            LlamaConfig(
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            ),
            "partial RoPE",
        ),
    ],
)
def test_refusals_name_their_reason(config, reason) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(config)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        MistralConfig(sliding_window=None),
        # As Qwen2-7B-Instruct ships: a window is written down and not used.
        Qwen2Config(sliding_window=131072, use_sliding_window=False),
        Qwen3Config(),
    ],
)
def test_full_attention_models_pass(config) -> None:
    check_supported(config)


def test_a_saved_model_loads_and_its_tables_stay_fp32(tmp_path) -> None:
    tiny_model("qwen3", "yarn").save_pretrained(tmp_path / "model")
    model = load_model(str(tmp_path / "model"), "bfloat16")
    assert model.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_missing_models_are_a_clear_error_with_the_nearest_folder(tmp_path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "smollm2")
    with pytest.raises(ModelNotFoundError, match=r"did you mean .*smollm2"):
        load_model(str(tmp_path / "smolm2"), "float32")
    with pytest.raises(ModelNotFoundError, match="nothing is downloaded"):
        load_model("nobody/nothing", "float32")
    with pytest.raises(ModelNotFoundError, match="no tokenizer at"):
        load_tokenizer(str(tmp_path / "smolm2"))


def test_damaged_folders_say_what_is_wrong(tmp_path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=r"lack 1 tensors .* model.layers.1.mlp.up_proj"):
        load_model(str(tmp_path), "float32")
    weights.write_bytes(b"not safetensors")
    with pytest.raises(ModelNotFoundError, match="no readable safetensors weights"):
        load_model(str(tmp_path), "float32")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match="no readable model in the folder"):
        load_model(str(tmp_path), "float32")


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    check_vocabulary(tiny_model("llama", vocabulary=len(tokenizer)), tokenizer)
    with pytest.raises(UnsupportedModelError, match="do not belong together"):
        check_vocabulary(tiny_model("llama", vocabulary=100), tokenizer)


def test_pickled_weights_are_not_read(tmp_path) -> None:
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="no readable safetensors weights"):
        load_model(str(tmp_path), "float32")
