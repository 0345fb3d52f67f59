"""Scores, ranks and selection: the top k_c chunks of a question, then the top k nuggets in them.

The CoinRAG paper's two-stage selection and its one-stage ablation, with FlagEmbedding encoders.
Scores are rounded to `SCORE_DECIMALS` and equal scores keep their order: ranks do not depend on how
texts are batched.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data_builders.encoded import Encoded
from recipes.retrieval import RetrievalWeights

Embeddings = NDArray[np.float32]

SCORE_DECIMALS = 5
# Reciprocal rank fusion's constant, from Cormack, Clarke and Buettcher (SIGIR 2009).
FUSION_CONSTANT = 60
# How many candidates of a corpus each ranking brings to fusion or to a second score.
FUSION_DEPTH = 100


def cosine_scores(query: Embeddings, rows: Embeddings) -> list[float]:
    """Rounded cosines of one unit vector with unit rows, as exact float32 values."""
    return rounded(_dense_scores(query, rows))


def scores(query: Encoded, texts: Sequence[Encoded], weights: RetrievalWeights) -> list[float]:
    """Rounded scores of texts for a query: the weighted sum of BGE-M3's three scores.

    Dense is the cosine; sparse the sum over shared tokens of the products of their weights; ColBERT
    the mean over the query's vectors of the greatest cosine with one of the text's (Chen et al.,
    BGE M3-Embedding, 2024, section 3). A score depends on its own text alone.

    Args:
        query: holds every part whose weight is not 0, and so does each text.
    """
    if not texts:
        return []
    total = np.zeros(len(texts))
    if weights.dense:
        rows = np.stack([text.dense for text in texts])
        total += weights.dense * _dense_scores(query.dense, rows)
    if weights.sparse:
        total += weights.sparse * np.array([_sparse_score(query, text) for text in texts])
    if weights.colbert:
        total += weights.colbert * np.array([_colbert_score(query, text) for text in texts])
    return rounded(total)


def _dense_scores(query: Embeddings, rows: Embeddings) -> NDArray[np.float64]:
    # Elementwise products in float64: unlike a matrix product, independent of the other rows.
    return (rows.astype(np.float64) * query.astype(np.float64)).sum(axis=1)


def _sparse_score(query: Encoded, text: Encoded) -> float:
    assert query.sparse is not None, "the query has no lexical weights"
    assert text.sparse is not None, "the text has no lexical weights"
    (query_ids, query_weights), (text_ids, text_weights) = query.sparse, text.sparse
    _, ours, theirs = np.intersect1d(query_ids, text_ids, assume_unique=True, return_indices=True)
    products = query_weights[ours].astype(np.float64) * text_weights[theirs]
    return float(products.sum())


def _colbert_score(query: Encoded, text: Encoded) -> float:
    assert query.tokens is not None, "the query has no ColBERT vectors"
    assert text.tokens is not None, "the text has no ColBERT vectors"
    products = query.tokens.astype(np.float64) @ text.tokens.astype(np.float64).T
    return float(products.max(axis=1).mean())


def rounded(values: NDArray[np.float64]) -> list[float]:
    """Scores to `SCORE_DECIMALS`, as exact float32 values."""
    found: list[float] = np.round(values, SCORE_DECIMALS).astype(np.float32).tolist()
    return found


def top(scores: ArrayLike, count: int) -> list[int]:
    """Indices of the highest scores, best first; the earlier index wins a tie."""
    values = np.asarray(scores)
    places = np.arange(len(values))
    if count < len(values):
        # Everything that ties with the last one in is still a candidate.
        places = np.flatnonzero(values >= np.partition(values, -count)[-count])
    order = np.argsort(-values[places], kind="stable")[:count]
    indices: list[int] = places[order].tolist()
    return indices


def fuse(rankings: Sequence[Sequence[int]], count: int) -> list[tuple[int, float]]:
    """The best `count` candidates of several rankings, as (candidate, score), best first.

    Reciprocal rank fusion: a candidate scores the sum of 1 / (`FUSION_CONSTANT` + rank), with ranks
    from 1, over the rankings that hold it. Ties go to the better place in the first ranking, then
    in the second, and so on.
    """
    places = [{candidate: at for at, candidate in enumerate(row, 1)} for row in rankings]
    keys = {}
    for candidate in dict.fromkeys(candidate for row in rankings for candidate in row):
        ranks = [place.get(candidate, math.inf) for place in places]
        # fsum: the sum does not depend on the order of its terms, so equal ones are ties.
        score = math.fsum(1 / (FUSION_CONSTANT + rank) for rank in ranks)
        keys[candidate] = (-score, ranks)
    best = sorted(keys, key=keys.__getitem__)[:count]
    return [(candidate, -keys[candidate][0]) for candidate in best]


def select_nuggets(
    nugget_scores: Sequence[Sequence[float]],
    nuggets: Sequence[Sequence[tuple[int, int]]],
    k: int,
) -> list[tuple[int, int]]:
    """The best `k` nuggets of the retrieved chunks, as (chunk index, nugget index), best first.

    The selection for a smaller `k` is a prefix of it.

    Args:
        nugget_scores: for each chunk in rank order, a score for each of its nuggets.
        nuggets: likewise, each nugget's token span in its chunk.
        k: how many nuggets at most.

    Ties go to the better chunk rank, then to the earlier position in the chunk.
    """
    order = sorted(
        (-score, chunk, nuggets[chunk][nugget], nugget)
        for chunk, scores in enumerate(nugget_scores)
        for nugget, score in enumerate(scores)
    )
    return [(chunk, nugget) for _, chunk, _, nugget in order[:k]]


def one_stage_chunks(nugget_scores: Sequence[Sequence[float]], k: int) -> list[int]:
    """The chunks that hold the best `k` nuggets of all candidates, ranked by their best nugget.

    One-stage selection is `select_nuggets` over these chunks, in this order: no nugget of another
    chunk scores higher than one it chooses.

    Args:
        nugget_scores: for each candidate chunk, a score for each of its nuggets.
        k: how many nuggets are to be selected.

    Returns:
        Indices of at most `k` chunks; those for a smaller `k` are a prefix. Ties go to the earlier
        candidate.
    """
    owners = [chunk for chunk, row in enumerate(nugget_scores) for _ in row]
    flat = [score for row in nugget_scores for score in row]
    return list(dict.fromkeys(owners[hit] for hit in top(flat, k)))
