import numpy as np
import pytest
from numpy.typing import ArrayLike

from eval.significance import Interval, bootstrap_intervals


def interval(values: ArrayLike, *, resamples: int, seed: int) -> Interval:
    return bootstrap_intervals([values], resamples=resamples, seed=seed)[0]


def test_a_constant_difference_has_no_width() -> None:
    base = np.random.default_rng(0).uniform(0, 100, size=50)
    found = interval((base + 5) - base, resamples=500, seed=1)
    assert (found.mean, found.low, found.high) == pytest.approx((5, 5, 5))


def test_equal_scores_have_no_difference() -> None:
    scores = np.random.default_rng(0).uniform(0, 100, size=50)
    found = interval(scores - scores, resamples=500, seed=1)
    assert (found.mean, found.low, found.high) == (0, 0, 0)


def test_half_width_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    found = interval(values, resamples=20_000, seed=1)
    expected = 1.96 * values.std() / np.sqrt(values.size)
    assert found.mean == pytest.approx(values.mean())
    assert found.mean - found.low == pytest.approx(expected, rel=0.06)
    assert found.high - found.mean == pytest.approx(expected, rel=0.06)


def test_intervals_cover_the_true_mean_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(7)
    hits = 0
    for seed in range(300):
        values = generator.exponential(1.0, size=100)
        found = interval(values, resamples=400, seed=seed)
        hits += found.low <= 1.0 <= found.high
    assert 0.89 <= hits / 300 <= 0.98


def test_pairing_cancels_how_hard_a_question_is() -> None:
    generator = np.random.default_rng(0)
    hardness = generator.uniform(0, 100, size=200)
    base = hardness + generator.normal(0, 1, size=200)
    tuned = hardness + generator.normal(2, 1, size=200)
    paired = interval(tuned - base, resamples=2000, seed=1)
    shuffled = interval(tuned - generator.permutation(base), resamples=2000, seed=1)
    assert paired.low > 0 > shuffled.low
    assert paired.high - paired.low < (shuffled.high - shuffled.low) / 5


def test_the_seed_decides_the_interval() -> None:
    values = np.random.default_rng(0).uniform(size=60)
    first = interval(values, resamples=300, seed=4)
    assert first == interval(values, resamples=300, seed=4)
    assert first != interval(values, resamples=300, seed=5)


def test_many_questions_are_resampled_in_blocks_of_bounded_memory() -> None:
    found = interval(np.arange(100_000.0), resamples=90, seed=0)
    assert found.low < found.mean < found.high


def test_series_of_any_lengths_get_the_intervals_they_have_alone() -> None:
    generator = np.random.default_rng(0)
    series = [generator.uniform(size=size) for size in (7, 40, 7, 1, 40)]
    together = bootstrap_intervals(series, resamples=250, seed=5)
    for values, found in zip(series, together, strict=True):
        alone = interval(values, resamples=250, seed=5)
        assert (found.mean, found.low, found.high) == pytest.approx(
            (alone.mean, alone.low, alone.high)
        )
    assert bootstrap_intervals([], resamples=250, seed=5) == []


def test_each_resample_is_drawn_once_for_all_series_of_a_length() -> None:
    values = np.random.default_rng(0).uniform(size=30)
    up, down = bootstrap_intervals([values, -values], resamples=250, seed=5)
    assert (up.low, up.high) == pytest.approx((-down.high, -down.low))


@pytest.mark.parametrize("values", [[], [[1.0, 2.0]]])
def test_anything_but_one_value_a_question_is_refused(values: ArrayLike) -> None:
    with pytest.raises(ValueError, match="one value a question"):
        interval(values, resamples=10, seed=0)
