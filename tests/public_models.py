"""Published shapes of the models that recipes are shipped for, as in their config.json."""

from typing import Any

from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from train.model_shape import RowShape

_LLAMA3 = {
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "head_dim": None,
}


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return _rope(
        500_000.0,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def _sizes(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool = False
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }


CONFIGS: dict[str, PreTrainedConfig] = {
    "Qwen/Qwen2-7B-Instruct": Qwen2Config(
        vocab_size=152064, **_sizes(3584, 18944, 28, 28, 4), **_rope(1e6)
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": Qwen2Config(
        vocab_size=151936, **_sizes(1536, 8960, 28, 12, 2, tied=True), **_rope(1e6)
    ),
    "Qwen/Qwen2.5-7B-Instruct": Qwen2Config(
        vocab_size=152064, **_sizes(3584, 18944, 28, 28, 4), **_rope(1e6)
    ),
    "Qwen/Qwen3-1.7B": Qwen3Config(
        vocab_size=151936,
        head_dim=128,
        **_sizes(2048, 6144, 28, 16, 8, tied=True),
        **_rope(1e6),
    ),
    "Qwen/Qwen3-8B": Qwen3Config(
        vocab_size=151936, head_dim=128, **_sizes(4096, 12288, 36, 32, 8), **_rope(1e6)
    ),
    "meta-llama/Llama-3.2-1B-Instruct": LlamaConfig(
        **_LLAMA3, **_sizes(2048, 8192, 16, 32, 8, tied=True), **_llama3_rope(32.0)
    ),
    "meta-llama/Llama-3.2-3B-Instruct": LlamaConfig(
        **_LLAMA3, **_sizes(3072, 8192, 28, 24, 8, tied=True), **_llama3_rope(32.0)
    ),
    "meta-llama/Llama-3.1-8B-Instruct": LlamaConfig(
        **_LLAMA3, **_sizes(4096, 14336, 32, 32, 8), **_llama3_rope(8.0)
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": MistralConfig(
        vocab_size=32768,
        sliding_window=None,
        **_sizes(4096, 14336, 32, 32, 8),
        **_rope(1e6),
    ),
}
"""By name in the Hugging Face cache."""

PARAMETERS = {
    "Qwen/Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
}
"""How many their model cards and weight files name, tied matrices once."""

# Four samples, each with a prompt, five passages up to their last nugget, ten nuggets sliced from
# them, a question and an answer.
PASS_OF_FOUR = RowShape(
    tokens=4096, segments=3600, prefix=1200, answers=40, masked_pairs=400e3, visible_pairs=1.2e6
)
