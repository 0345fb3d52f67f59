"""Bootstrap intervals over questions: how far a mean, or a paired difference, can be trusted."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

# Resamples are drawn in blocks of about this many indices, so that memory stays flat.
_BLOCK_INDICES = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its bootstrap interval, in the unit of the values."""

    mean: float
    low: float
    high: float


def bootstrap_interval(
    values_Q: ArrayLike, *, resamples: int, seed: int, confidence: float = 0.95
) -> Interval:
    """The percentile bootstrap interval of a mean over questions (Efron, 1979).

    `values_Q` holds one number a question. The same seed and question count always draw the same
    resamples. Raises ValueError for no questions.
    """
    values = np.asarray(values_Q, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"expected one value a question, got the shape {values.shape}")
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK_INDICES // values.size)
    means = np.concatenate(
        [
            values[generator.integers(values.size, size=(rows, values.size))].mean(axis=1)
            for rows in _block_sizes(resamples, block)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(values.mean()), float(low), float(high))


def paired_bootstrap(
    treated_Q: ArrayLike, control_Q: ArrayLike, *, resamples: int, seed: int
) -> Interval:
    """The 95% interval of mean(treated - control); entry i of both is the same question.

    Resampling questions, not scores, keeps the pairing: a question that is hard for both cancels
    (Koehn, 2004). Raises ValueError where the lengths differ or there are no questions.
    """
    treated = np.asarray(treated_Q, dtype=np.float64)
    control = np.asarray(control_Q, dtype=np.float64)
    if treated.shape != control.shape:
        raise ValueError(f"unpaired scores: {treated.shape} against {control.shape}")
    return bootstrap_interval(treated - control, resamples=resamples, seed=seed)


def _block_sizes(total: int, block: int) -> list[int]:
    return [min(block, total - start) for start in range(0, total, block)]
