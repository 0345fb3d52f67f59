"""Every sample once an epoch, whatever the ranks; every rank runs as many passes."""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.errors import UserError
from train.batches import BatchOrder
from train.grouping import group_by_chunks

sizes = st.tuples(st.integers(1, 90), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
lengths = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def plain(samples: int, effective: int, micro: int, ranks: int, seed: int) -> BatchOrder:
    return BatchOrder([10] * samples, effective, micro, ranks, seed)


def dealt(order: BatchOrder, step: int) -> list[list[list[int]]]:
    """The counted passes of each rank; ranks must run alike."""
    passes = [order.micro_batches(step, rank) for rank in range(order.ranks)]
    assert len({len(mine) for mine in passes}) == 1
    assert all(batch.indices for mine in passes for batch in mine)
    return [[batch.indices for batch in mine if batch.counts] for mine in passes]


@given(sizes=sizes, seed=st.integers(0, 9))
def test_an_epoch_sees_each_sample_once_and_ranks_run_alike(sizes, seed) -> None:
    samples, micro, accumulation, ranks = sizes
    order = plain(samples, micro * accumulation * ranks, micro, ranks, seed)
    seen = Counter()
    for step in range(order.steps_per_epoch):
        for passes in dealt(order, step):
            assert all(1 <= len(indices) <= micro for indices in passes)
            seen.update(index for indices in passes for index in indices)
    assert seen == Counter(range(samples))


@given(samples=st.integers(1, 60), seed=st.integers(0, 9))
def test_ranks_share_the_micro_batches_of_one_process(samples, seed) -> None:
    alone = plain(samples, 8, 2, 1, seed)
    pair = plain(samples, 8, 2, 2, seed)
    for step in range(samples // 8):
        together = [batch for rank in (0, 1) for batch in pair.micro_batches(step, rank)]
        expected = alone.micro_batches(step, 0)
        assert sorted(batch.indices for batch in together) == sorted(
            batch.indices for batch in expected
        )


def test_epochs_differ_and_seeds_differ() -> None:
    order = plain(40, 8, 4, 1, seed=0)
    first = [order.step_samples(step) for step in range(5)]
    second = [order.step_samples(step) for step in range(5, 10)]
    assert first != second
    assert first != [plain(40, 8, 4, 1, seed=1).step_samples(step) for step in range(5)]
    assert first == [plain(40, 8, 4, 1, seed=0).step_samples(step) for step in range(5)]


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(UserError, match=r"\(12\) .* \(2\) x 4 ranks, such as 16"):
        plain(100, 12, 2, 4, 0)


@given(
    tokens=lengths,
    ranks=st.integers(1, 3),
    micro=st.integers(1, 6),
    budget=st.integers(60, 300),
    group=st.booleans(),
    data=st.data(),
)
def test_passes_keep_to_their_tokens_and_lose_nothing(
    tokens, ranks, micro, budget, group, data
) -> None:
    chunks = [data.draw(st.lists(st.sampled_from("abcdefgh"), max_size=3)) for _ in tokens]
    order = BatchOrder(tokens, 4 * ranks, micro, ranks, 0, budget, chunks if group else None)
    seen = Counter()
    for step in range(order.steps_per_epoch):
        assert len(order.micro_batches(step, 0)) <= -(-len(order.step_samples(step)) // ranks)
        passes = [indices for mine in dealt(order, step) for indices in mine]
        assert Counter(chain.from_iterable(passes)) == Counter(order.step_samples(step))
        for indices in passes:
            assert len(indices) <= micro
            assert len(indices) == 1 or sum(tokens[index] for index in indices) <= budget
        seen.update(chain.from_iterable(passes))
    assert seen == Counter(range(len(tokens)))
    longest = order.longest(order.steps_per_epoch)
    most = max(
        sum(tokens[index] for index in indices)
        for step in range(order.steps_per_epoch)
        for mine in dealt(order, step)
        for indices in mine
    )
    assert sum(tokens[index] for index in longest) == most


def test_a_budget_below_one_sample_gives_each_a_pass_and_no_filler() -> None:
    order = BatchOrder([5, 9, 7, 3], 4, 4, ranks=1, seed=0, micro_batch_tokens=1)
    passes = order.micro_batches(0, 0)
    assert all(one.counts for one in passes)
    assert sorted(one.indices for one in passes) == [[0], [1], [2], [3]]


def test_equal_work_where_samples_alone_would_pile_it_up() -> None:
    tokens = [100, 90, 80, 70, 10, 10, 10, 10] * 8
    by_samples = BatchOrder(tokens, 8, 2, 2, 0)
    by_tokens = BatchOrder(tokens, 8, 8, 2, 0, 200)

    def waiting(order: BatchOrder) -> int:
        """Tokens by which the slower rank's passes are longer, over an epoch."""
        loads = [
            [[sum(tokens[i] for i in part) for part in mine] for mine in dealt(order, step)]
            for step in range(order.steps_per_epoch)
        ]
        return sum(
            abs(a - b) for first, second in loads for a, b in zip(first, second, strict=True)
        )

    assert waiting(by_tokens) < waiting(by_samples) / 3


@given(
    chunks=st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=3), min_size=1, max_size=40),
    most=st.integers(1, 4),
)
def test_a_group_shares_chunks_with_its_first_sample(chunks, most) -> None:
    order = list(range(len(chunks)))[::-1]
    groups = group_by_chunks(order, chunks, [5] * len(chunks), most=most, most_tokens=15)
    assert Counter(chain.from_iterable(groups)) == Counter(order)
    for first, *others in groups:
        assert len(others) < min(most, 3)
        assert all(set(chunks[first]) & set(chunks[other]) for other in others)


def test_samples_of_one_chunk_meet_in_a_pass() -> None:
    """Six samples of each of ten chunks, whose rows a plain order would scatter."""
    chunks = [[f"chunk {number % 10}"] for number in range(60)]

    def encoded(grouped: bool) -> int:
        order = BatchOrder([10] * 60, 12, 3, 1, 0, 30, chunks if grouped else None)
        return sum(
            len({chunk for index in indices for chunk in chunks[index]})
            for step in range(order.steps_per_epoch)
            for indices in dealt(order, step)[0]
        )

    assert encoded(grouped=True) == 20
    assert encoded(grouped=False) > 40
