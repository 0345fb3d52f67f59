"""The stages of one build, in the order in which they need each other."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

from cache_ops.hf import load_tokenizer
from data_builders.assets import AssetStore
from data_builders.build_assets import BuildAssets, asset_path, nugget_texts
from data_builders.candidates import VECTORS_FILE, Asked, Contexts, Corpus, rerank
from data_builders.extraction import ChunkTexts, extract, open_journal
from data_builders.intake import Intake
from data_builders.key import Split, chunks_key
from data_builders.lookups import ChunkLookup
from data_builders.raft import Noised, add_noise, remove_supporting
from data_builders.records import Passage, Question
from data_builders.report import Tally
from data_builders.samples import sample_row
from data_builders.scorers import compares_vectors, load_scorer, reads_generator
from data_builders.tables import (
    CHUNK_COLUMNS,
    CHUNKS_FILE,
    SAMPLE_COLUMNS,
    SAMPLES_FILE,
    WIDENED_COLUMNS,
    Chunk,
    TableWriter,
)
from data_builders.workers import ChunkWork, chunk_item
from recipes.progress import track
from recipes.schema import Recipe

# What a worker gets at once, and what a kill costs at most.
PASSAGES_A_BATCH = {"rules": 256, "llm": 256, "local_model": 8}
QUESTIONS_A_BLOCK = 256
_ROWS_A_PAGE = 256
Item = TypeVar("Item")


@dataclass
class Pipeline:
    """One build under way."""

    config: Recipe
    split: Split
    folder: Path
    intake: Intake
    chunk_store: AssetStore
    chunks: ChunkLookup
    assets: BuildAssets

    @classmethod
    def open(
        cls, config: Recipe, split: Split, folder: Path, intake: Intake, stack: ExitStack
    ) -> Self:
        """Opens the asset stores until `stack` is closed; `folder` is for work files."""
        path = asset_path(config, "chunks", chunks_key(config))
        chunk_store = stack.enter_context(AssetStore(path))
        return cls(
            config,
            split,
            folder,
            intake,
            chunk_store,
            chunks=ChunkLookup(intake, chunk_store),
            assets=BuildAssets.open(config, stack),
        )

    def run(self, final: Path, *, retry_failed: bool) -> dict[str, Any]:
        """Makes the two tables in `final` from the intake; the report."""
        tally = Tally()
        extraction = self._make_chunks(retry_failed=retry_failed)
        self._write_chunks(final / CHUNKS_FILE, tally)
        self._forget_other_chunks(final / CHUNKS_FILE)
        self._retrieve()
        self._write_samples(final / SAMPLES_FILE, tally)
        return tally.report(extraction)

    # Chunks

    def _make_chunks(self, *, retry_failed: bool) -> dict[str, Any] | None:
        config = self.config
        work = ChunkWork(config.model.path, config.data.chunk_tokens, config.nuggets)
        batch = PASSAGES_A_BATCH[config.nuggets.extractor]
        if config.nuggets.extractor != "llm":
            self.assets.make("passages", self.chunk_store, self._chunk_items(None), work, batch)
            return None
        tokenizer = load_tokenizer(config.model.path)
        texts = ChunkTexts(self.intake, tokenizer, config.data.chunk_tokens)
        with closing(open_journal(config)) as journal:
            extraction = extract(texts, journal, retry_failed=retry_failed)

            def candidates(passage: Passage) -> list[list[str]]:
                # What the model has failed on keeps no nuggets; the report counts it.
                return [journal.candidates(text) or [] for text in texts.of(passage)]

            items = self._chunk_items(candidates)
            self.assets.make("passages", self.chunk_store, items, work, batch)
        return extraction

    def _chunk_items(
        self, candidates: Callable[[Passage], list[list[str]]] | None
    ) -> Iterator[tuple[bytes, str]]:
        for page in _pages(self.intake.passages(), _ROWS_A_PAGE):
            items = [
                chunk_item(passage, None if candidates is None else candidates(passage))
                for _, passage in page
            ]
            self.intake.set_chunks(
                [(key, number) for (key, _), (number, _) in zip(items, page, strict=True)]
            )
            yield from items

    def _write_chunks(self, path: Path, tally: Tally) -> None:
        """Writes each distinct chunk once, where it first occurs."""
        widened = WIDENED_COLUMNS if self.config.nuggets.neighbour_sentences else {}
        with self.intake.db, TableWriter(path, CHUNK_COLUMNS | widened) as table:
            self.intake.db.execute("DELETE FROM chunks")
            passages = zip(self.intake.passages(), self.intake.chunks_keys(), strict=True)
            for page in _pages(passages, _ROWS_A_PAGE):
                values = self.chunk_store.get(key for _, (_, key) in page)
                for (number, passage), (_, key) in page:
                    tally.passage(passage)
                    for position, row in enumerate(json.loads(values[key])):
                        if self.intake.add_chunk(row["chunk_id"], number, position):
                            table.write(row)
                            tally.chunk(row)

    # Retrieval

    def _forget_other_chunks(self, path: Path) -> None:
        """What a stopped build retrieved is void if a model has given other nuggets since."""
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if self.intake.searched() != found:
            (self.folder / VECTORS_FILE).unlink(missing_ok=True)
            self.intake.search_anew(found)

    def _retrieve(self) -> None:
        """Finds the chunks of every question, and makes what their nuggets are scored by."""
        retrieval, assets = self.config.retrieval, self.assets
        assets.encode("questions", self._question_texts())
        all_nuggets = retrieval.selection == "one_stage" and retrieval.candidates == "corpus"
        if retrieval.selection == "two_stage":
            assets.encode("chunks", (chunk.text for chunk in self._all_chunks()))
        elif all_nuggets:
            assets.encode("nuggets", nugget_texts(self._all_chunks()))
        compared = self.chunks, assets.encoder, retrieval
        where = (
            Contexts(*compared)
            if retrieval.candidates == "contexts"
            else Corpus(*compared, self.folder)
        )
        questions = track(
            self.intake.questions(), "retrieve", self.intake.count("questions"), "questions"
        )
        pending = ((n, question) for n, question in questions if not self.intake.is_retrieved(n))
        for block in _pages(pending, QUESTIONS_A_BLOCK):
            found = where.retrieve([self._ask(question) for _, question in block])
            self.intake.put_retrieved(
                [(n, one.rows, one.scores) for (n, _), one in zip(block, found, strict=True)]
            )
        if retrieval.rerank_chunks is not None:
            assets.rerank(
                (question.text, chunk.text)
                for number, question in self.intake.questions()
                for chunk in self.chunks.at(self.intake.retrieved(number)[0])
            )
        if retrieval.nugget_scorer == "cross_encoder":
            assets.score_nuggets(
                (question.text, chunk.nugget_texts)
                for number, question in self.intake.questions()
                for chunk in self._ranked(number, question)[0]
            )
        if compares_vectors(retrieval) and not all_nuggets:
            assets.encode("nuggets", nugget_texts(self._kept_chunks()))
        if reads_generator(retrieval):
            assets.read_hidden_states(self._question_texts(), self._kept_chunks())

    def _question_texts(self) -> Iterator[str]:
        return (question.text for _, question in self.intake.questions())

    def _kept_chunks(self) -> Iterator[Chunk]:
        """The chunks whose nuggets are compared; reranked ones as often as they are kept."""
        if self.config.retrieval.rerank_chunks is not None:
            for number, question in self.intake.questions():
                yield from self._ranked(number, question)[0]
            return
        for page in _pages(self.intake.retrieved_rows(), _ROWS_A_PAGE):
            yield from self.chunks.at(page)

    def _ranked(self, number: int, question: Question) -> tuple[list[Chunk], list[float]]:
        """The chunks that a question was given, best first, with their scores."""
        rows, chunk_scores = self.intake.retrieved(number)
        chunks = self.chunks.at(rows)
        if self.config.retrieval.rerank_chunks is None:
            return chunks, chunk_scores
        cross_encoder = self.assets.cross_encoder
        assert cross_encoder is not None, "what reranks has been scored"
        return rerank(question.text, chunks, cross_encoder, self.config.retrieval.k_c)

    def _all_chunks(self) -> Iterator[Chunk]:
        for page in _pages(iter(range(self.intake.count("chunks"))), _ROWS_A_PAGE):
            yield from self.chunks.at(page)

    def _ask(self, question: Question) -> Asked:
        """What is searched for a question, and where."""
        passages = self._noised(question).question.passages
        query = self.assets.encoder([question.text])[0]
        if self.config.retrieval.candidates == "contexts":
            return Asked(question.text, query, candidates=self.chunks.rows(passages))
        removed = [passage for passage in question.passages if passage not in passages]
        return Asked(question.text, query, excluded=self.chunks.rows(removed))

    def _noised(self, question: Question) -> Noised:
        """The question after RAFT; questions to evaluate on keep their passages."""
        if self.split != "train":
            return Noised(question, drawn=False, noised=False)
        probability, seed = self.config.raft.noise_probability, self.config.seed
        if self.config.retrieval.candidates == "corpus":
            return remove_supporting(question, probability, seed)
        return add_noise(question, self._pools, probability, seed)

    @cached_property
    def _pools(self) -> Mapping[str, Sequence[Passage]]:
        return self.intake.pools()

    # Samples

    def _write_samples(self, path: Path, tally: Tally) -> None:
        assets = self.assets
        scorer = load_scorer(self.config, assets.encoder, assets.cross_encoder, assets.generator)
        questions = track(
            self.intake.questions(), "build samples", self.intake.count("questions"), "samples"
        )
        with TableWriter(path, SAMPLE_COLUMNS) as table:
            for number, question in questions:
                chunks, chunk_scores = self._ranked(number, question)
                row = sample_row(
                    self._noised(question),
                    chunks,
                    chunk_scores,
                    self.chunks,
                    scorer,
                    self.config.retrieval,
                )
                table.write(row)
                tally.sample(row)


def _pages(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while page := list(islice(iterator, size)):
        yield page
