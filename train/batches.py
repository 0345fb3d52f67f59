"""Which samples an optimizer step sees, and how ranks and micro-batches share them.

The order depends on the seed and the epoch alone. A step's samples are dealt to micro-batches
before they are dealt to ranks, so one process and several see the same micro-batches.
"""

import math
from dataclasses import dataclass

import numpy as np

from recipes.errors import UserError


@dataclass(frozen=True)
class MicroBatch:
    """Sample indices of one packed forward pass.

    `counts` is False for a filler, which a rank runs so that all ranks run as many passes.
    """

    indices: list[int]
    counts: bool = True


@dataclass(frozen=True)
class BatchOrder:
    """The steps of a whole run over `samples` samples."""

    samples: int
    effective_batch: int
    micro_batch: int
    ranks: int
    seed: int

    def __post_init__(self) -> None:
        if self.effective_batch % (self.micro_batch * self.ranks):
            raise UserError(
                f"train.effective_batch_samples ({self.effective_batch}) must be a multiple of "
                f"train.micro_batch_samples ({self.micro_batch}) x {self.ranks} ranks"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last may have fewer samples."""
        return math.ceil(self.samples / self.effective_batch)

    def step_samples(self, step: int) -> list[int]:
        """Sample indices of optimizer step `step`, counted from 0 over all epochs."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(self.samples)
        first = step_in_epoch * self.effective_batch
        return [int(index) for index in order[first : first + self.effective_batch]]

    def micro_batches(self, step: int, rank: int) -> list[MicroBatch]:
        """The passes of one rank in a step; every rank has as many."""
        samples = self.step_samples(step)
        passes = math.ceil(len(samples) / (self.micro_batch * self.ranks))
        parts = np.array_split(np.array(samples), passes * self.ranks)
        mine = [[int(index) for index in part] for part in parts[rank :: self.ranks]]
        return [MicroBatch(part) if part else MicroBatch(samples[:1], False) for part in mine]
