"""The space that a store's shards take, and how new ones are filled.

A shard is complete and durable under its name before the index names it. So whatever kills the
process leaves the whole shard in the index, or a file that nothing refers to.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypedDict, TypeVar

from cache_ops.records import RecordLayout
from cache_ops.store.index import Index
from cache_ops.store.shards import (
    HEADER_BYTES,
    TEMPORARY,
    Shard,
    ShardWriter,
    list_shards,
    remove_shards,
)

logger = logging.getLogger(__name__)

WhenFull = Literal["refuse", "evict"]
Item = TypeVar("Item")


class StoreOptions(TypedDict, total=False):
    """How an open store grows, and how long it waits."""

    max_bytes: int | None
    """The budget: bytes of all shard files. None: no limit."""
    when_full: WhenFull
    """`refuse` a chunk that has no room, or `evict` the least recently used ones."""
    shard_bytes: int
    """Shards grow up to this size; with a budget to an eighth of it at most."""
    wait_seconds: float
    """How long a write waits for another writer; 0 unless given."""


@dataclass(frozen=True)
class Space:
    """A store's shards on disk and in the index, and the bounds that they grow in."""

    folder: Path
    layout: RecordLayout
    index: Index
    shard_bytes: int
    """Shards do not grow beyond this, unless they hold one chunk only."""
    max_bytes: int | None
    """The budget: bytes of all shard files."""
    when_full: WhenFull

    def delete_orphans(self) -> tuple[int, int]:
        """Deletes files that the index does not name; returns how many, and their bytes."""
        named = {shard.name for shard in self.index.shards()}
        orphans = [name for name in list_shards(self.folder) if name not in named]
        sizes = {name: (self.folder / name).lstat().st_size for name in orphans}
        whole = [name for name in orphans if not name.endswith(TEMPORARY)]
        if whole:
            logger.warning(
                "%s: deleting %d shards (%d bytes) that the index does not name: an interrupted "
                "write left them, or they belonged to an index that is not here any more",
                self.folder,
                len(whole),
                sum(sizes[name] for name in whole),
            )
        remove_shards(self.folder, orphans)
        return len(orphans), sum(sizes.values())


class ShardFiller(Generic[Item]):
    """Spreads the records of items over new shards.

    A shard is entered in the index in one transaction, which also takes out the shards that it
    leaves without a chunk; `enter(shard, items with their offsets)` enters the items.
    """

    def __init__(
        self, space: Space, enter: Callable[[Shard, Sequence[tuple[Item, int]]], None]
    ) -> None:
        self._space = space
        self._enter = enter
        self._writer: ShardWriter | None = None
        self._placed: list[tuple[Item, int]] = []

    def bytes_with(self, size: int) -> int:
        """Bytes that the index does not know yet, once `size` bytes of records were appended."""
        opened = self._writer.bytes if self._writer else HEADER_BYTES
        return opened + size if self._takes(size) else opened + HEADER_BYTES + size

    def append(self, item: Item, records: memoryview) -> None:
        """Writes an item's records; commits the shard before where they do not fit in it.

        Raises:
            DiskFullError
        """
        if not self._takes(len(records)):
            self.commit()
        if self._writer is None:
            self._writer = ShardWriter(self._space.folder, self._space.layout)
        self._placed.append((item, self._writer.append(records)))

    def commit(self) -> None:
        """Makes what was appended durable and visible.

        Raises:
            DiskFullError: nothing of the shard is visible; its file is an orphan at most.
        """
        writer, placed = self._writer, self._placed
        self._writer, self._placed = None, []
        if writer is None:
            return
        index = self._space.index
        try:
            writer.finish()
            with index.database.transaction():
                self._enter(index.add_shard(writer.name, writer.bytes), placed)
                emptied = index.drop_empty_shards()
        finally:
            writer.close()
        remove_shards(self._space.folder, emptied)

    def close(self) -> None:
        """Deletes what was not committed."""
        if self._writer:
            self._writer.close()
        self._writer, self._placed = None, []

    def _takes(self, size: int) -> bool:
        return self._writer is None or self._writer.bytes + size <= self._space.shard_bytes
