"""One call of `Store.add`: chunks into shards, within the budget."""

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from cache_ops.store.errors import DiskFullError, ShardDamagedError, StoreFullError
from cache_ops.store.shards import HEADER_BYTES, Shard, open_shard, read_records
from cache_ops.store.space import ShardFiller, Space
from cache_ops.store.stored import (
    Entry,
    NewChunk,
    Ranges,
    Stored,
    chunk_key,
    count_tokens,
    missing_ranges,
    record_checksums,
    row_of,
    uncovered,
    union_ranges,
)
from cache_ops.store.upkeep import evict


class Adding:
    """Takes chunks one by one; leaving the context commits them, unless the disk gave out.

    Attributes:
        added: chunks written so far.
    """

    def __init__(self, space: Space, used: int) -> None:
        """`used`: the time of this call; chunks of this time are not evicted."""
        self.added = 0
        self._space = space
        self._used = used
        self._filler: ShardFiller[Entry] = ShardFiller(space, self._enter)
        self._uncommitted: dict[bytes, Ranges] = {}
        self._there_already: set[bytes] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if not isinstance(error, (DiskFullError, OSError)):
                self._commit()
        finally:
            self._filler.close()

    def append(self, chunk: NewChunk) -> None:
        """Writes a chunk, unless all of its ranges are kept already.

        Of a chunk with other ranges the records are carried over, so none is lost.

        Raises:
            ValueError: ranges that are no ranges of the chunk, or records that are not theirs.
            StoreFullError, DiskFullError
        """
        ranges, records = _checked(chunk, self._space.layout.token_bytes)
        key = chunk_key(chunk.token_ids)
        if key in self._uncommitted:
            if not uncovered(self._uncommitted[key], ranges):
                return
            self._commit()
        stored = self._space.index.lookup([key], checksums=True).get(key)
        if stored and not missing_ranges(stored, ranges):
            self._there_already.add(key)
            return
        if stored:
            ranges, records = self._united(stored, ranges, records)
        self._make_room(len(records))
        checksums = record_checksums(records, self._space.layout.token_bytes)
        self._filler.append(Entry(key, chunk.token_ids, ranges, checksums), records)
        self._uncommitted[key] = ranges
        self.added += 1

    def _enter(self, shard: Shard, placed: Sequence[tuple[Entry, int]]) -> None:
        self._space.index.put(shard, placed, self._used)
        self._uncommitted.clear()

    def _commit(self) -> None:
        self._filler.commit()
        if self._there_already:
            with self._space.index.database.transaction():
                self._space.index.mark_used((self._used, key) for key in self._there_already)
            self._there_already.clear()

    def _make_room(self, size: int) -> None:
        """Sees to it that `size` bytes of records fit in the budget."""
        space, index = self._space, self._space.index
        if space.max_bytes is None:
            return
        if index.shard_bytes() + self._filler.bytes_with(size) <= space.max_bytes:
            return
        self._commit()
        needed = HEADER_BYTES + size
        held = index.shard_bytes()
        if held + needed <= space.max_bytes:
            return
        store = space.folder.parent
        if space.when_full == "refuse":
            dead = sum(shard.dead_bytes for shard in index.shards())
            collect = f", run `coinrag cache gc` ({dead:,} bytes are dead)" if dead else ""
            raise StoreFullError(
                f"the store at {store} is full: its shards have {held:,} bytes, the next chunk "
                f"needs {needed:,} and the budget is {space.max_bytes:,}; raise store.max_gib, set "
                f"store.when_full=evict, remove chunks{collect}. What was added before stays"
            )
        if not evict(space, space.max_bytes, needed, self._used):
            own = index.live_bytes(self._used)
            raise StoreFullError(
                f"the budget of the store at {store} is too small for what is added at once: "
                f"{own:,} bytes of records so far, {needed:,} for the next chunk, and the budget "
                f"is {space.max_bytes:,}; raise store.max_gib, or add fewer chunks in one call. "
                "What was added before stays"
            )

    def _united(
        self, stored: Stored, ranges: Ranges, records: memoryview
    ) -> tuple[Ranges, memoryview]:
        """New records with those that are stored beside them, as far as those can be read."""
        kept = self._stored_records(stored)
        if kept is None:
            return ranges, records
        size = self._space.layout.token_bytes
        both = union_ranges(stored.ranges, ranges)
        united = memoryview(bytearray(count_tokens(both) * size))
        for old_ranges, old in ((stored.ranges, kept), (ranges, records)):
            at = 0
            for start, end in old_ranges:
                row = row_of(both, start, end)
                assert row is not None
                length = (end - start) * size
                united[row * size : row * size + length] = old[at : at + length]
                at += length
        return both, united

    def _stored_records(self, stored: Stored) -> memoryview | None:
        try:
            descriptor = open_shard(self._space.folder, stored.shard, stored.shard_bytes)
        except ShardDamagedError:
            return None
        try:
            return read_records(descriptor, stored)
        finally:
            os.close(descriptor)


def _checked(chunk: NewChunk, record_bytes: int) -> tuple[Ranges, memoryview]:
    """The ranges, joined where they touch, and the records as a flat buffer."""
    places = [place for piece in chunk.ranges for place in piece]
    ranges = union_ranges(chunk.ranges)
    if (
        not ranges
        or places != sorted(places)
        or any(start >= end for start, end in chunk.ranges)
        or places[0] < 0
        or places[-1] > len(chunk.token_ids)
    ):
        raise ValueError(
            f"{list(chunk.ranges)} are not ascending, disjoint ranges of a chunk of "
            f"{len(chunk.token_ids)} tokens"
        )
    records_TR, shape = chunk.records_TR, (count_tokens(ranges), record_bytes)
    if records_TR.dtype != torch.uint8 or tuple(records_TR.shape) != shape:
        raise ValueError(
            f"records are {records_TR.dtype} {list(records_TR.shape)}; the ranges and the store's "
            f"layout need torch.uint8 {list(shape)}"
        )
    return ranges, records_TR.cpu().contiguous().flatten().numpy().data
