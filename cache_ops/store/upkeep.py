"""Compaction, eviction, verification and figures; the caller holds the writer's lock.

Compaction copies the live records of shards to new ones and deletes the old files after that. For
the moment, one new shard at a time is on disk twice.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cache_ops.store.errors import ShardDamagedError
from cache_ops.store.shards import HEADER_BYTES, Shard, open_shard, read_records, remove_shards
from cache_ops.store.space import ShardFiller, Space
from cache_ops.store.stored import Row, Stored

# Part of the budget that an eviction frees beyond its need, so that not every chunk needs another.
_SLACK = 16

TOKENS_DAMAGED = "its tokens in the index are damaged"
"""Why a chunk is lost that cannot be computed again from the store alone."""


@dataclass(frozen=True)
class Damaged:
    """A chunk whose records cannot be had any more."""

    key: bytes
    tokens: int
    """How many of its tokens were kept."""
    shard: str
    why: str


@dataclass(frozen=True)
class Verified:
    """What `verify` read and found."""

    chunks: int
    bytes: int
    damaged: tuple[Damaged, ...]


@dataclass(frozen=True)
class Collected:
    """What `gc` did."""

    orphans: int
    """Files deleted that the index did not name."""
    compacted: int
    """Shards rewritten or deleted."""
    freed_bytes: int
    damaged: tuple[Damaged, ...]
    """Chunks found damaged on the way; they are lost."""


@dataclass(frozen=True)
class StoreStat:
    """How much a store holds."""

    chunks: int
    tokens: int
    """Kept ones."""
    lost_chunks: int
    shards: int
    shard_bytes: int
    """Of the shard files: headers, live and dead records."""
    live_bytes: int
    dead_bytes: int
    index_bytes: int


def measure(space: Space) -> StoreStat:
    """Counts and sizes; takes no lock."""
    shards = space.index.shards()
    live = sum(shard.live_bytes for shard in shards)
    return StoreStat(
        chunks=space.index.count(),
        tokens=live // space.layout.token_bytes,
        lost_chunks=len(space.index.lost()),
        shards=len(shards),
        shard_bytes=sum(shard.bytes for shard in shards),
        live_bytes=live,
        dead_bytes=sum(shard.dead_bytes for shard in shards),
        index_bytes=space.index.database.path.stat().st_size,
    )


def verify(space: Space, repair: bool) -> Verified:
    """Reads every record and compares checksums; checks the tokens against the keys.

    Args:
        space: the store's.
        repair: take damaged chunks out of their shards, so that they count as missing.

    Raises:
        IndexDamagedError
    """
    space.index.check()
    why = "its entry in the index is damaged"
    damaged = [Damaged(key, kept, "?", why) for key, kept in space.index.broken()]
    chunks, size = len(damaged), 0
    for shard in space.index.shards():
        for row, records in _read(space, shard):
            chunks += 1
            if isinstance(records, str):
                damaged.append(Damaged(row.key, row.kept, shard.name, records))
                continue
            size += len(records)
            if not space.index.token_ids([row.key]):
                damaged.append(Damaged(row.key, row.kept, shard.name, TOKENS_DAMAGED))
    if repair and damaged:
        _mark_lost(space, damaged)
    return Verified(chunks, size, tuple(damaged))


def collect(space: Space) -> Collected:
    """Deletes orphans, and compacts shards with dead records and small ones.

    Raises:
        DiskFullError: the shards that were not compacted stay as they were.
        IndexDamagedError: nothing was deleted.
    """
    space.index.check()
    orphans, orphan_bytes = space.delete_orphans()
    before = space.index.shard_bytes()
    shards = space.index.shards()
    half_full = (space.shard_bytes - HEADER_BYTES) // 2
    small = {shard.id for shard in shards if shard.live_bytes < half_full}
    if len(small) < 2:
        small.clear()
    chosen = [shard for shard in shards if shard.dead_bytes or shard.id in small]
    damaged = compact(space, chosen)
    space.index.shrink()
    freed = before - space.index.shard_bytes() + orphan_bytes
    return Collected(orphans, len(chosen), freed, tuple(damaged))


def compact(space: Space, shards: Iterable[Shard]) -> list[Damaged]:
    """Copies what is live in the shards to new ones and deletes them.

    Returns:
        Chunks that were found damaged; they are lost.

    Raises:
        DiskFullError: what was copied into full shards stays so, the rest is where it was.
    """
    damaged: list[Damaged] = []
    filler: ShardFiller[Stored] = ShardFiller(space, space.index.move)
    try:
        for shard in shards:
            for row, records in _read(space, shard):
                if isinstance(records, str):
                    damaged.append(Damaged(row.key, row.kept, shard.name, records))
                elif row.stored:
                    filler.append(row.stored, records)
        filler.commit()
    finally:
        filler.close()
    _mark_lost(space, damaged)
    return damaged


def evict(space: Space, max_bytes: int, needed_bytes: int, protected_since: int) -> bool:
    """Makes room for `needed_bytes` at the cost of the least recently used chunks.

    Args:
        space: the store's.
        max_bytes: what the shard files and the needed bytes may take together.
        needed_bytes: of a shard to be written.
        protected_since: chunks used at this time or later stay.

    Returns:
        Whether there is room now. If not for the protected chunks alone, nothing was evicted.
    """
    index = space.index
    protected = index.live_bytes(protected_since)
    if protected + (HEADER_BYTES if protected else 0) + needed_bytes > max_bytes:
        return False
    most = max_bytes - needed_bytes
    goal = most - max_bytes // _SLACK
    while (total := index.shard_bytes()) > most:
        shards = sorted(index.shards(), key=lambda shard: shard.dead_bytes / shard.bytes)
        dead = sum(shard.dead_bytes for shard in shards)
        if total - dead > most:
            evicted: list[bytes] = []
            for key, size in index.least_recently_used(protected_since):
                if evicted and total - dead <= goal:
                    break
                evicted.append(key)
                dead += size
            if not evicted:
                return False
            with index.database.transaction():
                index.remove(evicted)
                emptied = index.drop_empty_shards()
            remove_shards(space.folder, emptied)
            continue
        chosen: list[Shard] = []
        while total > goal and shards and shards[-1].dead_bytes:
            chosen.append(shards.pop())
            total -= chosen[-1].dead_bytes
        compact(space, chosen)
    return True


def _read(space: Space, shard: Shard) -> Iterator[tuple[Row, memoryview | str]]:
    """Each chunk of a shard, by offset, with its records, or why they cannot be had."""
    rows = space.index.rows(shard)
    try:
        descriptor = open_shard(space.folder, shard.name, shard.bytes)
    except ShardDamagedError as damage:
        yield from ((row, f"its shard {damage.why}") for row in rows)
        return
    try:
        for row in rows:
            if row.stored is None:
                yield row, "its entry in the index is damaged"
                continue
            records = read_records(descriptor, row.stored)
            yield row, "its records are damaged" if records is None else records
    finally:
        os.close(descriptor)


def _mark_lost(space: Space, damaged: Iterable[Damaged]) -> None:
    with space.index.database.transaction():
        space.index.mark_lost([chunk.key for chunk in damaged])
        emptied = space.index.drop_empty_shards()
    remove_shards(space.folder, emptied)
