"""Loading models, and knowing which of them the cache operations are exact for."""

import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from cache_ops.rope import EXACT_ROPE_TYPES, Rope

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


class UnsupportedModelError(ValueError):
    """The cache operations would be wrong or are unproven for this model; says why."""

    is_user_error = True


class ModelNotFoundError(ValueError):
    """No model or tokenizer lies at a path or under a cached name; says what was looked for."""

    is_user_error = True


def check_supported(config: PreTrainedConfig) -> None:
    """Passes configs for which slicing and rotating keys is exact.

    Raises:
        UnsupportedModelError: another architecture, sliding-window layers (they would drop prefix
            tokens), a RoPE type whose angles depend on the sequence length, partial RoPE, or RoPE
            that differs between layers.
    """
    if config.model_type not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    others = {
        kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"
    }
    if config.model_type == "mistral" and config.sliding_window is not None:
        others.add("sliding_attention")
    if others:
        raise UnsupportedModelError(
            f"this {config.model_type} model has layers of type {', '.join(sorted(others))}, which "
            "would drop prefix tokens; only full_attention layers are supported"
        )
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type")
    if rope_type is None:
        raise UnsupportedModelError("RoPE that differs between layers is not supported")
    if rope_type not in EXACT_ROPE_TYPES:
        raise UnsupportedModelError(
            f"RoPE type {rope_type!r} is not supported: its angles are not a fixed multiple of the "
            f"position, so cached keys cannot be moved; supported are {', '.join(EXACT_ROPE_TYPES)}"
        )
    if (factor := parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial RoPE (partial_rotary_factor {factor}) is not supported"
        )


def load_model(path: str, dtype: str) -> PreTrainedModel:
    """Loads a supported causal LM for serving or training, from disk only, safetensors only.

    Args:
        path: a folder, or a name in the local Hugging Face cache.
        dtype: `float32` or `bfloat16`.

    Raises:
        ModelNotFoundError, UnsupportedModelError
    """
    load_config(path)
    return load_causal_model(path, dtype)


def load_causal_model(path: str, dtype: str) -> PreTrainedModel:
    """Loads any causal LM, for uses that need no slicing; otherwise as `load_model`.

    Raises:
        ModelNotFoundError
    """
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotFoundError(
            f"{path} has a config but no readable safetensors weights: {error}"
        ) from error
    model, found = loaded
    if absent := sorted(found["missing_keys"]):
        raise ModelNotFoundError(
            f"the weights at {path} lack {len(absent)} tensors of the model, {absent[0]} first"
        )
    restore_rope_tables(model)
    return model


def load_config(path: str) -> PreTrainedConfig:
    """The config of a supported model.

    Raises:
        ModelNotFoundError, UnsupportedModelError
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(_not_found("model", path, error)) from error
    check_supported(config)
    return config


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Loads a fast tokenizer from disk only.

    Raises:
        ModelNotFoundError: nothing there, or no fast tokenizer (offsets need one).
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(_not_found("tokenizer", path, error)) from error
    if not tokenizer.is_fast:
        raise ModelNotFoundError(f"the tokenizer at {path} has no fast form (tokenizer.json)")
    return tokenizer


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer that can give ids which the model has no embedding for.

    Raises:
        UnsupportedModelError
    """
    rows = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if len(tokenizer) > rows:
        raise UnsupportedModelError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {rows} embeddings; "
            "they do not belong together"
        )


def restore_rope_tables(model: nn.Module) -> None:
    """Puts fp32 RoPE frequencies back where casting the model to bf16 has rounded them."""
    for module in model.modules():
        table = getattr(module, "inv_freq", None)
        if isinstance(table, torch.Tensor) and table.dtype != torch.float32:
            exact = Rope.from_config(cast(PreTrainedConfig, module.config))
            module.inv_freq = exact.inverse_frequencies.to(table.device)


def decoder(model: PreTrainedModel) -> Any:
    """The model without its head (and inside any adapter)."""
    causal_lm: Any = model
    if hasattr(model, "get_base_model"):
        causal_lm = causal_lm.get_base_model()
    return causal_lm.model


def _not_found(kind: str, path: str, cause: Exception) -> str:
    if Path(path).is_dir():
        return f"no readable {kind} in the folder {path!r}: {cause}"
    parent = Path(path).parent
    siblings = [str(parent / child.name) for child in parent.iterdir()] if parent.is_dir() else []
    close = get_close_matches(path, siblings, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return (
        f"no {kind} at {path!r}: it is neither a folder with one nor a name in the local Hugging "
        f"Face cache (nothing is downloaded){hint}"
    )
