"""APE (Yang et al., 2025): chunks encoded in parallel behind one prompt, attention reweighted."""

from cache_ops.layout import Layout
from cache_ops.parallel import ParallelAttention
from cache_ops.plan import PROMPT, PrefixPlan, Slice
from eval.systems.chunks import chunk_evidence
from eval.systems.interface import Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """Every chunk saw the prompt and starts right after it; the query follows the longest."""
    chunks = question.chunks[: width.k_c]
    prompt_ids, options = serving.template.prompt_ids, serving.config.systems.ape
    shared = len(prompt_ids)
    slices = [Slice(PROMPT, 0, shared, 0)] if shared else []
    segments = {PROMPT: prompt_ids}
    for chunk in chunks:
        segments[chunk.chunk_id] = [*prompt_ids, *chunk.token_ids]
        slices.append(Slice(chunk.chunk_id, shared, shared + len(chunk.token_ids), shared))
    return Request(
        layout=Layout(PrefixPlan(tuple(slices))),
        segments=segments,
        evidence=chunk_evidence(chunks),
        parallel=ParallelAttention(shared, options.temperature, options.scale),
    )
