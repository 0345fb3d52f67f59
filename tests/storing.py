"""Chunks whose records follow from their key, so that anyone can tell what must be stored."""

import hashlib
import os
from pathlib import Path
from random import Random

import torch

from cache_ops.fingerprint import Fingerprint
from cache_ops.records import RecordLayout
from cache_ops.store import Store
from cache_ops.store.shards import open_shard
from cache_ops.store.stored import NewChunk, Stored, chunk_key, count_tokens

LAYOUT = RecordLayout(layers=2, kv_heads=1, head_dim=4, dtype="float32")
FINGERPRINT = Fingerprint("w", "r", "t", "512 tokens", "none", "float32 model, float32 records")


def tokens_of(number: int) -> list[int]:
    """The tokens of chunk `number`: 8 to 40."""
    random = Random(number)
    return [number, *(random.randrange(50_000) for _ in range(random.randrange(7, 40)))]


def records_of(key: bytes, ranges, record_bytes: int = LAYOUT.token_bytes) -> bytes:
    """The records of a chunk's tokens, each from the key and its place."""
    return b"".join(
        hashlib.shake_256(key + token.to_bytes(4)).digest(record_bytes)
        for start, end in ranges
        for token in range(start, end)
    )


def new_chunk(number: int, ranges=None, layout: RecordLayout = LAYOUT) -> NewChunk:
    """Chunk `number`, whole or some ranges of it."""
    tokens = tokens_of(number)
    ranges = ranges or [(0, len(tokens))]
    flat = bytearray(records_of(chunk_key(tokens), ranges, layout.token_bytes))
    records_TR = torch.frombuffer(flat, dtype=torch.uint8).view(-1, layout.token_bytes)
    return NewChunk(tokens, ranges, records_TR)


def key_of(number: int) -> bytes:
    """The key of chunk `number`."""
    return chunk_key(tokens_of(number))


def make_store(folder: Path, layout: RecordLayout = LAYOUT, **options) -> Store:
    """A new store."""
    return Store.create(folder, FINGERPRINT, layout, **options)


def read_back(store: Store, stored: Stored) -> bytes:
    """The bytes that lie where a chunk is said to be."""
    descriptor = open_shard(store.shards_folder, stored.shard, stored.shard_bytes)
    try:
        size = count_tokens(stored.ranges) * stored.record_bytes
        return os.pread(descriptor, size, stored.offset)
    finally:
        os.close(descriptor)


def wrong_chunks(store: Store) -> list[str]:
    """Keys of stored chunks whose bytes are not those that follow from the key."""
    located = store.locate(store.keys(), checksums=True)
    wrong = set(store.keys()) - set(located)
    for key, stored in located.items():
        records = read_back(store, stored)
        if records != records_of(key, stored.ranges, stored.record_bytes):
            wrong.add(key)
    return sorted(key.hex() for key in wrong)


def files_of(store: Store) -> dict[str, int]:
    """Names and bytes of the files among the shards."""
    return {path.name: path.stat().st_size for path in store.shards_folder.iterdir()}


def flip(path: Path, offset: int) -> None:
    """Flips one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
