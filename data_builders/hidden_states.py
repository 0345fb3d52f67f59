"""The generator's own vectors of nuggets and questions: means of its last hidden states over spans.

A nugget's comes out of one forward pass over its whole chunk; a question's out of one over the
question alone, as if it were a chunk that is one nugget. Both are assets: computed once a content.
"""

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from cache_ops.encode import span_means
from cache_ops.hf import load_model
from data_builders.assets import AssetStore, content_key
from data_builders.encoder import torch_threads
from data_builders.executor import Worker
from data_builders.models import check_device
from data_builders.scorers.hidden_ffn import NuggetVectors, Vectors
from data_builders.tables import Chunk
from recipes.errors import UserError
from recipes.schema import Recipe

Item = tuple[bytes, str]
SpanMeans = Callable[[Sequence[int], Sequence[tuple[int, int]]], Vectors]
"""Token ids and spans in them to a float32 row a span."""


def chunk_items(chunks: Iterable[Chunk]) -> Iterable[Item]:
    """Chunks with nuggets as (key, payload) of `HiddenWork`."""
    return (_item(chunk.token_ids, chunk.nuggets) for chunk in chunks if chunk.nuggets)


def question_items(questions: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterable[Item]:
    """Questions as (key, payload) of `HiddenWork`.

    Raises:
        UserError: one of them is empty.
    """
    return (_item(*_as_chunk(question, tokenizer)) for question in questions)


def _item(token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Item:
    payload = json.dumps([list(token_ids), [list(span) for span in spans]])
    return content_key(payload), payload


def _as_chunk(
    question: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[tuple[int, int]]]:
    ids = tokenizer(question, add_special_tokens=False)["input_ids"]
    if not ids:
        raise UserError("a question without text has no hidden states to score nuggets by")
    return ids, [(0, len(ids))]


@dataclass(frozen=True)
class HiddenWork:
    """Token ids with spans to float32 rows; `threads` also decides their last bits."""

    model_path: str
    dtype: str
    device: str
    threads: int | None

    @classmethod
    def of(cls, config: Recipe) -> Self:
        """That of a recipe's model, on the device of its retrieval."""
        threads = torch.get_num_threads()
        return cls(config.model.path, config.model.dtype, config.retrieval.device, threads)

    def load(self) -> SpanMeans:
        """Loads the model. Threads may share it.

        Raises:
            UserError: no such device on this machine.
            ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_model`.
        """
        check_device(self.device, "retrieval.device")
        model = load_model(self.model_path, self.dtype).eval().to(torch.device(self.device))
        lock = threading.Lock()

        def means(token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Vectors:
            # One chunk a pass: its bits do not depend on company.
            with lock, torch_threads(self.threads):
                return span_means(model, token_ids, spans).cpu().numpy()

        return means

    def __call__(self) -> Worker:
        """Loads the model."""
        means = self.load()
        return lambda payloads: [
            means(*json.loads(payload)).astype("<f4").tobytes() for payload in payloads
        ]


class HiddenLookup:
    """Rows that were computed before, as `SpanMeans`."""

    def __init__(self, store: AssetStore) -> None:
        self._store = store

    def __call__(self, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Vectors:
        key, _ = _item(token_ids, spans)
        return np.frombuffer(self._store.get([key])[key], "<f4").reshape(len(spans), -1)


def generator_vectors(
    tokenizer: PreTrainedTokenizerBase, of_chunk: SpanMeans, of_question: SpanMeans
) -> NuggetVectors:
    """The generator's vectors for a scorer, from what gives those of chunks and of questions.

    Threads may share them where they may share those two.
    """
    # A tokenizer is not made for two threads.
    tokenizing = threading.Lock()

    def question_vector(question: str) -> Vectors:
        with tokenizing:
            as_chunk = _as_chunk(question, tokenizer)
        return of_question(*as_chunk)[0]

    return NuggetVectors(question_vector, lambda chunk: of_chunk(chunk.token_ids, chunk.nuggets))
