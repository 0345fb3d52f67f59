"""The index of a store: which chunk's records lie where, who was used last, what is lost.

A chunk whose records were found damaged keeps its row, its tokens and its ranges, and has no shard:
it is *lost*, counts as missing, and can be computed again. Bytes of a shard that no chunk refers to
are *dead*; they are never counted in a place of their own, so no count can be wrong.
"""

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar
from zlib import crc32

from cache_ops.store.database import Database, errors_named, index_damaged
from cache_ops.store.shards import HEADER_BYTES, Shard
from cache_ops.store.stored import (
    Entry,
    Ranges,
    Row,
    Stored,
    are_ranges,
    count_tokens,
    pack_ranges,
    pack_tokens,
    packed_key,
    unpack_ranges,
    unpack_tokens,
)

_KEYS_A_QUERY = 500
# Places that a thread remembers.
_MOST_KNOWN = 100_000
Value = TypeVar("Value")


class Index:
    """Queries and changes; changes are made inside `database.transaction()`."""

    def __init__(self, database: Database, record_bytes: int) -> None:
        self.database = database
        self._record_bytes = record_bytes
        self._local = threading.local()

    def lookup(self, keys: Sequence[bytes], checksums: bool = False) -> dict[bytes, Stored]:
        """The places of those of the chunks that are stored and not lost.

        Without checksums each thread remembers them for as long as the index stays as it is.
        """
        connection = self.database.connection()
        if checksums or connection.in_transaction:
            return self._lookup(keys, checksums)
        # Changed by what other connections commit, and by what this one does.
        stamp = self._one("PRAGMA data_version"), connection.total_changes
        if getattr(self._local, "stamp", None) != stamp or len(self._local.known) > _MOST_KNOWN:
            self._local.stamp, self._local.known = stamp, {}
        known: dict[bytes, Stored] = self._local.known
        if unknown := [key for key in keys if key not in known]:
            known.update(self._lookup(unknown, checksums=False))
        return {key: known[key] for key in keys if key in known}

    def _lookup(self, keys: Sequence[bytes], checksums: bool) -> dict[bytes, Stored]:
        details = ", details.checksums", "JOIN details ON details.chunk = chunks.id"
        column, join = details if checksums else ("", "")
        found: dict[bytes, Stored] = {}
        for row in self._by_key(
            f"""SELECT chunks.key, name, bytes, kept, offset, ranges, checksum {column}
                FROM chunks JOIN shards ON shards.id = chunks.shard {join}
                WHERE chunks.key IN """,
            keys,
        ):
            stored = self._stored(*row)
            if stored:
                found[stored.key] = stored
        return found

    def token_ids(self, keys: Sequence[bytes]) -> dict[bytes, list[int]]:
        """The tokens of those of the chunks that are known, lost ones too; damaged ones are not."""
        query = "SELECT key, token_ids FROM chunks JOIN details ON chunk = chunks.id WHERE key IN "
        return {
            key: unpack_tokens(packed)
            for key, packed in self._by_key(query, keys)
            if isinstance(packed, bytes) and packed_key(packed) == key
        }

    def keys(self) -> list[bytes]:
        """All chunks that are stored and not lost."""
        rows = self._all("SELECT key FROM chunks WHERE shard IS NOT NULL")
        return [self._typed(key, bytes) for (key,) in rows]

    def lost(self) -> dict[bytes, Ranges]:
        """The chunks that are lost, and which of their tokens were kept; () where unknown."""
        rows = self._all("SELECT key, ranges, checksum FROM chunks WHERE shard IS NULL")
        return {
            self._typed(key, bytes): _lost_ranges(key, packed, checksum)
            for key, packed, checksum in rows
        }

    def count(self) -> int:
        """How many chunks are stored and not lost."""
        return self._one("SELECT count(*) FROM chunks WHERE shard IS NOT NULL")

    def shards(self) -> list[Shard]:
        """All shards, the oldest first."""
        query = """SELECT id, name, bytes,
                          (SELECT coalesce(sum(kept), 0) FROM chunks WHERE shard = shards.id)
                   FROM shards ORDER BY id"""
        return [
            Shard(
                number,
                self._typed(name, str),
                self._typed(size, int),
                self._typed(kept, int) * self._record_bytes,
            )
            for number, name, size, kept in self._all(query)
        ]

    def rows(self, shard: Shard) -> list[Row]:
        """The chunks of a shard with their checksums, by offset."""
        query = """SELECT id, key, kept, offset, ranges, checksum, checksums
                   FROM chunks JOIN details ON chunk = id WHERE shard = ? ORDER BY offset"""
        return [
            Row(
                number,
                self._typed(key, bytes),
                self._typed(kept, int),
                self._stored(key, shard.name, shard.bytes, kept, *place),
            )
            for number, key, kept, *place in self._all(query, shard.id)
        ]

    def broken(self) -> list[tuple[bytes, int]]:
        """Keys and kept tokens of chunks that refer to parts of the index that are not there."""
        rows = self._all(
            """SELECT key, kept FROM chunks LEFT JOIN shards ON shards.id = shard
                      LEFT JOIN details ON details.chunk = chunks.id
               WHERE shard IS NOT NULL AND (shards.id IS NULL OR details.chunk IS NULL)"""
        )
        return [(self._typed(key, bytes), self._typed(kept, int)) for key, kept in rows]

    def check(self) -> None:
        """Lets SQLite check its file.

        Raises:
            IndexDamagedError
        """
        ((finding,),) = self._all("PRAGMA quick_check(1)")
        if finding != "ok":
            raise index_damaged(self.database.folder, finding)

    def shrink(self) -> None:
        """Gives free pages back, and the write-ahead log's."""
        self._all("PRAGMA incremental_vacuum")
        self._all("PRAGMA wal_checkpoint(TRUNCATE)")

    def shard_bytes(self) -> int:
        """Bytes of all shard files."""
        return self._one("SELECT coalesce(sum(bytes), 0) FROM shards")

    def live_bytes(self, used_since: int = 0) -> int:
        """Bytes of the records of chunks that were last used at `used_since` or later."""
        query = """SELECT coalesce(sum(kept), 0) FROM chunks
                   WHERE used >= ? AND shard IS NOT NULL"""
        return self._one(query, used_since) * self._record_bytes

    def last_use(self) -> int:
        """The largest `used`; 0 in an empty index."""
        return self._one("SELECT coalesce(max(used), 0) FROM chunks")

    def least_recently_used(self, before: int) -> Iterator[tuple[bytes, int]]:
        """Keys and record bytes of the chunks last used before `before`, the oldest first."""
        query = """SELECT key, kept FROM chunks WHERE used < ? AND shard IS NOT NULL
                   ORDER BY used, id"""
        with errors_named(self.database.folder):
            for key, kept in self.database.connection().execute(query, (before,)):
                yield key, kept * self._record_bytes

    def add_shard(self, name: str, size: int) -> Shard:
        """Enters a shard file that is complete and durable."""
        query = "INSERT INTO shards (name, bytes) VALUES (?, ?) RETURNING id"
        return Shard(self._one(query, name, size), name, size, 0)

    def put(self, shard: Shard, placed: Iterable[tuple[Entry, int]], used: int) -> None:
        """Enters chunks and their offsets in a new shard, in place of what was known of them."""
        for entry, offset in placed:
            packed = pack_ranges(entry.ranges)
            number = self._one(
                """INSERT INTO chunks (key, shard, offset, kept, ranges, used, checksum)
                   VALUES (?, ?, ?, ?, ?, ?, ?)
                   ON CONFLICT (key) DO UPDATE SET shard = excluded.shard,
                       offset = excluded.offset, kept = excluded.kept, ranges = excluded.ranges,
                       used = excluded.used, checksum = excluded.checksum
                   RETURNING id""",
                entry.key,
                shard.id,
                offset,
                count_tokens(entry.ranges),
                packed,
                used,
                _checksum(entry.key, shard.name, shard.bytes, offset, packed),
            )
            self._change(
                "INSERT OR REPLACE INTO details VALUES (?, ?, ?)",
                [(number, pack_tokens(entry.token_ids), entry.checksums)],
            )

    def move(self, shard: Shard, moved: Iterable[tuple[Stored, int]]) -> None:
        """Enters the offsets of chunks whose records were copied to a new shard."""
        rows = []
        for old, offset in moved:
            packed = pack_ranges(old.ranges)
            checksum = _checksum(old.key, shard.name, shard.bytes, offset, packed)
            rows.append((shard.id, offset, checksum, old.key))
        self._change("UPDATE chunks SET shard = ?, offset = ?, checksum = ? WHERE key = ?", rows)

    def remove(self, keys: Iterable[bytes]) -> int:
        """Forgets chunks; returns how many were known."""
        rows = [(key,) for key in keys]
        self._change(
            "DELETE FROM details WHERE chunk = (SELECT id FROM chunks WHERE key = ?)", rows
        )
        return self._change("DELETE FROM chunks WHERE key = ?", rows)

    def mark_lost(self, keys: Sequence[bytes]) -> None:
        """Takes chunks out of their shards; their tokens and ranges stay."""
        sound = self.lookup(keys)
        rows = [
            (_lost_checksum(key, pack_ranges(sound[key].ranges)) if key in sound else None, key)
            for key in keys
        ]
        self._change(
            "UPDATE chunks SET shard = NULL, offset = NULL, checksum = ? WHERE key = ?", rows
        )

    def mark_used(self, uses: Iterable[tuple[int, bytes]]) -> None:
        """Notes times of last use, each with its chunk."""
        self._change("UPDATE chunks SET used = ? WHERE key = ?", list(uses))

    def drop_empty_shards(self) -> list[str]:
        """Takes shards without a chunk out; returns their names: delete the files after commit."""
        query = """DELETE FROM shards
                   WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE shard = shards.id) RETURNING name"""
        return [name for (name,) in self._all(query)]

    def _stored(
        self,
        key: bytes,
        name: str,
        size: int,
        kept: int,
        offset: int,
        packed: bytes,
        checksum: int,
        checksums: bytes | None = None,
    ) -> Stored | None:
        """None where the row is not what was written, or what no writer of ours would write."""
        try:
            if checksum != _checksum(key, name, size, offset, packed):
                return None
            ranges = unpack_ranges(packed)
        except (TypeError, AttributeError, struct.error):
            return None
        if (
            not are_ranges(ranges)
            or kept != count_tokens(ranges)
            or offset < HEADER_BYTES
            or offset + kept * self._record_bytes > size
            or not isinstance(checksums, bytes | None)
        ):
            return None
        return Stored(key, name, size, offset, self._record_bytes, ranges, checksums)

    def _typed(self, value: Any, kind: type[Value]) -> Value:
        """SQLite puts no bounds on what a column holds."""
        if not isinstance(value, kind):
            raise index_damaged(self.database.folder, f"it holds {value!r:.40} for {kind.__name__}")
        return value

    def _by_key(self, query: str, keys: Sequence[bytes]) -> Iterator[tuple[Any, ...]]:
        for at in range(0, len(keys), _KEYS_A_QUERY):
            page = keys[at : at + _KEYS_A_QUERY]
            yield from self._all(f"{query} ({', '.join('?' * len(page))})", *page)

    def _all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with errors_named(self.database.folder):
            return self.database.connection().execute(query, values).fetchall()

    def _one(self, query: str, *values: Any) -> int:
        return self._typed(self._all(query, *values)[0][0], int)

    def _change(self, query: str, rows: Sequence[tuple[Any, ...]]) -> int:
        """Changes a row for each of `rows`; returns how many there were to change."""
        with errors_named(self.database.folder):
            return max(self.database.connection().executemany(query, rows).rowcount, 0)


def _checksum(key: bytes, name: str, size: int, offset: int, ranges: bytes) -> int:
    return crc32(key + name.encode() + struct.pack("<qq", size, offset) + ranges)


def _lost_ranges(key: bytes, packed: bytes, checksum: int) -> Ranges:
    try:
        ranges = unpack_ranges(packed) if checksum == _lost_checksum(key, packed) else ()
    except (TypeError, AttributeError, struct.error):
        return ()
    return ranges if are_ranges(ranges) else ()


def _lost_checksum(key: bytes, ranges: bytes) -> int:
    return _checksum(key, "", 0, 0, ranges)
