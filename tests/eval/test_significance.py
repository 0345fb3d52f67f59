import numpy as np
import pytest

from eval.significance import bootstrap_interval, paired_bootstrap


def test_a_constant_difference_has_no_width() -> None:
    base = np.random.default_rng(0).uniform(0, 100, size=50)
    interval = paired_bootstrap(base + 5, base, resamples=500, seed=1)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((5, 5, 5))


def test_equal_scores_have_no_difference() -> None:
    scores = np.random.default_rng(0).uniform(0, 100, size=50)
    interval = paired_bootstrap(scores, scores, resamples=500, seed=1)
    assert (interval.mean, interval.low, interval.high) == (0, 0, 0)


def test_half_width_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    interval = bootstrap_interval(values, resamples=20_000, seed=1)
    expected = 1.96 * values.std() / np.sqrt(values.size)
    assert interval.mean == pytest.approx(values.mean())
    assert interval.mean - interval.low == pytest.approx(expected, rel=0.06)
    assert interval.high - interval.mean == pytest.approx(expected, rel=0.06)


def test_intervals_cover_the_true_mean_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(7)
    hits = 0
    for seed in range(300):
        values = generator.exponential(1.0, size=100)
        interval = bootstrap_interval(values, resamples=400, seed=seed)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.89 <= hits / 300 <= 0.98


def test_pairing_cancels_how_hard_a_question_is() -> None:
    generator = np.random.default_rng(0)
    hardness = generator.uniform(0, 100, size=200)
    base = hardness + generator.normal(0, 1, size=200)
    tuned = hardness + generator.normal(2, 1, size=200)
    paired = paired_bootstrap(tuned, base, resamples=2000, seed=1)
    shuffled = paired_bootstrap(tuned, generator.permutation(base), resamples=2000, seed=1)
    assert paired.low > 0 > shuffled.low
    assert paired.high - paired.low < (shuffled.high - shuffled.low) / 5


def test_the_seed_decides_the_interval() -> None:
    values = np.random.default_rng(0).uniform(size=60)
    first = bootstrap_interval(values, resamples=300, seed=4)
    assert first == bootstrap_interval(values, resamples=300, seed=4)
    assert first != bootstrap_interval(values, resamples=300, seed=5)


def test_many_questions_are_resampled_in_blocks_of_bounded_memory() -> None:
    interval = bootstrap_interval(np.arange(100_000.0), resamples=90, seed=0)
    assert interval.low < interval.mean < interval.high


@pytest.mark.parametrize(("treated", "control"), [([], []), ([1.0, 2.0], [1.0])])
def test_scores_that_cannot_be_paired_are_refused(
    treated: list[float], control: list[float]
) -> None:
    with pytest.raises(ValueError, match=r"a question|unpaired"):
        paired_bootstrap(treated, control, resamples=10, seed=0)
