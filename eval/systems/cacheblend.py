"""CacheBlend (Yao et al., 2025): cached chunks, of which the tokens that deviate are recomputed."""

from cache_ops.layout import whole_chunks
from cache_ops.recompute import ChosenRows
from eval.systems.chunks import chunk_evidence, chunk_lengths
from eval.systems.interface import Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """TurboRAG's reordered prefix; the first pass chooses and recomputes some of it."""
    chunks = question.chunks[: width.k_c]
    options = serving.config.systems.cacheblend
    return Request(
        layout=whole_chunks(chunk_lengths(chunks), len(serving.template.prompt_ids)),
        segments=serving.segments(chunks),
        evidence=chunk_evidence(chunks),
        recompute=ChosenRows(
            options.ratio, options.metric, options.check_layer, gradual=options.gradual
        ),
    )
