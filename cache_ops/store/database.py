"""The SQLite file of a store's index: creating it at one stroke, opening it, naming what is wrong.

WAL mode, so that readers go on while one process writes; every commit is synced. Connections are
one a thread.
"""

import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from cache_ops.fingerprint import FORMAT_VERSION, difference
from cache_ops.store.errors import (
    DiskFullError,
    ForeignStoreError,
    IndexDamagedError,
    NotAStoreError,
    StoreBusyError,
    StoreError,
    StoreReadOnlyError,
)

INDEX = "index.sqlite"
_BUSY_SECONDS = 10.0
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
_SCHEMA = """
    PRAGMA auto_vacuum = INCREMENTAL;
    BEGIN;
    CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE shards (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        bytes INTEGER NOT NULL          -- of the file
    );
    CREATE TABLE chunks (
        id INTEGER PRIMARY KEY,
        key BLOB NOT NULL UNIQUE,
        shard INTEGER,                  -- NULL: lost
        offset INTEGER,
        kept INTEGER NOT NULL,          -- tokens in the ranges
        ranges BLOB NOT NULL,
        used INTEGER NOT NULL,          -- larger is later
        checksum INTEGER                -- of all that says where the records lie
    );
    CREATE INDEX chunks_by_shard ON chunks (shard, offset, kept);
    CREATE INDEX chunks_by_use ON chunks (used);
    CREATE TABLE details (              -- apart, so that the table of a lookup stays small
        chunk INTEGER PRIMARY KEY,
        token_ids BLOB NOT NULL,
        checksums BLOB NOT NULL
    );
"""


class _Connection(sqlite3.Connection):
    """Can be referred to weakly: one that belonged to a thread goes when the thread has ended."""


def create_database(folder: Path, meta: dict[str, Any]) -> None:
    """Writes an empty index with `meta`, whole or not at all; the caller holds the writer's lock.

    Raises:
        DiskFullError
        StoreError: a file system that knows no WAL.
    """
    temporary = folder / f"{INDEX}.tmp"
    for suffix in ("", "-journal", "-wal", "-shm"):
        Path(f"{temporary}{suffix}").unlink(missing_ok=True)
    with (
        errors_named(folder),
        closing(sqlite3.connect(temporary, isolation_level=None)) as connection,
    ):
        connection.executescript(_SCHEMA)
        rows = [(name, json.dumps(value)) for name, value in meta.items()]
        connection.executemany("INSERT INTO meta VALUES (?, ?)", rows)
        connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        connection.execute("COMMIT")
        # Last: what lies in the log at the end may not reach the file, and SQLite would not say so.
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreError(
            f"SQLite has no write-ahead log on the file system of {folder} (its journal mode is "
            f"{mode}); give a folder on a local disk"
        )
    temporary.rename(folder / INDEX)


class Database:
    """An index that was checked to be one, of this format version.

    Raises:
        NotAStoreError, ForeignStoreError, IndexDamagedError, StoreReadOnlyError: see `Store.open`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / INDEX
        if folder.is_file():
            raise NotAStoreError(f"{folder} is a file, and a store is a folder; give another path")
        if self.path.is_dir():
            raise NotAStoreError(
                f"no store at {folder}: {INDEX} is a folder there, and not a file; move it away, "
                "or give another folder"
            )
        if not self.path.is_file():
            raise NotAStoreError(
                f"no store at {folder}: it has no file {INDEX}; `coinrag cache build` makes one"
            )
        self.writable = os.access(folder, os.W_OK) and os.access(self.path, os.W_OK)
        self._process = os.getpid()
        self._local = threading.local()
        self._connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
        try:
            self._check_version()
        except BaseException:
            self.close()
            raise

    def connection(self) -> sqlite3.Connection:
        """This thread's connection."""
        assert os.getpid() == self._process, "a store is opened anew in every process"
        connection: _Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
            self._connections.add(connection)
        return connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, durable at the end; the caller holds the writer's lock."""
        with errors_named(self.folder):
            connection = self.connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def meta(self, name: str) -> Any:
        """A value that `create_database` was given."""
        with errors_named(self.folder):
            row = self.connection().execute("SELECT value FROM meta WHERE name = ?", (name,))
            try:
                return json.loads(row.fetchone()[0])
            except (TypeError, ValueError) as error:
                raise index_damaged(self.folder, f"its {name} cannot be read") from error

    def close(self) -> None:
        """Closes the connections of all threads."""
        for connection in list(self._connections):
            connection.close()

    def _connect(self) -> _Connection:
        wal = Path(f"{self.path}-wal")
        unfinished = wal.is_file() and wal.stat().st_size > 0
        if self.writable:
            mode = "mode=rw"
        elif unfinished:
            mode = "mode=ro"
        else:
            # Without a WAL there is nothing to recover, and SQLite need not create its own files.
            mode = "mode=ro&immutable=1"
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{mode}",
            uri=True,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            factory=_Connection,
        )
        try:
            connection.text_factory = lambda text: text.decode(errors="replace")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            connection.close()
            if self.writable or not unfinished:
                raise
            raise StoreReadOnlyError(
                f"the store at {self.folder} was not closed: its last changes are in {wal.name}, "
                "which a read-only folder keeps from being read; open it once where it can be "
                "written (`coinrag cache stat`)"
            ) from error
        return connection

    def _check_version(self) -> None:
        with errors_named(self.folder):
            connection = self.connection()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if "meta" not in tables:
            raise NotAStoreError(
                f"{self.path} is not a store's index; give another folder, or delete it and build "
                "the store anew"
            )
        if version != FORMAT_VERSION:
            line = difference("format", f"version {version}", f"version {FORMAT_VERSION}")
            raise ForeignStoreError(self.folder, [line])


@contextmanager
def errors_named(folder: Path) -> Iterator[None]:
    """Gives SQLite's errors the names and words of `errors`."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code in _FULL:
            raise DiskFullError(
                f"no room for the index in {folder} ({error}): free some space; what was "
                "committed before stays"
            ) from error
        match code & 0xFF:
            case 0:
                # Raised by Python, of a wrong use.
                raise
            case sqlite3.SQLITE_READONLY:
                raise StoreReadOnlyError(f"the index in {folder} takes no writes") from error
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                raise StoreBusyError(f"the index in {folder} is locked: {error}") from error
            case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN:
                raise StoreError(f"the index in {folder} cannot be used: {error}") from error
        # The statements are fixed: where one of them makes no sense, the schema is not ours.
        raise index_damaged(folder, str(error)) from error
    except UnicodeDecodeError as error:
        raise index_damaged(folder, "its text is no text") from error


def index_damaged(folder: Path, why: str) -> IndexDamagedError:
    """The error of an index that is beyond use."""
    return IndexDamagedError(
        f"the index {folder / INDEX} is damaged ({why}), and without it the shards mean nothing; "
        "delete the folder and build the store anew"
    )
