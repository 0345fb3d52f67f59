"""Opening a store with many entries, and looking chunks up in it, cold and warm.

    python tests/benchmarks/store_index.py [--entries N] [--folder FOLDER]

The index is synthetic: entries of random keys, 512 tokens and four kept ranges of 30 tokens each,
in shards that do not exist. Cold means that the index file's pages were dropped from the page cache
(`posix_fadvise`) and the connection is new; the disk's own cache stays. Prints one JSON object.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np

# The folder of the tests' shared helpers, for a run as a script.
sys.path.insert(0, str(Path(__file__).parents[1]))

from storing import FINGERPRINT, LAYOUT, make_store

from cache_ops.store import Store
from cache_ops.store.database import INDEX, Database
from cache_ops.store.index import Index
from cache_ops.store.stored import Entry
from eval.environment import environment

CHUNK_TOKENS = 512
RANGES = ((10, 40), (100, 130), (200, 230), (400, 430))
CHUNKS_A_SHARD = 1000
COLD_TRIALS = 30
WARM_LOOKUPS = 20_000
BATCH_KEYS = 5


def keys_of(entries: int) -> Iterator[bytes]:
    """Random keys, the same ones each time."""
    random = Random(0)
    return (random.randbytes(32) for _ in range(entries))


def build(folder: Path, entries: int) -> None:
    """Writes the index, shard by shard, as `Store.add` would."""
    make_store(folder).close()
    database = Database(folder)
    index = Index(database, LAYOUT.token_bytes)
    kept = sum(end - start for start, end in RANGES)
    tokens, checksums = range(CHUNK_TOKENS), bytes(4 * kept)
    database.connection().execute("PRAGMA synchronous = OFF")
    database.connection().execute("PRAGMA cache_size = -500000")
    keys = list(keys_of(entries))
    for used, first in enumerate(range(0, entries, CHUNKS_A_SHARD)):
        page = keys[first : first + CHUNKS_A_SHARD]
        placed = [
            (Entry(key, tokens, RANGES, checksums), 4096 + at * kept * LAYOUT.token_bytes)
            for at, key in enumerate(page)
        ]
        with database.transaction():
            shard = index.add_shard(f"{used:032x}.safetensors", 1 << 28)
            index.put(shard, placed, used)
    database.close()


def drop_pages(path: Path) -> None:
    """Takes a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def milliseconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def cpu_milliseconds(work: Callable[[], object]) -> float:
    """How much of it this thread computed: what other processes' load does not change."""
    began = time.thread_time()
    work()
    return (time.thread_time() - began) * 1e3


def percentiles(times: list[float]) -> dict[str, float]:
    """The median and the 99th percentile, in the unit given."""
    return {f"p{p}": round(float(np.percentile(times, p)), 4) for p in (50, 99)}


def measure(folder: Path, entries: int) -> dict[str, object]:
    """Times in milliseconds."""
    keys, random = list(keys_of(entries)), Random(1)
    opened: dict[str, list[float]] = {"cold": [], "warm": []}
    looked_up: dict[str, list[float]] = {"cold": [], "cold_batch": []}
    for trial in range(COLD_TRIALS):
        drop_pages(folder / INDEX)
        began = time.perf_counter()
        with Store.open(folder, FINGERPRINT) as store:
            opened["cold"].append((time.perf_counter() - began) * 1e3)
            kind, count = ("cold", 1) if trial % 2 else ("cold_batch", BATCH_KEYS)
            asked = random.sample(keys, count)
            looked_up[kind].append(milliseconds(lambda asked=asked: store.locate(asked)))
        opened["warm"].append(milliseconds(lambda: Store.open(folder, FINGERPRINT).close()))
    with Store.open(folder, FINGERPRINT) as store:
        for kind, count, clock in (
            ("warm", 1, milliseconds),
            ("warm_cpu", 1, cpu_milliseconds),
            ("warm_batch", BATCH_KEYS, milliseconds),
            ("warm_batch_cpu", BATCH_KEYS, cpu_milliseconds),
        ):
            looked_up[kind] = []
            for turn in range(2 * WARM_LOOKUPS):
                asked = random.sample(keys, count)
                took = clock(lambda asked=asked: store.locate(asked))
                # The first half warms the pages up.
                if turn >= WARM_LOOKUPS:
                    looked_up[kind].append(took)
        assert len(store.locate(keys[:100])) == 100
        absent = [milliseconds(lambda: store.locate([random.randbytes(32)])) for _ in range(1000)]
    return {
        "open_ms": {kind: percentiles(times) for kind, times in opened.items()},
        "lookup_ms": {kind: percentiles(times) for kind, times in looked_up.items()}
        | {"absent": percentiles(absent)},
    }


def main() -> None:
    """Runs as the module says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--folder", help="where to build; the index goes again afterwards")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        seconds = milliseconds(lambda: build(Path(folder), arguments.entries)) / 1e3
        result = {
            "entries": arguments.entries,
            "index_bytes": (Path(folder) / INDEX).stat().st_size,
            "build_seconds": round(seconds, 1),
            **measure(Path(folder), arguments.entries),
            "batch_keys": BATCH_KEYS,
            "environment": environment(),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
