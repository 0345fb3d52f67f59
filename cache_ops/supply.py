"""The records of a plan's tokens: from memory, then from disk, then from the model."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor

from cache_ops.closing import Closing
from cache_ops.memory_tier import MemoryTier
from cache_ops.plan import PROMPT, PrefixPlan
from cache_ops.records import RecordLayout
from cache_ops.store.errors import StoreError
from cache_ops.store.reading import Reading, SliceReader, SliceSpan
from cache_ops.store.stored import NewChunk, Ranges, chunk_key, union_ranges

logger = logging.getLogger(__name__)

Keep = Literal["nuggets", "chunks"]
KeptRanges = Mapping[str, Sequence[tuple[int, int]]]
Stage = Literal["look_up", "read", "compute", "store"]

_MOST_FREE_BUFFERS = 4
_BUFFER_STEP_BYTES = 8 << 20


class MissingSlicesError(ValueError):
    """Slices are not in the store and there is no model to compute them; names their chunks."""

    is_user_error = True


@dataclass(frozen=True)
class Supplied:
    """The records of a plan, in its order. `release` it, or use it as a context.

    Attributes:
        records_TR: uint8; not to be used after `release`, which gives their memory to others.
        tokens_memory, tokens_disk, tokens_computed: where the plan's tokens came from.
        tokens_encoded: tokens of the chunks that the model had to encode for that.
        bytes_read: bytes received from shards.
        seconds: what each stage took of the caller's time; "store" counts once released.
    """

    records_TR: Tensor
    tokens_memory: int
    tokens_disk: int
    tokens_computed: int
    tokens_encoded: int
    bytes_read: int
    seconds: dict[Stage, float]
    _release: Callable[[], None] = field(repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Ends the use of the records; to be called once, best after the first token is out.

        Only now are slices from disk copied into memory and computed chunks added to the store.
        """
        self._release()


