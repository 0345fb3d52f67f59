"""What a store keeps of a chunk: the records of some token ranges, one after another.

R is the bytes of one record, as in `records`.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""Token ranges `[start, end)`: ascending, disjoint, not touching."""


def chunk_key(token_ids: Sequence[int]) -> bytes:
    """The content address of a chunk: SHA-256 of its tokens as little-endian int32."""
    return packed_key(pack_tokens(token_ids))


def packed_key(packed: bytes) -> bytes:
    """The `chunk_key` of tokens that `pack_tokens` wrote."""
    return hashlib.sha256(packed).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Tokens as little-endian int32."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Tokens that `pack_tokens` wrote."""
    tokens: list[int] = np.frombuffer(packed, dtype="<i4").tolist()
    return tokens


def record_checksums(records: memoryview, record_bytes: int) -> bytes:
    """CRC-32 of each record of a flat buffer, as little-endian uint32."""
    sums = [crc32(records[at : at + record_bytes]) for at in range(0, len(records), record_bytes)]
    return np.array(sums, dtype="<u4").tobytes()


@dataclass(frozen=True)
class Stored:
    """Where a chunk's kept tokens lie: their records follow one another in one shard."""

    key: bytes
    shard: str
    """The shard's file name."""
    shard_bytes: int
    """The size that the shard's file must have."""
    offset: int
    """Byte offset in the file of the first record."""
    record_bytes: int
    ranges: Ranges
    checksums: bytes | None = None
    """CRC-32 of each record, where asked for."""

    def place(self, start: int, end: int) -> int | None:
        """Byte offset in the file of token `start`'s record.

        None unless all tokens of `[start, end)` are kept; their records then follow one another.
        """
        row = row_of(self.ranges, start, end)
        return None if row is None else self.offset + row * self.record_bytes

    def intact(self, start: int, end: int, records: memoryview) -> bool:
        """Whether the flat buffer holds the bytes that were stored for tokens `[start, end)`."""
        row = row_of(self.ranges, start, end)
        assert row is not None, "not kept"
        assert self.checksums is not None, "look up with checksums=True"
        expected = self.checksums[4 * row : 4 * (row + end - start)]
        return record_checksums(records, self.record_bytes) == expected


@dataclass(frozen=True)
class NewChunk:
    """A chunk to be stored: all of its tokens, and the records of the kept ones only.

    Ranges ascend and do not overlap; touching ones are joined.
    """

    token_ids: Sequence[int]
    ranges: Sequence[tuple[int, int]]
    records_TR: Tensor


@dataclass(frozen=True)
class Row:
    """A chunk in a shard; `stored` is None where the row itself is damaged."""

    id: int
    key: bytes
    kept: int
    stored: Stored | None


@dataclass(frozen=True)
class Entry:
    """A chunk to be entered."""

    key: bytes
    token_ids: Sequence[int]
    ranges: Ranges
    checksums: bytes


def count_tokens(ranges: Iterable[tuple[int, int]]) -> int:
    """Tokens in disjoint ranges."""
    return sum(end - start for start, end in ranges)


def row_of(ranges: Ranges, start: int, end: int) -> int | None:
    """Which record of the kept ones is token `start`'s; None unless `[start, end)` is kept."""
    before = 0
    for first, last in ranges:
        if first <= start < end <= last:
            return before + start - first
        before += last - first
    return None


def union_ranges(*several: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges that cover the same tokens: ascending, disjoint, not touching."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(piece for ranges in several for piece in ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return tuple(joined)


def are_ranges(ranges: Ranges) -> bool:
    """Whether there is at least one range, none is empty, and they ascend without overlap."""
    places = [place for span in ranges for place in span]
    return bool(ranges) and places == sorted(places) and all(start < end for start, end in ranges)


def missing_ranges(stored: Stored | None, wanted: Iterable[tuple[int, int]]) -> Ranges:
    """The parts of `wanted` that are not kept; all of it where nothing is."""
    return uncovered(stored.ranges if stored else (), wanted)


def uncovered(kept: Ranges, wanted: Iterable[tuple[int, int]]) -> Ranges:
    """The parts of `wanted` outside `kept`."""
    outside: list[tuple[int, int]] = []
    for start, end in union_ranges(wanted):
        for first, last in kept:
            if last <= start or first >= end:
                continue
            if start < first:
                outside.append((start, first))
            start = last
        if start < end:
            outside.append((start, end))
    return tuple(outside)


def pack_ranges(ranges: Ranges) -> bytes:
    """Ranges as the index keeps them."""
    return np.array(ranges, dtype="<u4").tobytes()


def unpack_ranges(packed: bytes) -> Ranges:
    """Ranges that `pack_ranges` wrote."""
    return tuple((start, end) for start, end in struct.iter_unpack("<II", packed))
