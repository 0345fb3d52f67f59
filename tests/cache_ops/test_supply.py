"""A plan's records are the model's, bit by bit, wherever they come from, and that is counted."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from cache_ops.assemble import gather
from cache_ops.encode import encode_chunk
from cache_ops.fingerprint import Fingerprint
from cache_ops.memory_tier import MemoryTier
from cache_ops.plan import PROMPT, PrefixPlan, Span, plan_prefix
from cache_ops.records import RecordLayout
from cache_ops.store import Store
from cache_ops.store.reading import SliceReader
from cache_ops.store.stored import chunk_key
from cache_ops.supply import MissingSlicesError, Supply

LAYOUT = RecordLayout(2, 1, 4, "float32")
FINGERPRINT = Fingerprint("w", "r", "t", "40 tokens", "none", "float32")
PROMPT_IDS = [9, 8, 7]


def ids_of(number: int) -> list[int]:
    return [number * 1000 + token for token in range(40)]


CHUNKS = {f"c{number}": ids_of(number) for number in range(1, 5)}
IDS: Mapping[str, Sequence[int]] = {PROMPT: PROMPT_IDS, **CHUNKS}


class Encoder:
    """Keys and values that depend on the chunk's tokens alone; notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._busy = threading.Lock()

    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        assert self._busy.acquire(blocking=False), "two threads at once"
        self.asked.append(token_ids[0] // 1000)
        generator = torch.Generator().manual_seed(sum(token_ids))
        kv_TL2HD = torch.randn(len(token_ids), 2, 2, 1, 4, generator=generator)
        self._busy.release()
        return kv_TL2HD


def plan_of(spans: Sequence[tuple[str, int, int]], prompt: int = len(PROMPT_IDS)) -> PrefixPlan:
    return plan_prefix(
        [Span(*span) for span in spans],
        prompt_length=prompt,
        chunk_ranks=list(CHUNKS),
        overlap="keep",
    )


def expected(plan: PrefixPlan) -> torch.Tensor:
    return gather(plan, {name: Encoder()(ids) for name, ids in IDS.items()})


def is_right(records_TR: torch.Tensor, plan: PrefixPlan) -> bool:
    return torch.equal(LAYOUT.decode(records_TR, torch.float32), expected(plan))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store", FINGERPRINT, LAYOUT) as store:
        yield store


@pytest.fixture
def reader(store: Store) -> Iterator[SliceReader]:
    with SliceReader(store, 2, check=True) as reader:
        yield reader


def supply_of(
    reader: SliceReader | None,
    memory: MemoryTier | None = None,
    encode: Callable[[Sequence[int]], torch.Tensor] | None = None,
    keep: str = "nuggets",
) -> Supply:
    return Supply(LAYOUT, reader=reader, memory=memory, encode=encode, keep=keep)


PLAN = plan_of([("c1", 3, 9), ("c1", 20, 25), ("c2", 0, 40)])
TOKENS = 3 + 6 + 5 + 40


def test_records_come_from_the_model_then_from_disk_then_from_memory(reader: SliceReader) -> None:
    encoder = Encoder()
    memory = MemoryTier(1 << 20)
    with supply_of(reader, None, encoder).fetch(PLAN, IDS) as supplied:
        assert is_right(supplied.records_TR, PLAN)
        assert (supplied.tokens_memory, supplied.tokens_disk) == (0, 0)
        assert (supplied.tokens_computed, supplied.bytes_read) == (TOKENS, 0)
    assert sorted(encoder.asked) == [0, 1, 2], "each chunk and the prompt once"
    assert supplied.seconds["compute"] > 0
    assert supplied.seconds["store"] > 0

    supply = supply_of(reader, memory)
    with supply.fetch(PLAN, IDS) as supplied:
        assert is_right(supplied.records_TR, PLAN)
        assert (supplied.tokens_memory, supplied.tokens_disk) == (0, TOKENS)
        assert supplied.bytes_read == TOKENS * LAYOUT.token_bytes
    inside = plan_of([("c2", 10, 20), ("c1", 4, 9)])
    with supply.fetch(inside, IDS) as supplied:
        assert is_right(supplied.records_TR, inside)
        assert (supplied.tokens_memory, supplied.tokens_disk) == (3 + 10 + 5, 0)
        assert supplied.bytes_read == 0


spans = st.tuples(st.sampled_from(list(CHUNKS)), st.integers(0, 39), st.integers(1, 12)).map(
    lambda at: (at[0], at[1], min(40, at[1] + at[2]))
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    plans=st.lists(st.tuples(st.lists(spans, max_size=6), st.sampled_from([0, 3])), max_size=4),
    memory_tokens=st.sampled_from([None, 0, 20, 1000]),
    on_disk=st.booleans(),
    keep=st.sampled_from(["nuggets", "chunks"]),
)
def test_any_sequence_of_plans_gives_the_models_records(
    tmp_path_factory: pytest.TempPathFactory,
    plans: list[tuple[list[tuple[str, int, int]], int]],
    memory_tokens: int | None,
    on_disk: bool,
    keep: str,
) -> None:
    folder = tmp_path_factory.mktemp("supply") / "store"
    memory = None if memory_tokens is None else MemoryTier(memory_tokens * LAYOUT.token_bytes)
    with Store.create(folder, FINGERPRINT, LAYOUT) as store, SliceReader(store, 2) as reader:
        supply = supply_of(reader if on_disk else None, memory, Encoder(), keep)
        for chosen, prompt in plans:
            plan = plan_of(chosen, prompt)
            started = supply.start(plan, IDS)
            rows = [row for first, end in started.ready() for row in range(first, end)]
            assert sorted(rows) == list(range(plan.tokens))
            with started.wait() as supplied:
                assert is_right(supplied.records_TR, plan) if plan.slices else not rows
                sources = supplied.tokens_memory, supplied.tokens_disk, supplied.tokens_computed
                assert sum(sources) == plan.tokens
                assert supplied.bytes_read == supplied.tokens_disk * LAYOUT.token_bytes


@pytest.mark.parametrize("keep", ["nuggets", "chunks"])
def test_what_is_kept_of_a_computed_chunk(reader: SliceReader, keep: str) -> None:
    supply = supply_of(reader, None, Encoder(), keep)
    kept = {"c1": [(0, 2), (8, 12)], "c2": [(5, 9)], "c4": [(0, 40)]}
    prompt_and_one = plan_of([("c1", 3, 9)], prompt=2)
    supply.fetch(prompt_and_one, IDS, kept).release()
    found = {
        name: stored.ranges
        for name, ids in IDS.items()
        if (stored := reader.store.locate([chunk_key(ids)]).get(chunk_key(ids)))
    }
    nuggets = ((0, 2), (3, 12))
    assert found == {PROMPT: ((0, 3),), "c1": nuggets if keep == "nuggets" else ((0, 40),)}
    # A slice that was not kept makes the chunk's entry grow, and nothing is lost.
    supply.fetch(plan_of([("c1", 30, 35)]), IDS, {}).release()
    (stored,) = reader.store.locate([chunk_key(IDS["c1"])]).values()
    assert stored.ranges == ((*nuggets, (30, 35)) if keep == "nuggets" else ((0, 40),))
    supplied = supply_of(reader).fetch(plan_of([("c1", 8, 12), ("c1", 30, 35)]), IDS)
    assert supplied.tokens_disk == 3 + 9


def test_without_a_model_what_is_missing_is_named(reader: SliceReader) -> None:
    supply_of(reader, None, Encoder()).fetch(plan_of([("c1", 3, 9)]), IDS).release()
    with pytest.raises(MissingSlicesError, match=r"'c2', 'c3'.*coinrag cache build") as raised:
        supply_of(reader).fetch(plan_of([("c1", 3, 9), ("c2", 0, 4), ("c3", 0, 4)]), IDS)
    assert "c1" not in str(raised.value)
    assert raised.value.is_user_error
    with pytest.raises(MissingSlicesError):
        list(supply_of(None).start(PLAN, IDS).ready())


def test_a_slice_beyond_its_chunk_is_refused(reader: SliceReader) -> None:
    with pytest.raises(ValueError, match=r"\[30, 41\) is beyond the 40 tokens of chunk 'c1'"):
        supply_of(reader, None, Encoder()).fetch(plan_of([("c1", 30, 41)]), IDS)


def test_a_store_that_another_process_writes_to_does_not_stop_answers(
    reader: SliceReader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supply = supply_of(reader, None, Encoder())
    with Store.open(tmp_path / "store") as other, caplog.at_level(logging.WARNING):
        with other._writing():
            for _ in range(2):
                with supply.fetch(PLAN, IDS) as supplied:
                    assert is_right(supplied.records_TR, PLAN)
        assert supply.not_stored == {"StoreBusyError": 6}
        supply.fetch(PLAN, IDS).release()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert supply_of(reader).fetch(PLAN, IDS).tokens_disk == TOKENS


def test_a_full_store_does_not_stop_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "full"
    with (
        Store.create(folder, FINGERPRINT, LAYOUT, max_bytes=5000) as store,
        SliceReader(store, 2) as reader,
    ):
        supply = supply_of(reader, None, Encoder())
        for _ in range(2):
            with supply.fetch(PLAN, IDS) as supplied:
                assert is_right(supplied.records_TR, PLAN)
    assert set(supply.not_stored) == {"StoreFullError"}
    assert len(caplog.records) == 1


@pytest.mark.parametrize("damage", ["bit", "missing"])
def test_damaged_slices_are_computed_again_and_repaired(reader: SliceReader, damage: str) -> None:
    encoder = Encoder()
    supply = supply_of(reader, None, encoder)
    supply.fetch(PLAN, IDS).release()
    stored = reader.store.locate([chunk_key(IDS["c1"])])[chunk_key(IDS["c1"])]
    path = reader.store.shards_folder / stored.shard
    if damage == "missing":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.seek(stored.place(20, 25))
            file.write(b"\xff\xff")
    encoder.asked.clear()
    with SliceReader(reader.store, 2, check=True) as fresh:
        supply = supply_of(fresh, None, encoder)
        with supply.fetch(PLAN, IDS) as supplied:
            assert is_right(supplied.records_TR, PLAN)
            assert supplied.tokens_computed == (5 if damage == "bit" else TOKENS)
        assert sorted(encoder.asked) == ([1] if damage == "bit" else [0, 1, 2])
        with supply_of(fresh).fetch(PLAN, IDS) as supplied:
            assert is_right(supplied.records_TR, PLAN)
            assert supplied.tokens_disk == TOKENS


def test_requests_that_wait_together_compute_a_chunk_once(reader: SliceReader) -> None:
    encoder = Encoder()
    supply = supply_of(reader, MemoryTier(1 << 20), encoder)
    started = [supply.start(PLAN, IDS) for _ in range(4)]
    supplied: list[bool] = []

    def wait(number: int) -> None:
        with started[number].wait() as records:
            supplied.append(is_right(records.records_TR, PLAN))

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert supplied == [True] * 4
    assert sorted(encoder.asked) == [0, 1, 2]


def test_buffers_come_back_and_are_not_shared_meanwhile(reader: SliceReader) -> None:
    supply = supply_of(reader, None, Encoder())
    first, second = supply.fetch(PLAN, IDS), supply.fetch(PLAN, IDS)
    assert first.records_TR.data_ptr() != second.records_TR.data_ptr()
    at = first.records_TR.data_ptr()
    first.release()
    assert supply.fetch(PLAN, IDS).records_TR.data_ptr() == at
    assert is_right(second.records_TR, PLAN)
    with pytest.raises(AssertionError, match="twice"):
        first.release()


def test_a_use_is_noted_for_eviction(reader: SliceReader) -> None:
    supply = supply_of(reader, MemoryTier(1 << 20), Encoder())
    for number in range(1, 5):
        supply.fetch(plan_of([(f"c{number}", 0, 40)], prompt=0), IDS).release()
    supply.fetch(plan_of([("c1", 0, 5)], prompt=0), IDS).release()
    reader.store.remove([b"nothing"])
    oldest, _ = next(iter(reader.store._index.least_recently_used(1 << 40)))
    assert oldest == chunk_key(IDS["c2"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8"])
def test_a_real_model_gives_the_same_bits_from_everywhere(tmp_path: Path, dtype: str) -> None:
    model = tiny_model("qwen3")
    layout = RecordLayout.from_model(model.config, dtype)
    ids = {PROMPT: [1, 2, 3], "c1": list(range(10, 50)), "c2": list(range(60, 100))}
    plan = plan_of([("c1", 3, 9), ("c2", 0, 40)])
    encoded = {name: encode_chunk(model, tokens) for name, tokens in ids.items()}
    wanted_TR = layout.encode(gather(plan, encoded))
    with (
        Store.create(tmp_path / "store", FINGERPRINT, layout) as store,
        SliceReader(store, 2) as reader,
    ):
        supply = Supply(
            layout,
            reader=reader,
            memory=MemoryTier(1 << 20),
            encode=lambda tokens: encode_chunk(model, tokens),
            keep="nuggets",
        )
        disk_only = Supply(layout, reader=reader, memory=None, encode=None, keep="nuggets")
        for source in (supply, disk_only, supply):
            with source.fetch(plan, ids) as supplied:
                assert torch.equal(supplied.records_TR, wanted_TR)
        assert supplied.tokens_memory == plan.tokens
