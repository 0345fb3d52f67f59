"""The memory tier gives back what was put, stays under its limit, and forgets the oldest first."""

from threading import Thread

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_ops.memory_tier import MemoryTier

WIDTH = 8


def records(key: bytes, start: int, end: int) -> torch.Tensor:
    """Rows that depend on the chunk and the token alone."""
    rows = torch.arange(start, end)[:, None] * 3 + torch.arange(WIDTH) + key[0]
    return rows.to(torch.uint8)


spans = st.tuples(st.integers(0, 20), st.integers(1, 8)).map(lambda at: (at[0], at[0] + at[1]))
calls = st.tuples(st.sampled_from(["put", "get"]), st.sampled_from([b"a", b"b", b"c"]), spans)


@settings(max_examples=200, deadline=None)
@given(st.lists(calls, max_size=40), st.integers(0, 40))
def test_what_is_given_back_is_what_was_put(
    sequence: list[tuple[str, bytes, tuple[int, int]]], limit_tokens: int
) -> None:
    tier = MemoryTier(limit_tokens * WIDTH)
    put: list[tuple[bytes, int, int]] = []
    hits = misses = 0
    for action, key, (start, end) in sequence:
        if action == "put":
            tier.put(key, start, end, records(key, start, end))
            put.append((key, start, end))
            fits = end - start <= limit_tokens
            assert (tier.get(key, start, end) is not None) == fits
            hits, misses = hits + fits, misses + (not fits)
        else:
            found = tier.get(key, start, end)
            if found is None:
                misses += 1
            else:
                hits += 1
                assert torch.equal(found, records(key, start, end))
                assert any(k == key and s <= start and end <= e for k, s, e in put)
        counts = tier.counts()
        assert counts.bytes <= limit_tokens * WIDTH
        assert (counts.hits, counts.misses) == (hits, misses)
    assert (tier.counts().bytes == 0) == (tier.counts().slices == 0)


def test_the_least_recently_used_slice_gives_way() -> None:
    tier = MemoryTier(10 * WIDTH)
    tier.put(b"a", 0, 5, records(b"a", 0, 5))
    tier.put(b"b", 0, 5, records(b"b", 0, 5))
    kept = tier.get(b"a", 1, 3)
    tier.put(b"c", 0, 5, records(b"c", 0, 5))
    assert tier.get(b"b", 0, 5) is None
    assert tier.get(b"a", 0, 5) is not None
    tier.put(b"c", 10, 19, records(b"c", 10, 19))
    assert tier.get(b"a", 0, 5) is None
    assert torch.equal(kept, records(b"a", 1, 3)), "a view must outlive its slice's eviction"
    assert tier.counts().evictions == 3


def test_the_tier_keeps_a_copy() -> None:
    tier = MemoryTier(10 * WIDTH)
    buffer = records(b"a", 0, 5)
    tier.put(b"a", 0, 5, buffer)
    buffer.zero_()
    assert torch.equal(tier.get(b"a", 0, 5), records(b"a", 0, 5))


def test_a_longer_slice_takes_the_place_of_those_inside_it() -> None:
    tier = MemoryTier(100 * WIDTH)
    tier.put(b"a", 2, 4, records(b"a", 2, 4))
    tier.put(b"a", 5, 7, records(b"a", 5, 7))
    tier.put(b"a", 0, 6, records(b"a", 0, 6))
    counts = tier.counts()
    assert (counts.slices, counts.bytes, counts.evictions) == (2, 8 * WIDTH, 0)
    tier.put(b"a", 1, 3, records(b"a", 1, 3))
    assert tier.counts().slices == 2


def test_threads_share_a_tier() -> None:
    tier = MemoryTier(40 * WIDTH)
    wrong: list[object] = []

    def use(seed: int) -> None:
        for step in range(400):
            key, start = bytes([97 + (seed + step) % 5]), (seed * step) % 13
            found = tier.get(key, start, start + 6)
            if found is None:
                tier.put(key, start, start + 6, records(key, start, start + 6))
            elif not torch.equal(found, records(key, start, start + 6)):
                wrong.append((key, start))

    threads = [Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = tier.counts()
    assert not wrong
    assert counts.hits + counts.misses == 6 * 400
    assert counts.bytes <= 40 * WIDTH
