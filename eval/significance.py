"""Bootstrap intervals over questions: how far a mean can be trusted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Resamples are drawn in blocks of about this many indices, so that memory stays flat.
_BLOCK_INDICES = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its bootstrap interval, in the unit of the values."""

    mean: float
    low: float
    high: float


def bootstrap_intervals(
    series: Iterable[ArrayLike], *, resamples: int, seed: int, confidence: float = 0.95
) -> list[Interval]:
    """The percentile bootstrap interval of each series' mean over questions (Efron, 1979).

    A series holds one number a question; the difference of two scores of the same question makes
    it a paired bootstrap (Koehn, 2004). The same seed and question count always draw the same
    resamples, which are drawn once for all series of that count. Raises ValueError for a series
    without questions.
    """
    arrays = [np.asarray(values, dtype=np.float64) for values in series]
    by_size: dict[int, list[int]] = {}
    for place, values in enumerate(arrays):
        if values.ndim != 1 or values.size == 0:
            raise ValueError(f"expected one value a question, got the shape {values.shape}")
        by_size.setdefault(values.size, []).append(place)

    tail = (1 - confidence) / 2
    intervals: dict[int, Interval] = {}
    for places in by_size.values():
        values_SQ = np.stack([arrays[place] for place in places])
        means_SR = _resampled_means(values_SQ, resamples, seed)
        lows, highs = np.quantile(means_SR, [tail, 1 - tail], axis=1)
        for place, values, low, high in zip(places, values_SQ, lows, highs, strict=True):
            intervals[place] = Interval(float(values.mean()), float(low), float(high))
    return [intervals[place] for place in range(len(arrays))]


def _resampled_means(
    values_SQ: NDArray[np.float64], resamples: int, seed: int
) -> NDArray[np.float64]:
    """Means over questions drawn with replacement, one row a series and one column a resample."""
    questions = values_SQ.shape[1]
    generator = np.random.default_rng(seed)
    means = []
    for rows in _block_sizes(resamples, max(1, _BLOCK_INDICES // questions)):
        drawn_RQ = generator.integers(questions, size=(rows, questions))
        # How often each question was drawn turns the means into one matrix product.
        drawn_RQ += np.arange(rows)[:, None] * questions
        counts_RQ = np.bincount(drawn_RQ.ravel(), minlength=drawn_RQ.size).reshape(drawn_RQ.shape)
        means.append(values_SQ @ counts_RQ.T.astype(np.float64) / questions)
    return np.concatenate(means, axis=1)


def _block_sizes(total: int, block: int) -> Sequence[int]:
    return [min(block, total - start) for start in range(0, total, block)]
