"""Sample rows: a question after RAFT, its chunks, and the selected nuggets inside them."""

from collections.abc import Sequence
from typing import Any

from data_builders.answers import answer_key, holds_answer
from data_builders.candidates import score_nuggets
from data_builders.lookups import ChunkLookup
from data_builders.raft import Noised
from data_builders.scorers import NuggetScorer
from data_builders.selection import select, selected_texts
from data_builders.tables import Chunk
from recipes.retrieval import RetrievalConfig


def sample_row(
    noised: Noised,
    retrieved: Sequence[Chunk],
    chunk_scores: Sequence[float],
    chunks: ChunkLookup,
    scorer: NuggetScorer,
    config: RetrievalConfig,
) -> dict[str, Any]:
    """The row of a question, with what the report counts beside the columns of the table.

    Args:
        noised: the question after RAFT.
        retrieved: its chunks in rank order; with one-stage selection all candidates.
        chunk_scores: a score for each of them; with one-stage selection the best nugget's counts.
        chunks: of all passages.
        scorer: scores a nugget for the question.
        config: how chunks and nuggets are chosen.
    """
    question = noised.question
    retrieved, chunk_scores, nugget_scores = score_nuggets(
        question.text, retrieved, chunk_scores, scorer, config
    )
    chosen = select(retrieved, nugget_scores, config.k, config)
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
        "answer_in_spans": _answered(question.answers, selected_texts(retrieved, chosen)),
    }


def _answered(answers: Sequence[str], texts: Sequence[str]) -> bool:
    return any(holds_answer(answer_key(text), answers) for text in texts)
