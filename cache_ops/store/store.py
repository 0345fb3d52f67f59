"""The store: keys and values of chunks on disk, by content, for many readers and one writer.

A folder with `index.sqlite` and `shards/*.safetensors`. It has one fingerprint and one record
layout. A chunk's kept tokens lie side by side in one shard, so that one nugget is one contiguous
range; `reading` reads them. Adding and removing chunks rewrites nothing else.
"""

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self, Unpack

from cache_ops.closing import Closing
from cache_ops.fingerprint import Fingerprint
from cache_ops.records import RecordLayout
from cache_ops.store.adding import Adding
from cache_ops.store.database import INDEX, Database, create_database, index_damaged
from cache_ops.store.errors import (
    ForeignStoreError,
    NotAStoreError,
    ShardDamagedError,
    StoreError,
    StoreExistsError,
    StoreReadOnlyError,
    StoreWriteError,
)
from cache_ops.store.index import Index
from cache_ops.store.lock import writer_lock
from cache_ops.store.shards import disk_full_named, open_shard, sync_folder
from cache_ops.store.space import Space, StoreOptions, WhenFull
from cache_ops.store.stored import NewChunk, Ranges, Stored
from cache_ops.store.upkeep import Collected, StoreStat, Verified, collect, measure, verify

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 << 20
_SHARDS = "shards"
# Of a budget, at most this part is a shard: compaction has one on disk twice for a moment.
_SHARDS_A_BUDGET = 8