class Supply(Closing):
    """Supplies plans with records; threads may share one. `close` it.

    Attributes:
        layout: the layout of the records.
        memory: the tier in front of the store.
        not_stored: computed chunks that the store did not take so far, by the error's name.
    """

    def __init__(
        self,
        layout: RecordLayout,
        *,
        reader: SliceReader | None,
        memory: MemoryTier | None,
        encode: Callable[[Sequence[int]], Tensor] | None,
        keep: Keep,
        store_computed: bool = True,
        pin_memory: bool = False,
    ) -> None:
        """Prepares a supply.

        Args:
            layout: the layout of the records; the store's, where there is a reader.
            reader: reads the store; `close` closes both. None: nothing is read or stored.
            memory: the tier in front of it; None: none.
            encode: token ids of a chunk to kv_TL2HD (see `encode_chunk`), called by one thread at
                a time; None: what is missing is an error.
            keep: what is kept of a computed chunk, in the store or else in memory: the tokens that
                a nugget covers, or all.
            store_computed: computed chunks are added to the reader's store.
            pin_memory: records are supplied in pinned memory, for copies to CUDA.
        """
        assert reader is None or reader.store.layout == layout, "the store's records differ"
        self.not_stored: Counter[str] = Counter()
        self.layout = layout
        self._reader = reader
        self.memory = memory
        self._encode = encode
        self._keep = keep
        self._storing = store_computed and reader is not None
        self._pin_memory = pin_memory
        self._computing = Lock()
        self._lock = Lock()
        self._free: list[Tensor] = []

    @property
    def computes(self) -> bool:
        """Whether a model computes what is neither in memory nor on disk."""
        return self._encode is not None

    def close(self) -> None:
        """Closes the reader and its store, once all that was started has been released."""
        if self._reader is not None:
            self._reader.close()
            self._reader.store.close()

    def fetch(
        self,
        plan: PrefixPlan,
        chunk_ids: Mapping[str, Sequence[int]],
        kept: KeptRanges | None = None,
    ) -> Supplied:
        """`start` and `Supplying.wait` in one."""
        return self.start(plan, chunk_ids, kept).wait()

    def start(
        self,
        plan: PrefixPlan,
        chunk_ids: Mapping[str, Sequence[int]],
        kept: KeptRanges | None = None,
    ) -> "Supplying":
        """Looks a plan's slices up, begins to read those on disk, and returns at once.

        Args:
            plan: which tokens, in which order.
            chunk_ids: the tokens of each chunk of the plan, those of the prompt under `PROMPT`.
            kept: for each chunk the token ranges of its nuggets: what is stored of it, beside the
                plan's own slices, should it be computed under `keep: nuggets`.

        Raises:
            ValueError: a slice reaches beyond its chunk's tokens.
        """
        return Supplying(self, plan, chunk_ids, kept or {})

    def _kept_of(self, chunk: str, tokens: int, kept: KeptRanges) -> Ranges:
        """What is to be kept of a chunk beside the slices that a plan asks for."""
        if self._keep == "chunks" or chunk == PROMPT:
            return ((0, tokens),)
        return union_ranges(kept.get(chunk, ()))

    def _from_memory(self, spans: Mapping[int, SliceSpan]) -> dict[int, Tensor]:
        if self.memory is None:
            return {}
        looked_up = {number: self.memory.get(*span) for number, span in spans.items()}
        return {number: found for number, found in looked_up.items() if found is not None}

    def _encode_chunk(
        self, token_ids: Sequence[int], slices: Sequence[SliceSpan], kept: Ranges
    ) -> tuple[list[Tensor], NewChunk | None]:
        """The records of a chunk's slices from the model, and what is to be stored of it."""
        assert self._encode is not None
        kv_TL2HD = self._encode(token_ids)
        records = [self.layout.encode(kv_TL2HD[start:end]) for _, start, end in slices]
        if not self._storing:
            if self.memory is not None:
                # There is no store to find the chunk's other nuggets in later.
                for start, end in kept:
                    kept_TR = self.layout.encode(kv_TL2HD[start:end])
                    self.memory.put(slices[0][0], start, end, kept_TR)
            return records, None
        ranges = union_ranges(kept, [(start, end) for _, start, end in slices])
        kept_TL2HD = torch.cat([kv_TL2HD[start:end] for start, end in ranges])
        return records, NewChunk(token_ids, ranges, self.layout.encode(kept_TL2HD))

    def _stored_ranges(self, key: bytes) -> Ranges:
        assert self._reader is not None
        stored = self._reader.store.locate([key]).get(key)
        return stored.ranges if stored else ()

    def _add_to_store(self, chunks: Sequence[NewChunk], damaged: set[bytes]) -> None:
        """Stores computed chunks, in place of damaged ones; what the store refuses is counted."""
        assert self._reader is not None
        store = self._reader.store
        try:
            if damaged:
                # `add` skips what the index says is there.
                store.mark_lost(list(damaged))
            store.add(chunks)
        except (StoreError, OSError) as error:
            kind = type(error).__name__
            with self._lock:
                known = kind in self.not_stored
                self.not_stored[kind] += len(chunks)
            if not known:
                logger.warning("computed chunks are used but not stored: %s", error)

    def _take_buffer(self, needed: int) -> Tensor:
        # A fresh buffer's page faults take as long as reading into it.
        with self._lock:
            fitting = [at for at, buffer in enumerate(self._free) if len(buffer) >= needed]
            if fitting:
                return self._free.pop(fitting[0])
        size = max(1, -(-needed // _BUFFER_STEP_BYTES)) * _BUFFER_STEP_BYTES
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin_memory)

    def _give_buffer(self, buffer: Tensor) -> None:
        with self._lock:
            self._free = sorted([*self._free, buffer], key=len)[-_MOST_FREE_BUFFERS:]


class Supplying:
    """A plan's records on their way; one thread's.

    Attributes:
        records_TR: uint8; before `wait` only rows that `ready` has yielded may be read.
    """

    def __init__(
        self,
        supply: Supply,
        plan: PrefixPlan,
        chunk_ids: Mapping[str, Sequence[int]],
        kept: KeptRanges,
    ) -> None:
        began = time.perf_counter()
        self._supply = supply
        self._supplied: Supplied | None = None
        self._keys = {name: chunk_key(chunk_ids[name]) for name in {p.chunk for p in plan.slices}}
        self._ids = {key: chunk_ids[name] for name, key in self._keys.items()}
        self._kept = {
            key: supply._kept_of(name, len(chunk_ids[name]), kept)
            for name, key in self._keys.items()
        }
        self._spans: dict[int, SliceSpan] = {}
        self._rows: dict[int, tuple[int, int]] = {}
        row = 0
        for number, piece in enumerate(plan.slices):
            if piece.end > (tokens := len(chunk_ids[piece.chunk])):
                raise ValueError(
                    f"slice [{piece.start}, {piece.end}) is beyond the {tokens} tokens of chunk "
                    f"{piece.chunk!r}"
                )
            self._spans[number] = (self._keys[piece.chunk], piece.start, piece.end)
            self._rows[number] = (row, row + piece.end - piece.start)
            row += piece.end - piece.start
        size = row * supply.layout.token_bytes
        self._buffer: Tensor | None = supply._take_buffer(size)
        self.records_TR = self._buffer[:size].view(row, supply.layout.token_bytes)

        in_memory = supply._from_memory(self._spans)
        self._memory = set(in_memory)
        self._computed: set[int] = set()
        self._disk = [number for number in self._spans if number not in in_memory]
        self._reading: Reading | None = None
        if supply._reader is not None:
            self._reading = supply._reader.start(
                [self._spans[number] for number in self._disk],
                self.records_TR,
                [self._rows[number][0] for number in self._disk],
            )
        looked_up = time.perf_counter()
        # Copied while the disk reads.
        for number, found_TR in in_memory.items():
            self._fill(number, found_TR)
        cached_seconds = self._reading.cached_seconds if self._reading else 0.0
        self._seconds: dict[Stage, float] = {
            "look_up": looked_up - began - cached_seconds,
            "read": time.perf_counter() - looked_up + cached_seconds,
            "compute": 0.0,
            "store": 0.0,
        }

    def ready(self) -> Iterator[tuple[int, int]]:
        """Yields rows `[first, end)` of `records_TR` as they arrive, in any order, all in the end.

        Rows that come again are to be read again.

        Raises:
            MissingSlicesError
        """
        yield from [self._rows[number] for number in sorted(self._memory)]
        if self._reading is not None:
            yield from self._reading.ready()
        before = set(self._memory)
        self.wait()
        yield from [self._rows[number] for number in (self._memory - before) | self._computed]

    def wait(self) -> Supplied:
        """Waits for the disk and computes what is missing.

        Raises:
            MissingSlicesError: slices are neither in memory nor on disk and there is no model.
        """
        if self._supplied is not None:
            return self._supplied
        began = time.perf_counter()
        missing = list(self._disk)
        damaged: set[bytes] = set()
        if self._reading is not None:
            missing = [self._disk[at] for at in self._reading.wait()]
            damaged = self._reading.damaged
        self._seconds["read"] += time.perf_counter() - began

        began = time.perf_counter()
        new_chunks = self._compute(missing, damaged) if missing else []
        self._seconds["compute"] += time.perf_counter() - began
        self._disk = [number for number in self._disk if number not in missing]
        tokens_memory, tokens_disk, tokens_computed = (
            sum(self._rows[number][1] - self._rows[number][0] for number in numbers)
            for numbers in (self._memory, self._disk, self._computed)
        )
        self._supplied = Supplied(
            self.records_TR,
            tokens_memory,
            tokens_disk,
            tokens_computed,
            sum(len(self._ids[key]) for key in {self._spans[n][0] for n in self._computed}),
            self._reading.bytes_read if self._reading else 0,
            self._seconds,
            lambda: self._release(new_chunks, damaged),
        )
        return self._supplied

    def _compute(self, missing: Sequence[int], damaged: set[bytes]) -> list[NewChunk]:
        """Fills what is neither in memory nor on disk; returns what is to be stored of it."""
        supply = self._supply
        new_chunks: list[NewChunk] = []
        with supply._computing:
            # Another request may have computed the same meanwhile.
            in_memory = supply._from_memory({number: self._spans[number] for number in missing})
            for number, found_TR in in_memory.items():
                self._fill(number, found_TR)
            self._memory |= in_memory.keys()
            by_chunk: dict[bytes, list[int]] = defaultdict(list)
            for number in missing:
                if number not in in_memory:
                    by_chunk[self._spans[number][0]].append(number)
            if by_chunk and supply._encode is None:
                raise MissingSlicesError(self._missing_text(by_chunk))
            for key, numbers in by_chunk.items():
                slices = [self._spans[number] for number in numbers]
                kept = self._kept[key]
                if key in damaged:
                    kept = union_ranges(kept, supply._stored_ranges(key))
                records, new_chunk = supply._encode_chunk(self._ids[key], slices, kept)
                for number, records_TR in zip(numbers, records, strict=True):
                    self._fill(number, records_TR)
                    if supply.memory is not None:
                        supply.memory.put(*self._spans[number], records_TR)
                self._computed.update(numbers)
                if new_chunk is not None:
                    new_chunks.append(new_chunk)
        return new_chunks

    def _fill(self, number: int, records_TR: Tensor) -> None:
        first, end = self._rows[number]
        self.records_TR[first:end].copy_(records_TR)

    def _missing_text(self, by_chunk: Mapping[bytes, Sequence[int]]) -> str:
        names = [name for name, key in self._keys.items() if key in by_chunk]
        shown = ", ".join(repr(name) for name in sorted(names)[:5])
        reader = self._supply._reader
        place = f"in the store at {reader.store.folder}" if reader else "in memory"
        return (
            f"slices of {len(names)} chunks are not {place} ({shown}{', …' if names[5:] else ''}) "
            "and there is no model to compute them: build the store with `coinrag cache build`"
        )

    def _release(self, new_chunks: Sequence[NewChunk], damaged: set[bytes]) -> None:
        assert self._buffer is not None, "released twice"
        supply = self._supply
        began = time.perf_counter()
        if supply.memory is not None:
            for number in self._disk:
                first, end = self._rows[number]
                supply.memory.put(*self._spans[number], self.records_TR[first:end])
        if supply._reader is not None:
            supply._reader.store.touch(list(self._ids))
            if new_chunks:
                computed = {self._spans[number][0] for number in self._computed}
                supply._add_to_store(new_chunks, damaged & computed)
        self._seconds["store"] += time.perf_counter() - began
        supply._give_buffer(self._buffer)
        self._buffer = None
