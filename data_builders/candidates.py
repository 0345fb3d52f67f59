"""Which chunks a question gets: ranked among its own contexts, or found in the whole corpus."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_builders import bm25
from data_builders.index import search, write_vectors
from data_builders.lookups import Lookups
from data_builders.raft import Noised
from data_builders.records import Passage
from data_builders.retrieval import FUSION_DEPTH, fuse, scores, top
from recipes.building import RetrievalConfig

VECTORS_FILE = "vectors.npy"
_ROWS_A_BLOCK = 1024


class Retrieved(NamedTuple):
    """Rows of the chunks table, best first, with their scores."""

    rows: list[int]
    scores: list[float]


class Asked(NamedTuple):
    """A question after RAFT, and the passages that may not be found for it."""

    noised: Noised
    excluded: Sequence[Passage]


@dataclass(frozen=True)
class Contexts:
    """The chunks of a question's own passages."""

    lookups: Lookups
    config: RetrievalConfig

    def retrieve(self, asked: Sequence[Asked]) -> list[Retrieved]:
        """The top k_c chunks of each question; all of them, unranked, for one-stage selection."""
        return [self._retrieve(question.noised) for question in asked]

    def _retrieve(self, noised: Noised) -> Retrieved:
        config, question = self.config, noised.question
        encoded = self.lookups.encoded
        chunks = self.lookups.chunks.of(question.passages)
        rows = [self.lookups.intake.chunk_row(chunk.chunk_id) for chunk in chunks]
        if config.selection == "one_stage":
            return Retrieved(rows, [0.0] * len(rows))
        texts = [chunk.text for chunk in chunks]
        found = scores(encoded([question.text])[0], encoded(texts), config.weights)
        if not config.bm25:
            best = top(found, config.k_c)
            return Retrieved([rows[at] for at in best], [found[at] for at in best])
        lexical = bm25.rank(bm25.index_texts(texts), question.text, len(texts))
        fused = fuse([top(found, len(texts)), lexical], config.k_c)
        return Retrieved([rows[at] for at, _ in fused], [score for _, score in fused])


class Corpus:
    """The chunks of all passages, searched through files of vectors in `folder`."""

    def __init__(self, lookups: Lookups, config: RetrievalConfig, folder: Path) -> None:
        self._intake = lookups.intake
        self._chunks = lookups.chunks
        self._encoded = lookups.encoded
        self._config = config
        self._one_stage = config.selection == "one_stage"
        self._vectors = folder / VECTORS_FILE
        self._lexical = folder / "bm25"
        # Where each chunk's texts begin in the file of vectors: its nuggets', or its own one.
        self._firsts = np.cumsum([0, *(len(texts) for texts in self._texts())])
        if not self._vectors.exists():
            write_vectors(self._vectors, self._dense_blocks())
        if config.bm25 and not self._lexical.exists():
            bm25.write_index(self._lexical, (text for texts in self._texts() for text in texts))

    def _texts(self) -> Iterator[list[str]]:
        """For each chunk in row order the texts that a question is compared with."""
        count = self._intake.count("chunks")
        for first in range(0, count, _ROWS_A_BLOCK):
            for chunk in self._chunks.at(range(first, min(first + _ROWS_A_BLOCK, count))):
                yield chunk.nugget_texts if self._one_stage else [chunk.text]

    def _dense_blocks(self) -> Iterator[np.ndarray]:
        texts: list[str] = []
        for of_chunk in self._texts():
            texts += of_chunk
            if len(texts) >= _ROWS_A_BLOCK:
                yield np.stack([row.dense for row in self._encoded(texts)])
                texts = []
        if texts:
            yield np.stack([row.dense for row in self._encoded(texts)])

    def retrieve(self, asked: Sequence[Asked]) -> list[Retrieved]:
        """The top k_c chunks of each question, or, unranked, those of its top k nuggets."""
        config = self._config
        wanted = config.k if self._one_stage else config.k_c
        second_look = bool(config.bm25 or config.weights.sparse or config.weights.colbert)
        reach = max(wanted, FUSION_DEPTH) if second_look else wanted
        excluded = [self._excluded(question.excluded) for question in asked]
        depth = reach + max(map(len, excluded))
        queries = self._encoded([question.noised.question.text for question in asked])
        hits, _ = search(self._vectors, np.stack([query.dense for query in queries]), depth)
        lexical = bm25.read_index(self._lexical) if config.bm25 else None
        found = []
        for question, query, near, out in zip(asked, queries, hits, excluded, strict=True):
            # As many as without the other questions; in row order: a tie goes to the lower row.
            rows = sorted([row for row in near.tolist() if row not in out][:reach])
            values = scores(query, self._encoded(self._texts_at(rows)), config.weights)
            ranked = [(rows[at], values[at]) for at in top(values, len(rows))]
            if lexical is not None:
                words = bm25.rank(lexical, question.noised.question.text, depth)
                lexical_rows = [row for row in words if row not in out][:reach]
                ranked = fuse([[row for row, _ in ranked], lexical_rows], wanted)
            found.append(self._retrieved(ranked[:wanted]))
        return found

    def _retrieved(self, ranked: Sequence[tuple[int, float]]) -> Retrieved:
        if not self._one_stage:
            return Retrieved([row for row, _ in ranked], [score for _, score in ranked])
        # In row order: they are ranked by their nuggets later, as those of contexts are.
        chunks = sorted({self._owner(row) for row, _ in ranked})
        return Retrieved(chunks, [0.0] * len(chunks))

    def _excluded(self, passages: Sequence[Passage]) -> set[int]:
        """The rows of the file of vectors that belong to the passages."""
        chunks = self._chunks.of(passages)
        rows = [self._intake.chunk_row(chunk.chunk_id) for chunk in chunks]
        return {at for row in rows for at in range(self._firsts[row], self._firsts[row + 1])}

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
