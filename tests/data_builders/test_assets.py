import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from data_builders.assets import AssetStore, Needed, content_key
from recipes.errors import UserError

KEYS = st.binary(min_size=1, max_size=3)
# Whatever SQLite and UTF-8 take, NUL and non-characters too.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PARTS = st.lists(st.text(max_size=3), max_size=4)
BATCH = 40
# Batches of one value each, so that a torn one would show.
WRITER = f"""
import sys
from pathlib import Path
from data_builders.assets import AssetStore
with AssetStore(Path(sys.argv[1])) as store:
    number = int(sys.argv[2])
    while True:
        batch = number.to_bytes(8, "big")
        store.put((batch + bytes([at]), batch * 500) for at in range({BATCH}))
        print(number, flush=True)
        number += 1
"""


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(KEYS, st.binary(max_size=8)),
    st.lists(st.tuples(KEYS, TEXTS), max_size=30),
    st.integers(1, 7),
)
def test_missing_is_what_is_asked_for_and_not_there(tmp_path_factory, there, asked, size):
    with AssetStore(tmp_path_factory.mktemp("assets") / "store.sqlite") as store:
        store.put(there.items())
        first: dict[bytes, str] = {}
        for key, payload in asked:
            first.setdefault(key, payload)
        absent = sorted(item for item in first.items() if item[0] not in there)
        assert store.need(asked) == Needed(len(first), len(absent))
        batches = list(store.missing(size))
        assert [item for batch in batches for item in batch] == absent
        assert all(len(batch) == size for batch in batches[:-1])
        assert store.get(there) == there
        assert store.need([]) == Needed(0, 0)
        assert list(store.missing(size)) == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(KEYS, st.binary(max_size=6)), max_size=10), max_size=5))
def test_the_first_value_of_a_key_stays(tmp_path_factory, batches):
    path = tmp_path_factory.mktemp("assets") / "store.sqlite"
    expected: dict[bytes, bytes] = {}
    for batch in batches:
        with AssetStore(path) as store:
            store.put(batch)
        for key, value in batch:
            expected.setdefault(key, value)
    with AssetStore(path) as store:
        assert store.get(expected) == expected
        assert store.get([*expected, *expected]) == expected


def test_more_keys_than_a_page(tmp_path):
    items = {number.to_bytes(4, "big"): str(number).encode() for number in range(1201)}
    with AssetStore(tmp_path / "store.sqlite") as store:
        store.put(items.items())
        assert store.get(items) == items
        with pytest.raises(KeyError, match="ff00"):
            store.get([*items, b"\xff\x00"])


def test_missing_goes_on_while_batches_are_put(tmp_path):
    items = [(number.to_bytes(4, "big"), str(number)) for number in range(100)]
    with AssetStore(tmp_path / "store.sqlite") as store:
        store.need(items)
        seen = []
        for batch in store.missing(7):
            seen += batch
            store.put((key, payload.encode()) for key, payload in batch)
        assert seen == items
        assert store.need(items) == Needed(100, 0)


def test_a_batch_that_fails_is_not_kept(tmp_path):
    def breaking():
        yield b"a", b"1"
        raise RuntimeError("halfway")

    with AssetStore(tmp_path / "store.sqlite") as store:
        with pytest.raises(RuntimeError, match="halfway"):
            store.put(breaking())
        assert store.need([(b"a", "")]) == Needed(1, 1)


def test_two_stores_share_a_file(tmp_path):
    path = tmp_path / "store.sqlite"
    with AssetStore(path) as one, AssetStore(path) as other:
        one.need([(b"a", "mine"), (b"b", "mine")])
        other.put([(b"a", b"theirs")])
        one.put([(b"a", b"mine"), (b"b", b"mine")])
        assert one.get([b"a", b"b"]) == other.get([b"a", b"b"]) == {b"a": b"theirs", b"b": b"mine"}


def test_a_writer_killed_at_any_moment_leaves_whole_batches(tmp_path):
    path = tmp_path / "store.sqlite"
    moments = random.Random(0)
    said = 0
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(said)], stdout=subprocess.PIPE, text=True
        )
        lines = [process.stdout.readline()]
        time.sleep(moments.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        told = [int(line) for line in lines if line.endswith("\n")]
        said = told[-1] + 1
        with AssetStore(path) as store:
            assert rows_of_whole_batches(path) >= said
            store.get(
                n.to_bytes(8, "big") + bytes([at]) for n in range(said) for at in range(BATCH)
            )


def rows_of_whole_batches(path: Path) -> int:
    """How many batches there are, all of them whole."""
    db = sqlite3.connect(path)
    rows = db.execute(
        "SELECT substr(key, 1, 8), count(*), count(DISTINCT value), min(length(value)) "
        "FROM assets GROUP BY 1"
    ).fetchall()
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    # Four bytes of checksum stand before each value.
    assert {row[1:] for row in rows} == {(BATCH, 1, 4004)}
    return len(rows)


@given(PARTS, PARTS)
def test_other_parts_have_another_key(one, other):
    assert (content_key(*one) == content_key(*other)) == (one == other)


def test_a_value_that_has_changed_on_disk_is_named_and_never_given(tmp_path):
    path = tmp_path / "store.sqlite"
    with AssetStore(path) as store:
        store.put([(b"a", b"the value of a"), (b"b", b"the value of b")])
    path.write_bytes(path.read_bytes().replace(b"the value of a", b"tho value of a"))
    with AssetStore(path) as store:
        assert store.get([b"b"]) == {b"b": b"the value of b"}
        with pytest.raises(UserError, match=r"store\.sqlite: damaged; delete it"):
            store.get([b"a", b"b"])
