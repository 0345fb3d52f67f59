"""One writer at a time, by a lock file: a write is more than a transaction of the index."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_ops.store.errors import StoreBusyError

_LOCK = "writer.lock"
_PID_BYTES = 20
_POLL_SECONDS = 0.02

WAIT_SECONDS = 10.0
"""How long commands and runs wait for another writer."""


@contextmanager
def writer_lock(folder: Path, wait_seconds: float) -> Iterator[None]:
    """Holds the store's one place for a writer; the system gives it back when a process dies.

    Raises:
        StoreBusyError: another writer holds it, and still does after `wait_seconds`.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    pid = os.pread(descriptor, _PID_BYTES, 0).decode(errors="replace").strip()
                    holder = f"process {pid}" if pid else "another process"
                    raise StoreBusyError(
                        f"{holder} is writing to the store at {folder}, and a store has "
                        "one writer at a time; wait for it, or give another folder"
                    ) from None
                time.sleep(_POLL_SECONDS)
        # In one write over the last holder's, so that nobody reads half of it.
        os.pwrite(descriptor, str(os.getpid()).ljust(_PID_BYTES).encode(), 0)
        yield
    finally:
        # A process forked meanwhile has the descriptor too; closing ours would leave it the lock.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