class Store(Closing):
    """A store that is open. Threads may share it; another process opens it anew.

    Every method may raise `IndexDamagedError`. Those that write raise `StoreReadOnlyError`,
    `DiskFullError`, `StoreWriteError`, and `StoreBusyError` where another process, or another
    `Store` of this one, writes for longer than `wait_seconds`.
    """

    def __init__(
        self,
        database: Database,
        max_bytes: int | None = None,
        when_full: WhenFull = "refuse",
        shard_bytes: int = SHARD_BYTES,
        wait_seconds: float = 0.0,
    ) -> None:
        """For `create` and `open`; the options are those of `StoreOptions`."""
        if max_bytes is not None:
            shard_bytes = min(shard_bytes, max_bytes // _SHARDS_A_BUDGET)
        self.folder = database.folder
        self.shards_folder = self.folder / _SHARDS
        try:
            self.fingerprint = Fingerprint.from_json(database.meta("fingerprint"))
            self.layout = RecordLayout.from_json(database.meta("layout"))
            assert self.layout.token_bytes > 0, self.layout
        except (TypeError, AssertionError) as error:
            raise index_damaged(self.folder, f"what it holds is not described: {error}") from error
        self._database = database
        self._index = Index(database, self.layout.token_bytes)
        self._space = Space(
            self.shards_folder, self.layout, self._index, shard_bytes, max_bytes, when_full
        )
        self._wait_seconds = wait_seconds
        self._writing_here = threading.Lock()
        self._swept = False
        self._touched: dict[bytes, None] = {}
        self._touching = threading.Lock()

    @classmethod
    def create(
        cls,
        folder: Path | str,
        fingerprint: Fingerprint,
        layout: RecordLayout,
        **options: Unpack[StoreOptions],
    ) -> Self:
        """Makes an empty store and opens it.

        Raises:
            StoreExistsError, StoreBusyError, DiskFullError
            StoreError: the folder cannot be made or written.
        """
        folder = Path(folder)
        meta = {"fingerprint": fingerprint.as_json(), "layout": layout.as_json()}
        try:
            with disk_full_named(folder):
                (folder / _SHARDS).mkdir(parents=True, exist_ok=True)
                with writer_lock(folder, options.get("wait_seconds", 0.0)):
                    if (folder / INDEX).is_file():
                        raise StoreExistsError(f"there is a store at {folder} already; open it")
                    create_database(folder, meta)
                    sync_folder(folder)
        except OSError as error:
            raise StoreError(f"no store can be made at {folder}: {error}") from error
        return cls.open(folder, fingerprint, **options)

    @classmethod
    def open(
        cls,
        folder: Path | str,
        fingerprint: Fingerprint | None = None,
        **options: Unpack[StoreOptions],
    ) -> Self:
        """Opens a store; where its folder takes no writes, for reading.

        A read-only folder is taken as it is: no one may write to it by another way meanwhile.

        Args:
            folder: the store's.
            fingerprint: what its contents must come from. None: whatever it holds, for upkeep.
            options: see `StoreOptions`.

        Raises:
            NotAStoreError: nothing there, or something else.
            ForeignStoreError: of another fingerprint or format version; says what differs.
            IndexDamagedError: the index is no database any more.
            StoreReadOnlyError: a read-only folder of a store that was not closed.
        """
        folder = Path(folder)
        database = Database(folder)
        try:
            if not (folder / _SHARDS).is_dir():
                raise NotAStoreError(
                    f"the store at {folder} has no folder {_SHARDS}; put it back, or delete the "
                    "store and build it anew"
                )
            store = cls(database, **options)
            if fingerprint and (differences := store.fingerprint.differences(fingerprint)):
                raise ForeignStoreError(folder, differences)
        except BaseException:
            database.close()
            raise
        return store

    @property
    def writable(self) -> bool:
        """Whether the folder takes writes."""
        return self._database.writable

    def locate(self, keys: Sequence[bytes], *, checksums: bool = False) -> dict[bytes, Stored]:
        """Where chunks lie; those that are not stored are left out.

        `gc` in another process may move a chunk at any time and delete its old shard. Whoever
        cannot open the shard looks the chunk up again.

        Args:
            keys: of `chunk_key`.
            checksums: give those of the records too.
        """
        return self._index.lookup(keys, checksums)

    def unreadable(self, located: Mapping[bytes, Stored]) -> list[bytes]:
        """Those of the chunks whose shard is missing or not whole: `locate` asks the index only.

        Looks at the size and the header of each shard once, and reads no records.
        """
        broken: set[str] = set()
        for name, size in {(stored.shard, stored.shard_bytes) for stored in located.values()}:
            try:
                os.close(open_shard(self.shards_folder, name, size))
            except ShardDamagedError:
                broken.add(name)
        suspects = [key for key, stored in located.items() if stored.shard in broken]
        # gc may have moved them meanwhile.
        now = self.locate(suspects)
        return [key for key in suspects if key in now and now[key].shard in broken]

    def keys(self) -> list[bytes]:
        """The keys of all chunks that are stored."""
        return self._index.keys()

    def token_ids(self, keys: Sequence[bytes]) -> dict[bytes, list[int]]:
        """All tokens of chunks, those of lost chunks too; unknown and damaged ones are left out."""
        return self._index.token_ids(keys)

    def lost(self) -> dict[bytes, Ranges]:
        """Chunks whose records were damaged, and which of their tokens were kept; () where unknown.

        With `token_ids` they can be computed again from the store alone, and added.
        """
        return self._index.lost()

    def add(self, chunks: Iterable[NewChunk]) -> int:
        """Stores chunks; one whose ranges are all kept already is skipped.

        Of a chunk with other ranges the kept ones stay too. Chunks become visible shard by shard,
        and all of them by the end, also when an error ends the call, unless the disk is full.

        Args:
            chunks: consumed one by one, and written as they come.

        Returns:
            How many were written.

        Raises:
            StoreFullError: no room in the budget; under `evict`, beside what this call brought.
            ValueError: ranges or records that do not belong to their chunk.
        """
        with self._writing() as now, Adding(self._space, now) as adding:
            for chunk in chunks:
                adding.append(chunk)
        return adding.added

    def remove(self, keys: Iterable[bytes]) -> int:
        """Forgets chunks, lost ones too; their records stay on disk, dead, until `gc`.

        Returns:
            How many were known.
        """
        with self._writing(), self._database.transaction():
            return self._index.remove(keys)

    def mark_lost(self, keys: Sequence[bytes]) -> None:
        """Notes that the records of chunks were found damaged, so that they count as missing."""
        with self._writing(), self._database.transaction():
            self._index.mark_lost(keys)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Notes a use of chunks, for eviction; it is written with the next change or at close."""
        if not self.writable:
            return
        with self._touching:
            for key in keys:
                self._touched.pop(key, None)
                self._touched[key] = None

    def gc(self) -> Collected:
        """Gives back the bytes of dead records, small shards and orphan files.

        Readers go on meanwhile.
        """
        with self._writing():
            return collect(self._space)

    def verify(self) -> Verified:
        """Reads everything and compares checksums; damaged chunks are lost from then on.

        In a read-only folder it only reports.
        """
        if not self.writable:
            return verify(self._space, repair=False)
        with self._writing():
            return verify(self._space, repair=True)

    def stat(self) -> StoreStat:
        """Counts and sizes."""
        return measure(self._space)

    def close(self) -> None:
        """Writes down the uses noted, if no other process is writing, and closes the index.

        Without that only an order of eviction is lost.
        """
        try:
            if self._touched and self.writable:
                with self._writing(wait_seconds=0.0):
                    pass
        except StoreError as error:
            logger.warning("the last uses of chunks were not noted: %s", error)
        finally:
            self._database.close()

    @contextmanager
    def _writing(self, wait_seconds: float | None = None) -> Iterator[int]:
        """Holds the writer's lock, with the uses noted written down; gives the time of a change."""
        try:
            with disk_full_named(self.folder), self._locked(wait_seconds) as now:
                yield now
        except OSError as error:
            raise StoreWriteError(
                f"the store at {self.folder} cannot be written ({error}); see that {_SHARDS} is a "
                "folder in it and that nothing else has put its own files there"
            ) from error

    @contextmanager
    def _locked(self, wait_seconds: float | None) -> Iterator[int]:
        if not self.writable:
            raise StoreReadOnlyError(
                f"the store at {self.folder} is in a read-only folder: it can be read, but takes "
                "no chunks; copy it to where it can be written, or set store.folder to null"
            )
        wait_seconds = self._wait_seconds if wait_seconds is None else wait_seconds
        with self._writing_here, writer_lock(self.folder, wait_seconds):
            if not self._swept:
                self._space.delete_orphans()
            self._swept = False
            now = self._index.last_use() + 1
            with self._touching:
                touched, self._touched = list(self._touched), {}
            if touched:
                with self._database.transaction():
                    self._index.mark_used(enumerate(touched, now))
            yield now + len(touched)
            self._swept = True
