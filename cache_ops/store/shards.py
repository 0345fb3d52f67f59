"""Shards: safetensors files of records, written once, whole, under names that are never reused.

A shard of a float dtype holds the tensor `kv` `[T, L, 2, H, D]`, one of `int8` or `float8` the
tensor `records` U8 `[T, R]`; in both the data are the bytes of records, one after another, and
start at `HEADER_BYTES`.
"""

import errno
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cache_ops.records import RecordLayout
from cache_ops.store.errors import DiskFullError, ShardDamagedError
from cache_ops.store.stored import Stored, count_tokens, record_checksums

# The count of tokens is known last, so a whole page is kept for the header.
HEADER_BYTES = 4096
TEMPORARY = ".tmp"
_LENGTH_BYTES = 8
_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Shard:
    """A shard that the index names."""

    id: int
    name: str
    bytes: int
    live_bytes: int

    @property
    def dead_bytes(self) -> int:
        """Bytes of records that no chunk refers to."""
        return self.bytes - HEADER_BYTES - self.live_bytes


def open_shard(folder: Path, name: str, expected_bytes: int) -> int:
    """Opens a shard for reading, if its size and its header are what the index says.

    Args:
        folder: the store's folder `shards`.
        name: the file's name, from the index: not trusted.
        expected_bytes: the size of the file.

    Returns:
        A file descriptor; the caller closes it. It stays readable after `gc` deleted the file.

    Raises:
        ShardDamagedError: it is missing, or anything but the shard that was written. Where another
            process may have run `gc`, look the chunk up again before believing it.
    """
    if not _NAME.fullmatch(name):
        raise ShardDamagedError(repr(name), "has a name that no shard has")
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        why = "is missing" if error.errno == errno.ENOENT else f"cannot be opened ({error})"
        raise ShardDamagedError(name, why) from error
    try:
        size = os.fstat(descriptor).st_size
        if size != expected_bytes:
            raise ShardDamagedError(name, f"has {size:,} bytes instead of {expected_bytes:,}")
        if _data_bytes(os.pread(descriptor, HEADER_BYTES, 0)) != size - HEADER_BYTES:
            raise ShardDamagedError(name, "has a damaged header")
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise ShardDamagedError(name, f"cannot be read ({error})") from error
        raise
    return descriptor


def read_records(descriptor: int, stored: Stored) -> memoryview | None:
    """All records of a chunk, as a flat buffer; None where they are not what was stored.

    The chunk must have been looked up with its checksums.
    """
    assert stored.checksums is not None
    count, offset = count_tokens(stored.ranges) * stored.record_bytes, stored.offset
    records = memoryview(bytearray(count))
    rest = records
    try:
        while rest and (got := os.preadv(descriptor, [rest], offset)):
            rest, offset = rest[got:], offset + got
    except OSError:
        return None
    sound = not rest and record_checksums(records, stored.record_bytes) == stored.checksums
    return records if sound else None


class ShardWriter:
    """A shard that grows on disk under a temporary name; `finish` gives it its own.

    Every method may raise `DiskFullError`; the shard is then to be closed unfinished.
    """

    def __init__(self, folder: Path, layout: RecordLayout) -> None:
        self.name = f"{secrets.token_hex(16)}.safetensors"
        self.bytes = HEADER_BYTES
        self._folder = folder
        self._layout = layout
        self._temporary = folder / f"{self.name}{TEMPORARY}"
        with disk_full_named(folder):
            # Unbuffered: a failed write raises here and not on close.
            self._file = self._temporary.open("xb", buffering=0)

    def close(self) -> None:
        """Ends the writing; a shard that was not finished is deleted."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def append(self, records: memoryview) -> int:
        """Writes the records of one chunk, a flat buffer; returns their byte offset."""
        offset = self.bytes
        with disk_full_named(self._folder):
            # Over whatever an interrupted write has left.
            self._file.seek(offset)
            rest = records
            while rest:
                rest = rest[self._file.write(rest) :]
        self.bytes += len(records)
        return offset

    def finish(self) -> None:
        """Makes the shard durable under its name."""
        with disk_full_named(self._folder):
            self._file.truncate(self.bytes)
            self._file.seek(0)
            self._file.write(self._header())
            os.fsync(self._file.fileno())
            self._temporary.rename(self._folder / self.name)
            sync_folder(self._folder)

    def _header(self) -> bytes:
        data_bytes = self.bytes - HEADER_BYTES
        layout = self._layout
        tokens = data_bytes // layout.token_bytes
        if layout.has_scales:
            name, dtype, shape = "records", "U8", [tokens, layout.token_bytes]
        else:
            name, dtype = "kv", _SAFETENSORS_DTYPES[layout.dtype]
            shape = [tokens, layout.layers, 2, layout.kv_heads, layout.head_dim]
        tensor = {"dtype": dtype, "shape": shape, "data_offsets": [0, data_bytes]}
        text = json.dumps({name: tensor}).encode().ljust(HEADER_BYTES - _LENGTH_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def remove_shards(folder: Path, names: Iterable[str]) -> None:
    """Deletes shards that the index does not name (any more).

    Other names are passed over, and folders.
    """
    for name in names:
        if _NAME.fullmatch(name.removesuffix(TEMPORARY)):
            with suppress(IsADirectoryError):
                (folder / name).unlink(missing_ok=True)


def list_shards(folder: Path) -> list[str]:
    """The names of all shards in a folder, temporary ones included, and of nothing else.

    A folder or a link is no shard, whatever its name.
    """
    with os.scandir(folder) as entries:
        return [
            entry.name
            for entry in entries
            if _NAME.fullmatch(entry.name.removesuffix(TEMPORARY))
            and entry.is_file(follow_symlinks=False)
        ]


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_full_named(folder: Path) -> Iterator[None]:
    """Turns "no space", "quota exceeded" and "file too large" into `DiskFullError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFullError(
            f"no room to write in {folder} ({os.strerror(error.errno)}): free some space, or set "
            "store.max_gib below what the disk has; nothing of the unfinished shard is kept"
        ) from error


def _data_bytes(header: bytes) -> int | None:
    """The bytes of the one tensor that a header describes; None where it is not a header."""
    length = int.from_bytes(header[:_LENGTH_BYTES], "little")
    if length != HEADER_BYTES - _LENGTH_BYTES:
        return None
    try:
        (tensor,) = json.loads(header[_LENGTH_BYTES:]).values()
        start, end = tensor["data_offsets"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return end if start == 0 and isinstance(end, int) else None
