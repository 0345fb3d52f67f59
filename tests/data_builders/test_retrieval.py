import itertools
import operator
import random
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings
from pydantic import ValidationError

from data_builders.encoded import Encoded, unit_rows
from data_builders.index import search, write_vectors
from data_builders.retrieval import (
    cosine_scores,
    fuse,
    one_stage_chunks,
    scores,
    select_nuggets,
    top,
)
from recipes.retrieval import RetrievalConfig, RetrievalWeights

SCORES = st.lists(
    st.lists(st.sampled_from([-0.5, 0.0, 0.25, 0.5]), max_size=5), min_size=1, max_size=4
)
RANKINGS = st.lists(st.lists(st.integers(0, 9), unique=True), min_size=1, max_size=4)


def spans_of(nugget_scores):
    return [[(at, at + 2) for at in range(len(row))] for row in nugget_scores]


@given(SCORES, st.integers(1, 12))
def test_selection_is_the_best_k_and_ties_go_to_rank_then_position(nugget_scores, k):
    chosen = select_nuggets(nugget_scores, spans_of(nugget_scores), k)
    everything = [(chunk, at) for chunk, row in enumerate(nugget_scores) for at in range(len(row))]
    # A stable sort of what stands in (rank, position) order is the rule itself.
    assert chosen == sorted(everything, key=lambda place: -nugget_scores[place[0]][place[1]])[:k]


def test_position_and_not_table_order_breaks_a_tie():
    assert select_nuggets([[0.5, 0.5]], [[(8, 9), (2, 3)]], 2) == [(0, 1), (0, 0)]


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), max_size=8), st.integers(1, 9))
def test_top_prefers_the_earlier_of_equals(values, count):
    found = top(values, count)
    assert found == sorted(range(len(values)), key=lambda at: -values[at])[:count]


@given(st.integers(0, 2**32 - 1), st.integers(1, 20))
@settings(deadline=None)
def test_a_score_does_not_depend_on_the_other_rows(seed, count):
    rows = unit_rows(np.random.default_rng(seed).normal(size=(count, 37)))
    query = rows[0]
    alone = [cosine_scores(query, rows[at : at + 1])[0] for at in range(count)]
    assert cosine_scores(query, rows) == alone
    assert alone[0] == 1.0


def test_noise_below_the_rounding_does_not_flip_a_tie():
    query = np.array([1.0, 0.0], dtype=np.float32)
    rows = np.array([[0.5, 0.1], [0.5 + 1e-7, 0.1]], dtype=np.float32)
    assert top(cosine_scores(query, rows), 1) == [0]


def made_text(generator) -> Encoded:
    ids = np.flatnonzero(generator.random(30) < 0.3).astype(np.int32)
    return Encoded(
        unit_rows(generator.normal(size=(1, 8)))[0],
        (ids, generator.random(len(ids)).astype(np.float32)),
        unit_rows(generator.normal(size=(generator.integers(1, 6), 8))).astype(np.float16),
    )


WEIGHTS = st.builds(
    RetrievalWeights,
    dense=st.sampled_from([0.5, 1.0]),
    sparse=st.sampled_from([0.0, 0.3]),
    colbert=st.sampled_from([0.0, 1.0]),
)


@given(st.integers(0, 2**32 - 1), WEIGHTS)
@settings(deadline=None, max_examples=50)
def test_a_score_is_the_weighted_sum_in_plain_loops(seed, weights):
    generator = np.random.default_rng(seed)
    query, *texts = [made_text(generator) for _ in range(5)]
    for text, score in zip(texts, scores(query, texts, weights), strict=True):
        dense = sum(map(operator.mul, query.dense.tolist(), text.dense.tolist()))
        lexical = dict(zip(*text.sparse, strict=True))
        sparse = sum(
            float(weight) * float(lexical.get(token, 0))
            for token, weight in zip(*query.sparse, strict=True)
        )
        best = [
            max(sum(map(operator.mul, row.tolist(), other.tolist())) for other in text.tokens)
            for row in query.tokens
        ]
        colbert = sum(best) / len(best)
        expected = weights.dense * dense + weights.sparse * sparse + weights.colbert * colbert
        assert score == pytest.approx(expected, abs=6e-6)


@given(st.integers(0, 2**32 - 1), WEIGHTS, st.integers(1, 12))
@settings(deadline=None, max_examples=50)
def test_ranks_are_of_content_whatever_the_order_and_the_batches(seed, weights, size):
    generator = np.random.default_rng(seed)
    query, *distinct = [made_text(generator) for _ in range(6)]
    assume(len(set(scores(query, distinct, weights))) == len(distinct))
    numbers = generator.integers(len(distinct), size=12)
    texts = [distinct[number] for number in numbers]
    whole = scores(query, texts, weights)
    batched = [
        score
        for first in range(0, len(texts), size)
        for score in scores(query, texts[first : first + size], weights)
    ]
    assert batched == whole
    ranked = top(whole, len(texts))
    for better, worse in itertools.pairwise(ranked):
        if numbers[better] == numbers[worse]:
            assert better < worse
    shuffled = generator.permutation(len(texts))
    again = top(scores(query, [texts[at] for at in shuffled], weights), len(texts))
    assert [numbers[shuffled[at]] for at in again] == [numbers[at] for at in ranked]


def test_dense_scores_alone_are_the_cosines():
    generator = np.random.default_rng(2)
    query, *texts = [made_text(generator) for _ in range(9)]
    cosines = cosine_scores(query.dense, np.stack([text.dense for text in texts]))
    assert scores(query, texts, RetrievalWeights()) == cosines
    assert scores(query, [], RetrievalWeights()) == []


