"""Reading a query's slices from the store: bytes and throughput, against other ways, in one run.

    python tests/benchmarks/store_reading.py [--model NAME] [--chunks N] [--repeats N] ...

A synthetic store keeps the nuggets of `--chunks` chunks of 512 tokens; beside it each chunk lies in
a file of the transformers layout, `[L, 2, H, T, D]`. A query asks for k nuggets in k_c chunks. The
ways, each into a buffer whose pages are there already:

- `slices`    the package's reader, look-up included;
- `plain`     as many bytes as one contiguous range of a shard, one `preadv` a block, one thread
              (the faster of blocks of 1 and 8 MiB);
- `fragments` the query's tokens from the transformers layout: one read for each nugget, layer,
              key or value, and head;
- `chunks`    all of the query's chunks, whole.

`warm`: all files are in the page cache, and no query's bytes were read just before. `cold`: the
files' pages were dropped by `posix_fadvise` before each read, and `mincore` counted how many of
the pages to be read were left (a cache below the operating system, such as a virtual machine's
host, stays as it is). Ways take turns; ratios are medians over the turns. `slices` must give the
bytes that were stored and `fragments` the same values, which the script checks. Prints tables to
stderr and one JSON object to stdout.
"""

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from cache_ops.fingerprint import Fingerprint
from cache_ops.records import RecordLayout
from cache_ops.store import Store
from cache_ops.store.open_shards import read_into
from cache_ops.store.reading import SliceReader, SliceSpan
from cache_ops.store.stored import NewChunk, chunk_key, union_ranges
from eval.environment import environment

GEOMETRIES = {"smollm2-135m": (30, 3, 64), "qwen2-7b": (28, 4, 128)}
CHUNK_TOKENS = 512
NUGGETS_A_CHUNK = 8
BLOCK_MIB = (1, 8)
BYTES_LIMIT, WARM_GOAL, COLD_GOAL = 1.05, 0.6, 0.8

Read = Callable[[], int]
"""Reads, and gives the bytes read."""


@dataclass(frozen=True)
class Corpus:
    """A store, where its nuggets are, and the same chunks in the transformers layout."""

    store: Store
    layout: RecordLayout
    keys: list[bytes]
    nuggets: list[list[tuple[int, int]]]
    descriptors: list[int]
    """Of each chunk's file in the transformers layout."""
    shards: list[tuple[Path, int, int]]
    """Path, descriptor and bytes of each shard."""


def build(
    folder: Path, layout: RecordLayout, chunks: int, nugget_tokens: int
) -> Generator[Corpus, None, None]:
    rng = Random(0)
    generator = torch.Generator().manual_seed(0)
    fingerprint = Fingerprint("synthetic", "", "", f"{CHUNK_TOKENS} tokens", "none", layout.dtype)
    keys: list[bytes] = []
    nuggets: list[list[tuple[int, int]]] = []
    files: list[Path] = []

    def new_chunks() -> Iterator[NewChunk]:
        for number in range(chunks):
            ids = [number, *range(1, CHUNK_TOKENS)]
            own = draw_nuggets(rng, nugget_tokens)
            shape = (CHUNK_TOKENS, layout.layers, 2, layout.kv_heads, layout.head_dim)
            kv_TL2HD = torch.randn(shape, generator=generator).to(layout.torch_dtype)
            files.append(folder / f"{number}.layers")
            with files[-1].open("wb") as file:
                layers_L2HTD = kv_TL2HD.permute(1, 2, 3, 0, 4).contiguous()
                file.write(layers_L2HTD.view(torch.uint8).numpy().data)
                file.flush()
                os.fsync(file.fileno())
            keys.append(chunk_key(ids))
            nuggets.append(own)
            ranges = union_ranges(own)
            kept = torch.cat([kv_TL2HD[start:end] for start, end in ranges])
            yield NewChunk(ids, ranges, layout.encode(kept))

    with ExitStack() as stack:
        store = stack.enter_context(Store.create(folder / "store", fingerprint, layout))
        store.add(new_chunks())

        def opened(path: Path) -> int:
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            return descriptor

        descriptors = [opened(path) for path in files]
        paths = sorted(store.shards_folder.iterdir())
        shards = [(path, opened(path), path.stat().st_size) for path in paths]
        yield Corpus(store, layout, keys, nuggets, descriptors, shards)


