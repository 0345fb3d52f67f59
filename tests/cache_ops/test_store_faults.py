"""Whatever is wrong with a store: a named error or a repair, never a wrong answer."""

import shutil
import sqlite3
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storing import (
    FINGERPRINT,
    LAYOUT,
    files_of,
    flip,
    key_of,
    make_store,
    new_chunk,
    read_back,
    records_of,
    tokens_of,
    wrong_chunks,
)

from cache_ops.store import Store
from cache_ops.store.errors import (
    DiskFullError,
    ForeignStoreError,
    IndexDamagedError,
    NotAStoreError,
    ShardDamagedError,
    StoreBusyError,
    StoreError,
    StoreReadOnlyError,
    StoreWriteError,
)
from cache_ops.store.index import _checksum, _lost_checksum
from cache_ops.store.lock import writer_lock
from cache_ops.store.shards import HEADER_BYTES, list_shards, open_shard
from cache_ops.store.stored import pack_ranges


@pytest.fixture
def folder(tmp_path):
    """A store of five chunks in one shard, closed."""
    with make_store(tmp_path / "store") as store:
        store.add(map(new_chunk, range(5)))
    return tmp_path / "store"


@contextmanager
def mounted(folder, *options):
    """A file system at `folder` for the time being."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, folder], capture_output=True)
    if done.returncode:
        pytest.skip(f"no right to mount: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def only_shard(store):
    (name,) = files_of(store)
    return store.shards_folder / name


def change_index(folder, statement, *values):
    with closing(sqlite3.connect(folder / "index.sqlite")) as index, index:
        assert index.execute(statement, values).rowcount


def test_every_error_is_the_users_to_mend():
    classes = [StoreError]
    for one in classes:
        classes.extend(one.__subclasses__())
    assert len(classes) == 11
    assert all(one.is_user_error for one in classes)


# Not the store that was meant.


def test_a_folder_that_is_no_store(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NotAStoreError, match="coinrag cache build"):
            Store.open(folder)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as other:
        other.execute("CREATE TABLE something (x)")
    with pytest.raises(NotAStoreError, match="not a store's index"):
        Store.open(tmp_path)


def test_a_store_cannot_be_made_under_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="no store can be made"):
        make_store(tmp_path / "file" / "store")


def test_a_store_without_its_shards_is_not_emptied(folder):
    shutil.move(folder / "shards", folder / "away")
    with pytest.raises(NotAStoreError, match="put it back"):
        Store.open(folder)


@pytest.mark.parametrize("part", ["weights", "rope", "tokenizer", "chunking", "dtype"])
def test_a_foreign_fingerprint_names_the_part(folder, part):
    with pytest.raises(ForeignStoreError) as refused:
        Store.open(folder, replace(FINGERPRINT, **{part: "other"}))
    assert f"- {part}: the store has {getattr(FINGERPRINT, part)}, this run other; " in str(
        refused.value
    )
    assert len(refused.value.differences) == 1
    Store.open(folder, FINGERPRINT).close()


def test_a_foreign_format_version_is_refused_even_for_upkeep(folder):
    with closing(sqlite3.connect(folder / "index.sqlite")) as index:
        index.execute("PRAGMA user_version = 7")
    with pytest.raises(ForeignStoreError, match=r"format: the store has version 7, this run"):
        Store.open(folder)


def test_a_path_that_holds_something_else_is_told(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotAStoreError, match="is a file"):
        Store.open(tmp_path / "file")
    (tmp_path / "odd" / "index.sqlite").mkdir(parents=True)
    with pytest.raises(NotAStoreError, match=r"index\.sqlite is a folder"):
        Store.open(tmp_path / "odd")
    with pytest.raises(StoreError, match="no store can be made"):
        make_store(tmp_path / "odd")


# The index.


@pytest.mark.parametrize("content", [b"no database at all" * 300, b"", b"SQLite format 3\0" * 100])
def test_an_index_that_is_no_database(folder, content):
    (folder / "index.sqlite").write_bytes(content)
    with pytest.raises(StoreError, match="build"):
        Store.open(folder)


def test_a_truncated_index(folder):
    data = (folder / "index.sqlite").read_bytes()
    (folder / "index.sqlite").write_bytes(data[: len(data) // 2])
    with (
        pytest.raises(IndexDamagedError, match="build the store anew"),
        Store.open(folder) as store,
    ):
        store.verify()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(where=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
def test_a_byte_of_the_index_changed_never_gives_wrong_records(folder, where, bits):
    index = folder / "index.sqlite"
    data = bytearray(index.read_bytes())
    sound = bytes(data)
    data[int(where * len(data))] ^= bits
    index.write_bytes(data)
    try:
        with Store.open(folder, FINGERPRINT) as store:
            found = store.locate([key_of(number) for number in range(5)], checksums=True)
            for key, stored in found.items():
                assert key in {key_of(number) for number in range(5)}
                assert read_back(store, stored) == records_of(key, stored.ranges)
            tokens = store.token_ids(list(map(key_of, range(5))))
            assert all(tokens[key_of(n)] == tokens_of(n) for n in range(5) if key_of(n) in tokens)
    except StoreError:
        pass
    finally:
        for path in folder.glob("index.sqlite*"):
            path.unlink()
        index.write_bytes(sound)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE chunks SET offset = offset + 64 WHERE key = ?",
        "UPDATE chunks SET ranges = x'0000000001000000' WHERE key = ?",
        "UPDATE chunks SET ranges = x'000000' WHERE key = ?",
        "UPDATE chunks SET shard = 99 WHERE key = ?",
        "DELETE FROM details WHERE chunk = (SELECT id FROM chunks WHERE key = ?)",
    ],
)
def test_a_damaged_entry_counts_as_missing_and_verify_names_it(folder, statement):
    change_index(folder, statement, key_of(2))
    with Store.open(folder) as store:
        assert key_of(2) not in store.locate(store.keys(), checksums=True)
        (damaged,) = store.verify().damaged
        assert damaged.key == key_of(2)
        assert "index" in damaged.why
        assert key_of(2) in store.lost()
        store.add([new_chunk(2)])
        assert store.verify().damaged == ()
        assert wrong_chunks(store) == []


def _ranges(*places):
    return pack_ranges(tuple(zip(places[::2], places[1::2], strict=True)))


@pytest.mark.parametrize(
    ("offset", "ranges"),
    [
        (HEADER_BYTES - 64, _ranges(0, 1)),
        (-64, _ranges(0, 1)),
        (1 << 40, _ranges(0, 1)),
        (HEADER_BYTES, _ranges(0, 1 << 31)),
        (HEADER_BYTES, _ranges(4, 4)),
        (HEADER_BYTES, _ranges(5, 4)),
        (HEADER_BYTES, _ranges(2, 3, 0, 1)),
        (HEADER_BYTES, _ranges(0, 3, 2, 4)),
        (HEADER_BYTES, b""),
    ],
)
@pytest.mark.parametrize("own_count", [True, False])
def test_a_crafted_entry_counts_as_damaged(folder, offset, ranges, own_count):
    with Store.open(folder) as store:
        (stored,) = store.locate([key_of(2)]).values()
    count = sum(end - start for start, end in struct.iter_unpack("<II", ranges))
    change_index(
        folder,
        "UPDATE chunks SET offset = ?, ranges = ?, kept = ?, checksum = ? WHERE key = ?",
        offset,
        ranges,
        count if own_count else 1,
        _checksum(key_of(2), stored.shard, stored.shard_bytes, offset, ranges),
        key_of(2),
    )
    with Store.open(folder) as store:
        assert key_of(2) not in store.locate(store.keys())
        assert [damaged.key for damaged in store.verify().damaged] == [key_of(2)]
        store.add([new_chunk(2)])
        assert wrong_chunks(store) == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE shards SET name = x'00'",
        "UPDATE shards SET bytes = 'many'",
        "UPDATE chunks SET kept = 'some'",
        "UPDATE chunks SET used = 'never'",
        "UPDATE chunks SET key = 'key' || id",
        "UPDATE chunks SET ranges = 'text'",
        "UPDATE chunks SET ranges = 7, shard = NULL",
        "UPDATE chunks SET checksum = 'text', shard = NULL",
        "UPDATE details SET checksums = 'text'",
        "UPDATE details SET token_ids = 7",
        "UPDATE meta SET value = '{}'",
        """UPDATE meta SET value = replace(value, '"layers": 2', '"layers": "2"')""",
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.verify(),
        lambda store: (store.stat(), store.lost(), store.token_ids(store.keys())),
        lambda store: wrong_chunks(store),
        lambda store: store.add([new_chunk(1), new_chunk(7)]),
        lambda store: store.gc(),
    ],
)
def test_values_of_another_type_are_damage(folder, statement, use):
    change_index(folder, statement)
    with suppress(StoreError), Store.open(folder) as store:
        use(store)


@pytest.mark.parametrize("ranges", [b"text", b"", _ranges(3, 1), "text"])
def test_crafted_ranges_of_a_lost_chunk_are_unknown(folder, ranges):
    checksum = _lost_checksum(key_of(2), ranges) if isinstance(ranges, bytes) else 1
    change_index(
        folder,
        "UPDATE chunks SET shard = NULL, ranges = ?, checksum = ? WHERE key = ?",
        ranges,
        checksum,
        key_of(2),
    )
    with Store.open(folder) as store:
        assert store.lost() == {key_of(2): ()}


@pytest.mark.parametrize("token_ids", [b"1234", b"odd", "text"])
def test_damaged_tokens_are_damage(folder, token_ids):
    query = "UPDATE details SET token_ids = ? WHERE chunk = (SELECT id FROM chunks WHERE key = ?)"
    change_index(folder, query, token_ids, key_of(2))
    with Store.open(folder) as store:
        (damaged,) = store.verify().damaged
        assert (damaged.key, damaged.why) == (key_of(2), "its tokens in the index are damaged")
        assert store.lost().keys() == {key_of(2)}
        assert store.token_ids([key_of(2)]) == {}
        store.add([new_chunk(2)])
        assert store.verify().damaged == ()


def test_shards_of_an_index_that_is_gone_are_not_deleted_silently(folder, caplog):
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    size = sum(path.stat().st_size for path in (folder / "shards").iterdir())
    with make_store(folder) as store:
        store.add([new_chunk(1)])
        assert wrong_chunks(store) == []
    assert f"deleting 1 shards ({size} bytes) that the index does not name" in caplog.text


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "..", "", f"{'0' * 32}.bin"])
def test_a_shard_name_is_never_a_path(folder, name):
    change_index(folder, "UPDATE shards SET name = ?", name)
    with Store.open(folder) as store:
        for stored in store.locate(store.keys()).values():
            with pytest.raises(ShardDamagedError, match="a name that no shard has"):
                open_shard(store.shards_folder, stored.shard, stored.shard_bytes)
        assert len(store.verify().damaged) == 5


# Shards.


def _nest(path):
    """A header that JSON's parser gives up on."""
    with path.open("r+b") as shard:
        shard.seek(8)
        shard.write(b"[" * (HEADER_BYTES - 8))


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.unlink(), "is missing"),
        (_truncate, r"has [\d,]+ bytes instead of [\d,]+"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
        (lambda path: flip(path, 1), "damaged header"),
        (lambda path: flip(path, 9), "damaged header"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), "cannot be opened"),
        (lambda path: (path.unlink(), path.mkdir()), "instead of|cannot be"),
        (_nest, "damaged header"),
    ],
)
def test_a_shard_that_is_not_whole_names_the_chunks_it_held(folder, damage, why):
    with Store.open(folder) as store:
        shard = only_shard(store)
        damage(shard)
        (stored, *_) = store.locate(store.keys()).values()
        with pytest.raises(ShardDamagedError, match=why) as refused:
            open_shard(store.shards_folder, stored.shard, stored.shard_bytes)
        assert refused.value.name == shard.name
        assert "coinrag cache verify" in str(refused.value)
        assert set(store.unreadable(store.locate(store.keys()))) == set(store.keys())
        found = store.verify()
        assert {(chunk.key, chunk.tokens) for chunk in found.damaged} == {
            (key_of(number), len(tokens_of(number))) for number in range(5)
        }
        assert {chunk.shard for chunk in found.damaged} == {shard.name}
        assert store.keys() == []


