"""A model's weights copied in the memory of one shard, possibly into another dtype."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from recipes.files import write_text
from train.beside import BESIDE_FILES

Dtype = Literal["float32", "bfloat16"]
SHARD_BYTES = 2 << 30


def copy_weights(
    source: Path, folder: Path, dtype: Dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Copies a model's weights, tensor by tensor, with an index where there are several files.

    Args:
        source: a folder with safetensors files; those of `BESIDE_FILES` are no weights.
        folder: where to.
        dtype: of what is floating; None: as it is.
        shard_bytes: of the largest file, unless a single tensor is larger.

    Raises:
        OSError, SafetensorError: they cannot be read, or not be written.
    """
    split = split_state_dict_into_shards_factory(
        tensor_bytes(source, dtype),
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for filename, names in split.filename_to_tensors.items():
        shard = {name: _cast(tensor, dtype) for name, tensor in _tensors(source, set(names))}
        save_file(shard, folder / filename, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def tensor_bytes(source: Path, dtype: Dtype | None) -> dict[str, int]:
    """What each tensor of a model takes in a dtype, by name, in the order of the files."""
    sizes = {}
    for path in _files(source):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_slice(name)
                # An empty piece has the stored dtype, and no weights are read for it.
                itemsize = _cast(tensor[:0], dtype).element_size()
                sizes[name] = itemsize * torch.Size(tensor.get_shape()).numel()
    return sizes


def _files(source: Path) -> list[Path]:
    return [path for path in sorted(source.glob("*.safetensors")) if path.name not in BESIDE_FILES]


def _tensors(source: Path, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    for path in _files(source):
        with safe_open(path, framework="pt") as file:
            for name in names & set(file.keys()):
                yield name, file.get_tensor(name)


def _cast(tensor: Tensor, dtype: Dtype | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(getattr(torch, dtype))
