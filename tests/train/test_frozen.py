"""Frozen context: what it trains on, where the slices come from, and when it is refused."""

import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cache_ops import encode
from cache_ops.hf import load_tokenizer
from cache_ops.packing import Example
from cache_ops.plan import PROMPT, Span, plan_prefix
from cache_ops.store.errors import ForeignStoreError
from cache_ops.store.shards import HEADER_BYTES
from cache_ops.store.stored import chunk_key
from data_builders.build import load_built
from data_builders.kv import open_store, supply_over
from recipes.errors import UserError
from recipes.resolve import resolve
from train.context import FrozenContext

LORA = ["train.tuning=lora", "train.lora.rank=4", "train.learning_rate=1e-2", "train.epochs=2"]
FROZEN = [*LORA, "context.gradient=frozen"]
STEPS = 3
"""Of an epoch."""
SOURCES = ("memory", "disk", "computed")


def losses(metrics):
    return [line["loss"] for line in metrics]


def supplied(metrics, *sources):
    return sum(line[f"prefix_tokens_{source}"] for line in metrics for source in sources)


def assert_same_adapter(workplace, one, other, tolerance):
    first, second = (
        load_file(workplace.folder / name / "adapter" / "adapter_model.safetensors")
        for name in (one, other)
    )
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.allclose(weight, second[name], atol=tolerance, rtol=0), name


@pytest.fixture(scope="module")
def frozen(workplace):
    return workplace.train_here("frozen", *FROZEN)


@pytest.fixture(scope="module")
def with_store(workplace):
    """The same run, which fills a store."""
    return workplace.train_here("with_store", *FROZEN, store_option(workplace))


def store_option(workplace):
    return f"store.folder={workplace.folder / 'kv'}"


@pytest.mark.parametrize("gradient", ["detach", "full"])
def test_the_first_step_is_that_of_detach_and_full(workplace, frozen, gradient) -> None:
    # A new adapter changes nothing yet, so the chunks are encoded by the same weights.
    name = f"lora-{gradient}"
    metrics = workplace.train_here(name, *LORA, f"context.gradient={gradient}")
    first, other = frozen[0], metrics[0]
    assert other["loss"] == pytest.approx(first["loss"], rel=1e-5)
    same_norm = other["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-4)
    assert same_norm == (gradient == "detach")
    assert losses(metrics)[3] != pytest.approx(losses(frozen)[3], rel=1e-5)
    assert first["packed_tokens"] < 0.5 * other["packed_tokens"]


def test_the_run_says_what_serves_it(workplace, frozen) -> None:
    assert losses(frozen)[-1] < losses(frozen)[0]
    run = workplace.folder / "frozen"
    assert resolve([str(run / "recipe.yaml")]).config.context.gradient == "frozen"
    base = AutoModelForCausalLM.from_pretrained(workplace.folder / "model")
    adapted = PeftModel.from_pretrained(base, run / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-4)


def test_slices_in_memory_are_not_computed_again(frozen) -> None:
    assert supplied(frozen[:STEPS], "computed") > 0
    assert supplied(frozen[STEPS:], "computed", "disk") == 0
    assert supplied(frozen[STEPS:], "memory") > 0


def test_a_store_gives_the_same_run_and_the_next_one_computes_nothing(
    workplace, frozen, with_store
) -> None:
    assert losses(with_store) == losses(frozen)
    again = workplace.train_here("again", *FROZEN, store_option(workplace), "store.memory_gib=0.0")
    assert losses(again) == losses(frozen)
    assert supplied(again, "computed", "memory") == 0
    assert supplied(again, "disk") == supplied(frozen, *SOURCES)
    assert_same_adapter(workplace, "again", "frozen", 0)


def test_what_a_run_has_stored_is_the_untrained_models(workplace, with_store) -> None:
    config = resolve(workplace.arguments("new", store_option(workplace))).config
    model = AutoModelForCausalLM.from_pretrained(workplace.folder / "model")
    store = open_store(config, model, load_tokenizer(config.model.path), "base")
    context = FrozenContext(supply_over(config, model, store, compute=False), torch.float32)
    tables = load_built(config, "train")
    for row in tables.samples:
        chunk = tables.chunk(row["chunk_ids"][row["span_chunks"][0]])
        span = Span(chunk.chunk_id, row["span_starts"][0], row["span_ends"][0])
        plan = plan_prefix([span], prompt_length=0, chunk_ranks=[chunk.chunk_id])
        ids = {chunk.chunk_id: chunk.token_ids}
        prefix = context.prefix([Example(plan, [3], [4])], ids, {})
        expected = encode.encode_chunk(model, chunk.token_ids)[span.start : span.end]
        assert torch.equal(prefix, expected)
    context.close()


@pytest.mark.parametrize(
    "option", ["train.micro_batch_samples=1", "train.micro_batch_samples=8",
               "train.gradient_checkpointing=true"],
)  # fmt: skip
def test_micro_batches_and_checkpointing_change_nothing(workplace, frozen, option) -> None:
    name = f"frozen-{option}"
    metrics = workplace.train_here(name, *FROZEN, option)
    assert losses(metrics) == pytest.approx(losses(frozen), abs=1e-5)
    assert supplied(metrics, *SOURCES) == supplied(frozen, *SOURCES)
    assert_same_adapter(workplace, name, "frozen", 1e-4)


@pytest.mark.slow
def test_two_ranks_equal_one_process_and_one_of_them_fills_the_store(workplace, frozen) -> None:
    store = f"store.folder={workplace.folder / 'kv_of_ranks'}"
    metrics = workplace.train("frozen_ranks", *FROZEN, store, processes=2)
    assert losses(metrics) == pytest.approx(losses(frozen), abs=1e-5)
    assert_same_adapter(workplace, "frozen_ranks", "frozen", 1e-4)
    again = workplace.train_here("after_ranks", *FROZEN, store)
    assert 0 < supplied(again, "computed") < supplied(frozen, "computed")


def test_a_resumed_run_reads_the_base_models_slices(workplace, frozen, with_store) -> None:
    options = [*FROZEN, store_option(workplace), "train.save_every_steps=4"]
    workplace.train_here("resumed", *options)
    for product in ("checkpoint", "adapter"):
        shutil.rmtree(workplace.folder / "resumed" / product)
    resume = [*options, "train.resume=true"]
    with pytest.raises(UserError, match=r"store.dtype: None -> 'bfloat16'"):
        workplace.train_here("resumed", *resume, "store.dtype=bfloat16")
    metrics = workplace.train_here("resumed", *resume, "store.memory_gib=0.0")
    assert supplied(metrics, "computed") == 0
    assert losses(metrics) == losses(frozen)
    assert_same_adapter(workplace, "resumed", "frozen", 0)


def test_full_fine_tuning_needs_every_slice_in_the_store(workplace, with_store) -> None:
    full = ["context.gradient=frozen", "train.max_steps=2"]
    with pytest.raises(UserError, match=r"(\d+) of \1 chunks .* are not in a store"):
        workplace.train_here("new", *full)
    folder = workplace.folder / "kv_for_full"
    shutil.copytree(workplace.folder / "kv", folder)
    store = f"store.folder={folder}"
    metrics = workplace.train_here("full_frozen", *full, store)
    assert supplied(metrics, "computed") == 0 < supplied(metrics, "disk")

    config = resolve(workplace.arguments("new", *full, store)).config
    model = AutoModelForCausalLM.from_pretrained(workplace.folder / "model")
    tables = load_built(config, "train")
    sample = tables.samples[0]
    used = tables.chunk(sample["chunk_ids"][sample["span_chunks"][0]])
    opened = open_store(config, model, load_tokenizer(config.model.path), "base")
    opened.remove([chunk_key(used.token_ids)])
    opened.close()
    with pytest.raises(UserError, match=r"; 1 of \d+ chunks .* `coinrag cache build`"):
        workplace.train_here("new", *full, store)
    for shard in (folder / "base" / "shards").iterdir():
        shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"(\d+) of \1 chunks .* `coinrag cache build`"):
        workplace.train_here("new", *full, store)
    assert not (workplace.folder / "new").exists()


