"""The kinds of work that a build spreads over workers: chunks with nuggets, embeddings, scores.

Payloads and results are text and bytes, so that they travel to other machines and lie in an
`AssetStore`. Equal payloads give equal results.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_ops.hf import load_tokenizer
from data_builders.assets import content_key
from data_builders.chunking import TextChunk, chunk_text, covering_tokens
from data_builders.encoder import load_encoder
from data_builders.executor import Worker
from data_builders.nuggets.align import align
from data_builders.nuggets.extract import load_extractor
from data_builders.nuggets.neighbours import widened
from data_builders.records import Passage
from data_builders.scorers.cross_encoder import load_cross_encoder
from recipes.building import NuggetsConfig
from recipes.retrieval import CrossEncoderConfig, RetrievalConfig

ALIGNMENT_KINDS = ("exact", "fuzzy", "abandoned", "repeated")


def chunk_item(passage: Passage, candidates: Sequence[Sequence[str]] | None) -> tuple[bytes, str]:
    """A passage as (key, payload) of `ChunkWork`, with each chunk's candidates if known."""
    payload = json.dumps([passage.title, passage.text, candidates])
    return content_key(payload), payload


@dataclass(frozen=True)
class ChunkWork:
    """Passages to their chunks: token ids and located nuggets, as JSON rows."""

    model_path: str
    chunk_tokens: int
    nuggets: NuggetsConfig

    def __call__(self) -> Worker:
        """Loads tokenizer and extractor."""
        tokenizer = load_tokenizer(self.model_path)
        extract = None if self.nuggets.extractor == "llm" else load_extractor(self.nuggets)

        def work(payloads: Sequence[str]) -> list[bytes]:
            passages, known = [], []
            for title, text, candidates in map(json.loads, payloads):
                passages.append(Passage(title, text))
                known.append(candidates)
            chunked = [chunk_text(tokenizer, p.full_text, self.chunk_tokens) for p in passages]
            if extract is not None:
                found = iter(extract([chunk.text for chunks in chunked for chunk in chunks]))
                known = [[next(found) for _ in chunks] for chunks in chunked]
            return [
                json.dumps(
                    [
                        self._row(passage, chunk, candidates)
                        for chunk, candidates in zip(chunks, of_passage, strict=True)
                    ]
                ).encode()
                for passage, chunks, of_passage in zip(passages, chunked, known, strict=True)
            ]

        return work

    def _row(self, passage: Passage, chunk: TextChunk, candidates: Sequence[str]) -> dict[str, Any]:
        return {
            "chunk_id": chunk.chunk_id,
            "title": passage.title,
            "text": chunk.text,
            "token_ids": chunk.token_ids,
            **nugget_columns(
                chunk,
                candidates,
                self.nuggets.fuzzy_threshold,
                self.nuggets.neighbour_sentences,
            ),
        }


def nugget_columns(
    chunk: TextChunk,
    candidates: Sequence[str],
    fuzzy_threshold: float | None,
    neighbour_sentences: int = 0,
) -> dict[str, Any]:
    """Nuggets in chunk order, each token span once, and how many candidates ended in which way.

    With `neighbour_sentences` a span covers so many around its nugget too, and their text is in
    `widened_texts`. Nuggets whose spans become equal stay two: each is found by its own text.
    """
    alignment = align(chunk.text, candidates, fuzzy_threshold)
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for found in alignment.located:
        span = covering_tokens(chunk.offsets, found.start, found.end)
        if span is not None:
            places.setdefault(span, (found.start, found.end))
    spans = sorted(places)
    nuggets = [places[span] for span in spans]
    beside: dict[str, Any] = {}
    if neighbour_sentences:
        wide = widened(chunk.text, nuggets, neighbour_sentences)
        beside["widened_texts"] = [chunk.text[slice(*place)] for place in wide]
        spans = [span for place in wide if (span := covering_tokens(chunk.offsets, *place))]
    return {
        "nugget_starts": [start for start, _ in spans],
        "nugget_ends": [end for _, end in spans],
        "nugget_texts": [chunk.text[slice(*place)] for place in nuggets],
        **beside,
        "exact": alignment.counts["exact"],
        "fuzzy": alignment.counts["fuzzy"],
        "abandoned": alignment.counts["abandoned"],
        "repeated": len(alignment.located) - len(spans),
    }


def text_items(texts: Iterable[str]) -> Iterable[tuple[bytes, str]]:
    """Texts as (key, payload) of `EncodeWork`."""
    return ((content_key(text), text) for text in texts)


@dataclass(frozen=True)
class EncodeWork:
    """Texts to what the retrieval encoder knows of them; `threads` also decides a vector's bits."""

    retrieval: RetrievalConfig
    threads: int

    def __call__(self) -> Worker:
        """Loads the encoder."""
        encode = load_encoder(self.retrieval, self.threads)
        return lambda texts: [encoded.to_bytes() for encoded in encode(texts)]


def scored_item(question: str, texts: Sequence[str]) -> tuple[bytes, str]:
    """A question with texts as (key, payload) of `ScoreWork`."""
    return content_key(question, *texts), json.dumps([question, texts])


@dataclass(frozen=True)
class ScoreWork:
    """Questions with texts to the cross-encoder's scores, as little-endian float32 numbers.

    `threads` also decides a score's last bits.
    """

    cross_encoder: CrossEncoderConfig
    threads: int

    def __call__(self) -> Worker:
        """Loads the cross-encoder."""
        score = load_cross_encoder(self.cross_encoder, self.threads)
        return lambda payloads: [
            np.array(found, "<f4").tobytes() for found in score([*map(json.loads, payloads)])
        ]
