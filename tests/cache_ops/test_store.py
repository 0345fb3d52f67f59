"""What a store keeps, where it lies on disk, and what changes leave alone."""

import hashlib
import multiprocessing
import struct
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from storing import (
    FINGERPRINT,
    LAYOUT,
    files_of,
    key_of,
    make_store,
    new_chunk,
    read_back,
    records_of,
    tokens_of,
    wrong_chunks,
)

from cache_ops.records import RecordLayout
from cache_ops.store import Store
from cache_ops.store.errors import StoreBusyError, StoreExistsError, StoreFullError
from cache_ops.store.shards import HEADER_BYTES
from cache_ops.store.stored import (
    NewChunk,
    Stored,
    chunk_key,
    count_tokens,
    missing_ranges,
    union_ranges,
)

RANGES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair))),
    max_size=8,
)


@pytest.fixture
def store(tmp_path):
    with make_store(tmp_path / "store") as store:
        yield store


def whole(number: int) -> int:
    """Bytes of chunk `number`'s records."""
    return len(tokens_of(number)) * LAYOUT.token_bytes


def test_the_address_is_sha256_of_int32_tokens():
    assert chunk_key([1, 2]).hex() == hashlib.sha256(struct.pack("<2i", 1, 2)).hexdigest()


def test_chunks_come_back_by_content_with_their_places(store):
    ranges = [(1, 3), (5, 8)]
    assert store.add([new_chunk(1), new_chunk(2, ranges)]) == 2
    found = store.locate([key_of(1), key_of(2), key_of(3)])
    assert set(found) == {key_of(1), key_of(2)}
    stored = found[key_of(2)]
    assert stored.ranges == ((1, 3), (5, 8))
    assert read_back(store, stored) == records_of(key_of(2), ranges)
    assert stored.place(1, 3) == stored.offset
    assert stored.place(6, 8) == stored.offset + 3 * LAYOUT.token_bytes
    for start, end in [(0, 2), (2, 4), (1, 8), (3, 5), (7, 9), (6, 6)]:
        assert stored.place(start, end) is None
    assert store.token_ids([key_of(2), key_of(3)]) == {key_of(2): tokens_of(2)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8"])
def test_a_shard_is_a_safetensors_file_of_records(tmp_path, dtype):
    layout = RecordLayout(layers=2, kv_heads=3, head_dim=4, dtype=dtype)
    kv_TL2HD = torch.randn(5, 2, 2, 3, 4)
    records_TR = layout.encode(kv_TL2HD)
    with make_store(tmp_path / "store", layout) as store:
        store.add([NewChunk(range(5), [(0, 2), (2, 5)], records_TR)])
        (name,) = files_of(store)
        tensors = load_file(store.shards_folder / name)
        if dtype in ("int8", "float8"):
            assert torch.equal(tensors["records"], records_TR)
        else:
            assert torch.equal(tensors["kv"], kv_TL2HD.to(getattr(torch, dtype)))
        (stored,) = store.locate([chunk_key(range(5))]).values()
        assert stored.ranges == ((0, 5),)


def test_the_same_chunk_is_stored_once(store):
    store.add([new_chunk(1), new_chunk(1, [(0, 4)]), new_chunk(2)])
    before = files_of(store)
    assert store.add([new_chunk(1, [(2, 5)]), new_chunk(2)]) == 0
    assert files_of(store) == before
    assert store.stat().tokens == len(tokens_of(1)) + len(tokens_of(2))


@pytest.mark.parametrize("calls", [1, 2])
def test_other_ranges_of_a_chunk_join_those_kept(store, calls):
    one, two = new_chunk(1, [(0, 2), (4, 6)]), new_chunk(1, [(1, 3), (6, 8)])
    for chunks in [[one, two]] if calls == 1 else [[one], [two]]:
        store.add(chunks)
    (stored,) = store.locate([key_of(1)]).values()
    assert stored.ranges == ((0, 3), (4, 8))
    assert wrong_chunks(store) == []


@given(RANGES, RANGES)
def test_missing_ranges_are_those_wanted_and_not_kept(kept, wanted):
    stored = Stored(b"", "", 0, 0, 1, union_ranges(kept))
    covered = {token for start, end in kept for token in range(start, end)}
    asked = {token for start, end in wanted for token in range(start, end)}
    missing = missing_ranges(stored, wanted)
    assert {token for start, end in missing for token in range(start, end)} == asked - covered
    assert all(one[1] < two[0] for one, two in pairwise(missing))
    assert missing_ranges(None, wanted) == union_ranges(wanted)


@given(RANGES)
def test_place_counts_the_kept_tokens_before(ranges):
    kept = union_ranges(ranges)
    stored = Stored(b"", "", 0, 100, 7, kept)
    tokens = [token for start, end in kept for token in range(start, end)]
    for row, token in enumerate(tokens):
        assert stored.place(token, token + 1) == 100 + 7 * row
    assert count_tokens(kept) == len(tokens)


def test_adding_and_removing_rewrites_nothing_else(store):
    store.add(map(new_chunk, range(5)))
    before = {path: path.read_bytes() for path in store.shards_folder.iterdir()}
    store.add(map(new_chunk, range(5, 8)))
    assert store.remove([key_of(1), key_of(6), key_of(99)]) == 2
    assert {path: path.read_bytes() for path in before} == before
    assert set(store.locate(list(map(key_of, range(8))))) == set(map(key_of, [0, 2, 3, 4, 5, 7]))
    stat = store.stat()
    assert stat.dead_bytes == whole(1) + whole(6)
    assert stat.shard_bytes == sum(files_of(store).values())
    assert stat.chunks == 6


def test_shards_grow_up_to_their_size(tmp_path):
    with make_store(tmp_path / "store", shard_bytes=10_000) as store:
        store.add(map(new_chunk, range(40)))
        sizes = list(files_of(store).values())
        assert len(sizes) > 3
        assert max(sizes) <= 10_000
        store.add([new_chunk(100)])
        assert wrong_chunks(store) == []


def test_gc_gives_dead_bytes_back_and_joins_small_shards(tmp_path):
    with make_store(tmp_path / "store", shard_bytes=10_000) as store:
        for number in range(12):
            store.add([new_chunk(number)])
        store.remove(map(key_of, range(0, 12, 2)))
        orphans = [f"{'0' * 32}.safetensors", f"{'1' * 32}.safetensors.tmp"]
        for name in orphans:
            (store.shards_folder / name).write_bytes(b"1234")
        before = sum(files_of(store).values())
        done = store.gc()
        assert (done.orphans, done.compacted) == (2, 12)
        files, stat = files_of(store), store.stat()
        assert before - sum(files.values()) == done.freed_bytes
        assert stat.dead_bytes == 0
        assert stat.shards == len(files) <= 2
        assert wrong_chunks(store) == []
        assert len(store.keys()) == 6
        again = store.gc()
        assert again.freed_bytes == 0
        assert files_of(store) == files


def test_gc_leaves_full_shards_alone(tmp_path):
    with make_store(tmp_path / "store", shard_bytes=8_000) as store:
        store.add(map(new_chunk, range(30)))
        before = files_of(store)
        store.remove([key_of(0)])
        store.gc()
        assert len(set(before) & set(files_of(store))) >= len(before) - 2


def test_everything_is_there_after_reopening(tmp_path):
    with make_store(tmp_path / "store") as store:
        store.add(map(new_chunk, range(5)))
        places = store.locate(store.keys())
    with Store.open(tmp_path / "store", FINGERPRINT) as store:
        assert store.layout == LAYOUT
        assert store.locate(store.keys()) == places
        assert store.verify().damaged == ()


def test_no_lookup_goes_through_all_chunks(store):
    store.add([new_chunk(number) for number in range(4)])
    connection = store._database.connection()
    queries = []
    connection.set_trace_callback(queries.append)
    store.locate([key_of(1)])
    store.locate([key_of(1)], checksums=True)
    store.touch([key_of(1)])
    store.remove([key_of(2)])
    store.add([new_chunk(5)])
    connection.set_trace_callback(None)
    plans = [
        step
        for query in queries
        if query.split()[0] in ("SELECT", "UPDATE", "DELETE")
        for *_, step in connection.execute(f"EXPLAIN QUERY PLAN {query}")
    ]
    assert any(step.startswith("SEARCH chunks") for step in plans)
    assert not [step for step in plans if step.startswith(("SCAN chunks", "SCAN details"))]


def test_a_full_store_refuses_in_words_and_keeps_what_came_before(tmp_path):
    budget = 2 * HEADER_BYTES + whole(0) + whole(1) + 1000
    with make_store(tmp_path / "store", max_bytes=budget, shard_bytes=1 << 20) as store:
        store.add([new_chunk(0)])
        store.add([new_chunk(1)])
        held = sum(files_of(store).values())
        with pytest.raises(StoreFullError) as refused:
            store.add([new_chunk(0), new_chunk(3)])
        for part in (
            f"have {held:,} bytes", f"needs {HEADER_BYTES + whole(3):,}", f"is {budget:,}",
            "store.max_gib", "store.when_full=evict",
        ):  # fmt: skip
            assert part in str(refused.value)
        assert "cache gc" not in str(refused.value)
        store.remove([key_of(1)])
        with pytest.raises(StoreFullError, match=rf"cache gc` \({whole(1):,} bytes are dead\)"):
            store.add([new_chunk(3)])
        assert store.keys() == [key_of(0)]
        store.gc()
        store.add([new_chunk(3)])
        assert sum(files_of(store).values()) <= budget
        assert wrong_chunks(store) == []


def test_the_least_recently_used_give_way(tmp_path):
    budget = 60_000
    with make_store(tmp_path / "store", max_bytes=budget, when_full="evict") as store:
        for number in range(10):
            store.add([new_chunk(number)])
        for number in range(10, 60):
            store.touch([key_of(0), key_of(5)])
            store.add([new_chunk(number)])
            assert sum(files_of(store).values()) <= budget
        left = set(store.keys())
        assert {key_of(number) for number in (0, 5, 57, 58, 59)} <= left
        assert not {key_of(number) for number in (1, 2, 3, 4, 6)} & left
        assert wrong_chunks(store) == []


def test_the_order_of_uses_decides_and_outlives_closing(tmp_path):
    folder = tmp_path / "store"
    options = {"max_bytes": 1 << 20, "when_full": "evict"}
    with make_store(folder, **options) as store:
        store.add(map(new_chunk, range(4)))
        store.touch([key_of(2), key_of(0), key_of(2)])
    with Store.open(folder) as store:
        order = [key for key, _ in store._index.least_recently_used(1 << 60)]
        assert order == [key_of(number) for number in (1, 3, 0, 2)]


def test_chunks_of_one_call_do_not_evict_each_other(tmp_path):
    budget = 30_000
    with make_store(tmp_path / "store", max_bytes=budget, when_full="evict") as store:
        store.add([new_chunk(100), new_chunk(101)])
        with pytest.raises(StoreFullError, match="too small for what is added at once"):
            store.add(map(new_chunk, range(50)))
        left = store.keys()
        assert left
        assert {key_of(number) for number in range(len(left))} == set(left)
        assert sum(files_of(store).values()) <= budget
        before = set(left)
        with pytest.raises(StoreFullError):
            store.add([NewChunk(range(2000), [(0, 2000)], torch.zeros(2000, 64).byte())])
        assert set(store.keys()) == before


@pytest.mark.parametrize(
    "chunk",
    [
        NewChunk([1, 2], [], torch.zeros(0, 64).byte()),
        NewChunk([1, 2], [(0, 3)], torch.zeros(3, 64).byte()),
        NewChunk([1, 2], [(1, 1)], torch.zeros(0, 64).byte()),
        NewChunk([1, 2, 3], [(0, 2), (1, 3)], torch.zeros(3, 64).byte()),
        NewChunk([1, 2, 3], [(2, 3), (0, 1)], torch.zeros(2, 64).byte()),
        NewChunk([1, 2], [(0, 2)], torch.zeros(2, 63).byte()),
        NewChunk([1, 2], [(0, 2)], torch.zeros(2, 64)),
    ],
)
def test_records_that_do_not_belong_to_the_ranges_are_refused(store, chunk):
    with pytest.raises(ValueError, match="ranges"):
        store.add([new_chunk(1), chunk])
    assert store.keys() == [key_of(1)]


def test_an_error_of_the_source_keeps_the_chunks_before_it(store):
    def source():
        yield new_chunk(1)
        raise RuntimeError("model")

    with pytest.raises(RuntimeError):
        store.add(source())
    assert store.keys() == [key_of(1)]
    assert wrong_chunks(store) == []


def test_a_store_is_not_made_twice(store):
    with pytest.raises(StoreExistsError, match="open it"):
        make_store(store.folder)


def test_a_second_writer_is_refused_at_once_or_waits(tmp_path):
    with make_store(tmp_path / "store") as store, Store.open(tmp_path / "store") as second:
        third = Store.open(tmp_path / "store", wait_seconds=20)
        begun, go_on = threading.Event(), threading.Event()

        def slow():
            yield new_chunk(1)
            begun.set()
            go_on.wait(20)

        threads = [threading.Thread(target=store.add, args=(slow(),))]
        threads[0].start()
        begun.wait(20)
        for change in (second.gc, second.verify, lambda: second.add([new_chunk(2)])):
            with pytest.raises(StoreBusyError, match=r"process \d+ is writing"):
                change()
        assert second.locate([key_of(1)]) == {}
        threads.append(threading.Thread(target=third.add, args=([new_chunk(3)],)))
        threads[1].start()
        go_on.set()
        for thread in threads:
            thread.join()
        assert set(second.keys()) == {key_of(1), key_of(3)}
        third.close()


def _read_all(folder, ready, stop, wrong):
    """A reader process: looks up and reads until told to stop; counts what is not right."""
    with Store.open(folder, FINGERPRINT) as store:
        ready.set()
        while not stop.is_set():
            for number in range(20):
                wrong.value += not _reads_right(store, number)


def _reads_right(store, number):
    for _ in range(20):
        stored = store.locate([key_of(number)]).get(key_of(number))
        if stored is None:
            return False
        try:
            return read_back(store, stored) == records_of(key_of(number), stored.ranges)
        except ValueError:
            continue
    return False


def test_readers_in_processes_and_threads_go_on_while_one_writes(tmp_path):
    folder = tmp_path / "store"
    with make_store(folder) as store:
        store.add(map(new_chunk, range(20)))
    # Forked while no store is open: SQLite's connections must not be shared.
    context = multiprocessing.get_context("fork")
    stop, wrong = context.Event(), context.Value("i", 0)
    readers, ready = [], []
    for kind in (context.Process, context.Process, threading.Thread):
        ready.append(context.Event())
        readers.append(kind(target=_read_all, args=(folder, ready[-1], stop, wrong)))
        readers[-1].start()
    with Store.open(folder, shard_bytes=10_000) as store:
        assert all(event.wait(60) for event in ready)
        for turn in range(8):
            store.add(map(new_chunk, range(100 + 5 * turn, 105 + 5 * turn)))
            store.remove(map(key_of, range(100 + 5 * turn, 103 + 5 * turn)))
            store.gc()
        stop.set()
        for reader in readers:
            reader.join()
        assert wrong.value == 0


def test_what_a_thread_remembers_follows_every_change(tmp_path):
    chunks = [new_chunk(number) for number in range(3)]
    keys = [key_of(number) for number in range(3)]
    with make_store(tmp_path) as store, Store.open(store.folder, FINGERPRINT) as other:
        store.add(chunks)
        first = store.locate(keys)
        assert store.locate(keys) == other.locate(keys) == first
        other.remove(keys[:1])
        assert store.locate(keys).keys() == other.locate(keys).keys() == set(keys[1:])
        store.gc()
        moved = other.locate(keys)
        assert {one.shard for one in moved.values()}.isdisjoint(s.shard for s in first.values())
        assert store.locate(keys) == moved
        store.mark_lost(keys[1:2])
        assert store.locate(keys).keys() == other.locate(keys).keys() == {keys[2]}
