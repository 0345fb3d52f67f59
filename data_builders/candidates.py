"""Which chunks a question gets: ranked among its own contexts, or found in the whole corpus.

A build asks for the questions of its split, and a retriever for new ones over the built tables:
with equal chunks and vectors both find the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from data_builders import bm25
from data_builders.encoded import Encoded, Encoder
from data_builders.index import map_vectors, search, write_vectors
from data_builders.retrieval import (
    FUSION_DEPTH,
    Embeddings,
    fuse,
    one_stage_chunks,
    scores,
    top,
)
from data_builders.scorers import NuggetScorer
from data_builders.scorers.cross_encoder import CrossEncoder
from data_builders.tables import Chunk
from recipes.retrieval import RetrievalConfig

VECTORS_FILE = "vectors.npy"
LEXICAL_FOLDER = "bm25"
_ROWS_A_BLOCK = 1024


class ChunkTable(Protocol):
    """The chunks that may be found, by their row."""

    def count(self) -> int:
        """How many there are."""
        ...

    def at(self, rows: Sequence[int]) -> list[Chunk]:
        """Those in the given rows."""
        ...


class Found(NamedTuple):
    """Rows of the chunks table, best first, with their scores."""

    rows: list[int]
    scores: list[float]


class Asked(NamedTuple):
    """A question and, as rows of the chunks table, its own candidates and what it must not find.

    `Contexts` looks at `candidates` alone and `Corpus` at `excluded` alone.
    """

    text: str
    query: Encoded
    candidates: Sequence[int] = ()
    excluded: Sequence[int] = ()


class Scored(NamedTuple):
    """Chunks in rank order, with a score each, and one for each nugget of each."""

    chunks: list[Chunk]
    scores: list[float]
    nugget_scores: list[list[float]]


def score_nuggets(
    question: str,
    chunks: Sequence[Chunk],
    chunk_scores: Sequence[float],
    scorer: NuggetScorer,
    config: RetrievalConfig,
) -> Scored:
    """Scores the nuggets of retrieved chunks; one-stage selection ranks the chunks by them.

    Args:
        question: its text.
        chunks: in rank order; with one-stage selection all candidates.
        chunk_scores: a score for each of them; with one-stage selection the best nugget's counts.
        scorer: scores a nugget for the question.
        config: with one-stage selection only the chunks of the top `k` nuggets are kept.
    """
    kept, kept_scores = list(chunks), list(chunk_scores)
    rows = scorer(question, chunks)
    if config.selection == "one_stage":
        best = one_stage_chunks(rows, config.k)
        kept, rows = [kept[index] for index in best], [rows[index] for index in best]
        kept_scores = [max(row) for row in rows]
    return Scored(kept, kept_scores, rows)


def rerank(
    question: str, chunks: Sequence[Chunk], cross_encoder: CrossEncoder, count: int
) -> tuple[list[Chunk], list[float]]:
    """The `count` chunks that the cross-encoder puts first, best first, and their scores.

    Args:
        question: its text.
        chunks: in the order in which they were found, which ties keep.
        cross_encoder: scores a chunk's text for the question.
        count: how many at most.
    """
    rows = cross_encoder([(question, [chunk.text]) for chunk in chunks])
    found = [score for (score,) in rows]
    best = top(found, count)
    return [chunks[at] for at in best], [found[at] for at in best]


def chunks_to_find(config: RetrievalConfig) -> int:
    """How many chunks retrieval brings with two-stage selection: k_c, or more to rerank."""
    return config.rerank_chunks or config.k_c


@dataclass(frozen=True)
class Contexts:
    """The chunks of a question's own passages."""

    chunks: ChunkTable
    encoded: Encoder
    config: RetrievalConfig

    def retrieve(self, asked: Sequence[Asked]) -> list[Found]:
        """The top `chunks_to_find` of each question; all, unranked, for one-stage selection."""
        return [self._retrieve(question) for question in asked]

    def _retrieve(self, question: Asked) -> Found:
        config, rows = self.config, list(question.candidates)
        if config.selection == "one_stage":
            return Found(rows, [0.0] * len(rows))
        texts = [chunk.text for chunk in self.chunks.at(rows)]
        found = scores(question.query, self.encoded(texts), config.weights)
        if not config.bm25:
            best = top(found, chunks_to_find(config))
            return Found([rows[at] for at in best], [found[at] for at in best])
        lexical = bm25.rank(bm25.index_texts(texts), question.text, len(texts))
        fused = fuse([top(found, len(texts)), lexical], chunks_to_find(config))
        return Found([rows[at] for at, _ in fused], [score for _, score in fused])


