"""Standard RAG: full causal prefill of [prompt, C_1 … C_k, query], nothing cached.

Of a prompt that is too long the middle of the context is left out; see `eval.truncation`.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from cache_ops.layout import computed
from data_builders.tables import Chunk
from eval.systems.chunks import chunk_evidence
from eval.systems.interface import Evidence, Question, Request, Serving, Width
from eval.truncation import middle_to_cut, prompt_limit


def request(question: Question, width: Width, serving: Serving) -> Request:
    """Everything is an online token; the chunks keep their retrieval order."""
    chunks, options = question.chunks[: width.k_c], serving.config.eval
    prompt_ids = serving.template.prompt_ids
    context_ids = [token for chunk in chunks for token in chunk.token_ids]
    start, end = middle_to_cut(
        len(context_ids),
        before=len(prompt_ids),
        after=len(serving.template.query_ids(question.question)),
        limit=prompt_limit(
            options.max_prompt_tokens, serving.max_positions, options.max_new_tokens
        ),
    )
    evidence = chunk_evidence(chunks)
    if start < end:
        evidence = _remaining(chunks, start, end, serving.tokenizer)
    return Request(
        layout=computed([*prompt_ids, *context_ids[:start], *context_ids[end:]]),
        segments={},
        evidence=evidence,
        cut=(start, end),
    )


def _remaining(
    chunks: Sequence[Chunk], start: int, end: int, tokenizer: PreTrainedTokenizerBase
) -> list[Evidence]:
    """What is left of each chunk without the context tokens `[start, end)`, up to two pieces."""
    evidence = []
    first = 0
    for chunk in chunks:
        ids = chunk.token_ids
        for piece in (ids[: max(0, start - first)], ids[max(0, end - first) :]):
            if len(piece) == len(ids):
                evidence.append(Evidence(chunk.chunk_id, chunk.text))
            elif piece:
                evidence.append(Evidence(chunk.chunk_id, str(tokenizer.decode(piece))))
        first += len(ids)
    return evidence
