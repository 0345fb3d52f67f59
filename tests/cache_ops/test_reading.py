"""Slices come back bit by bit and byte for byte as cheap as they can, or are said to be missing."""

import gc
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cache_ops.store.open_shards as open_shards
import cache_ops.store.reading as reading
from cache_ops.fingerprint import Fingerprint
from cache_ops.records import RecordLayout
from cache_ops.store import Store
from cache_ops.store.open_shards import read_into
from cache_ops.store.reading import SliceReader
from cache_ops.store.shards import ShardWriter
from cache_ops.store.stored import (
    NewChunk,
    Ranges,
    Stored,
    chunk_key,
    count_tokens,
    record_checksums,
    union_ranges,
)

LAYOUT = RecordLayout(2, 1, 4, "float32")
R = LAYOUT.token_bytes


@pytest.fixture(autouse=True, params=["cached", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the caller's thread where the page cache has it, and by the pool."""
    if request.param == "threads":
        monkeypatch.setattr(reading, "_AT_ONCE_BYTES", -1)


def rows_of(key: bytes, start: int, end: int) -> torch.Tensor:
    """Records that depend on the chunk and the token alone."""
    generator = torch.Generator().manual_seed(key[0])
    rows_TR = torch.randint(0, 256, (300, R), generator=generator, dtype=torch.uint8)
    return rows_TR[start:end]


class Shelf:
    """A store's reading side: real shards, an index in memory, and a place to interfere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards_folder = folder / "shards"
        self.shards_folder.mkdir(parents=True)
        self.layout = LAYOUT
        self.index: dict[bytes, Stored] = {}
        self.lookups = 0
        self.after_lookup = lambda: None

    def locate(self, keys: Sequence[bytes], *, checksums: bool = False) -> dict[bytes, Stored]:
        self.lookups += 1
        found = {key: self.index[key] for key in keys if key in self.index}
        self.after_lookup()
        if checksums:
            return found
        return {key: replace(stored, checksums=None) for key, stored in found.items()}

    def write_shard(self, chunks: dict[bytes, Ranges]) -> str:
        with closing(ShardWriter(self.shards_folder, LAYOUT)) as writer:
            placed = {}
            for key, ranges in chunks.items():
                records_TR = torch.cat([rows_of(key, start, end) for start, end in ranges])
                flat = records_TR.flatten().numpy().data
                placed[key] = writer.append(flat), record_checksums(flat, R)
            writer.finish()
        for key, (offset, checksums) in placed.items():
            self.index[key] = Stored(
                key, writer.name, writer.bytes, offset, R, chunks[key], checksums
            )
        return writer.name

    def path(self, shard: str) -> Path:
        return self.shards_folder / shard


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "store")


def buffer_for(spans: Sequence[tuple[bytes, int, int]]) -> torch.Tensor:
    return torch.zeros(sum(end - start for _, start, end in spans), R, dtype=torch.uint8)


def check_rows(
    spans: Sequence[tuple[bytes, int, int]], into_TR: torch.Tensor, absent: Sequence[int] = ()
) -> None:
    row = 0
    for number, (key, start, end) in enumerate(spans):
        if number not in absent:
            assert torch.equal(into_TR[row : row + end - start], rows_of(key, start, end))
        row += end - start


def open_files() -> list[str]:
    """What this process has open."""
    descriptors = Path("/proc/self/fd")
    return [str(link.readlink()) for link in list(descriptors.iterdir()) if link.is_symlink()]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


token_spans = st.tuples(st.integers(0, 60), st.integers(1, 30)).map(lambda at: (at[0], sum(at)))
kept_ranges = st.lists(token_spans, min_size=1, max_size=4).map(lambda spans: union_ranges(spans))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(kept_ranges, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 7), token_spans), max_size=12),
    st.sampled_from([1, 3 * R, 8 * R, 1 << 20]),
    st.booleans(),
    st.integers(1, 3),
)
def test_slices_come_back_and_the_rest_is_named(
    tmp_path_factory: pytest.TempPathFactory,
    chunks: list[Ranges],
    wanted: list[tuple[int, tuple[int, int]]],
    piece_bytes: int,
    check: bool,
    shards: int,
) -> None:
    shelf = Shelf(tmp_path_factory.mktemp("shelf") / "store")
    for shard in range(shards):
        shelf.write_shard({bytes([n]): r for n, r in enumerate(chunks) if n % shards == shard})
    spans = [(bytes([number]), start, end) for number, (start, end) in wanted]
    kept = {
        (bytes([n]), token)
        for n, ranges in enumerate(chunks)
        for r in ranges
        for token in range(*r)
    }
    absent = [
        at
        for at, (key, *span) in enumerate(spans)
        if not all((key, token) in kept for token in range(*span))
    ]
    into_TR = buffer_for(spans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_PIECE_BYTES", piece_bytes)
        with SliceReader(shelf, 3, check=check) as reader:
            started = reader.start(spans, into_TR)
            arrived = sorted(started.ready())
            assert started.wait() == absent
    check_rows(spans, into_TR, absent)
    had = sum(end - start for at, (_, start, end) in enumerate(spans) if at not in absent)
    assert started.bytes_read == had * R
    assert not started.damaged
    rows = [row for first, end in arrived for row in range(first, end)]
    assert len(rows) == len(set(rows)) == had


def test_slices_may_go_to_any_rows(shelf: Shelf) -> None:
    shelf.write_shard({b"a": ((0, 50),)})
    into_TR = torch.zeros(20, R, dtype=torch.uint8)
    with SliceReader(shelf, 2) as reader:
        reader.start([(b"a", 5, 8), (b"a", 8, 10)], into_TR, rows=[12, 3]).wait()
    assert torch.equal(into_TR[12:15], rows_of(b"a", 5, 8))
    assert torch.equal(into_TR[3:5], rows_of(b"a", 8, 10))
    rest = torch.ones(20, dtype=torch.bool)
    rest[12:15] = rest[3:5] = False
    assert not into_TR[rest].any()


def test_neighbours_are_read_by_one_call_and_long_ranges_by_several(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.write_shard({b"a": ((0, 5), (20, 30)), b"b": ((0, 40),)})
    calls: list[tuple[int, int]] = []
    real = os.preadv

    def counted(
        descriptor: int, destinations: Sequence[memoryview], offset: int, flags: int
    ) -> int:
        calls.append((len(destinations), sum(map(len, destinations)) // R))
        return real(descriptor, destinations, offset, flags)

    monkeypatch.setattr(os, "preadv", counted)
    spans = [(b"b", 0, 2), (b"a", 22, 30), (b"a", 0, 5), (b"a", 20, 22)]
    into_TR = buffer_for(spans)
    with SliceReader(shelf, 2) as reader:
        assert reader.start(spans, into_TR).wait() == []
    check_rows(spans, into_TR)
    assert calls == [(3, 17)], "four that follow one another, two of them also in the buffer"

    calls.clear()
    monkeypatch.setattr(reading, "_PIECE_BYTES", 10 * R)
    with SliceReader(shelf, 2) as reader:
        reader.start([(b"b", 0, 40)], torch.zeros(40, R, dtype=torch.uint8)).wait()
    assert sorted(calls) == [(1, 10)] * 4


@pytest.mark.parametrize("most", [1, 2, 1000])
def test_short_reads_and_many_destinations_are_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    data = secrets.token_bytes(5000)
    (tmp_path / "file").write_bytes(data)
    real = os.preadv

    def short(descriptor: int, destinations: Sequence[memoryview], offset: int, flags: int) -> int:
        assert len(destinations) <= most
        first = [destinations[0][:7]] if len(destinations) == 1 else destinations
        return real(descriptor, first, offset, flags)

    monkeypatch.setattr(open_shards, "_MOST_DESTINATIONS", most)
    monkeypatch.setattr(os, "preadv", short)
    filled = bytearray(6000)
    cuts = sorted({0, 6000, *(secrets.randbelow(6000) for _ in range(40))})
    views = [memoryview(filled)[a:b] for a, b in pairwise(cuts)]
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert read_into(descriptor, views, 100) == 4900
    finally:
        os.close(descriptor)
    assert filled[:4900] == data[100:]


def test_what_the_page_cache_lacks_is_left_to_the_pool(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_AT_ONCE_BYTES", 1 << 20)
    shelf.write_shard({b"a": ((0, 100),)})
    lacking = shelf.index[b"a"].offset + 20 * R
    threads: dict[int, str] = {}
    real = os.preadv

    def partly(descriptor: int, destinations: Sequence[memoryview], offset: int, flags: int) -> int:
        if flags & os.RWF_NOWAIT and offset == lacking:
            destinations[0][:R] = bytes(R)
            raise BlockingIOError
        threads[offset] = threading.current_thread().name
        return real(descriptor, destinations, offset, flags)

    monkeypatch.setattr(os, "preadv", partly)
    spans = [(b"a", 0, 5), (b"a", 20, 30), (b"a", 60, 70)]
    into_TR = buffer_for(spans)
    with SliceReader(shelf, 2) as reader:
        started = reader.start(spans, into_TR)
        assert started.wait() == []
    check_rows(spans, into_TR)
    assert started.bytes_read == 25 * R
    own = threading.current_thread().name
    assert [name == own for _, name in sorted(threads.items())] == [True, False, True]


def test_more_destinations_than_one_call_takes(shelf: Shelf) -> None:
    shelf.write_shard({bytes([n]): ((0, 200),) for n in range(8)})
    order = [(bytes([n]), t, t + 1) for t in reversed(range(200)) for n in range(8)]
    assert len(order) > os.sysconf("SC_IOV_MAX")
    into_TR = buffer_for(order)
    with SliceReader(shelf, 1) as reader:
        assert reader.start(order, into_TR).wait() == []
    check_rows(order, into_TR)


def test_a_chunk_that_gc_moves_is_found_again(shelf: Shelf) -> None:
    spans = [(b"a", 3, 9), (b"b", 0, 4), (b"a", 20, 30)]
    chunks = {b"a": ((0, 30),), b"b": ((0, 9),)}
    name = shelf.write_shard(chunks)
    moves = iter(range(2))

    def move() -> None:
        nonlocal name
        if next(moves, None) is not None:
            old, name = name, shelf.write_shard({b"x": ((0, 7),), **chunks})
            shelf.path(old).unlink()

    shelf.after_lookup = move
    into_TR = buffer_for(spans)
    with SliceReader(shelf, 2) as reader:
        started = reader.start(spans, into_TR)
        assert started.wait() == []
    assert not started.damaged
    check_rows(spans, into_TR)


def test_a_chunk_that_always_moves_is_given_up(shelf: Shelf) -> None:
    shelf.write_shard({b"a": ((0, 30),)})

    def move() -> None:
        old = shelf.index[b"a"].shard
        shelf.write_shard({b"a": ((0, 30),)})
        shelf.path(old).unlink()

    shelf.after_lookup = move
    with SliceReader(shelf, 2) as reader:
        assert reader.start([(b"a", 0, 30)], torch.zeros(30, R, dtype=torch.uint8)).wait() == [0]
    assert shelf.lookups < 10


def test_a_chunk_evicted_after_the_lookup_is_absent_and_not_damaged(shelf: Shelf) -> None:
    name = shelf.write_shard({b"a": ((0, 30),)})

    def evict() -> None:
        shelf.path(name).unlink(missing_ok=True)
        shelf.index.clear()

    shelf.after_lookup = evict
    with SliceReader(shelf, 2) as reader:
        started = reader.start([(b"a", 0, 30)], torch.zeros(30, R, dtype=torch.uint8))
        assert started.wait() == [0]
    assert not started.damaged


@pytest.mark.parametrize(
    "damage", ["missing", "truncated", "header", "foreign", "longer", "folder"]
)
def test_a_damaged_shard_is_named_once_and_never_read(
    shelf: Shelf, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    shard = shelf.write_shard({b"a": ((0, 30),), b"b": ((0, 30),)})
    shelf.write_shard({b"c": ((0, 30),)})
    path = shelf.path(shard)
    if damage == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "header":
        flip(path, 1)
    elif damage == "foreign":
        path.write_bytes(secrets.token_bytes(path.stat().st_size))
    elif damage == "longer":
        path.write_bytes(path.read_bytes() + bytes(R))
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    spans = [(b"a", 0, 5), (b"c", 0, 5), (b"b", 9, 12)]
    with caplog.at_level(logging.WARNING), SliceReader(shelf, 2) as reader:
        for _ in range(3):
            into_TR = buffer_for(spans)
            started = reader.start(spans, into_TR)
            assert started.wait() == [0, 2]
            assert started.damaged == {b"a", b"b"}
            assert list(started.ready()) == [(5, 10)]
            check_rows(spans, into_TR, [0, 2])
            assert not into_TR[:5].any()
    (record,) = caplog.records
    assert shard in record.message


def test_a_shard_cut_while_it_is_open_gives_what_it_still_has(shelf: Shelf) -> None:
    shard = shelf.write_shard({b"a": ((0, 30),), b"b": ((0, 30),)})
    spans = [(b"a", 25, 30), (b"b", 0, 5), (b"b", 5, 10)]
    with SliceReader(shelf, 1) as reader:
        reader.start(spans, buffer_for(spans)).wait()
        os.truncate(shelf.path(shard), shelf.index[b"b"].offset + 7 * R + 1)
        into_TR = buffer_for(spans)
        started = reader.start(spans, into_TR)
        assert started.wait() == [2]
        assert started.damaged == {b"b"}
        check_rows(spans, into_TR, [2])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 59), st.integers(0, R - 1))
def test_a_flipped_bit_is_seen_where_checksums_are_compared(
    tmp_path_factory: pytest.TempPathFactory, token: int, byte: int
) -> None:
    shelf = Shelf(tmp_path_factory.mktemp("shelf") / "store")
    ranges = ((0, 20), (30, 50), (60, 80))
    shard = shelf.write_shard({b"a": ranges})
    flip(shelf.path(shard), shelf.index[b"a"].offset + token * R + byte)
    spans = [(b"a", first + at, first + at + 5) for first, _ in ranges for at in (0, 5, 10, 15)]
    into_TR = buffer_for(spans)
    with SliceReader(shelf, 2, check=True) as reader:
        started = reader.start(spans, into_TR)
        assert started.wait() == [token // 5]
    assert started.damaged == {b"a"}
    check_rows(spans, into_TR, [token // 5])
    assert started.bytes_read == count_tokens(ranges) * R, "a check reads no more than is asked"


def test_few_shards_are_open_at_once_and_none_afterwards(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_shards, "_MOST_OPEN_SHARDS", 3)
    for number in range(12):
        shelf.write_shard({bytes([number]): ((0, 20),)})
    gc.collect()
    before = len(open_files())
    wrong: list[object] = []
    with SliceReader(shelf, 4) as reader:

        def read(seed: int) -> None:
            for step in range(40):
                spans = [(bytes([(seed + step + n) % 12]), n, n + 9) for n in range(5)]
                into_TR = buffer_for(spans)
                if reader.start(spans, into_TR).wait():
                    wrong.append(spans)
                try:
                    check_rows(spans, into_TR)
                except AssertionError:
                    wrong.append(spans)

        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(5)]
        for thread in readers:
            thread.start()
        for thread in readers:
            thread.join()
        # Those in use may go beyond the bound, by one a thread.
        assert len(open_files()) - before <= 3 + 4
    assert not wrong
    assert len(open_files()) <= before


def test_a_deleted_shard_gives_its_disk_space_back(shelf: Shelf) -> None:
    old = shelf.write_shard({b"a": ((0, 20),)})
    span = [(b"a", 0, 9)]
    with SliceReader(shelf, 1) as reader:
        reader.start(span, buffer_for(span)).wait()
        shelf.write_shard({b"a": ((0, 20),)})
        shelf.path(old).unlink()
        reader.start(span, buffer_for(span)).wait()
        assert not [file for file in open_files() if old in file]


def test_an_error_that_is_no_damage_reaches_the_caller_after_the_last_write(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.write_shard({b"a": ((0, 20),)})
    shelf.write_shard({b"b": ((0, 20),)})
    real = open_shards.open_shard
    name = shelf.index[b"a"].shard

    def broken(folder: Path, shard: str, expected_bytes: int) -> int:
        if shard == name:
            raise RuntimeError("out of luck")
        time.sleep(0.05)
        return real(folder, shard, expected_bytes)

    monkeypatch.setattr(open_shards, "open_shard", broken)
    monkeypatch.setattr(reading, "_AT_ONCE_BYTES", -1)
    spans = [(b"a", 0, 9), (b"b", 0, 9)]
    into_TR = buffer_for(spans)
    with SliceReader(shelf, 2) as reader:
        started = reader.start(spans, into_TR)
        with pytest.raises(RuntimeError, match="out of luck"):
            started.wait()
        check_rows(spans, into_TR, [0])


def test_a_real_stores_slices_are_right_while_it_changes(tmp_path: Path) -> None:
    kept = ((0, 30), (40, 90))
    fingerprint = Fingerprint("w", "r", "t", "300 tokens", "none", "float32")
    ids = {number: [number, *range(1, 300)] for number in range(12)}
    keys = {number: chunk_key(ids[number]) for number in ids}

    def chunks() -> Iterator[NewChunk]:
        for number in ids:
            parts = [rows_of(bytes([number]), start, end) for start, end in kept]
            yield NewChunk(ids[number], kept, torch.cat(parts))

    Store.create(tmp_path / "store", fingerprint, LAYOUT).close()
    stop = threading.Event()
    changed: list[int] = []

    def change() -> None:
        # Another `Store`, as another process would have; small shards, so that gc moves a lot.
        with Store.open(tmp_path / "store", shard_bytes=60 * R) as writer:
            while not stop.is_set():
                changed.append(writer.add(chunks()))
                writer.remove([keys[number] for number in range(0, 12, 2)])
                writer.gc()

    writing = threading.Thread(target=change)
    writing.start()
    had = 0
    try:
        with Store.open(tmp_path / "store") as store, SliceReader(store, 3, check=True) as reader:
            deadline = time.monotonic() + 20
            for step in count():
                if (had > 100 and len(changed) > 2) or time.monotonic() > deadline:
                    break
                numbers = [(step + at) % 12 for at in range(4)]
                spans = [(keys[number], 45, 80) for number in numbers]
                into_TR = torch.zeros(4 * 35, R, dtype=torch.uint8)
                started = reader.start(spans, into_TR)
                absent = started.wait()
                assert not started.damaged
                for at, number in enumerate(numbers):
                    if at not in absent:
                        had += 1
                        rows_TR = into_TR[35 * at : 35 * (at + 1)]
                        assert torch.equal(rows_TR, rows_of(bytes([number]), 45, 80))
    finally:
        stop.set()
        writing.join()
    assert had > 100
    assert len(changed) > 2
