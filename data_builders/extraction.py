"""The nuggets that a language model is asked for: which texts, and where its answers are kept."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_builders.chunking import chunk_text
from data_builders.intake import Intake
from data_builders.nuggets.llm.cost import estimate
from data_builders.nuggets.llm.journal import Journal
from data_builders.nuggets.llm.run import extract_with_llm
from data_builders.records import Passage
from recipes.building import LlmConfig
from recipes.errors import UserError
from recipes.schema import Recipe


def asked_model(config: Recipe) -> LlmConfig:
    """The model that the recipe asks for nuggets.

    Raises:
        UserError: it asks none.
    """
    if config.nuggets.extractor != "llm" or config.nuggets.llm is None:
        raise UserError(
            "nuggets.extractor: expected llm to work with a model's answers, got "
            f"{config.nuggets.extractor!r}"
        )
    return config.nuggets.llm


def open_journal(config: Recipe) -> Journal:
    """The journal of the model's answers beside the builds; what is in it was paid for.

    Raises:
        UserError: the recipe asks no model, or another process uses the journal.
    """
    return Journal(Path(config.data.built_root) / "llm-journal.sqlite", asked_model(config))


@dataclass(frozen=True)
class ChunkTexts:
    """The texts that the model is asked about: the distinct chunks of an intake."""

    intake: Intake
    tokenizer: PreTrainedTokenizerBase
    chunk_tokens: int

    def of(self, passage: Passage) -> list[str]:
        """The chunks of one passage."""
        chunks = chunk_text(self.tokenizer, passage.full_text, self.chunk_tokens)
        return [chunk.text for chunk in chunks]

    def __iter__(self) -> Iterator[str]:
        texts = (text for _, passage in self.intake.passages() for text in self.of(passage))
        return self.intake.distinct(texts)


def extract(texts: ChunkTexts, journal: Journal, *, retry_failed: bool) -> dict[str, Any]:
    """Asks the model about every text without an outcome in the journal; how it ended.

    The result depends on the journal alone, not on how many runs it took.

    Raises:
        UserError: see `extract_with_llm`.
    """
    ahead = estimate(texts, journal, retry_failed)
    done = extract_with_llm(texts, journal, retry_failed=retry_failed, estimate=ahead)
    return {
        "model": journal.config.model,
        "chunks": done.texts,
        "failed": dict(sorted(done.failures.items())),
    }
