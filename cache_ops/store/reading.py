"""Slices of records from a store's shards into a buffer: several reads in flight, no copy between.

A slice is one contiguous range of a shard. Slices that follow one another in a shard are joined
into one `preadv` with several destinations, and long ones are cut so that threads share them. What
the page cache holds is copied by the caller's own thread: a thread's wake-up takes as long as
copying megabytes, and the more the busier the machine.
"""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from queue import SimpleQueue
from threading import Event, Lock
from typing import NamedTuple

import torch
from torch import Tensor

from cache_ops.closing import Closing
from cache_ops.store import Store
from cache_ops.store.errors import ShardDamagedError
from cache_ops.store.open_shards import OpenShards, read_into
from cache_ops.store.stored import Stored

SliceSpan = tuple[bytes, int, int]
"""A chunk's key and the tokens `[start, end)` wanted of it."""

# Cold, pieces of 1 MiB take half as long again; much larger ones leave threads without work.
_PIECE_BYTES = 4 << 20
# Up to so much, waking threads costs more than they save on bytes in the page cache.
_AT_ONCE_BYTES = 32 << 20
# gc may move a chunk between each look-up and the opening of its shard.
_LOOKUPS = 4


class SliceReader(Closing):
    """Reads slices of one store; threads may share one. `close` it, or use it as a context.

    With `check`, each record's checksum is compared as it arrives, and a slice with a record that
    differs is not to be had. Without, bytes changed inside a shard of the right size go unseen.
    """

    def __init__(self, store: Store, threads: int, *, check: bool = False) -> None:
        self.store = store
        self._threads = threads
        self._check = check
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="slice-reader")
        self._shards = OpenShards(store)

    def close(self) -> None:
        """Finishes the readings in flight, ends the threads and closes the shards."""
        self._pool.shutdown()
        self._shards.close()

    def start(
        self, spans: Sequence[SliceSpan], into_TR: Tensor, rows: Sequence[int] | None = None
    ) -> "Reading":
        """Looks slices up and begins to read them; returns without waiting for the disk.

        Args:
            spans: slices to read.
            into_TR: uint8 on the CPU, contiguous, with a row for each token; pinned where it will
                be copied to CUDA.
            rows: the row of `into_TR` that each slice's first record goes to; None: one after
                another from row 0 on.
        """
        if rows is None:
            lengths = [end - start for _, start, end in spans]
            rows = list(accumulate(lengths, initial=0))[:-1]
        assert into_TR.dtype == torch.uint8
        assert into_TR.is_contiguous()
        assert into_TR.shape[1] == self.store.layout.token_bytes, "rows are not records"
        for (_, start, end), row in zip(spans, rows, strict=True):
            assert 0 <= row <= into_TR.shape[0] - (end - start), "a slice does not fit"
        reading = Reading(self.store, self._shards, spans, into_TR, rows, check=self._check)
        for _ in range(min(self._threads, reading.pieces_left)):
            self._pool.submit(reading._work)
        return reading


