"""What the questions of a build are compared with: asset stores, filled and then looked up."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from cache_ops.hf import load_tokenizer
from data_builders.assets import AssetStore, Needed
from data_builders.executor import Work, make_assets
from data_builders.hidden_states import (
    HiddenLookup,
    HiddenWork,
    chunk_items,
    generator_vectors,
    question_items,
)
from data_builders.key import assets_folder, digest, encoder_key, hidden_key, pairs_key
from data_builders.lookups import EncodedLookup, ScoredLookup
from data_builders.scorers import reads_generator, used_cross_encoder
from data_builders.scorers.hidden_ffn import NuggetVectors
from data_builders.tables import Chunk
from data_builders.workers import EncodeWork, ScoreWork, scored_item, text_items
from recipes.schema import Recipe

# What a worker gets at once, and what a kill costs at most.
TEXTS_A_BATCH = 64
# Of these, some hundreds of texts: the library computes the first pass of every call twice.
CHUNKS_TO_RERANK_A_BATCH = 256
NUGGET_LISTS_A_BATCH = 32
HIDDEN_A_BATCH = 32


def asset_path(config: Recipe, kind: str, key: dict[str, Any]) -> Path:
    """The file of a kind of asset, which all builds with that key share."""
    return assets_folder(config) / f"{kind}-{digest(key)}.sqlite"


@dataclass
class BuildAssets:
    """The stores that a recipe needs; `made` says how much of each kind was needed and missing."""

    config: Recipe
    encoded: AssetStore
    scored: AssetStore | None
    hidden: AssetStore | None
    made: dict[str, Needed] = field(default_factory=dict)

    @classmethod
    def open(cls, config: Recipe, stack: ExitStack) -> Self:
        """Opens the stores until `stack` is closed."""
        retrieval = config.retrieval

        def store(kind: str, key: dict[str, Any]) -> AssetStore:
            return stack.enter_context(AssetStore(asset_path(config, kind, key)))

        return cls(
            config,
            encoded=store("encoded", encoder_key(config)),
            scored=store("scored", pairs_key(config)) if used_cross_encoder(retrieval) else None,
            hidden=store("hidden", hidden_key(config)) if reads_generator(retrieval) else None,
        )

    def make(
        self,
        unit: str,
        store: AssetStore,
        items: Iterable[tuple[bytes, str]],
        work: Work,
        batch_size: int,
    ) -> None:
        """See `executor.make_assets`."""
        self.made[unit] = make_assets(store, items, work, self.config.build, batch_size, unit)

    def encode(self, unit: str, texts: Iterable[str]) -> None:
        """Makes what the retrieval encoder knows of the texts."""
        work = EncodeWork(self.config.retrieval, torch.get_num_threads())
        self.make(unit, self.encoded, text_items(texts), work, TEXTS_A_BATCH)

    def rerank(self, asked: Iterable[tuple[str, str]]) -> None:
        """Makes the cross-encoder's scores of questions with a chunk's text each."""
        items = ((question, [text]) for question, text in asked)
        self._score("chunk scores", items, CHUNKS_TO_RERANK_A_BATCH)

    def score_nuggets(self, asked: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Makes the cross-encoder's scores of questions with a chunk's nuggets each."""
        self._score("nugget scores", asked, NUGGET_LISTS_A_BATCH)

    def _score(self, unit: str, asked: Iterable[tuple[str, Sequence[str]]], size: int) -> None:
        cross_encoder = used_cross_encoder(self.config.retrieval)
        assert cross_encoder is not None, "only what it scores comes here"
        assert self.scored is not None, "it has a store"
        items = (scored_item(question, texts) for question, texts in asked)
        self.make(unit, self.scored, items, ScoreWork(cross_encoder, torch.get_num_threads()), size)

    def read_hidden_states(self, questions: Iterable[str], chunks: Iterable[Chunk]) -> None:
        """Makes the generator's vectors of questions and of the chunks' nuggets.

        Raises:
            UserError: a question is empty.
        """
        assert self.hidden is not None, "a recipe that reads them has a store"
        tokenizer = load_tokenizer(self.config.model.path)
        for unit, items in (
            ("hidden states of questions", question_items(questions, tokenizer)),
            ("hidden states of chunks", chunk_items(chunks)),
        ):
            self.make(unit, self.hidden, items, HiddenWork.of(self.config), HIDDEN_A_BATCH)

    @property
    def encoder(self) -> EncodedLookup:
        """The encoder, for texts that it has encoded."""
        return EncodedLookup(self.encoded)

    @property
    def cross_encoder(self) -> ScoredLookup | None:
        """The cross-encoder, for what it has scored; None: the recipe uses none."""
        return None if self.scored is None else ScoredLookup(self.scored)

    @property
    def generator(self) -> NuggetVectors | None:
        """The generator, for what it has read; None: the recipe scores nothing by it."""
        if self.hidden is None:
            return None
        lookup = HiddenLookup(self.hidden)
        return generator_vectors(load_tokenizer(self.config.model.path), lookup, lookup)


def nugget_texts(chunks: Iterable[Chunk]) -> Iterator[str]:
    """The texts of all their nuggets."""
    return (text for chunk in chunks for text in chunk.nugget_texts)
