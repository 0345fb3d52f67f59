"""KVLink (Yang et al., 2025): whole cached chunks, each followed by link tokens computed online."""

from cache_ops.layout import linked_chunks
from eval.systems.chunks import chunk_evidence, chunk_lengths
from eval.systems.interface import Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """Link tokens carry what was before them on to the query; chunks stay as cached."""
    chunks = question.chunks[: width.k_c]
    group = serving.soft_tokens.get("links")
    links = group.ids(len(chunks)) if group else [[]] * len(chunks)
    return Request(
        layout=linked_chunks(chunk_lengths(chunks), len(serving.template.prompt_ids), links),
        segments=serving.segments(chunks),
        evidence=chunk_evidence(chunks),
    )
