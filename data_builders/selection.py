"""Which nuggets of the retrieved chunks form a prefix: the best k, or what fills a token budget.

One function selects for builds, and so for training, for comparisons and online. A budget is filled
greedily by score. A nugget that does not fit is passed over for the next that does: ending there
leaves room unused, and never covered more answers under the budgets tried on IRCoT's dev questions.
Near-duplicates are told by the Jaccard similarity of token multisets. By containment a short nugget
would be a duplicate of any long one that has its words, and some of those held the answer.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from data_builders.retrieval import one_stage_chunks, select_nuggets
from data_builders.tables import Chunk
from recipes.retrieval import BudgetConfig, RetrievalConfig

Place = tuple[int, int]


def select(
    chunks: Sequence[Chunk],
    nugget_scores: Sequence[Sequence[float]],
    k: int,
    config: RetrievalConfig,
) -> list[Place]:
    """The selected nuggets of retrieved chunks, as (chunk index, nugget index), best first.

    Without `budget` and `min_score` these are `retrieval.select_nuggets`. A smaller `k` selects
    some of the same nuggets; the best of them, unless `budget.a_chunk` brings others forward.

    Args:
        chunks: in rank order.
        nugget_scores: for each of them a score for each of its nuggets.
        k: how many nuggets at most.
        config: no nugget below `min_score` is selected, also not for `budget.a_chunk`. With
            `budget` the slices together have at most `budget.tokens` active tokens, and no two
            selected nuggets are more alike than `budget.max_similarity`.
    """
    nuggets = [chunk.nuggets for chunk in chunks]
    if config.budget is None:
        ranked = select_nuggets(nugget_scores, nuggets, k)
    else:
        if config.selection == "one_stage":
            # Of the chunks that a table made for this k holds, whatever k it was made for.
            nugget_scores = nugget_scores[: len(one_stage_chunks(nugget_scores, k))]
        ranked = select_nuggets(nugget_scores, nuggets, sum(map(len, nugget_scores)))
    if config.min_score is not None:
        # Scores are float32 values: a written 0.7 must not be above a stored one.
        least = float(np.float32(config.min_score))
        ranked = [(c, n) for c, n in ranked if nugget_scores[c][n] >= least]
    if config.budget is None:
        return ranked
    chosen = _fill(ranked, chunks, k, config.budget, keep_overlaps=config.overlap == "keep")
    return [place for place in ranked if place in chosen]


def _fill(
    ranked: Sequence[Place],
    chunks: Sequence[Chunk],
    k: int,
    budget: BudgetConfig,
    *,
    keep_overlaps: bool,
) -> set[Place]:
    """What is taken of ranked nuggets: first up to 1, 2, ... `a_chunk` of each chunk, then any."""
    used: set[Place] = set()
    spent = 0
    of_chunk: Counter[int] = Counter()
    bags: dict[Place, Counter[int]] = {}
    for most in [*range(1, budget.a_chunk + 1), k]:
        for chunk, nugget in ranked:
            if len(bags) == k:
                return set(bags)
            if (chunk, nugget) in bags or of_chunk[chunk] >= most:
                continue
            start, end = chunks[chunk].nuggets[nugget]
            tokens = {(chunk, token) for token in range(start, end)}
            cost = len(tokens if keep_overlaps else tokens - used)
            bag = Counter(chunks[chunk].token_ids[start:end])
            if spent + cost > budget.tokens or _is_repeated(bag, bags.values(), budget):
                continue
            bags[chunk, nugget] = bag
            of_chunk[chunk] += 1
            used |= tokens
            spent += cost
    return set(bags)


def _is_repeated(bag: Counter[int], chosen: Iterable[Counter[int]], budget: BudgetConfig) -> bool:
    limit = budget.max_similarity
    return limit is not None and any(similarity(bag, other) > limit for other in chosen)


def similarity(one: Counter[int], other: Counter[int]) -> float:
    """The Jaccard similarity of two multisets of tokens, not both empty: 1 for equal ones."""
    return (one & other).total() / (one | other).total()


def active_tokens(chunks: Sequence[Chunk], selected: Sequence[Place]) -> int:
    """Distinct tokens of the chunks under the selected nuggets' slices."""
    return len({(c, token) for c, n in selected for token in range(*chunks[c].nuggets[n])})


def selected_texts(chunks: Sequence[Chunk], selected: Sequence[Place]) -> list[str]:
    """For each chunk its selected slices in chunk order: an answer may run over two of them."""
    by_chunk: dict[int, list[str]] = {}
    for chunk, nugget in sorted(selected):
        by_chunk.setdefault(chunk, []).append(chunks[chunk].slice_texts[nugget])
    return ["\n".join(texts) for texts in by_chunk.values()]