@given(RANKINGS, st.integers(1, 12))
def test_fusion_is_the_sum_of_reciprocal_ranks(rankings, count):
    exact = {}
    for ranking in rankings:
        for rank, candidate in enumerate(ranking, 1):
            exact[candidate] = exact.get(candidate, 0) + Fraction(1, 60 + rank)

    def places(candidate):
        return [row.index(candidate) if candidate in row else 99 for row in rankings]

    expected = sorted(exact, key=lambda candidate: (-exact[candidate], places(candidate)))
    found = fuse(rankings, count)
    assert [candidate for candidate, _ in found] == expected[:count]
    assert [score for _, score in found] == pytest.approx([float(exact[c]) for c, _ in found])


def test_a_tie_of_fusion_goes_to_the_first_ranking():
    assert [candidate for candidate, _ in fuse([[7, 3], [3, 7]], 2)] == [7, 3]
    assert [candidate for candidate, _ in fuse([[], [5]], 2)] == [5]


def one_stage(nugget_scores, k):
    """Chunks and nuggets of one-stage selection, in the candidates' own numbers."""
    chunks = one_stage_chunks(nugget_scores, k)
    chosen = select_nuggets(
        [nugget_scores[chunk] for chunk in chunks],
        [spans_of(nugget_scores)[chunk] for chunk in chunks],
        k,
    )
    return chunks, [(chunks[chunk], nugget) for chunk, nugget in chosen]


@given(SCORES, st.integers(1, 12))
def test_one_stage_is_the_best_k_of_all_and_each_chunk_stands_by_its_best_nugget(nugget_scores, k):
    chunks, chosen = one_stage(nugget_scores, k)
    found = [nugget_scores[chunk][nugget] for chunk, nugget in chosen]
    assert found == sorted((score for row in nugget_scores for score in row), reverse=True)[:k]
    best = {chunk: max(nugget_scores[chunk]) for chunk in chunks}
    assert chunks == sorted(best, key=lambda chunk: (-best[chunk], chunk))


@given(SCORES, st.integers(1, 12), st.integers(1, 12))
def test_a_smaller_k_selects_a_prefix(nugget_scores, k, other):
    smaller, larger = sorted((k, other))
    chunks, chosen = one_stage(nugget_scores, larger)
    fewer_chunks, fewer = one_stage(nugget_scores, smaller)
    assert fewer_chunks == chunks[: len(fewer_chunks)]
    assert fewer == chosen[:smaller]
    # A table holds the chunks of the larger k; selecting from it again is the same.
    again = select_nuggets(
        [nugget_scores[chunk] for chunk in chunks],
        [spans_of(nugget_scores)[chunk] for chunk in chunks],
        smaller,
    )
    assert [(chunks[chunk], nugget) for chunk, nugget in again] == fewer


def test_hits_of_an_index_choose_the_same_chunks_as_scores_of_all(tmp_path):
    generator = np.random.default_rng(4)
    distinct = unit_rows(generator.normal(size=(9, 8)))
    owners = sorted(generator.integers(12, size=40).tolist())
    rows = distinct[generator.integers(9, size=40)]
    write_vectors(tmp_path / "nuggets.npy", [rows])
    queries = unit_rows(generator.normal(size=(20, 8)))
    hits, _ = search(tmp_path / "nuggets.npy", queries, 10)
    for query, found in zip(queries, hits, strict=True):
        flat = iter(cosine_scores(query, rows))
        nugget_scores = [[next(flat) for _ in range(owners.count(chunk))] for chunk in range(12)]
        kept = sorted({owners[hit] for hit in found})
        again = one_stage_chunks([nugget_scores[chunk] for chunk in kept], 10)
        assert [kept[at] for at in again] == one_stage_chunks(nugget_scores, 10)


@pytest.mark.parametrize("seed", range(5))
def test_shuffled_candidates_of_distinct_scores_give_the_same_selection(seed):
    shuffler = random.Random(seed)
    nugget_scores = [[shuffler.random() for _ in range(4)] for _ in range(6)]
    order = shuffler.sample(range(6), 6)
    chunks, chosen = one_stage([nugget_scores[chunk] for chunk in order], 7)
    expected_chunks, expected = one_stage(nugget_scores, 7)
    assert [order[chunk] for chunk in chunks] == expected_chunks
    assert [(order[chunk], nugget) for chunk, nugget in chosen] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"sparse": 0.3}, "encoder_kind": "flag_cls"}, "sparse scores need"),
        ({"weights": {"colbert": 1.0}, "encoder_kind": "flag_mean"}, "colbert scores need"),
        ({"weights": {"dense": 0.0}}, "expected a weight above 0"),
        ({"weights": {"dense": -1.0}}, "greater than or equal to 0"),
        ({"weights": {"dense": 0.0, "sparse": 1.0}, "candidates": "corpus"}, "by dense vectors"),
        ({"bm25": True, "selection": "one_stage"}, "which one_stage does not do"),
        ({"nugget_scorer": "cross_encoder"}, "needs the section retrieval.cross_encoder"),
        ({"rerank_chunks": 9}, "rerank_chunks needs the section retrieval.cross_encoder"),
        (
            {"rerank_chunks": 4, "cross_encoder": {"path": "any"}},
            r"at least retrieval\.k_c \(5\), got 4",
        ),
        (
            {"rerank_chunks": 9, "cross_encoder": {"path": "any"}, "selection": "one_stage"},
            "among chunks, which one_stage does not do",
        ),
        ({"cross_encoder": {"path": "any", "max_tokens": 8}}, "greater than or equal to 32"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        RetrievalConfig.model_validate({"encoder": "any", **options})
