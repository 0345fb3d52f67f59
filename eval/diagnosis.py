"""Why an answer is wrong, as far as the retrieved chunks and the prefix tell.

The CoinRAG paper's three kinds of errors, and the counts behind them. The paper speaks of passages;
here everything is counted in chunks, so that a gold passage of three chunks is three gold chunks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from cache_ops.plan import PROMPT
from data_builders.answers import answer_key, holds_answer
from data_builders.tables import Chunk
from eval.systems import Question, Request

ErrorKind = Literal["bridge_gap", "extraction_loss", "distractor_bias"]

# Such answers stand in no text, though their words do.
_VERDICTS = frozenset({"yes", "no"})
# Texts of a few questions: each is looked at once in every cell.
_key = lru_cache(maxsize=512)(answer_key)


@dataclass(frozen=True)
class Diagnosis:
    """What a question's evidence held in one cell of a comparison."""

    gold_recall: float | None
    """Share of the gold chunks that were retrieved; None where the data name none."""
    gold_tokens: int
    """Active tokens that belong to gold chunks."""
    context_tokens: int
    """Active tokens without the prompt."""
    answer_in_chunks: bool
    """Whether a retrieved chunk holds an answer word for word."""
    answer_in_prefix: bool
    """Whether what the model saw of a chunk does."""
    error_kinds: list[ErrorKind]
    """Of a wrong answer; it may have several or none."""


def diagnose(question: Question, served: Request, k_c: int, f1: float) -> Diagnosis:
    """Says what was retrieved, what the model saw of it, and what that explains.

    An answer with F1 below 1 is wrong. Its kinds of error: `bridge_gap`, a gold chunk was not
    retrieved; `extraction_loss`, a retrieved chunk holds an answer and the prefix does not;
    `distractor_bias`, the prefix holds an answer and another was given. Only the first can be told
    where the answer is yes or no.

    Args:
        question: the question with its chunks.
        served: how a system served it.
        k_c: how many of the question's chunks were retrieved; one-stage selection may have taken
            nuggets of others too, which then count as well.
        f1: token F1 of the answer given, in [0, 1].
    """
    seen = {piece.chunk_id for piece in served.evidence}
    chunks = [
        chunk for rank, chunk in enumerate(question.chunks) if rank < k_c or chunk.chunk_id in seen
    ]
    gold = set(question.gold_chunk_ids)
    recall = len(gold & {chunk.chunk_id for chunk in chunks}) / len(gold) if gold else None
    answers = [answer for answer in question.answers if _key(answer).strip() not in _VERDICTS]
    in_chunks = any(holds_answer(_key(chunk.text), answers) for chunk in chunks)
    in_prefix = any(holds_answer(_key(text), answers) for text in _seen_texts(chunks, served))
    kinds: list[ErrorKind] = []
    if f1 < 1:
        if recall is not None and recall < 1:
            kinds.append("bridge_gap")
        if in_chunks and not in_prefix:
            kinds.append("extraction_loss")
        if in_prefix:
            kinds.append("distractor_bias")
    tokens = _tokens_by_chunk(chunks, served)
    return Diagnosis(
        gold_recall=recall,
        gold_tokens=sum(tokens[chunk_id] for chunk_id in gold),
        context_tokens=served.layout.tokens - tokens[PROMPT],
        answer_in_chunks=in_chunks,
        answer_in_prefix=in_prefix,
        error_kinds=kinds,
    )


def _seen_texts(chunks: Sequence[Chunk], served: Request) -> list[str]:
    """For each chunk what the model saw of it in text order: an answer may run over two nuggets."""
    seen: dict[str, list[str]] = {chunk.chunk_id: [] for chunk in chunks}
    for piece in served.evidence:
        seen[piece.chunk_id].append(piece.text)
    # Texts that are not the chunk's own stay in the order in which they came.
    return ["\n".join(sorted(seen[chunk.chunk_id], key=chunk.text.find)) for chunk in chunks]


def _tokens_by_chunk(chunks: Sequence[Chunk], served: Request) -> Counter[str]:
    """Active tokens of each chunk, and of the prompt under `PROMPT`."""
    layout = served.layout
    if layout.online_ids and not layout.plan.slices:
        return _computed_tokens(chunks, len(layout.online_ids), served.cut)
    counts: Counter[str] = Counter()
    for piece in layout.plan.slices:
        # What is encoded alone is named after its chunk, as in "chunk[start:end]".
        counts[piece.chunk.partition("[")[0]] += piece.end - piece.start
    return counts


def _computed_tokens(
    chunks: Sequence[Chunk], online_tokens: int, cut: tuple[int, int]
) -> Counter[str]:
    """The same of a layout without slices: the prompt, then the chunks less a part cut out."""
    start, end = cut
    context = [chunk.chunk_id for chunk in chunks for _ in chunk.token_ids]
    kept = context[:start] + context[end:]
    return Counter({PROMPT: online_tokens - len(kept), **Counter(kept)})
