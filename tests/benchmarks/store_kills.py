"""Kills of a process that writes to a store, at random moments, and what the store is worth then.

    python tests/benchmarks/store_kills.py [--kills N] [--seed N]

A child adds, removes, uses and collects chunks without end; every second one in a store with a byte
budget, where adding evicts. It tells over a pipe what it begins and what is there when that is
done. After each SIGKILL: every chunk that was committed reads back bit for bit (an eviction under
way may have taken the least recently used ones and no others), nothing is visible that was not
begun, and after `gc` no file is left that the index does not name. Prints one JSON object.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

# The folder of the tests' shared helpers, for a run as a script.
sys.path.insert(0, str(Path(__file__).parents[1]))

from storing import FINGERPRINT, files_of, key_of, make_store, new_chunk, wrong_chunks

from cache_ops.store import Store

BUDGET_BYTES = 120_000
SHARD_BYTES = 20_000
MOST_SECONDS = 0.4


@dataclass
class Known:
    """What the parent knows from the pipe, by chunk number."""

    present: list[int] = field(default_factory=list)
    """What was there after the last operation that was done, the least recently used first."""
    under_way: str = ""
    chunks: list[int] = field(default_factory=list)
    """Of the operation under way."""

    def take(self, line: str) -> None:
        """One line of the child: `begin` and an operation with its chunks, or `done`."""
        word, *numbers = line.split()
        chunks = list(map(int, numbers))
        if word == "done":
            self.under_way, self.chunks, self.present = "", [], chunks
        else:
            self.under_way, self.chunks = word, chunks


def run_kills(folder: Path, kills: int, seed: int) -> dict[str, object]:
    """Kills `kills` children, one after another, and checks the store after each.

    Raises:
        AssertionError: the store is not what it must be.
    """
    random = Random(seed)
    stores = [folder / "unbounded", folder / "bounded"]
    known = [Known(), Known()]
    for path in stores:
        make_store(path).close()
    killed: Counter[str] = Counter()
    figures: Counter[str] = Counter()
    for life in range(kills):
        which = life % 2
        _kill_one(stores[which], random, life, known[which], bounded=which == 1)
        operation = known[which].under_way or "between"
        killed[f"{operation} with eviction" if which and operation == "add" else operation] += 1
        figures.update(_check(stores[which], known[which], bounded=which == 1))
    return {"kills": kills, "killed_during": dict(killed), **figures}


def _kill_one(path: Path, random: Random, life: int, known: Known, *, bounded: bool) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        # Nothing of the parent's may run on in the child.
        try:
            _live(path, writer, life, list(known.present), bounded)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        first = pipe.readline()
        assert first == "alive\n", "the child could not open its store"
        time.sleep(random.random() * MOST_SECONDS)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself: an operation failed"
        lines = pipe.read().split("\n")
    # The last piece is a line that the kill cut short, or nothing.
    known.take("done " + " ".join(map(str, known.present)))
    for line in lines[:-1]:
        known.take(line)


def _live(path: Path, writer: int, life: int, present: list[int], bounded: bool) -> None:
    random = Random(life)
    options = {"max_bytes": BUDGET_BYTES, "when_full": "evict"} if bounded else {}
    new = (life + 1) * 100_000

    def say(word: str, chunks: list[int]) -> None:
        os.write(writer, f"{word} {' '.join(map(str, chunks))}\n".encode())

    with Store.open(path, FINGERPRINT, shard_bytes=SHARD_BYTES, **options) as store:
        os.write(writer, b"alive\n")
        operation = "use"
        while True:
            if operation == "add":
                chunks = list(range(new, new + random.randrange(1, 25)))
                new += len(chunks)
                say("add", chunks)
                store.add(map(new_chunk, chunks))
            elif operation == "remove":
                most = 30 if len(present) > 200 else 5
                chunks = random.sample(present, min(len(present), most))
                say("remove", chunks)
                store.remove(map(key_of, chunks))
            elif operation == "use":
                # All of them, so that the order is known whatever the last life came to.
                random.shuffle(present)
                say("use", [])
                store.touch(map(key_of, present))
                store.remove([])
            else:
                say("gc", [])
                store.gc()
            there = set(store.keys())
            in_order = present + chunks if operation == "add" else present
            present = [number for number in in_order if key_of(number) in there]
            say("done", present)
            operation = random.choices(["add", "remove", "use", "gc"], [6, 2, 1, 2])[0]


def _check(path: Path, known: Known, *, bounded: bool) -> dict[str, int]:
    with Store.open(path, FINGERPRINT) as store:
        orphans = len(files_of(store)) - store.stat().shards
        keys = set(store.keys())
        newest = known.chunks if known.under_way == "add" else []
        visible = [number for number in known.present + newest if key_of(number) in keys]
        assert len(visible) == len(keys), "a chunk is visible that was removed or never added"
        missing = {number for number in known.present if key_of(number) not in keys}
        if known.under_way == "remove":
            assert missing in (set(), set(known.chunks)), "a removal was done by halves"
        elif known.under_way == "add" and bounded:
            oldest = set(known.present[: len(missing)])
            assert missing == oldest, "others than the least recently used were evicted"
        else:
            assert not missing, f"{len(missing)} committed chunks are gone"
        for _ in range(2):
            assert wrong_chunks(store) == [], "a chunk does not read back"
            assert not store.verify().damaged
            assert not store.lost()
            assert set(store.keys()) == keys
            store.gc()
            shards = {stored.shard for stored in store.locate(store.keys()).values()}
            assert set(files_of(store)) == shards, "a file is left that the index does not name"
        known.present = visible
        return {"chunks_read_back": len(keys), "orphans_left_by_kills": orphans}


def main() -> None:
    """Runs as the module says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run_kills(Path(folder), arguments.kills, arguments.seed)
    print(json.dumps(result | {"seconds": round(time.perf_counter() - began, 1)}))


if __name__ == "__main__":
    main()
