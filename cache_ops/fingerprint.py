"""What cached keys and values depend on: a store is used only where all of it is the same.

The weights are hashed as they lie in memory, so the files that they came from, and how those are
sharded, do not matter. Under an adapter of peft there are two readings: the weights that a forward
pass uses, or the base model's alone, which has the digest of the model without any adapter.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from cache_ops.contextualizer import CONTEXTUALIZER
from cache_ops.hf import UnsupportedModelError, decoder
from cache_ops.records import StoreDtype
from cache_ops.rope import Rope

FORMAT_VERSION = 1
"""Of the store's files. A store of another version is never read."""

_REMEDIES = {
    "weights": "give the model that filled the store, or another folder. A store of base weights "
    "serves an adapter that was trained with context.gradient=frozen",
    "rope": "set the model's rope_parameters back, or give another folder",
    "tokenizer": "give the tokenizer that the store was built with, or another folder",
    "chunking": "set the chunk length back, or give another folder",
    "prompt_visibility": "let chunks see what they saw in the store, or give another folder",
    "dtype": "set model.dtype and store.dtype back, or give another folder",
    "format": "use the version of this package that wrote it, or give another folder and build "
    "the store anew",
}
# What a forward pass depends on beside its tensors and RoPE.
_ARCHITECTURE = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
)
_HASH_PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a store's contents, part by part."""

    weights: str
    """`weights_digest` of the model that encodes the chunks."""
    rope: str
    tokenizer: str
    chunking: str
    prompt_visibility: str
    dtype: str
    """The dtypes of the model and of the stored records."""
    format: int = FORMAT_VERSION

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        stored_dtype: StoreDtype,
        *,
        tokenizer: str,
        chunking: str,
        prompt_visibility: str = "none",
        base: bool = False,
    ) -> Self:
        """The fingerprint of what `encode_chunk(model, ...)` gives.

        Args:
            model: a supported model, inside an adapter of peft or not.
            stored_dtype: of the store's records.
            tokenizer: a digest of the tokenizer.
            chunking: how passages are cut, in words, such as "512 tokens".
            prompt_visibility: what of the prompt a chunk sees.
            base: read the weights under the adapter, for a model whose adapter will be disabled.

        Raises:
            UnsupportedModelError: as `weights_digest`.
        """
        return cls(
            weights=weights_digest(model, base=base),
            rope=describe_rope(model.config),
            tokenizer=tokenizer,
            chunking=chunking,
            prompt_visibility=prompt_visibility,
            dtype=f"{str(model.dtype).removeprefix('torch.')} model, {stored_dtype} records",
        )

    @classmethod
    def from_json(cls, parts: Mapping[str, Any]) -> Self:
        """The fingerprint that `as_json` wrote."""
        return cls(**parts)

    def as_json(self) -> dict[str, Any]:
        """A plain dict of the parts."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """SHA-256 of all parts, in hex."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: "Fingerprint") -> list[str]:
        """For each part in which the run `other` differs from this store: both, and the way out."""
        return [
            difference(part.name, mine, others)
            for part in fields(self)
            if (mine := getattr(self, part.name)) != (others := getattr(other, part.name))
        ]


def difference(part: str, stored: object, wanted: object) -> str:
    """One part that differs, in words."""
    name = part.replace("_", " ")
    return f"{name}: the store has {stored}, this run {wanted}; {_REMEDIES[part]}"


def describe_rope(config: PreTrainedConfig) -> str:
    """The RoPE parameters of a supported model, in one order."""
    parameters = {
        name: value for name, value in config.rope_parameters.items() if value is not None
    }
    return json.dumps(parameters, sort_keys=True)


