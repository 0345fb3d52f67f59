"""Online nuggets: a published nugget pipeline (GINGER, Crucible) asked once a question.

An extractor is called for every question, inside the time to first token, and what it gives is
encoded as short independent texts: each attends to itself alone, and the query to all of them. The
prompt alone is cached, since no other keys and values can be known before the question.
"""

import time

from cache_ops.layout import Layout
from cache_ops.plan import Span, plan_prefix
from eval.systems.interface import Evidence, Question, Request, Serving, Width


def request(question: Question, width: Width, serving: Serving) -> Request:
    """The extractor's first `k` nuggets of the first `k_c` chunks, one a line.

    They are laid out as CoinRAG's are: by `retrieval.order` in the order of chunk and text, or best
    first; contiguously after the prompt. Where the extractor finds nothing, the prefix is the
    prompt.
    """
    assert width.k is not None, "online nuggets need their number"
    assert serving.extractor is not None, "online nuggets need an extractor"
    chunks = question.chunks[: width.k_c]
    start = time.perf_counter()
    nuggets = serving.extractor(question.question, chunks)[: width.k]
    extract_ms = (time.perf_counter() - start) * 1e3

    segments = dict(serving.segments([]))
    names = []
    for number, nugget in enumerate(nuggets):
        names.append(f"{chunks[nugget.chunk].chunk_id}[{number}]")
        segments[names[-1]] = serving.tokenizer(
            f"{nugget.text}\n", add_special_tokens=False, split_special_tokens=True
        )["input_ids"]
    as_read = sorted(range(len(names)), key=lambda n: (nuggets[n].chunk, nuggets[n].place))
    plan = plan_prefix(
        [Span(name, 0, len(segments[name])) for name in names],
        prompt_length=len(serving.template.prompt_ids),
        chunk_ranks=[names[number] for number in as_read],
        order=serving.config.retrieval.order,
        # Each is a chunk of its own.
        overlap="keep",
    )
    return Request(
        layout=Layout(plan),
        segments=segments,
        evidence=[Evidence(chunks[n.chunk].chunk_id, n.text) for n in nuggets],
        online_segments=frozenset(names),
        extract_ms=extract_ms,
    )
