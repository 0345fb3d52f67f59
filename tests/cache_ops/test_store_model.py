"""The store against a dict: any sequence of changes, reopenings, damage and evictions."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from storing import (
    FINGERPRINT,
    LAYOUT,
    files_of,
    flip,
    key_of,
    make_store,
    new_chunk,
    tokens_of,
    wrong_chunks,
)

from cache_ops.store import Store
from cache_ops.store.errors import StoreFullError
from cache_ops.store.shards import HEADER_BYTES
from cache_ops.store.stored import count_tokens, union_ranges

NUMBERS = st.integers(0, 11)
# Within the shortest chunk.
RANGES = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 2)).map(lambda pair: (pair[0], sum(pair))),
    min_size=1,
    max_size=3,
).map(union_ranges)
CHUNKS = st.lists(st.tuples(NUMBERS, st.one_of(st.none(), RANGES)), max_size=6)


class StoreMachine(RuleBasedStateMachine):
    """`kept` is what must be there, by chunk number; `lost` what was damaged and found so."""

    @initialize(budget=st.sampled_from([None, 14_000, 40_000]), shard=st.sampled_from([5000, 9000]))
    def create(self, budget, shard):
        self.folder = Path(tempfile.mkdtemp())
        self.options = {"max_bytes": budget, "when_full": "evict", "shard_bytes": shard}
        self.store = make_store(self.folder / "store", **self.options)
        self.kept, self.lost, self.damaged = {}, {}, set()

    @rule(chunks=CHUNKS)
    def add(self, chunks):
        given_now = []

        def source():
            for number, ranges in chunks:
                given_now.append((number, ranges or ((0, len(tokens_of(number))),)))
                yield new_chunk(number, ranges)

        try:
            self.store.add(source())
        except StoreFullError:
            assert self.options["max_bytes"] is not None
            # All before the last one are there.
            given_now.pop()
        least = {}
        for number, ranges in given_now:
            least[number] = union_ranges(least.get(number, ()), ranges)
            kept = self.kept.get(number, ())
            both = union_ranges(kept, ranges)
            if number in self.damaged and both != kept:
                # Damaged records cannot be carried over.
                self.damaged.discard(number)
                both = ranges
            self.kept[number] = both
            self.lost.pop(number, None)
        if self.options["max_bytes"] is not None:
            self._take_note_of_evictions(least)

    def _take_note_of_evictions(self, least):
        """Any chunk may be gone, but for those of the last call, which have their ranges at least.

        One that was evicted before the call came to it has no others.
        """
        assert sum(files_of(self.store).values()) <= self.options["max_bytes"]
        located, lost = self.store.locate(self.store.keys()), self.store.lost()
        wrong = wrong_chunks(self.store)
        self.damaged = {
            number
            for number in self.damaged
            if key_of(number) not in located or key_of(number).hex() in wrong
        }
        for number, ranges in list(self.kept.items()):
            if (stored := located.get(key_of(number))) is not None:
                assert stored.ranges in (ranges, least.get(number))
                self.kept[number] = stored.ranges
                continue
            assert number not in least or number in self.damaged
            del self.kept[number]
            if number in self.damaged and key_of(number) in lost:
                # Compaction on the way has found it.
                self.lost[number] = ranges
            self.damaged.discard(number)

    @rule(numbers=st.lists(NUMBERS, max_size=4))
    def remove(self, numbers):
        known = {*self.kept, *self.lost} & set(numbers)
        assert self.store.remove(map(key_of, numbers)) == len(known)
        for number in known:
            self.kept.pop(number, None)
            self.lost.pop(number, None)
            self.damaged.discard(number)

    @rule(numbers=st.lists(NUMBERS, max_size=4))
    def touch(self, numbers):
        self.store.touch(list(map(key_of, numbers)))

    @rule()
    def gc(self):
        done = self.store.gc()
        self._all_lost(done.damaged, everything=False)
        stat = self.store.stat()
        assert stat.dead_bytes == 0
        assert set(files_of(self.store)) == {
            stored.shard for stored in self.store.locate(self.store.keys()).values()
        }
        assert stat.shard_bytes == stat.live_bytes + HEADER_BYTES * stat.shards

    @rule()
    def verify(self):
        self._all_lost(self.store.verify().damaged, everything=True)

    @rule()
    def reopen(self):
        self.store.close()
        self.store = Store.open(self.folder / "store", FINGERPRINT, **self.options)

    @precondition(lambda self: self.kept.keys() - self.damaged)
    @rule(data=st.data())
    def damage(self, data):
        number = data.draw(st.sampled_from(sorted(self.kept.keys() - self.damaged)))
        (stored,) = self.store.locate([key_of(number)]).values()
        size = count_tokens(stored.ranges) * LAYOUT.token_bytes
        place = data.draw(st.integers(0, size - 1))
        flip(self.store.shards_folder / stored.shard, stored.offset + place)
        self.damaged.add(number)

    @invariant()
    def what_is_kept_reads_back_and_nothing_else(self):
        if not hasattr(self, "store"):
            return
        located = self.store.locate([key_of(number) for number in range(12)])
        assert {key: stored.ranges for key, stored in located.items()} == {
            key_of(number): ranges for number, ranges in self.kept.items()
        }
        assert set(self.store.keys()) == set(located)
        assert wrong_chunks(self.store) == sorted(key_of(number).hex() for number in self.damaged)
        assert self.store.lost() == {key_of(number): ranges for number, ranges in self.lost.items()}
        known = [*self.kept, *self.lost]
        assert self.store.token_ids(list(map(key_of, range(12)))) == {
            key_of(number): tokens_of(number) for number in known
        }
        assert self.store.stat().tokens == sum(map(count_tokens, self.kept.values()))

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    def _all_lost(self, found, everything):
        named = {chunk.key: chunk.tokens for chunk in found}
        expected = {
            key_of(number): count_tokens(self.kept[number])
            for number in self.damaged
            if everything or key_of(number) in named
        }
        assert named == expected
        for number in [number for number in self.damaged if key_of(number) in named]:
            self.lost[number] = self.kept.pop(number)
            self.damaged.remove(number)


StoreMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
TestStore = StoreMachine.TestCase
