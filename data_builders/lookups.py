"""Chunks and embeddings of a build, read from its asset stores when they are needed."""

import json
from collections.abc import Sequence

import numpy as np

from data_builders.assets import AssetStore, content_key
from data_builders.encoded import Encoded
from data_builders.intake import Intake
from data_builders.records import Passage
from data_builders.tables import Chunk, chunk_from_row


class ChunkLookup:
    """The chunks of passages, and those of the chunks table by row."""

    def __init__(self, intake: Intake, store: AssetStore) -> None:
        self._intake = intake
        self._store = store

    def count(self) -> int:
        """Rows of the chunks table."""
        return self._intake.count("chunks")

    def of(self, passages: Sequence[Passage]) -> list[Chunk]:
        """The distinct chunks of the passages, in their order."""
        keys = [self._intake.chunks_key(passage) for passage in passages]
        values = self._store.get(keys)
        chunks = (chunk_from_row(row) for key in keys for row in json.loads(values[key]))
        return list({chunk.chunk_id: chunk for chunk in chunks}.values())

    def rows(self, passages: Sequence[Passage]) -> list[int]:
        """The rows of the distinct chunks of the passages, in their order."""
        return [self._intake.chunk_row(chunk.chunk_id) for chunk in self.of(passages)]

    def at(self, rows: Sequence[int]) -> list[Chunk]:
        """The chunks in those rows of the table."""
        places = [self._intake.chunk_place(row) for row in rows]
        values = self._store.get(key for key, _ in places)
        passages = {key: json.loads(value) for key, value in values.items()}
        return [chunk_from_row(passages[key][position]) for key, position in places]


class EncodedLookup:
    """What the encoder knows of texts that were encoded before."""

    def __init__(self, store: AssetStore) -> None:
        self._store = store

    def __call__(self, texts: Sequence[str]) -> list[Encoded]:
        keys = [content_key(text) for text in texts]
        values = self._store.get(keys)
        return [Encoded.from_bytes(values[key]) for key in keys]


class ScoredLookup:
    """What the cross-encoder gave for questions with texts that were scored before."""

    def __init__(self, store: AssetStore) -> None:
        self._store = store

    def __call__(self, asked: Sequence[tuple[str, Sequence[str]]]) -> list[list[float]]:
        keys = [content_key(question, *texts) for question, texts in asked]
        values = self._store.get(keys)
        return [np.frombuffer(values[key], "<f4").tolist() for key in keys]