class Corpus:
    """All chunks of a table, searched through files in a folder, which are made if missing.

    With `mapped` the vectors are mapped into memory once and the system keeps what it can of them;
    otherwise every search reads the file anew and none of it stays.
    """

    def __init__(
        self,
        chunks: ChunkTable,
        encoded: Encoder,
        config: RetrievalConfig,
        folder: Path,
        *,
        mapped: bool = False,
    ) -> None:
        self._chunks = chunks
        self._encoded = encoded
        self._config = config
        self._one_stage = config.selection == "one_stage"
        # Where each chunk's texts begin in the file of vectors: its nuggets', or its own one.
        self._firsts = (
            np.cumsum([0, *(len(texts) for texts in self._texts())])
            if self._one_stage
            else np.arange(chunks.count() + 1)
        )
        path, lexical = folder / VECTORS_FILE, folder / LEXICAL_FOLDER
        if not path.exists():
            write_vectors(path, self._dense_blocks())
        if config.bm25 and not lexical.exists():
            bm25.write_index(lexical, (text for texts in self._texts() for text in texts))
        self._vectors: Path | Embeddings = map_vectors(path) if mapped else path
        self._lexical = bm25.read_index(lexical) if config.bm25 else None

    def _texts(self) -> Iterator[list[str]]:
        """For each chunk in row order the texts that a question is compared with."""
        count = self._chunks.count()
        for first in range(0, count, _ROWS_A_BLOCK):
            for chunk in self._chunks.at(range(first, min(first + _ROWS_A_BLOCK, count))):
                yield chunk.nugget_texts if self._one_stage else [chunk.text]

    def _dense_blocks(self) -> Iterator[Embeddings]:
        texts: list[str] = []
        for of_chunk in self._texts():
            texts += of_chunk
            if len(texts) >= _ROWS_A_BLOCK:
                yield np.stack([row.dense for row in self._encoded(texts)])
                texts = []
        if texts:
            yield np.stack([row.dense for row in self._encoded(texts)])

    def retrieve(self, asked: Sequence[Asked]) -> list[Found]:
        """The top `chunks_to_find` of each question, or, unranked, those of its top k nuggets."""
        config = self._config
        wanted = config.k if self._one_stage else chunks_to_find(config)
        second_look = bool(config.bm25 or config.weights.sparse or config.weights.colbert)
        reach = max(wanted, FUSION_DEPTH) if second_look else wanted
        excluded = [self._excluded(question.excluded) for question in asked]
        depth = reach + max(map(len, excluded))
        queries = np.stack([question.query.dense for question in asked])
        hits, _ = search(self._vectors, queries, depth)
        found = []
        for question, near, out in zip(asked, hits, excluded, strict=True):
            # As many as without the other questions; in row order: a tie goes to the lower row.
            rows = sorted([row for row in near.tolist() if row not in out][:reach])
            values = scores(question.query, self._encoded(self._texts_at(rows)), config.weights)
            ranked = [(rows[at], values[at]) for at in top(values, len(rows))]
            if self._lexical is not None:
                words = bm25.rank(self._lexical, question.text, depth)
                lexical_rows = [row for row in words if row not in out][:reach]
                ranked = fuse([[row for row, _ in ranked], lexical_rows], wanted)
            found.append(self._found(ranked[:wanted]))
        return found

    def _found(self, ranked: Sequence[tuple[int, float]]) -> Found:
        if not self._one_stage:
            return Found([row for row, _ in ranked], [score for _, score in ranked])
        # In row order: they are ranked by their nuggets later, as those of contexts are.
        chunks = sorted({self._owner(row) for row, _ in ranked})
        return Found(chunks, [0.0] * len(chunks))

    def _excluded(self, chunks: Sequence[int]) -> set[int]:
        """The rows of the file of vectors that belong to chunks."""
        return {at for row in chunks for at in range(self._firsts[row], self._firsts[row + 1])}

    def _texts_at(self, rows: Sequence[int]) -> list[str]:
        owners = [self._owner(row) for row in rows]
        chunks = self._chunks.at(owners)
        if not self._one_stage:
            return [chunk.text for chunk in chunks]
        return [
            chunk.nugget_texts[row - int(self._firsts[owner])]
            for row, owner, chunk in zip(rows, owners, chunks, strict=True)
        ]

    def _owner(self, row: int) -> int:
        return int(np.searchsorted(self._firsts, row, side="right")) - 1