def draw_nuggets(rng: Random, mean_tokens: int) -> list[tuple[int, int]]:
    """Spans of one chunk, one in each eighth of it, so that they do not touch."""
    room = CHUNK_TOKENS // NUGGETS_A_CHUNK
    spans = []
    for at in range(NUGGETS_A_CHUNK):
        length = min(rng.randint(mean_tokens * 3 // 5, mean_tokens * 7 // 5), room - 1)
        start = at * room + rng.randint(0, room - 1 - length)
        spans.append((start, start + length))
    return spans


class Query:
    """One query's nuggets, by each way of reading them."""

    def __init__(self, corpus: Corpus, rng: Random, k: int, k_c: int) -> None:
        self.corpus = corpus
        chosen = rng.sample(range(len(corpus.keys)), k_c)
        counts = [k // k_c + (at < k % k_c) for at in range(k_c)]
        self.pieces = [
            (chunk, *span)
            for chunk, count in zip(chosen, counts, strict=True)
            for span in sorted(rng.sample(corpus.nuggets[chunk], count))
        ]
        self.chunks = chosen
        self.spans: list[SliceSpan] = [
            (corpus.keys[c], start, end) for c, start, end in self.pieces
        ]
        self.tokens = sum(end - start for _, start, end in self.pieces)
        self.bytes = self.tokens * corpus.layout.token_bytes
        large = [(fd, size) for _, fd, size in corpus.shards if size >= self.bytes]
        if not large:
            raise SystemExit("a query is larger than the store: give more --chunks")
        # Each block size has a range of its own: none profits from what another has read.
        self.plain: dict[str, tuple[int, int, int]] = {}
        for mib in BLOCK_MIB:
            descriptor, size = rng.choice(large)
            offset = rng.randrange(0, size - self.bytes + 1, mmap.PAGESIZE)
            self.plain[f"plain_{mib}"] = descriptor, offset, self.bytes

    def fragments(self) -> list[tuple[int, int, int]]:
        """Descriptor, offset and bytes of each run of bytes in the transformers layout."""
        layout = self.corpus.layout
        vector = layout.head_dim * layout.torch_dtype.itemsize
        return [
            (
                self.corpus.descriptors[chunk],
                (head * CHUNK_TOKENS + start) * vector,
                (end - start) * vector,
            )
            for chunk, start, end in self.pieces
            for head in range(layout.layers * 2 * layout.kv_heads)
        ]

    def ranges(self, way: str) -> list[tuple[int, int, int]]:
        """Descriptor, offset and bytes of all that a way reads."""
        if way in self.plain:
            return [self.plain[way]]
        if way == "fragments":
            return self.fragments()
        if way == "chunks":
            whole = CHUNK_TOKENS * self.corpus.layout.token_bytes
            return [(self.corpus.descriptors[chunk], 0, whole) for chunk in self.chunks]
        located = self.corpus.store.locate([key for key, _, _ in self.spans])
        by_name = {path.name: fd for path, fd, _ in self.corpus.shards}
        found = []
        for key, start, end in self.spans:
            offset = located[key].place(start, end)
            assert offset is not None, "the store lacks a nugget"
            size = (end - start) * self.corpus.layout.token_bytes
            found.append((by_name[located[key].shard], offset, size))
        return found


def reads(query: Query, reader: SliceReader, buffer: Tensor) -> dict[str, Read]:
    memory = buffer.numpy().data
    records_TR = buffer[: query.bytes].view(query.tokens, query.corpus.layout.token_bytes)

    def slices() -> int:
        reading = reader.start(query.spans, records_TR)
        assert not reading.wait(), "slices are missing"
        return reading.bytes_read

    def each(ranges: Sequence[tuple[int, int, int]], block: int | None = None) -> int:
        filled = 0
        for descriptor, offset, size in ranges:
            for at in range(0, size, block or size):
                room = memory[filled : filled + min(block or size, size - at)]
                filled += read_into(descriptor, [room], offset + at)
        return filled

    ways: dict[str, Read] = {"slices": slices}
    for mib in BLOCK_MIB:
        plain = query.ranges(f"plain_{mib}")
        ways[f"plain_{mib}"] = lambda plain=plain, mib=mib: each(plain, mib << 20)
    fragments, whole = query.ranges("fragments"), query.ranges("chunks")
    ways["fragments"] = lambda: each(fragments)
    ways["chunks"] = lambda: each(whole)
    return ways


def check(query: Query, reader: SliceReader, buffer: Tensor) -> None:
    """Holds what the reader gives against the fragments of the transformers layout."""
    layout = query.corpus.layout
    ways = reads(query, reader, buffer)
    assert ways["slices"]() == query.bytes
    records_TR = buffer[: query.bytes].view(query.tokens, layout.token_bytes)
    kv_TL2HD = layout.decode(records_TR, layout.torch_dtype).clone()
    assert ways["fragments"]() == query.bytes
    flat = buffer[: query.bytes].view(layout.torch_dtype)
    row = at = 0
    for _, start, end in query.pieces:
        tokens = end - start
        shape = (layout.layers, 2, layout.kv_heads, tokens, layout.head_dim)
        size = tokens * layout.token_bytes // layout.torch_dtype.itemsize
        piece_L2HTD = flat[at : at + size].view(shape)
        assert torch.equal(piece_L2HTD.permute(3, 0, 1, 2, 4), kv_TL2HD[row : row + tokens])
        row, at = row + tokens, at + size


def drop_pages(corpus: Corpus) -> None:
    for descriptor in [*corpus.descriptors, *(shard for _, shard, _ in corpus.shards)]:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(ranges: Sequence[tuple[int, int, int]]) -> float:
    """Which part of the ranges' pages is in the page cache, by `mincore`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    pages = resident = 0
    for descriptor, offset, size in ranges:
        first = offset - offset % mmap.PAGESIZE
        length = offset + size - first
        at = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, first)
        states = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if libc.mincore(at, length, states):
            raise OSError(ctypes.get_errno(), "mincore")
        libc.munmap(at, length)
        pages += len(states)
        resident += sum(state & 1 for state in states.raw)
    return resident / pages


def measure(
    corpus: Corpus, queries: Sequence[Query], reader: SliceReader, buffer: Tensor, *, cold: bool
) -> dict[str, Any]:
    """Each query by every way in turn: bytes, times, and ratios to the plain way."""
    seconds: dict[str, list[float]] = {}
    cpu_seconds: dict[str, list[float]] = {}
    total: dict[str, int] = {}
    left: list[float] = []
    for number, query in enumerate(queries):
        ways = list(reads(query, reader, buffer).items())
        Random(number).shuffle(ways)
        for way, read in ways:
            if cold:
                drop_pages(corpus)
                left.append(resident_share(query.ranges(way)))
            # As warm for every way, whatever the way before has read.
            buffer[: query.bytes].fill_(0)
            start, cpu_start = time.perf_counter(), time.process_time()
            size = read()
            seconds.setdefault(way, []).append(time.perf_counter() - start)
            cpu_seconds.setdefault(way, []).append(time.process_time() - cpu_start)
            total[way] = total.get(way, 0) + size
    plain = min((f"plain_{mib}" for mib in BLOCK_MIB), key=lambda w: statistics.median(seconds[w]))
    asked = sum(query.bytes for query in queries)
    result: dict[str, Any] = {
        way: {
            "bytes_a_query": total[way] // len(queries),
            "bytes_to_nugget_bytes": total[way] / asked,
            "ms": statistics.median(seconds[way]) * 1e3,
            "cpu_ms": statistics.median(cpu_seconds[way]) * 1e3,
            "gb_a_second": total[way] / sum(seconds[way]) / 1e9,
            "time_of_plain": statistics.median(
                one / other for one, other in zip(seconds[way], seconds[plain], strict=True)
            ),
        }
        for way in seconds
    }
    ratios = [p / s for p, s in zip(seconds[plain], seconds["slices"], strict=True)]
    cpu_ratios = [p / s for p, s in zip(cpu_seconds[plain], cpu_seconds["slices"], strict=True)]
    result["throughput_to_plain"] = {
        "plain": plain,
        "median": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "by_cpu_seconds": statistics.median(cpu_ratios),
    }
    if cold:
        result["pages_left_before_reading"] = {"mean": statistics.mean(left), "most": max(left)}
    return result


def fresh_buffer(queries: Sequence[Query], reader: SliceReader, buffer: Tensor) -> dict[str, float]:
    """What reading takes into new memory against memory whose pages are there."""
    times: dict[str, list[float]] = {"fresh": [], "used": []}
    for query in queries:
        for kind in times:
            # A mapping of its own: the allocator would give back what was used before.
            own = mmap.mmap(-1, query.bytes)
            into = buffer if kind == "used" else torch.frombuffer(own, dtype=torch.uint8)
            records_TR = into[: query.bytes].view(query.tokens, -1)
            start = time.perf_counter()
            reader.start(query.spans, records_TR).wait()
            times[kind].append(time.perf_counter() - start)
    return {f"{kind}_ms": statistics.median(took) * 1e3 for kind, took in times.items()}


def table(name: str, result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{name:<12}{'MB a query':>11}{'of nuggets':>12}{'ms':>9}{'CPU ms':>9}{'GB/s':>7}"
        f"{'time of plain':>15}"
    )
    for way in ("slices", *(f"plain_{mib}" for mib in BLOCK_MIB), "fragments", "chunks"):
        row = result[way]
        yield (
            f"{way:<12}{row['bytes_a_query'] / 1e6:>11.2f}{row['bytes_to_nugget_bytes']:>12.3f}"
            f"{row['ms']:>9.2f}{row['cpu_ms']:>9.2f}{row['gb_a_second']:>7.2f}{row['time_of_plain']:>15.2f}"
        )
    ratio = result["throughput_to_plain"]
    low, high = ratio["quartiles"]
    yield (
        f"slices to {ratio['plain']}: {ratio['median']:.2f} (quartiles {low:.2f} to {high:.2f}), "
        f"by processor seconds {ratio['by_cpu_seconds']:.2f}"
    )
    if "pages_left_before_reading" in result:
        left = result["pages_left_before_reading"]
        yield f"pages in memory before: {left['mean']:.4f} on average, {left['most']:.4f} at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=GEOMETRIES, default="qwen2-7b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--chunks", type=int, default=48, help="chunks of 512 tokens in the store")
    parser.add_argument("--nuggets", type=int, default=10, help="nuggets a query (k)")
    parser.add_argument("--query-chunks", type=int, default=5, help="chunks a query (k_c)")
    parser.add_argument("--nugget-tokens", type=int, default=25, help="mean tokens of a nugget")
    parser.add_argument(
        "--repeats", type=int, default=60, help="warm queries; a third as many cold"
    )
    parser.add_argument("--threads", type=int, default=4, help="reads in flight")
    parser.add_argument("--check-reads", action="store_true", help="compare checksums too")
    parser.add_argument(
        "--folder", type=Path, help="where the store is made; on the disk to measure"
    )
    options = parser.parse_args()
    layout = RecordLayout(*GEOMETRIES[options.model], options.dtype)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
        corpora = build(Path(folder), layout, options.chunks, options.nugget_tokens)
        corpus = next(corpora)
        stack.callback(corpora.close)
        reader = stack.enter_context(
            SliceReader(corpus.store, options.threads, check=options.check_reads)
        )
        whole = CHUNK_TOKENS * layout.token_bytes
        # Touched once, so that all of its pages are there.
        buffer = torch.zeros(options.query_chunks * whole, dtype=torch.uint8)
        rng = Random(1)
        queries = [
            Query(corpus, rng, options.nuggets, options.query_chunks)
            for _ in range(options.repeats)
        ]
        check(queries[0], reader, buffer)
        for query in queries:
            for read in reads(query, reader, buffer).values():
                read()
        warm = measure(corpus, queries, reader, buffer, cold=False)
        new_memory = fresh_buffer(queries, reader, buffer)
        cold = measure(corpus, queries[: max(2, options.repeats // 3)], reader, buffer, cold=True)
    fragments = layout.layers * 2 * layout.kv_heads
    bytes_ratio = warm["slices"]["bytes_to_nugget_bytes"]
    goals = {
        "bytes": bytes_ratio <= BYTES_LIMIT,
        "warm": warm["throughput_to_plain"]["median"] >= WARM_GOAL,
        "cold": cold["throughput_to_plain"]["median"] >= COLD_GOAL,
    }
    for line in (*table("warm", warm), "", *table("cold", cold), ""):
        print(line, file=sys.stderr)
    print(
        f"{options.nuggets} reads a query against {options.nuggets * fragments} fragments "
        f"({fragments} a nugget); into new memory {new_memory['fresh_ms']:.2f} ms, into used "
        f"{new_memory['used_ms']:.2f} ms; goals met: {goals}",
        file=sys.stderr,
    )
    arguments = {name: value for name, value in vars(options).items() if name != "folder"}
    result = {
        "arguments": arguments,
        "token_bytes": layout.token_bytes,
        "fragments_a_nugget": fragments,
        "warm": warm,
        "cold": cold,
        "buffer": new_memory,
        "goals_met": goals,
        "environment": environment(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
