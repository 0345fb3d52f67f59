"""Sample rows: a question after RAFT, its chunks, and the selected nuggets inside them."""

from collections.abc import Sequence
from typing import Any

from data_builders.answers import answer_key, holds_answer
from data_builders.candidates import score_nuggets
from data_builders.lookups import Lookups
from data_builders.raft import Noised
from data_builders.retrieval import select_nuggets
from data_builders.tables import Chunk
from recipes.building import RetrievalConfig


def sample_row(
    noised: Noised,
    retrieved: Sequence[Chunk],
    chunk_scores: Sequence[float],
    lookups: Lookups,
    config: RetrievalConfig,
) -> dict[str, Any]:
    """The row of a question, with what the report counts beside the columns of the table.

    Args:
        noised: the question after RAFT.
        retrieved: its chunks in rank order; with one-stage selection all candidates.
        chunk_scores: a score for each of them; with one-stage selection the best nugget's counts.
    """
    question, chunks, encoded = noised.question, lookups.chunks, lookups.encoded
    query = encoded([question.text])[0]
    retrieved, chunk_scores, nugget_scores = score_nuggets(
        query, retrieved, chunk_scores, encoded, config
    )
    chosen = select_nuggets(nugget_scores, [chunk.nuggets for chunk in retrieved], config.k)
    gold = chunks.of([passage for passage in question.passages if passage.is_supporting])
    spans = [retrieved[chunk].nuggets[nugget] for chunk, nugget in chosen]
    return {
        "question_id": question.id,
        "dataset": question.dataset,
        "question": question.text,
        "answers": list(question.answers),
        "chunk_ids": [chunk.chunk_id for chunk in retrieved],
        "chunk_scores": chunk_scores,
        "nugget_scores": nugget_scores,
        "span_chunks": [chunk for chunk, _ in chosen],
        "span_starts": [start for start, _ in spans],
        "span_ends": [end for _, end in spans],
        "gold_chunk_ids": [chunk.chunk_id for chunk in gold],
        "noised": noised.noised,
        "noise_drawn": noised.drawn,
        "context_passages": len(question.passages),
        # Of a corpus all are candidates.
        "candidate_nuggets": (
            sum(len(chunk.nuggets) for chunk in chunks.of(question.passages))
            if config.candidates == "contexts"
            else None
        ),
        "answer_in_contexts": _answered(question.answers, [p.full_text for p in question.passages]),
        "answer_in_chunks": _answered(question.answers, [chunk.text for chunk in retrieved]),
        "answer_in_spans": _answered(question.answers, _selected_texts(retrieved, chosen)),
    }


def _answered(answers: Sequence[str], texts: Sequence[str]) -> bool:
    return any(holds_answer(answer_key(text), answers) for text in texts)


def _selected_texts(chunks: Sequence[Chunk], chosen: Sequence[tuple[int, int]]) -> list[str]:
    """For each chunk its selected nuggets in chunk order: an answer may run over two of them."""
    by_chunk: dict[int, list[str]] = {}
    for chunk, nugget in sorted(chosen):
        by_chunk.setdefault(chunk, []).append(chunks[chunk].nugget_texts[nugget])
    return ["\n".join(texts) for texts in by_chunk.values()]
