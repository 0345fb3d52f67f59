"""The rows that a build makes: chunk rows from passages, sample rows from questions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_builders.answers import answer_key, holds_answer
from data_builders.chunking import TextChunk, chunk_text, covering_tokens
from data_builders.nuggets.align import align
from data_builders.nuggets.extract import Extractor
from data_builders.raft import Noised
from data_builders.records import Passage, Question
from data_builders.retrieval import Embeddings, cosine_scores, select_nuggets, top
from data_builders.tables import CHUNK_COLUMNS, SAMPLE_COLUMNS, Chunk

Lookup = Callable[[Sequence[str]], Embeddings]
"""Unit-length rows of texts that the build has embedded."""

ALIGNMENT_KINDS = ("exact", "fuzzy", "abandoned", "repeated")
# Shards hold what the report needs beside the columns of the built tables.
CHUNK_SHARD_COLUMNS = {
    **CHUNK_COLUMNS,
    "passage": "int32",
    **dict.fromkeys(ALIGNMENT_KINDS, "int32"),
}
SAMPLE_SHARD_COLUMNS = {
    **SAMPLE_COLUMNS,
    "answer_in_chunks": "bool",
    "noise_drawn": "bool",
}


def chunk_rows(
    passage: Passage,
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    chunk_tokens: int,
    extract: Extractor,
    fuzzy_threshold: float | None,
) -> list[dict[str, Any]]:
    """The chunks of one passage with their nuggets; `index` is the passage's number."""
    return [
        {
            "chunk_id": chunk.chunk_id,
            "title": passage.title,
            "text": chunk.text,
            "token_ids": chunk.token_ids,
            "passage": index,
            **_nugget_columns(chunk, extract(chunk.text), fuzzy_threshold),
        }
        for chunk in chunk_text(tokenizer, passage.full_text, chunk_tokens)
    ]


def _nugget_columns(
    chunk: TextChunk, candidates: Sequence[str], fuzzy_threshold: float | None
) -> dict[str, Any]:
    """Nuggets in chunk order, each token span once, and the alignment's counts."""
    alignment = align(chunk.text, candidates, fuzzy_threshold)
    texts: dict[tuple[int, int], str] = {}
    for found in alignment.located:
        span = covering_tokens(chunk.offsets, found.start, found.end)
        if span is not None:
            texts.setdefault(span, chunk.text[found.start : found.end])
    spans = sorted(texts)
    return {
        "nugget_starts": [start for start, _ in spans],
        "nugget_ends": [end for _, end in spans],
        "nugget_texts": [texts[span] for span in spans],
        "exact": alignment.counts["exact"],
        "fuzzy": alignment.counts["fuzzy"],
        "abandoned": alignment.counts["abandoned"],
        "repeated": len(alignment.located) - len(spans),
    }


@dataclass(frozen=True)
class Retrieved:
    """The chunks found for a question, best first, with their scores and the question's row."""

    query: Embeddings
    chunks: list[Chunk]
    scores: list[float]


def retrieve_chunks(
    question: Question,
    chunks_of: Callable[[Passage], Sequence[Chunk]],
    embed: Lookup,
    k_c: int,
) -> Retrieved:
    """The first stage: the top `k_c` of the chunks of a question's passages."""
    contexts = {
        chunk.chunk_id: chunk for passage in question.passages for chunk in chunks_of(passage)
    }
    candidates = list(contexts.values())
    query = embed([question.text])[0]
    scores = cosine_scores(query, embed([chunk.text for chunk in candidates]))
    ranked = top(scores, k_c)
    return Retrieved(
        query, [candidates[index] for index in ranked], [scores[index] for index in ranked]
    )


def sample_row(
    noised: Noised,
    retrieved: Retrieved,
    chunks_of: Callable[[Passage], Sequence[Chunk]],
    embed: Lookup,
    k: int,
) -> dict[str, Any]:
    """One question, after RAFT, with its retrieved chunks and the top `k` nuggets inside them."""
    question, chunks = noised.question, retrieved.chunks
    nugget_scores = [
        cosine_scores(retrieved.query, embed(chunk.nugget_texts)) if chunk.nuggets else []
        for chunk in chunks
    ]
    chosen = select_nuggets(nugget_scores, [chunk.nuggets for chunk in chunks], k)
    gold = dict.fromkeys(
        chunk.chunk_id
        for passage in question.passages
        if passage.is_supporting
        for chunk in chunks_of(passage)
    )
    spans = [chunks[chunk].nuggets[nugget] for chunk, nugget in chosen]
    return {
        "question_id": question.id,
        "dataset": question.dataset,
        "question": question.text,
        "answers": list(question.answers),
        "chunk_ids": [chunk.chunk_id for chunk in chunks],
        "chunk_scores": retrieved.scores,
        "nugget_scores": nugget_scores,
        "span_chunks": [chunk for chunk, _ in chosen],
        "span_starts": [start for start, _ in spans],
        "span_ends": [end for _, end in spans],
        "gold_chunk_ids": list(gold),
        "noised": noised.noised,
        "noise_drawn": noised.drawn,
        "answer_in_contexts": any(
            holds_answer(answer_key(passage.full_text), question.answers)
            for passage in question.passages
        ),
        "answer_in_chunks": any(
            holds_answer(answer_key(chunk.text), question.answers) for chunk in chunks
        ),
        "answer_in_spans": any(
            holds_answer(answer_key(text), question.answers)
            for text in _selected_texts(chunks, chosen)
        ),
    }


def _selected_texts(chunks: Sequence[Chunk], chosen: Sequence[tuple[int, int]]) -> list[str]:
    """For each chunk its selected nuggets in chunk order: an answer may run over two of them."""
    by_chunk: dict[int, list[str]] = {}
    for chunk, nugget in sorted(chosen):
        by_chunk.setdefault(chunk, []).append(chunks[chunk].nugget_texts[nugget])
    return ["\n".join(texts) for texts in by_chunk.values()]