@torch.no_grad()
def weights_digest(model: PreTrainedModel, base: bool = False) -> str:
    """SHA-256 over the decoder's tensors, by name, dtype, shape and bytes, and its architecture.

    A merged model has a digest of its own, as has every adapter on the same base.

    Args:
        model: a causal LM, inside an adapter of peft or not. The head does not count.
        base: leave the adapter out. So it is anyway while the adapter is disabled.

    Raises:
        UnsupportedModelError: weights that are not here (meta device, sharded over ranks), or an
            adapter that is merged into the weights for now (`merge_adapter`), or RoPE tables that
            a cast has rounded.
    """
    config = model.config
    _refuse_rounded_tables(model)
    tensors = dict(sorted(_named_tensors(decoder(model), base)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = list(pool.map(_tensor_digest, tensors, tensors.values()))
    architecture = {name: getattr(config, name, None) for name in _ARCHITECTURE}
    total = hashlib.sha256(json.dumps(architecture, sort_keys=True).encode())
    for name, digest in zip(tensors, digests, strict=True):
        total.update(f"\n{name} ".encode() + digest)
    return total.hexdigest()


def _refuse_rounded_tables(model: PreTrainedModel) -> None:
    """RoPE's frequencies are no weights, so the digest would not see them differ."""
    exact = Rope.from_config(model.config).inverse_frequencies
    for module in decoder(model).modules():
        table = getattr(module, "inv_freq", None)
        if not isinstance(table, Tensor) or table.is_meta:
            continue
        if table.shape != exact.shape or not torch.allclose(table.float().cpu(), exact, 1e-5, 0.0):
            raise UnsupportedModelError(
                "the model's RoPE tables are not those of its config (a cast rounds them); call "
                "hf.restore_rope_tables"
            )


def _named_tensors(module: nn.Module, base: bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a decoder under the names that they have without an adapter.

    Those of active adapters follow under `<layer>.<kind>.<place among the active ones>...`.
    """
    # A layer under an adapter holds its own self as one of these two.
    inner = ("base_layer", "original_module")
    wrapped = {
        path: layer
        for path, layer in module.named_modules()
        if any(name in inner for name, _ in layer.named_children())
    }
    for path, layer in wrapped.items():
        if getattr(layer, "merged", False):
            raise UnsupportedModelError(
                "an adapter is merged into the weights for now; call unmerge_adapter(), or merge "
                "it for good with merge_and_unload()"
            )
        for at, adapter in enumerate(_active(layer, base)):
            scaling = getattr(layer, "scaling", {}).get(adapter, 1.0)
            yield f"{path}.scaling.{at}", torch.tensor(float(scaling), dtype=torch.float64)
    for name, tensor in module.state_dict().items():
        # No chunk holds a soft token, and beside them the vocabulary is what it was. What corrects
        # a prefix encodes no chunk.
        if name.endswith(".soft_ND") or name.startswith(f"{CONTEXTUALIZER}."):
            continue
        name = name.replace("embed_tokens.vocabulary.", "embed_tokens.")
        owner = max((path for path in wrapped if name.startswith(f"{path}.")), key=len, default="")
        if not owner:
            yield name, tensor
            continue
        kind, *rest = name.removeprefix(f"{owner}.").split(".")
        if kind in inner:
            yield ".".join((owner, *rest)), tensor
            continue
        active = _active(wrapped[owner], base)
        if rest and rest[0] in active:
            place = str(active.index(rest[0]))
            yield ".".join((owner, kind, place, *rest[1:])), tensor


def _active(layer: Any, base: bool) -> list[str]:
    """The adapters that a forward pass through a wrapped layer uses."""
    return [] if base or layer.disable_adapters else list(layer.active_adapters)


def _tensor_digest(name: str, tensor: Tensor) -> bytes:
    if tensor.is_meta or not tensor.numel():
        raise UnsupportedModelError(
            f"the weights of {name} are not in this process (on the meta device, or sharded over "
            "ranks); load or gather them first"
        )
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for piece in flat.split(_HASH_PIECE_BYTES):
        digest.update(piece.cpu().numpy())
    return digest.digest()
