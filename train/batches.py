"""Which samples an optimizer step sees, and how ranks and micro-batches share them.

The order depends on the seed and the epoch alone. A step's samples are dealt to micro-batches
before they are dealt to ranks. Dealt by samples, one process and several see the same
micro-batches; dealt by tokens (`micro_batch_tokens`), passes carry equal work.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Self

import numpy as np

from recipes.errors import UserError
from recipes.training import TrainConfig
from train.grouping import group_by_chunks


def shuffled(samples: int, seed: int, epoch: int = 0) -> list[int]:
    """The order in which an epoch sees so many samples, where none are to meet."""
    order: list[int] = np.random.default_rng((seed, epoch)).permutation(samples).tolist()
    return order


@dataclass(frozen=True)
class MicroBatch:
    """Sample indices of one packed forward pass.

    `counts` is False for a filler, which a rank runs so that all ranks run as many passes.
    """

    indices: list[int]
    counts: bool = True


@dataclass(frozen=True)
class BatchOrder:
    """The steps of a whole run over the samples whose row lengths, in tokens, are `tokens`."""

    tokens: Sequence[int]
    effective_batch: int
    micro_batch: int
    """Most samples of one pass."""
    ranks: int
    seed: int
    micro_batch_tokens: int | None = None
    """Most tokens of one pass, but for a single longer sample; None: samples alone decide."""
    chunks: Sequence[Sequence[str]] | None = None
    """The chunks of each sample, for samples that share some to meet; None: as they come."""
    _epochs: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        train: TrainConfig,
        tokens: Sequence[int],
        chunks: Sequence[Sequence[str]],
        *,
        ranks: int,
        seed: int,
    ) -> Self:
        """The order that a recipe asks for.

        Raises:
            UserError: the ranks cannot share an effective batch.
        """
        return cls(
            tokens,
            train.effective_batch_samples,
            train.micro_batch_samples,
            ranks,
            seed,
            train.micro_batch_tokens,
            chunks if train.group_shared_chunks else None,
        )

    def __post_init__(self) -> None:
        shares = self.ranks if self.micro_batch_tokens else self.micro_batch * self.ranks
        if self.effective_batch % shares:
            samples = f"train.micro_batch_samples ({self.micro_batch}) x "
            passes = "" if self.micro_batch_tokens else samples
            raise UserError(
                f"train.effective_batch_samples ({self.effective_batch}) must be a multiple of "
                f"{passes}{self.ranks} ranks, such as "
                f"{math.ceil(self.effective_batch / shares) * shares}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last may have fewer samples."""
        return math.ceil(len(self.tokens) / self.effective_batch)

    def steps_of(self, train: TrainConfig) -> int:
        """Optimizer steps of a whole run."""
        steps = self.steps_per_epoch * train.epochs
        return min(steps, train.max_steps or steps)

    def step_samples(self, step: int) -> list[int]:
        """Sample indices of optimizer step `step`, counted from 0 over all epochs."""
        samples, _, place = self._step(step)
        return samples[place]

    def samples_of(self, steps: int) -> set[int]:
        """Sample indices of the first `steps` steps."""
        if steps >= self.steps_per_epoch:
            return set(range(len(self.tokens)))
        return {sample for step in range(steps) for sample in self.step_samples(step)}

    def micro_batches(self, step: int, rank: int) -> list[MicroBatch]:
        """The passes of one rank in a step; every rank has as many."""
        shortest = min(self.step_samples(step), key=self.tokens.__getitem__)
        return [
            MicroBatch(part) if part else MicroBatch([shortest], counts=False)
            for part in self._parts(step)[rank :: self.ranks]
        ]

    def longest(self, steps: int) -> list[int]:
        """Samples of the pass with the most tokens of the first `steps` steps, over all ranks.

        Of several epochs the first is looked at.
        """
        parts = (
            part for step in range(min(steps, self.steps_per_epoch)) for part in self._parts(step)
        )
        return max(parts, key=self._cost)

    def _parts(self, step: int) -> list[list[int]]:
        """The samples of a step's passes, which ranks take in turn; empty where one has none."""
        samples, groups, place = self._step(step)
        if self.micro_batch_tokens is None:
            return self._split_samples(samples[place])
        runs = groupby(range(len(samples))[place], key=lambda at: groups[at])
        return self._deal([[samples[at] for at in run] for _, run in runs])

    def _cost(self, samples: Sequence[int]) -> int:
        return sum(self.tokens[sample] for sample in samples)

    def _step(self, step: int) -> tuple[list[int], list[int], slice]:
        """An epoch's samples and the group of each, and the place of a step among them."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if epoch not in self._epochs:
            self._epochs.clear()
            self._epochs[epoch] = self._order(epoch)
        first = step_in_epoch * self.effective_batch
        return *self._epochs[epoch], slice(first, first + self.effective_batch)

    def _order(self, epoch: int) -> tuple[list[int], list[int]]:
        samples = shuffled(len(self.tokens), self.seed, epoch)
        if self.chunks is None:
            return samples, samples
        most_tokens = self.micro_batch_tokens or math.inf
        groups = group_by_chunks(
            samples, self.chunks, self.tokens, most=self.micro_batch, most_tokens=most_tokens
        )
        numbers = [number for number, group in enumerate(groups) for _ in group]
        return [sample for group in groups for sample in group], numbers

    def _split_samples(self, samples: list[int]) -> list[list[int]]:
        passes = math.ceil(len(samples) / (self.micro_batch * self.ranks))
        parts = np.array_split(np.array(samples), passes * self.ranks)
        return [part.tolist() for part in parts]

    def _deal(self, groups: list[list[int]]) -> list[list[int]]:
        """As few passes as hold the groups, longest first, each to the pass with the least work."""
        assert self.micro_batch_tokens is not None, "dealt by tokens"
        ordered = sorted(groups, key=self._cost, reverse=True)
        # A longer sample fills a pass alone.
        work = sum(min(self._cost(group), self.micro_batch_tokens) for group in groups)
        passes = max(1, math.ceil(work / (self.micro_batch_tokens * self.ranks)))
        while (parts := self._fill(ordered, passes * self.ranks)) is None:
            passes += 1
        # Ranks wait for each other after every pass: neighbours in length run side by side.
        return sorted(parts, key=self._cost, reverse=True)

    def _fill(self, groups: list[list[int]], bins: int) -> list[list[int]] | None:
        assert self.micro_batch_tokens is not None, "dealt by tokens"
        parts: list[list[int]] = [[] for _ in range(bins)]
        loads = [0] * bins
        for group in groups:
            cost = self._cost(group)
            fitting = [
                number
                for number, part in enumerate(parts)
                if not part
                or (
                    loads[number] + cost <= self.micro_batch_tokens
                    and len(part) + len(group) <= self.micro_batch
                )
            ]
            if not fitting:
                return None
            lightest = min(fitting, key=lambda number: loads[number])
            parts[lightest] += group
            loads[lightest] += cost
        return parts