def test_flipped_records_are_named_lost_and_computed_again_from_the_store_alone(folder):
    with Store.open(folder) as store:
        places = store.locate(store.keys())
        stored = places[key_of(3)]
        flip(only_shard(store), stored.offset + 5 * LAYOUT.token_bytes + 3)
        assert wrong_chunks(store) == [key_of(3).hex()]
        (damaged,) = store.verify().damaged
        assert (damaged.key, damaged.why) == (key_of(3), "its records are damaged")
        assert key_of(3) not in store.locate(list(places))
        assert store.lost() == {key_of(3): ((0, len(tokens_of(3))),)}
    with Store.open(folder) as store:
        (key,) = store.lost()
        assert store.token_ids([key]) == {key: tokens_of(3)}
        store.add([new_chunk(3)])
        assert store.lost() == {}
        assert store.verify().damaged == ()
        assert wrong_chunks(store) == []


def test_checksums_tell_of_each_record(folder):
    with Store.open(folder) as store:
        (stored,) = store.locate([key_of(3)], checksums=True).values()
        flip(only_shard(store), stored.offset + 5 * LAYOUT.token_bytes)
        with only_shard(store).open("rb") as shard:
            for start, end, intact in [(0, 5, True), (6, 8, True), (5, 6, False), (3, 7, False)]:
                shard.seek(stored.place(start, end))
                records = memoryview(shard.read((end - start) * LAYOUT.token_bytes))
                assert stored.intact(start, end, records) is intact


