"""Shards of a store kept open for many readers, and reading from them without a copy."""

import logging
import os
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from cache_ops.store import Store
from cache_ops.store.errors import ShardDamagedError
from cache_ops.store.shards import open_shard
from cache_ops.store.stored import Stored

logger = logging.getLogger(__name__)

_MOST_DESTINATIONS = os.sysconf("SC_IOV_MAX")
_MOST_OPEN_SHARDS = 64


def read_into(
    descriptor: int, destinations: Sequence[memoryview], offset: int, flags: int = 0
) -> int:
    """Fills flat byte buffers, one after another, from a file's bytes at `offset` on.

    Args:
        flags: of `os.preadv`.

    Returns:
        Bytes read: fewer than there is room for only where the file ends before.

    Raises:
        BlockingIOError: under `os.RWF_NOWAIT`, bytes are not in the page cache.
    """
    # `os.preadv` repeats a call that a signal interrupts; a short read is continued here.
    rest = deque(destinations)
    read = 0
    while rest:
        count = os.preadv(descriptor, [*rest][:_MOST_DESTINATIONS], offset + read, flags)
        if count == 0:
            break
        read += count
        while rest and count >= len(rest[0]):
            count -= len(rest.popleft())
        if count:
            rest[0] = rest[0][count:]
    return read


@dataclass
class _OpenShard:
    descriptor: int
    users: int = 0


class OpenShards:
    """Descriptors of a store's shards, the most recently used ones kept; none is closed in use."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = Lock()
        self._open: OrderedDict[str, _OpenShard] = OrderedDict()
        self._named: set[str] = set()

    @contextmanager
    def use(self, stored: Stored) -> Iterator[int]:
        """A descriptor of the shard that holds a chunk.

        Raises:
            ShardDamagedError: from `open_shard`.
        """
        with self._lock:
            shard = self._open.get(stored.shard)
            if shard is None:
                descriptor = open_shard(self._store.shards_folder, stored.shard, stored.shard_bytes)
                self._close_idle()
                shard = self._open[stored.shard] = _OpenShard(descriptor)
            self._open.move_to_end(stored.shard)
            shard.users += 1
        try:
            yield shard.descriptor
        finally:
            with self._lock:
                shard.users -= 1

    def name_once(self, damage: ShardDamagedError) -> None:
        """Warns of a shard whose records cannot be had, the first time."""
        with self._lock:
            known = damage.name in self._named
            self._named.add(damage.name)
        if not known:
            logger.warning("%s: %s", self._store.folder, damage)

    def close(self) -> None:
        """Closes all descriptors; none may be in use."""
        with self._lock:
            assert not any(shard.users for shard in self._open.values()), "a shard is in use"
            for shard in self._open.values():
                os.close(shard.descriptor)
            self._open.clear()

    def _close_idle(self) -> None:
        """Makes room for one more, and gives the disk back what gc has deleted."""
        for name, shard in list(self._open.items()):
            full = len(self._open) >= _MOST_OPEN_SHARDS
            if not shard.users and (full or os.fstat(shard.descriptor).st_nlink == 0):
                os.close(shard.descriptor)
                del self._open[name]
