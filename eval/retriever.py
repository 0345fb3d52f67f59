"""Retrieval online: for a new question what a build finds for those of its split.

Over the built tables of a split a question is embedded, searched among all chunks, and the nuggets
of what was found are scored, by the very code and vectors of the build. What that needs is made
once, in the folder `retrieval` inside the built one: vectors to map and search, and all that the
encoder knows of chunks and nuggets. It needs no other file of the build.
"""

import fcntl
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cache_ops.hf import load_tokenizer
from data_builders.assets import AssetStore, content_key
from data_builders.build import built_folder, load_built
from data_builders.build_assets import HIDDEN_A_BATCH, TEXTS_A_BATCH, asset_path
from data_builders.candidates import Asked, Corpus, rerank, score_nuggets
from data_builders.encoded import Encoded, Encoder
from data_builders.encoder import load_encoder
from data_builders.executor import make_assets
from data_builders.hidden_states import (
    HiddenLookup,
    HiddenWork,
    chunk_items,
    generator_vectors,
)
from data_builders.key import encoder_key, hidden_key
from data_builders.lookups import EncodedLookup
from data_builders.scorers import (
    compares_vectors,
    load_scorer,
    reads_generator,
    used_cross_encoder,
)
from data_builders.scorers.cross_encoder import CrossEncoder, load_cross_encoder
from data_builders.scorers.hidden_ffn import NuggetVectors, Vectors
from data_builders.tables import Chunk, Tables
from data_builders.workers import text_items
from eval.systems import Question
from recipes.building import BuildConfig
from recipes.errors import UserError
from recipes.schema import Recipe

INDEX_FOLDER = "retrieval"
ENCODED_FILE = "encoded.sqlite"
HIDDEN_FILE = "hidden.sqlite"
_ROWS_A_PAGE = 256


@dataclass(frozen=True)
class Retrieved:
    """A question with its chunks and nugget scores, and the milliseconds that each stage took.

    The search includes the reranking of chunks.
    """

    question: Question
    chunk_scores: list[float]
    embed_ms: float
    search_ms: float
    score_ms: float


class Retriever:
    """The built dev tables of a recipe, open for new questions. Threads may share it."""

    def __init__(
        self,
        config: Recipe,
        tables: Tables,
        encode: Encoder,
        encoded: "_ThreadsLookup",
        corpus: Corpus,
        cross_encoder: CrossEncoder | None,
        generator: NuggetVectors | None,
    ) -> None:
        self._config = config.retrieval
        self._tables = tables
        self._encode = encode
        self._encoded = encoded
        self._corpus = corpus
        self._cross_encoder = cross_encoder
        self._scorer = load_scorer(config, encoded, cross_encoder, generator)
        # An encoder's tokenizer is not made for two threads.
        self._encoding = threading.Lock()

    @classmethod
    def open(cls, config: Recipe) -> Self:
        """Opens the dev tables; makes what the search needs if it is not there.

        For that nothing is encoded again that some build has encoded.

        Raises:
            UserError: no built tables, no such encoder or cross-encoder, dense vectors count
                nothing, or the folder for the search is not there and cannot be written, or is
                damaged.
        """
        if not config.retrieval.weights.dense:
            raise UserError(
                "retrieval.weights.dense: new questions are searched by dense vectors first; "
                "expected a weight above 0"
            )
        tables = load_built(config, "dev")
        encode = load_encoder(config.retrieval, None)
        folder = built_folder(config, "dev") / INDEX_FOLDER
        if not folder.is_dir():
            _make_index(config, tables, encode, folder)
        encoded = _ThreadsLookup(folder / ENCODED_FILE)
        try:
            corpus = Corpus(tables, encoded, config.retrieval, folder, mapped=True)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: {error}; delete it, it is made again") from error
        used = used_cross_encoder(config.retrieval)
        cross_encoder = None if used is None else load_cross_encoder(used, None)
        generator = None
        if reads_generator(config.retrieval):
            generator = generator_vectors(
                load_tokenizer(config.model.path),
                _ThreadsStates(folder / HIDDEN_FILE),
                HiddenWork.of(config).load(),
            )
        return cls(config, tables, encode, encoded, corpus, cross_encoder, generator)

    def retrieve(self, question: str) -> Retrieved:
        """Finds the chunks of a question among all chunks, and scores their nuggets."""
        started = _now_ms()
        query = self._embed(question)
        embedded = _now_ms()
        [found] = self._corpus.retrieve([Asked(question, query)])
        chunks, chunk_scores = self._tables.at(found.rows), found.scores
        if self._config.rerank_chunks is not None:
            assert self._cross_encoder is not None, "a validated recipe describes it"
            chunks, chunk_scores = rerank(question, chunks, self._cross_encoder, self._config.k_c)
        searched = _now_ms()
        self._encoded.know(question, query)
        scored = score_nuggets(question, chunks, chunk_scores, self._scorer, self._config)
        return Retrieved(
            Question("", "", question, [], scored.chunks, scored.nugget_scores, []),
            scored.scores,
            embed_ms=embedded - started,
            search_ms=searched - embedded,
            score_ms=_now_ms() - searched,
        )

    def _embed(self, question: str) -> Encoded:
        # Alone, so that its bits do not depend on company.
        with self._encoding:
            return self._encode([question])[0]


