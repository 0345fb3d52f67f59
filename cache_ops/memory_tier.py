"""The tier in front of the disk: the least recently used slices of records give way."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

Entry = tuple[bytes, int, int]


@dataclass(frozen=True)
class MemoryCounts:
    """What a tier holds now, and what it has been asked since it was made."""

    slices: int
    bytes: int
    hits: int
    misses: int
    evictions: int


class MemoryTier:
    """Slices of records in memory under a byte limit. Threads may share one."""

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes >= 0, max_bytes
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._entries: OrderedDict[Entry, Tensor] = OrderedDict()
        self._of_chunk: defaultdict[bytes, set[Entry]] = defaultdict(set)
        self._bytes = self._hits = self._misses = self._evictions = 0

    def get(self, key: bytes, start: int, end: int) -> Tensor | None:
        """The records of tokens `[start, end)` of a chunk, also from inside a longer kept slice.

        Returns:
            records_TR, a view that stays valid when its slice gives way (read it, never write to
            it); None where no kept slice holds all of the tokens.
        """
        with self._lock:
            entry = self._holding(key, start, end)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(entry)
            records_TR = self._entries[entry]
        return records_TR[start - entry[1] : end - entry[1]]

    def put(self, key: bytes, start: int, end: int, records_TR: Tensor) -> None:
        """Keeps a copy of a slice's records, unless it is larger than the limit or kept already.

        Kept slices that lie inside the new one are dropped.
        """
        assert len(records_TR) == end - start, (len(records_TR), start, end)
        if records_TR.nbytes > self._max_bytes:
            return
        with self._lock:
            if (entry := self._holding(key, start, end)) is not None:
                self._entries.move_to_end(entry)
                return
        copy_TR = records_TR.clone()
        with self._lock:
            if self._holding(key, start, end) is not None:
                return
            for _, first, last in list(self._of_chunk[key]):
                if start <= first and last <= end:
                    self._drop((key, first, last))
            while self._bytes + copy_TR.nbytes > self._max_bytes:
                self._drop(next(iter(self._entries)))
                self._evictions += 1
            self._entries[key, start, end] = copy_TR
            self._of_chunk[key].add((key, start, end))
            self._bytes += copy_TR.nbytes

    def counts(self) -> MemoryCounts:
        """What the tier holds and has been asked."""
        with self._lock:
            return MemoryCounts(
                len(self._entries), self._bytes, self._hits, self._misses, self._evictions
            )

    def _holding(self, key: bytes, start: int, end: int) -> Entry | None:
        for entry in self._of_chunk.get(key, ()):
            if entry[1] <= start and end <= entry[2]:
                return entry
        return None

    def _drop(self, entry: Entry) -> None:
        self._bytes -= self._entries.pop(entry).nbytes
        kept = self._of_chunk[entry[0]]
        kept.remove(entry)
        if not kept:
            del self._of_chunk[entry[0]]
