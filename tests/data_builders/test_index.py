import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from data_builders import index
from data_builders.encoded import unit_rows
from data_builders.index import map_vectors, search, write_vectors
from data_builders.retrieval import SCORE_DECIMALS


def brute_force(rows, queries, count):
    """All cosines in float64, rounded, sorted by score and then by row."""
    ids, scores = [], []
    for query in queries.astype(np.float64):
        cosines = [
            np.float32(round(sum(row * query), SCORE_DECIMALS)) for row in rows.astype(np.float64)
        ]
        order = sorted(range(len(rows)), key=lambda at: (-cosines[at], at))[:count]
        ids.append(order)
        scores.append([cosines[at] for at in order])
    return ids, scores


def made_rows(seed, kinds, count, dimensions):
    """Rows drawn from few distinct vectors, some of them a hair apart: ties on purpose."""
    generator = np.random.default_rng(seed)
    distinct = generator.normal(size=(kinds, dimensions))
    noise = generator.choice([0, 0, 0, 1e-6, 3e-6], size=(count, 1))
    return unit_rows(distinct[generator.integers(kinds, size=count)] + noise)


@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.integers(1, 30),
    rows=st.integers(1, 120),
    block_rows=st.integers(1, 50),
    margin=st.integers(0, 5),
    count=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_search_is_brute_force_with_ties_across_blocks_and_the_cut(
    tmp_path_factory, seed, kinds, rows, block_rows, margin, count
):
    path = tmp_path_factory.mktemp("index") / "vectors.npy"
    vectors = made_rows(seed, kinds, rows, 8)
    queries = np.concatenate([vectors[:2], made_rows(seed + 1, 3, 3, 8)])
    write_vectors(path, [vectors])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "BLOCK_BYTES", block_rows * 8 * 4)
        patch.setattr(index, "MARGIN", margin)
        patch.setattr(index, "PIECE_ROWS", 7)
        found = [search(source, queries, count) for source in (path, map_vectors(path))]
    expected_ids, expected_scores = brute_force(vectors, queries, count)
    for ids, scores in found:
        assert ids.tolist() == expected_ids
        assert scores.tolist() == expected_scores


def test_a_text_that_stands_a_thousand_times_goes_by_row(tmp_path):
    query, other = unit_rows(np.random.default_rng(0).normal(size=(2, 384)))
    vectors = np.concatenate([[other], np.tile(query, (1000, 1)), [other]]).astype(np.float32)
    write_vectors(tmp_path / "vectors.npy", [vectors])
    ids, scores = search(tmp_path / "vectors.npy", query[None], 300)
    assert ids[0].tolist() == list(range(1, 301))
    assert set(scores[0].tolist()) == {1.0}


def test_what_was_written_is_an_npy_file_whatever_the_blocks(tmp_path):
    vectors = made_rows(3, 50, 50, 6)
    for name, sizes in (("one", [50]), ("many", [1, 0, 20, 29])):
        blocks = np.split(vectors, np.cumsum(sizes)[:-1])
        assert write_vectors(tmp_path / name, iter(blocks)) == 50
    np.testing.assert_array_equal(np.load(tmp_path / "one"), vectors)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()


def test_an_interrupted_write_leaves_no_file(tmp_path):
    def blocks():
        yield made_rows(0, 2, 2, 4)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_vectors(tmp_path / "vectors.npy", blocks())
    assert not (tmp_path / "vectors.npy").exists()
    assert write_vectors(tmp_path / "vectors.npy", [made_rows(0, 2, 2, 4)]) == 2


def test_a_file_without_rows_has_no_neighbours(tmp_path):
    assert write_vectors(tmp_path / "vectors.npy", []) == 0
    ids, scores = search(tmp_path / "vectors.npy", made_rows(0, 1, 2, 4), 3)
    assert ids.shape == scores.shape == (2, 0)


def test_memory_does_not_grow_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "BLOCK_BYTES", 2**18)
    queries = made_rows(1, 4, 4, 64)
    peaks = []
    for rows in (4_000, 40_000):
        path = tmp_path / f"{rows}.npy"
        write_vectors(path, (made_rows(first, 900, 1000, 64) for first in range(0, rows, 1000)))
        search(path, queries, 10)
        tracemalloc.start()
        search(path, queries, 10)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 4 * index.BLOCK_BYTES


def test_mapped_vectors_are_not_read_again_and_a_file_cut_short_is_told(tmp_path, monkeypatch):
    path = tmp_path / "vectors.npy"
    rows = made_rows(1, 40, 40, 8)
    write_vectors(path, [rows])
    mapped = map_vectors(path)
    monkeypatch.setattr(np, "fromfile", None)
    assert search(mapped, rows[:1], 1)[0].tolist() == [[0]]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    with pytest.raises(ValueError, match="mmap length is greater than file size"):
        map_vectors(path)
    write_vectors(path, [])
    assert map_vectors(path).shape == (0, 0)