def test_compaction_does_not_carry_damage_on(folder):
    with Store.open(folder) as store:
        flip(only_shard(store), store.locate([key_of(3)])[key_of(3)].offset)
        store.remove([key_of(0)])
        assert [chunk.key for chunk in store.gc().damaged] == [key_of(3)]
        assert set(store.keys()) == {key_of(1), key_of(2), key_of(4)}
        assert wrong_chunks(store) == []
        assert files_of(store).keys() == {
            stored.shard for stored in store.locate(store.keys()).values()
        }


def test_damage_met_while_reading_can_be_noted(folder):
    with Store.open(folder) as store:
        store.mark_lost([key_of(3)])
        assert store.locate([key_of(3)]) == {}
        assert set(store.lost()) == {key_of(3)}
        assert store.add([new_chunk(3)]) == 1


# The disk.


def test_a_read_only_folder_is_read_and_not_written(folder):
    with mounted(folder, "-o", "bind", folder):
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        with Store.open(folder, FINGERPRINT) as store:
            assert not store.writable
            assert wrong_chunks(store) == []
            assert store.verify().chunks == 5
            store.touch([key_of(1)])
            for change in (lambda: store.add([new_chunk(9)]), lambda: store.remove([]), store.gc):
                with pytest.raises(StoreReadOnlyError, match="read-only folder"):
                    change()
        with pytest.raises(StoreError, match="no store can be made"):
            make_store(folder / "inner")


