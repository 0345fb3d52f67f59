"""What an encoder knows of a text, and its form on disk."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

_VERSION = 1
# Version, dense dimensions, lexical tokens, ColBERT vectors and their dimensions; -1: none.
_HEADER = struct.Struct("<5i")


@dataclass(frozen=True, eq=False)
class Encoded:
    """What an encoder knows of one text.

    `dense` is a float32 row `[dimensions]` of unit length; `sparse` BGE-M3's lexical weights, as
    ascending int32 token ids and float32 weights; `tokens` its ColBERT vectors, float16
    `[tokens, dimensions]`. The last two are None unless they were asked for.
    """

    dense: NDArray[np.float32]
    sparse: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    tokens: NDArray[np.float16] | None = None

    def to_bytes(self) -> bytes:
        """All parts as little-endian numbers behind a short header with the format's version."""
        lexical = -1 if self.sparse is None else len(self.sparse[0])
        rows, columns = (-1, -1) if self.tokens is None else self.tokens.shape
        parts = [self.dense.astype("<f4")]
        if self.sparse is not None:
            parts += [self.sparse[0].astype("<i4"), self.sparse[1].astype("<f4")]
        if self.tokens is not None:
            parts.append(self.tokens.astype("<f2"))
        header = _HEADER.pack(_VERSION, len(self.dense), lexical, rows, columns)
        return header + b"".join(part.tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of `to_bytes`; the arrays are read-only views of `data`.

        Raises:
            ValueError: the bytes are of another version, cut short or too long.
        """
        if len(data) < _HEADER.size:
            raise ValueError(f"{len(data)} bytes are no encoded text")
        version, dimensions, lexical, rows, columns = _HEADER.unpack_from(data)
        if version != _VERSION:
            raise ValueError(f"encoded text of version {version}; this is version {_VERSION}")
        counts = [dimensions, max(lexical, 0), max(lexical, 0), max(rows, 0) * max(columns, 0)]
        types = [np.dtype(name) for name in ("<f4", "<i4", "<f4", "<f2")]
        sizes = [count * kind.itemsize for count, kind in zip(counts, types, strict=True)]
        if min(counts) < 0 or len(data) != _HEADER.size + sum(sizes):
            raise ValueError(f"encoded text of {len(data)} bytes does not fit its header")
        arrays, offset = [], _HEADER.size
        for count, kind, size in zip(counts, types, sizes, strict=True):
            arrays.append(np.frombuffer(data, kind, count, offset))
            offset += size
        return cls(
            arrays[0],
            None if lexical < 0 else (arrays[1], arrays[2]),
            None if rows < 0 else arrays[3].reshape(rows, columns),
        )


Encoder = Callable[[Sequence[str]], list[Encoded]]
"""Texts to what the encoder knows of each, in order."""


def unit_rows(rows: NDArray[np.floating]) -> NDArray[np.float32]:
    """Rows scaled to unit length, in float32; zero rows stay zero."""
    exact = rows.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    return (exact / np.where(lengths > 0, lengths, 1)).astype(np.float32)
