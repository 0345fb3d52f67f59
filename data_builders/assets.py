"""Results that cost time or money, kept by content: equal input under equal settings, once.

One SQLite file a kind of asset and its settings. Every batch is a transaction, so a killed build
keeps what it had finished. The default rollback journal is used, not WAL: it also holds on network
file systems, where a cluster's builds lie. Files may be deleted at any time; they are made again.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self
from zlib import crc32

from recipes.errors import UserError

_PAGE = 500  # keys a query
_LOCK_SECONDS = 600.0
_CHECKSUM_BYTES = 4


def content_key(*parts: str) -> bytes:
    """SHA-256 of the parts, kept apart by their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def is_damaged(path: Path) -> bool:
    """Whether SQLite finds its file at `path` damaged; reads all of it."""
    with closing(sqlite3.connect(path)) as db:
        try:
            return bool(db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",))
        except sqlite3.OperationalError:
            # Locked by another process, say.
            return False
        except sqlite3.DatabaseError:
            return True


@dataclass(frozen=True)
class Needed:
    """How many distinct assets a build asked for, and how many of them were not there."""

    distinct: int
    missing: int


class AssetStore:
    """Values by content key, on disk. One connection, one thread; other processes may share it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, timeout=_LOCK_SECONDS)
        self._db.execute("CREATE TABLE IF NOT EXISTS assets (key BLOB PRIMARY KEY, value BLOB)")
        # Temporary: on disk, this connection's alone, gone with it.
        self._db.execute("PRAGMA temp_store = FILE")
        self._db.execute(
            "CREATE TEMP TABLE needed (key BLOB PRIMARY KEY, payload TEXT) WITHOUT ROWID"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def need(self, items: Iterable[tuple[bytes, str]]) -> Needed:
        """Notes which of the (key, payload) items have no asset yet; `missing` gives them.

        Forgets what was noted before.
        """
        self._db.execute("DELETE FROM needed")
        note = """INSERT OR IGNORE INTO needed
                  SELECT ?1, CASE WHEN EXISTS (SELECT 1 FROM assets WHERE key = ?1)
                             THEN NULL ELSE ?2 END"""
        rest = iter(items)
        # Page by page: no other build waits for this one to read all of its input.
        while page := list(islice(rest, _PAGE)):
            self._db.executemany(note, page)
            self._db.commit()
        counted = self._db.execute("SELECT count(*), count(payload) FROM needed").fetchone()
        return Needed(*counted)

    def missing(self, size: int) -> Iterator[list[tuple[bytes, str]]]:
        """The noted items without an asset, in batches, in the order of their keys."""
        after = b""
        while True:
            batch: list[tuple[bytes, str]] = self._db.execute(
                "SELECT key, payload FROM needed WHERE key > ? AND payload IS NOT NULL "
                "ORDER BY key LIMIT ?",
                (after, size),
            ).fetchall()
            if not batch:
                return
            after = batch[-1][0]
            yield batch

    def put(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Keeps the (key, value) items, all or none; a key that is there keeps its value."""
        with self._db:
            self._db.executemany(
                "INSERT OR IGNORE INTO assets VALUES (?, ?)",
                ((key, _checksum(value) + value) for key, value in items),
            )

    def get(self, keys: Iterable[bytes]) -> Mapping[bytes, bytes]:
        """The values of those keys.

        Raises:
            KeyError: one of them is not there.
            UserError: one of them is not what was put in.
        """
        wanted = iter(set(keys))
        found: dict[bytes, bytes] = {}
        while page := list(islice(wanted, _PAGE)):
            found.update(self._page(page))
        return found

    def _page(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        marks = ",".join("?" * len(keys))
        rows = self._db.execute(f"SELECT key, value FROM assets WHERE key IN ({marks})", keys)
        found = {key: self._verified(value) for key, value in rows.fetchall()}
        if len(found) < len(keys):
            raise KeyError(next(key for key in keys if key not in found).hex())
        return found

    def _verified(self, stored: bytes) -> bytes:
        value = stored[_CHECKSUM_BYTES:]
        if stored[:_CHECKSUM_BYTES] != _checksum(value):
            raise UserError(f"{self._path}: damaged; delete it, what it holds is made again")
        return value


def _checksum(value: bytes) -> bytes:
    return crc32(value).to_bytes(_CHECKSUM_BYTES, "little")
