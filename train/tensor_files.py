"""Tensors by name in safetensors files of bounded size, and a marker that says they are whole.

Files are written one after the other, so that writing takes the memory of one. The marker comes
last; it has the size of every file and the checksum of every tensor, and of what else is there.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

MARKER = "complete.json"
FILE_BYTES = 2 << 30


class DamagedError(Exception):
    """A folder is not what was written into it; says what is wrong."""


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], file_bytes: int = FILE_BYTES
) -> None:
    """Writes tensors, and the marker of all that is then in the folder.

    Args:
        folder: where to; small files may be in it already.
        tensors: names and values; a value is not asked for before the one before it is at hand.
        file_bytes: of the largest file, unless a single tensor is larger.

    Raises:
        OSError, SafetensorError: they cannot be written.
    """
    others = {path.name: zlib.crc32(path.read_bytes()) for path in folder.iterdir()}
    files: dict[str, dict[str, int]] = {}
    part: dict[str, Tensor] = {}

    def write() -> None:
        name = f"tensors-{len(files) + 1:05d}.safetensors"
        save_file(part, folder / name)
        files[name] = _checksums(part)
        part.clear()

    for name, tensor in tensors:
        if part and sum(one.nbytes for one in part.values()) + tensor.nbytes > file_bytes:
            write()
        part[name] = tensor.detach().cpu().contiguous()
    write()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    marker = {"bytes": sizes, "tensors_crc32": files, "others_crc32": others}
    (folder / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a folder."""

    folder: Path
    files: dict[str, str]
    """The file of every tensor."""

    @classmethod
    def open(cls, folder: Path) -> "TensorFiles":
        """The tensors of a folder that has its marker, and whose files have their sizes.

        Raises:
            DamagedError
        """
        marker = _read_marker(folder)
        for name, size in marker["bytes"].items():
            path = folder / name
            if not path.is_file():
                raise DamagedError(f"{name} is gone")
            if path.stat().st_size != size:
                raise DamagedError(f"{name} has {path.stat().st_size} bytes, not {size}")
        places = marker["tensors_crc32"].items()
        return cls(folder, {name: file for file, names in places for name in names})

    def verify(self) -> None:
        """Reads everything and compares checksums, in the memory of one file.

        Raises:
            DamagedError
        """
        marker = _read_marker(self.folder)
        for name, checksum in marker["others_crc32"].items():
            if zlib.crc32((self.folder / name).read_bytes()) != checksum:
                raise DamagedError(f"{name} is not what was written")
        for file, written in marker["tensors_crc32"].items():
            try:
                with safe_open(self.folder / file, framework="pt") as opened:
                    found = _checksums({name: opened.get_tensor(name) for name in written})
            except (OSError, SafetensorError) as error:
                raise DamagedError(f"{file} cannot be read: {error}") from error
            if wrong := [name for name in written if found[name] != written[name]]:
                raise DamagedError(f"{file}: {wrong[0]} is not what was written")

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        with safe_open(self.folder / self.files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor


def _read_marker(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        marker = json.loads((folder / MARKER).read_text("utf-8"))
        return {key: marker[key] for key in ("bytes", "tensors_crc32", "others_crc32")}
    except (OSError, ValueError, KeyError) as error:
        raise DamagedError(f"{MARKER}, which is written last, cannot be read: {error}") from error


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The CRC-32 of dtype, shape and bytes of each tensor."""

    def checksum(tensor: Tensor) -> int:
        described = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
        return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, described)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(tensors, pool.map(checksum, tensors.values()), strict=True))