@pytest.mark.parametrize("with_shm", [True, False])
def test_a_read_only_folder_of_a_store_not_closed(tmp_path, with_shm):
    store = make_store(tmp_path / "store")
    store.add([new_chunk(1)])
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "store", copy)
    store.close()
    assert (copy / "index.sqlite-wal").stat().st_size
    if not with_shm:
        (copy / "index.sqlite-shm").unlink()
    with mounted(copy, "-o", "bind", copy):
        subprocess.run(["mount", "-o", "remount,bind,ro", copy], check=True)
        if with_shm:
            with Store.open(copy) as store:
                assert store.keys() == [key_of(1)]
                assert wrong_chunks(store) == []
        else:
            with pytest.raises(StoreReadOnlyError, match="was not closed"):
                Store.open(copy)
    with Store.open(copy) as store:
        assert store.keys() == [key_of(1)]


def _fill(folder, committed):
    """Makes a store and adds chunks, each noted, until something gives out."""
    with make_store(folder) as store:
        for number in range(1000):
            try:
                store.add([new_chunk(number)])
            except DiskFullError:
                assert set(store.keys()) == committed
                assert wrong_chunks(store) == []
                raise
            committed.add(key_of(number))


@pytest.mark.parametrize("room", [*range(60, 200, 12), 300])
def test_a_full_disk_leaves_what_was_committed(tmp_path, room):
    disk = tmp_path / "disk"
    with mounted(disk, "-t", "tmpfs", "-o", f"size={room}k", "tmpfs"):
        committed = set()
        with pytest.raises(DiskFullError, match="free some space"):
            _fill(disk / "store", committed)
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        if not (disk / "store" / "index.sqlite").exists():
            make_store(disk / "store").close()
        with Store.open(disk / "store") as store:
            assert set(store.keys()) == committed
            assert store.verify().damaged == ()
            store.add(map(new_chunk, range(1000, 1010)))
            store.gc()
            assert wrong_chunks(store) == []
            assert len(files_of(store)) == 1


def _in_place_of(path):
    shutil.rmtree(path)
    path.write_text("")