class _ThreadsLookup:
    """What is known of encoded texts, for any thread: each has its own connection and question."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()

    def know(self, question: str, query: Encoded) -> None:
        """From now on this thread looks the question up too."""
        self._local.known = {question: query}

    def __call__(self, texts: Sequence[str]) -> list[Encoded]:
        known = getattr(self._local, "known", {})
        if len(texts) == 1 and texts[0] in known:
            return [known[texts[0]]]
        if not hasattr(self._local, "lookup"):
            self._local.lookup = EncodedLookup(AssetStore(self._path))
        found: list[Encoded] = self._local.lookup(texts)
        return found


class _ThreadsStates(threading.local):
    """What is kept of chunks' hidden states, for any thread: each has its own connection."""

    def __init__(self, path: Path) -> None:
        self._lookup = HiddenLookup(AssetStore(path))

    def __call__(self, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Vectors:
        return self._lookup(token_ids, spans)


def _make_index(config: Recipe, tables: Tables, encode: Encoder, folder: Path) -> None:
    """Fills the folder for the search, which appears when it is whole; a second process waits."""
    partial = folder.with_name(f"{INDEX_FOLDER}.partial")
    try:
        with folder.with_name(f"{INDEX_FOLDER}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                return
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _write_encoded(config, tables, encode, partial / ENCODED_FILE)
            if reads_generator(config.retrieval):
                _write_hidden(config, tables, partial / HIDDEN_FILE)
            with AssetStore(partial / ENCODED_FILE) as store:
                Corpus(tables, EncodedLookup(store), config.retrieval, partial)
            partial.rename(folder)
    except (OSError, sqlite3.Error) as error:
        raise UserError(
            f"{folder}: not there, and cannot be made: {error}; open the recipe once where "
            "data.built_root can be written"
        ) from error


def _write_encoded(config: Recipe, tables: Tables, encode: Encoder, path: Path) -> None:
    """Copies what the encoder knows of the tables' texts out of the assets of all builds."""
    assets = asset_path(config, "encoded", encoder_key(config))
    with AssetStore(assets) as known, AssetStore(path) as own:
        texts = (text for page in _pages(tables, config) for text in page)
        make_assets(
            known,
            text_items(texts),
            lambda: lambda texts: [one.to_bytes() for one in encode(texts)],
            BuildConfig(),
            TEXTS_A_BATCH,
            "texts",
        )
        for page in _pages(tables, config):
            own.put(known.get(map(content_key, page)).items())


def _write_hidden(config: Recipe, tables: Tables, path: Path) -> None:
    """Copies the hidden states of the tables' chunks out of the assets of all builds."""
    assets = asset_path(config, "hidden", hidden_key(config))
    with AssetStore(assets) as known, AssetStore(path) as own:
        items = chunk_items(chunk for page in _chunks(tables) for chunk in page)
        work = HiddenWork.of(config)
        make_assets(known, items, work, BuildConfig(), HIDDEN_A_BATCH, "hidden states of chunks")
        for page in _chunks(tables):
            own.put(known.get(key for key, _ in chunk_items(page)).items())


def _pages(tables: Tables, config: Recipe) -> Iterator[list[str]]:
    """The texts whose vectors are compared with questions', those of some chunks at a time."""
    whole = config.retrieval.selection == "two_stage"
    nuggets = not whole or compares_vectors(config.retrieval)
    for chunks in _chunks(tables):
        texts = [text for chunk in chunks for text in chunk.nugget_texts if nuggets]
        yield [chunk.text for chunk in chunks if whole] + texts


def _chunks(tables: Tables) -> Iterator[list[Chunk]]:
    """All chunks of the tables, some at a time."""
    for first in range(0, tables.count(), _ROWS_A_PAGE):
        yield tables.at(range(first, min(first + _ROWS_A_PAGE, tables.count())))


def _now_ms() -> float:
    return time.perf_counter() * 1e3
