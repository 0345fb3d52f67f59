"""Questions of random tokens whose lengths are those of real CoinRAG rows; no data set is needed.

The lengths were chosen after multi-hop questions over Wikipedia passages of 70 to 95 words (about
1.4 tokens a word): 5 chunks of 60 to 180 tokens, cut into sentences of 16 to 32 tokens of which 10
are the nuggets, a prompt of 24 tokens, a question with its chat markup of 45 to 75, an answer of 2
to 8. Four samples then make a packed row of about 2,150 tokens, 17 of them to be learned.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cache_ops.packing import Example, PackedBatch, pack
from cache_ops.plan import PROMPT, PrefixPlan, Span, plan_prefix
from cache_ops.rope import Rope

PROMPT_TOKENS, CHUNKS, NUGGETS = 24, 5, 10
CHUNK_TOKENS, NUGGET_TOKENS = (60, 180), (16, 32)
QUERY_TOKENS, ANSWER_TOKENS = (45, 75), (2, 8)


@dataclass(frozen=True)
class Asked:
    """One question: its chunks, the nuggets' prefix, and the tokens that are computed."""

    chunks: dict[str, list[int]]
    """The tokens of each chunk, best first, and of the prompt under its key."""
    plan: PrefixPlan
    query_ids: list[int]
    answer_ids: list[int]


def questions(count: int, vocabulary: int, seed: int = 0) -> list[Asked]:
    """The same questions whenever `count`, `vocabulary` and `seed` are the same."""
    draw = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(draw.randint(least, most))]

    prompt = tokens(PROMPT_TOKENS, PROMPT_TOKENS)
    asked = []
    for number in range(count):
        chunks = {f"{number}.{rank}": tokens(*CHUNK_TOKENS) for rank in range(CHUNKS)}
        sentences = []
        for chunk, ids in chunks.items():
            start = 0
            while start < len(ids):
                end = min(start + draw.randint(*NUGGET_TOKENS), len(ids))
                sentences.append(Span(chunk, start, end))
                start = end
        spans = draw.sample(sentences, NUGGETS)
        plan = plan_prefix(spans, prompt_length=len(prompt), chunk_ranks=list(chunks))
        query, answer = tokens(*QUERY_TOKENS), tokens(*ANSWER_TOKENS)
        asked.append(Asked({PROMPT: prompt} | chunks, plan, query, answer))
    return asked


def rows(asked: Sequence[Asked], rope: Rope, samples: int) -> list[PackedBatch]:
    """The questions as packed rows of `samples` each."""
    packed = []
    for first in range(0, len(asked), samples):
        group = asked[first : first + samples]
        chunks = {name: ids for one in group for name, ids in one.chunks.items()}
        examples = [Example(one.plan, one.query_ids, one.answer_ids) for one in group]
        packed.append(pack(examples, chunks, rope))
    return packed