def _as_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: shutil.rmtree(folder / "shards"),
        lambda folder: _in_place_of(folder / "shards"),
        lambda folder: _as_folder(folder / "writer.lock"),
    ],
)
def test_what_the_system_refuses_is_named_and_close_only_warns(folder, damage, caplog):
    with Store.open(folder) as store:
        damage(folder)
        changes = (
            lambda: store.add([new_chunk(9)]),
            lambda: store.remove([key_of(1)]),
            lambda: store.mark_lost([key_of(1)]),
            store.gc,
            store.verify,
        )
        for change in changes:
            with pytest.raises(StoreWriteError, match="cannot be written"):
                change()
        store.touch([key_of(1)])
    assert "the last uses of chunks were not noted" in caplog.text


def test_what_is_named_like_a_shard_and_is_none_stays(folder):
    outside = folder / "outside"
    outside.write_text("")
    with Store.open(folder) as store:
        names = [f"{digit * 32}.safetensors" for digit in "012"]
        no_shards = {store.shards_folder / name for name in (*names[:2], f"{names[2]}.tmp")}
        (store.shards_folder / names[0]).mkdir()
        (store.shards_folder / names[1]).symlink_to(outside)
        (store.shards_folder / f"{names[2]}.tmp").symlink_to("nowhere")
        store.add([new_chunk(9)])
        assert store.gc().orphans == 0
        assert no_shards <= set(store.shards_folder.iterdir())
        assert len(list_shards(store.shards_folder)) == 1
        assert wrong_chunks(store) == []


def test_a_writer_is_waited_for_also_at_creation(tmp_path):
    (tmp_path / "shards").mkdir()
    with ThreadPoolExecutor(1) as pool:
        with writer_lock(tmp_path, 0.0):
            made = pool.submit(lambda: make_store(tmp_path, wait_seconds=20).close())
            with pytest.raises(TimeoutError):
                made.result(0.2)
        made.result()


def test_a_holder_that_has_not_said_its_number_yet(tmp_path):
    with writer_lock(tmp_path, 0.0):
        (tmp_path / "writer.lock").write_text("")
        with (
            pytest.raises(StoreBusyError, match="another process is writing"),
            writer_lock(tmp_path, 0.0),
        ):
            pass


def test_a_full_disk_during_gc_leaves_everything(tmp_path):
    disk = tmp_path / "disk"
    with mounted(disk, "-t", "tmpfs", "-o", "size=900k", "tmpfs"):
        store = make_store(disk / "store", shard_bytes=1 << 20)
        store.add(map(new_chunk, range(80)))
        store.remove([key_of(0)])
        filling = disk / "filling"
        with pytest.raises(OSError, match="No space"):
            filling.write_bytes(bytes(1 << 20))
        before = set(store.keys())
        with pytest.raises(DiskFullError):
            store.gc()
        assert set(store.keys()) == before
        assert wrong_chunks(store) == []
        filling.unlink()
        store.gc()
        assert wrong_chunks(store) == []
        store.close()


def test_a_crash_between_shard_and_index_leaves_an_orphan_that_goes(folder, monkeypatch):
    with Store.open(folder) as store:
        before = files_of(store)
        with monkeypatch.context() as patch:
            patch.setattr("cache_ops.store.index.Index.put", _fail)
            with pytest.raises(sqlite3.OperationalError):
                store.add([new_chunk(9)])
        assert len(files_of(store)) == 2
        assert not store.locate([key_of(9)])
        store.remove([])
        assert files_of(store) == before


def _fail(*_):
    raise sqlite3.OperationalError("killed")


def test_a_creation_that_was_cut_short_is_taken_up(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "index.sqlite.tmp").write_bytes(b"half")
    with make_store(tmp_path) as store:
        store.add([new_chunk(1)])
    assert not list(tmp_path.glob("*.tmp*"))


def test_a_locked_index_is_named(folder, monkeypatch):
    monkeypatch.setattr("cache_ops.store.database._BUSY_SECONDS", 0.05)
    with closing(sqlite3.connect(folder / "index.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with Store.open(folder) as store, pytest.raises(StoreBusyError, match="locked"):
            store.add([new_chunk(9)])


def test_the_header_page_is_the_first(folder):
    with Store.open(folder) as store:
        assert min(stored.offset for stored in store.locate(store.keys()).values()) == HEADER_BYTES