def test_flipped_records_are_not_trained_on(workplace, frozen, with_store) -> None:
    folder = workplace.folder / "kv_flipped"
    shutil.copytree(workplace.folder / "kv", folder)
    for shard in (folder / "base" / "shards").iterdir():
        data = bytearray(shard.read_bytes())
        data[HEADER_BYTES + 3 :: 64] = bytes(len(data[HEADER_BYTES + 3 :: 64]))
        shard.write_bytes(data)
    metrics = workplace.train_here("flipped", *FROZEN, f"store.folder={folder}")
    assert supplied(metrics, "computed") > 0
    assert losses(metrics) == losses(frozen)


def test_a_store_of_other_weights_is_refused(workplace, with_store) -> None:
    other = workplace.folder / "other_weights"
    shutil.copytree(workplace.folder / "model", other)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(other)
    with pytest.raises(ForeignStoreError, match="weights: the store has"):
        workplace.train_here("new", *FROZEN, store_option(workplace), f"model.path={other}")
    assert not (workplace.folder / "new").exists()


@pytest.mark.parametrize("stored", [False, True])
def test_a_chunk_is_encoded_once_for_all_of_its_nuggets(
    workplace, tmp_path, monkeypatch, stored
) -> None:
    options = [f"store.folder={tmp_path}"] if stored else []
    config = resolve(workplace.arguments("new", *options)).config
    model = AutoModelForCausalLM.from_pretrained(workplace.folder / "model")
    tokenizer = load_tokenizer(config.model.path)
    encoded = []

    def count(model, token_ids):
        encoded.append(list(token_ids))
        return encode.encode_chunk(model, token_ids)

    monkeypatch.setattr("data_builders.kv.encode_chunk", count)
    store = open_store(config, model, tokenizer, "base", create=True)
    context = FrozenContext(supply_over(config, model, store, writable=True), torch.float32)
    chunk_ids = {PROMPT: [1, 2], "a": list(range(10, 40))}
    nuggets = {"a": [(2, 8), (8, 12), (20, 25)]}
    for start, end in [(20, 25), (2, 8), (2, 12), (8, 12)]:
        plan = plan_prefix([Span("a", start, end)], prompt_length=2, chunk_ranks=["a"])
        prefix = context.prefix([Example(plan, [3], [4])], chunk_ids, nuggets)
        expected = encode.encode_chunk(model, chunk_ids["a"])[start:end]
        assert torch.equal(prefix[2:], expected)
    assert sorted(encoded) == sorted(chunk_ids.values())
    context.close()
