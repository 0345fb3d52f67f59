"""Every sample once an epoch, whatever the ranks; every rank runs as many passes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.errors import UserError
from train.batches import BatchOrder

sizes = st.tuples(st.integers(1, 90), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


@given(sizes=sizes, seed=st.integers(0, 9))
def test_an_epoch_sees_each_sample_once_and_ranks_run_alike(sizes, seed) -> None:
    samples, micro, accumulation, ranks = sizes
    order = BatchOrder(samples, micro * accumulation * ranks, micro, ranks, seed)
    seen = Counter()
    for step in range(order.steps_per_epoch):
        dealt = [order.micro_batches(step, rank) for rank in range(ranks)]
        assert len({len(passes) for passes in dealt}) == 1
        for passes in dealt:
            for micro_batch in passes:
                assert 1 <= len(micro_batch.indices) <= micro
                if micro_batch.counts:
                    seen.update(micro_batch.indices)
    assert seen == Counter(range(samples))


@given(samples=st.integers(1, 60), seed=st.integers(0, 9))
def test_ranks_share_the_micro_batches_of_one_process(samples, seed) -> None:
    alone = BatchOrder(samples, 8, 2, 1, seed)
    pair = BatchOrder(samples, 8, 2, 2, seed)
    for step in range(samples // 8):
        together = [batch for rank in (0, 1) for batch in pair.micro_batches(step, rank)]
        expected = alone.micro_batches(step, 0)
        assert sorted(batch.indices for batch in together) == sorted(
            batch.indices for batch in expected
        )


def test_epochs_differ_and_seeds_differ() -> None:
    order = BatchOrder(40, 8, 4, 1, seed=0)
    first = [order.step_samples(step) for step in range(5)]
    second = [order.step_samples(step) for step in range(5, 10)]
    assert first != second
    assert first != [BatchOrder(40, 8, 4, 1, seed=1).step_samples(step) for step in range(5)]
    assert first == [BatchOrder(40, 8, 4, 1, seed=0).step_samples(step) for step in range(5)]


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(UserError, match=r"multiple of .* x 4 ranks"):
        BatchOrder(100, 12, 2, 4, 0)