class Reading:
    """Slices on their way into a buffer.

    Until `wait` has returned, only rows that `ready` has yielded may be read, and none written.

    Attributes:
        pieces_left: reads that are not done yet.
        bytes_read: bytes received from shards so far.
        cached_seconds: what copying from the page cache took of the caller's time in `start`.
        damaged: keys of chunks that the store's index names but whose records could not be had.
    """

    def __init__(
        self,
        store: Store,
        shards: OpenShards,
        spans: Sequence[SliceSpan],
        into_TR: Tensor,
        rows: Sequence[int],
        *,
        check: bool,
    ) -> None:
        self.bytes_read = 0
        self.cached_seconds = 0.0
        self.damaged: set[bytes] = set()
        self._store = store
        self._shards = shards
        self._check = check
        self._record_bytes = store.layout.token_bytes
        self._buffer = into_TR.flatten().numpy().data
        self._absent: set[int] = set()
        self._lock = Lock()
        self._arrived: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._finished = Event()
        self._error: Exception | None = None

        self._most_tokens = max(1, _PIECE_BYTES // self._record_bytes)
        parts: list[_Part] = []
        located = self._locate(key for key, _, _ in spans)
        for number, ((key, start, end), row) in enumerate(zip(spans, rows, strict=True)):
            stored = located.get(key)
            offset = stored.place(start, end) if stored else None
            if stored is None or offset is None:
                self._absent.add(number)
                continue
            for cut in range(start, end, self._most_tokens):
                cut_end = min(cut + self._most_tokens, end)
                ahead = cut - start
                at = offset + ahead * self._record_bytes
                parts.append(_Part(number, cut, cut_end, row + ahead, stored, at))
        self._to_read = deque(_join(parts, self._most_tokens))
        self.pieces_left = len(self._to_read)
        if not self.pieces_left:
            self._end()
        elif sum(part.tokens for part in parts) * self._record_bytes <= _AT_ONCE_BYTES:
            began = time.perf_counter()
            self._to_read = deque(p for p in self._to_read if not self._read_if_cached(p))
            self.cached_seconds = time.perf_counter() - began

    def ready(self) -> Iterator[tuple[int, int]]:
        """Yields rows `[first, end)` of the buffer as they arrive, in any order, each once.

        Ends when nothing more will come; rows that are not to be had are left out.
        """
        while (rows := self._arrived.get()) is not None:
            yield rows
        self._arrived.put(None)

    def wait(self) -> list[int]:
        """Waits for the last read.

        Returns:
            Which slices are not to be had (absent, not kept or damaged), by their place in the
            order asked for. Their rows hold anything.
        """
        self._finished.wait()
        if self._error is not None:
            raise self._error
        return sorted(self._absent)

    def _work(self) -> None:
        while True:
            try:
                piece = self._to_read.popleft()
            except IndexError:
                return
            try:
                self._read(piece, _LOOKUPS)
            except Exception as error:
                self._error = error
            self._settle()

    def _read_if_cached(self, piece: list["_Part"]) -> bool:
        """Reads a piece without waiting for the disk; whether all of it was in the page cache."""
        size = sum(part.tokens for part in piece) * self._record_bytes
        try:
            with self._shards.use(piece[0].stored) as descriptor:
                destinations = self._destinations(piece)
                read = read_into(descriptor, destinations, piece[0].offset, os.RWF_NOWAIT)
        except (ShardDamagedError, OSError):
            # What is wrong, if anything is, shows again where waiting is allowed.
            return False
        if read < size or not all(self._intact(part) for part in piece):
            return False
        self.bytes_read += size
        for part in piece:
            self._arrived.put((part.row, part.row + part.tokens))
        self._settle()
        return True

    def _read(self, piece: list["_Part"], lookups: int) -> None:
        shard = piece[0].stored.shard
        read = 0
        why = ShardDamagedError(shard, "ends too early or holds other bytes than were stored")
        try:
            with self._shards.use(piece[0].stored) as descriptor:
                read = read_into(descriptor, self._destinations(piece), piece[0].offset)
        except ShardDamagedError as error:
            why = error
        except OSError as error:
            why = ShardDamagedError(shard, f"cannot be read ({error})")
        with self._lock:
            self.bytes_read += read
        wrong: list[_Part] = []
        for part in piece:
            end = part.offset + part.tokens * self._record_bytes
            if end <= piece[0].offset + read and self._intact(part):
                self._arrived.put((part.row, part.row + part.tokens))
            else:
                wrong.append(part)
        if wrong:
            self._read_elsewhere(wrong, why, lookups)

    def _read_elsewhere(self, parts: list["_Part"], why: ShardDamagedError, lookups: int) -> None:
        """Reads parts where the store has them by now; those that have not moved are damaged."""
        located = self._locate(part.stored.key for part in parts)
        moved: list[_Part] = []
        for part in parts:
            now = located.get(part.stored.key)
            offset = now.place(part.start, part.end) if now else None
            if now is None or offset is None:
                with self._lock:
                    self._absent.add(part.slice)
            elif now.shard != part.stored.shard and lookups > 1:
                moved.append(part._replace(stored=now, offset=offset))
            else:
                with self._lock:
                    self._absent.add(part.slice)
                    self.damaged.add(part.stored.key)
                self._shards.name_once(why)
        for piece in _join(moved, self._most_tokens):
            self._read(piece, lookups - 1)

    def _locate(self, keys: Iterable[bytes]) -> dict[bytes, Stored]:
        return self._store.locate(list(set(keys)), checksums=self._check)

    def _intact(self, part: "_Part") -> bool:
        return not self._check or part.stored.intact(
            part.start, part.end, self._rows(part.row, part.row + part.tokens)
        )

    def _rows(self, first: int, end: int) -> memoryview:
        return self._buffer[first * self._record_bytes : end * self._record_bytes]

    def _destinations(self, piece: list["_Part"]) -> list[memoryview]:
        """The memory to fill in the order of the shard, rows that touch as one."""
        runs: list[tuple[int, int]] = []
        for part in piece:
            if runs and runs[-1][1] == part.row:
                runs[-1] = runs[-1][0], part.row + part.tokens
            else:
                runs.append((part.row, part.row + part.tokens))
        return [self._rows(first, end) for first, end in runs]

    def _settle(self) -> None:
        with self._lock:
            self.pieces_left -= 1
            last = self.pieces_left == 0
        if last:
            self._end()

    def _end(self) -> None:
        self._arrived.put(None)
        self._finished.set()


class _Part(NamedTuple):
    """Tokens `[start, end)` of slice number `slice`, wanted from row `row` of the buffer on."""

    slice: int
    start: int
    end: int
    row: int
    stored: Stored
    offset: int
    """The byte of the shard where the part begins."""

    @property
    def tokens(self) -> int:
        return self.end - self.start


def _join(parts: Sequence[_Part], most_tokens: int) -> list[list[_Part]]:
    """Parts whose records follow one another in a shard as one piece, unless it grows too long."""
    pieces: list[list[_Part]] = []
    next_byte = tokens = 0
    for part in sorted(parts, key=lambda part: (part.stored.shard, part.offset)):
        follows = bool(pieces) and pieces[-1][0].stored.shard == part.stored.shard
        if follows and part.offset == next_byte and tokens + part.tokens <= most_tokens:
            pieces[-1].append(part)
            tokens += part.tokens
        else:
            pieces.append([part])
            tokens = part.tokens
        next_byte = part.offset + part.tokens * part.stored.record_bytes
    return pieces
