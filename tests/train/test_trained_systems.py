"""Every trained system: what a sample becomes, and what its training leaves behind."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cache_ops.hf import load_config, load_model, load_tokenizer
from cache_ops.plan import PROMPT
from cache_ops.rope import Rope
from cache_ops.soft_tokens import (
    SOFT_TOKENS_FILE,
    SoftTokensError,
    add_soft_tokens,
    load_soft_tokens,
    numbered,
    soft_tokens_of,
    soft_tokens_saved_in,
)
from data_builders.build import load_built
from data_builders.prompt import PromptTemplate
from eval.checkpoints import check_soft_tokens, weights_of
from launch import cache
from recipes.errors import UserError
from recipes.resolve import resolve, with_changes
from train.examples import ExampleBuilder, sample_spans
from train.stopping import StopRequest
from train.trainer import measure_lengths

SYSTEMS = ("coinrag", "standard_rag", "turborag", "block_attention", "kvlink")
KVLINK = ["train.system=kvlink", "systems.kvlink.link_tokens=2"]
LINK_ROWS = 3 * 2


@pytest.fixture(scope="module")
def builder(workplace):
    """A function from overrides to what a run with them is trained on."""
    model = load_model(str(workplace.folder / "model"), "float32")
    tokenizer = load_tokenizer(str(workplace.folder / "model"))

    def build(*overrides):
        config = resolve(workplace.arguments("none", *overrides)).config
        soft_tokens = numbered(len(tokenizer), {"links": (3, 2)})
        template = PromptTemplate(tokenizer, config.prompt)
        tables = load_built(config, "train")
        return ExampleBuilder(tables, template, Rope.from_config(model.config), config, soft_tokens)

    return build


def whole_texts(workplace, builder, index=0):
    row = load_built(resolve(workplace.arguments("none")).config, "train")
    chunk_ids = row.samples[index]["chunk_ids"]
    return [list(row.chunk(chunk).token_ids) for chunk in chunk_ids]


@pytest.mark.parametrize("answers", [[], [""], [" \n", "a second one is not learned"]])
def test_a_sample_without_an_answer_is_named(workplace, answers) -> None:
    config = resolve(workplace.arguments("none")).config
    template = PromptTemplate(load_tokenizer(config.model.path), config.prompt)
    tables = load_built(config, "train")
    rows = [tables.samples[0], {**tables.samples[1], "answers": answers}]
    built = SimpleNamespace(samples=rows, chunk=tables.chunk)
    rope = Rope.from_config(load_config(config.model.path))
    silent = ExampleBuilder(built, template, rope, config)
    with pytest.raises(UserError, match=f"{rows[1]['question_id']}' .* has no answer to learn"):
        measure_lengths(silent, 2, StopRequest(), report=False)


def test_forms_of_a_sample(workplace, builder) -> None:
    made = {name: builder(f"train.system={name}").sample(0) for name in SYSTEMS}
    texts = whole_texts(workplace, builder)
    tokens = sum(map(len, texts))
    prompt = list(made["coinrag"].segments[PROMPT])
    answers = {tuple(example.answer_ids) for one in made.values() for example in one.examples}
    assert len(answers) == 1
    query = list(made["coinrag"].examples[0].query_ids)

    (full,) = made["standard_rag"].examples
    assert full.query_ids == [*prompt, *(token for text in texts for token in text), *query]
    assert full.plan.slices == ()
    (cached,) = made["turborag"].examples
    assert cached.plan.tokens == len(prompt) + tokens
    assert list(cached.query_ids) == query
    blocks, again = made["block_attention"].examples
    assert (blocks, again) == (cached, full)
    (linked,) = made["kvlink"].examples
    assert len(linked.query_ids) == LINK_ROWS + len(query)
    assert linked.plan.tokens == cached.plan.tokens
    # The last link token stands right before the query.
    assert linked.query_positions[LINK_ROWS] == cached.plan.length + LINK_ROWS
    assert linked.query_positions[LINK_ROWS - 1] == cached.plan.length + LINK_ROWS - 1


def test_answer_tokens_of_all_forms_count(builder) -> None:
    once, twice = (builder(f"train.system={s}") for s in ("turborag", "block_attention"))
    assert twice.lengths(0).answer_tokens == 2 * once.lengths(0).answer_tokens
    assert twice.lengths(0).tokens == once.lengths(0).tokens


@pytest.mark.parametrize("system", SYSTEMS)
def test_over_long_samples_lose_the_worst_pieces(builder, system) -> None:
    longest = builder(f"train.system={system}")
    room = longest.lengths(0).tokens - 1
    cut = builder(f"train.system={system}", f"train.max_length_tokens={room}").sample(0)
    assert cut.dropped >= 1
    kept, whole = cut.examples[0], longest.sample(0).examples[0]
    assert kept.answer_ids == whole.answer_ids
    if system in ("turborag", "kvlink"):
        assert kept.plan.slices == whole.plan.slices[: len(kept.plan.slices)]


def test_isolated_nuggets_are_trained_on_alone(builder) -> None:
    sliced = builder().sample(0)
    alone = builder("context.encoding=isolated").sample(0)
    assert alone.examples[0].plan.tokens == sliced.examples[0].plan.tokens
    for piece in alone.examples[0].plan.slices:
        assert (piece.start, piece.end) == (0, len(alone.segments[piece.chunk]))


@pytest.mark.parametrize("system", SYSTEMS[1:4])
def test_the_loss_falls(workplace, system) -> None:
    metrics = workplace.train_here(system, f"train.system={system}", "train.epochs=3")
    assert min(line["loss"] for line in metrics[-3:]) < 0.9 * metrics[0]["loss"]


def test_options_of_coinrags_prefix_are_told_to_be_idle_elsewhere(workplace, caplog) -> None:
    idle = ["context.anchors.prefix_tokens=2", "context.repair.ratio=0.5", "train.max_steps=1"]
    for system, told in (("turborag", True), ("coinrag", False)):
        caplog.clear()
        workplace.train_here(f"idle_{system}", f"train.system={system}", *idle)
        assert ("context.anchors, context.repair: prefixes of" in caplog.text) is told


@pytest.fixture(scope="module")
def kvlink(workplace):
    return workplace.train_here("kvlink", *KVLINK, "train.epochs=3")


def test_link_tokens_are_trained_and_lie_beside_plain_weights(workplace, kvlink) -> None:
    assert kvlink[-1]["loss"] < 0.9 * kvlink[0]["loss"]
    checkpoint = workplace.folder / "kvlink" / "checkpoint"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    base = AutoModelForCausalLM.from_pretrained(workplace.folder / "model")
    assert model.get_input_embeddings().weight.shape == base.get_input_embeddings().weight.shape
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in base.named_parameters()}
    ids = torch.arange(30)[None]
    with torch.no_grad():
        before = model(ids).logits
    assert soft_tokens_saved_in(checkpoint) == {"links": (3, 2)}
    links = load_soft_tokens(model, checkpoint, ["links"])["links"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before), "texts do not see the link tokens"
    trained = soft_tokens_of(model).soft_ND
    add_soft_tokens(base, {"links": (3, 2)}, seed=0)
    assert trained.shape == (LINK_ROWS, model.config.hidden_size)
    assert not torch.isclose(trained, soft_tokens_of(base).soft_ND).all(dim=1).any(), (
        "every one moved"
    )
    with pytest.raises(SoftTokensError, match="made for 3 places in a prompt, 4"):
        links.ids(4)


def test_link_tokens_resume_bit_by_bit(workplace, kvlink) -> None:
    options = [*KVLINK, "train.epochs=3", "train.save_every_steps=2"]
    run = workplace.folder / "kvlink_resumed"

    workplace.train_here("kvlink_resumed", *options)
    state = sorted((run / "state").iterdir())[-1]
    (run / "checkpoint").rename(run / "before")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    step = int(state.name.removeprefix("step-"))
    assert 0 < step < len(lines), "there is something left to do"
    again = workplace.train_here("kvlink_resumed", *options, "train.resume=true")
    assert [line["loss"] for line in again] == [line["loss"] for line in kvlink]
    for name in ("model.safetensors", SOFT_TOKENS_FILE):
        one, other = load_file(run / "before" / name), load_file(run / "checkpoint" / name)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_an_adapter_keeps_its_link_tokens(workplace) -> None:
    lora = ["train.tuning=lora", "train.lora.rank=4", "train.learning_rate=1e-2"]
    workplace.train_here("kvlink_lora", *KVLINK, *lora)
    run = workplace.folder / "kvlink_lora"
    beside = [
        load_file(run / part / SOFT_TOKENS_FILE)["links"] for part in ("adapter", "checkpoint")
    ]
    assert torch.equal(*beside)
    names = load_file(run / "adapter" / "adapter_model.safetensors")
    assert not any("embed" in name for name in names)
    merged = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    assert soft_tokens_of(merged) is None


def test_a_checkpoint_without_link_tokens_says_so(workplace) -> None:
    model = load_model(str(workplace.folder / "model"), "float32")
    with pytest.raises(SoftTokensError, match=r"holds no soft tokens 'links'"):
        load_soft_tokens(model, workplace.folder / "model", ["links"])


def test_other_or_damaged_link_tokens_are_told_before_the_training(
    workplace, kvlink, tmp_path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(workplace.folder / "kvlink" / "checkpoint", start)
    options = [f"model.path={start}", "train.system=kvlink", "systems.kvlink.link_tokens=3"]
    with pytest.raises(UserError, match=r"model\.path .* has 2 link tokens .* asks for 3"):
        workplace.train_here("refused", *options)
    path = start / SOFT_TOKENS_FILE
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(SoftTokensError, match=r"soft_tokens\.safetensors is damaged"):
        workplace.train_here("refused", *options)


def test_tuning_none_trains_what_lies_beside_the_weights_alone(workplace) -> None:
    options = ["train.tuning=none", "train.learning_rate=0.1", "train.epochs=3"]
    frozen = ["train.gradient_checkpointing=true", "train.save_every_steps=4"]
    metrics = workplace.train_here("kvlink_none", *KVLINK, *options, *frozen)
    assert min(line["loss"] for line in metrics[-3:]) < 0.95 * metrics[0]["loss"]
    run = workplace.folder / "kvlink_none"
    trained = load_file(run / "checkpoint" / "model.safetensors")
    before = load_file(workplace.folder / "model" / "model.safetensors")
    assert trained.keys() == before.keys()
    assert all(torch.equal(trained[name], tensor) for name, tensor in before.items())
    (state,) = (run / "state").iterdir()
    held = {name for path in state.glob("*.safetensors") for name in load_file(path)}
    assert {name for name in held if name.startswith("weight.")} == {
        "weight.model.embed_tokens.soft_ND"
    }
    assert not (run / "adapter").exists()


def test_tuning_none_with_nothing_beside_names_what_would_be(workplace) -> None:
    for options, asked in (
        (["train.system=kvlink", "systems.kvlink.link_tokens=0"], "systems.kvlink.link_tokens"),
        (["train.system=coinrag"], r"context\.packets\.before_tokens"),
        (["train.system=standard_rag"], "standard_rag has nothing beside them"),
    ):
        with pytest.raises(UserError, match=asked):
            workplace.train_here("nothing", *options, "train.tuning=none")


PACKETS = ["context.packets={before_tokens: 2, after_tokens: 1}"]
ANCHORS = ["context.anchors={prefix_tokens: 3, suffix_tokens: 2}"]
MEANS = ["context.anchors={prefix_tokens: 3, summary: mean}"]


def test_anchors_of_a_sample_join_its_slices(builder) -> None:
    plain, anchored = builder().sample(0), builder(*ANCHORS).sample(0)
    slices = anchored.examples[0].plan.slices
    held = {(p.chunk, token) for p in slices for token in range(p.start, p.end)}
    for piece in plain.examples[0].plan.slices[1:]:
        tokens = len(anchored.segments[piece.chunk])
        kept = [*range(3), *range(tokens - 2, tokens), *range(piece.start, piece.end)]
        assert {(piece.chunk, token) for token in kept} <= held
    assert builder("context.anchors={}").sample(0) == plain
    # Without its nuggets a chunk has no anchors either.
    length = builder(*ANCHORS).lengths(0)
    cut = builder(*ANCHORS, f"train.max_length_tokens={length.tokens - length.prefix_tokens + 12}")
    (example,) = cut.sample(0).examples
    assert cut.sample(0).dropped
    spans = sample_spans(cut._samples[0])[: cut.sample(0).kept]
    assert {p.chunk for p in example.plan.slices} - {PROMPT} == {span.chunk for span in spans}


def test_only_packets_are_trained_over_stored_slices(place) -> None:
    """A store that was filled before serves the run and what it leaves."""
    options = [*PACKETS, *MEANS, "train.tuning=none", "context.gradient=frozen"]
    options += ["train.learning_rate=0.1", f"store.folder={place.folder / 'packets_kv'}"]
    recipe = place.arguments("packets", *options)
    filled = cache.build(recipe)
    store = place.folder / "packets_kv" / "base"
    metrics = place.train_here("packets", *options, "train.epochs=3")
    assert min(line["loss"] for line in metrics[-3:]) < 0.95 * metrics[0]["loss"]
    assert sum(line["prefix_tokens_computed"] for line in metrics) == 0
    assert cache.stat(str(store))["chunks"] == filled["chunks"]
    checkpoint = place.folder / "packets" / "checkpoint"
    before, trained = (
        load_file(folder / "model.safetensors") for folder in (place.folder / "model", checkpoint)
    )
    assert all(torch.equal(trained[name], tensor) for name, tensor in before.items())
    saved = {"packets_before": (1, 2), "packets_after": (1, 1)}
    assert soft_tokens_saved_in(checkpoint) == saved
    config = resolve(recipe).config
    weights = weights_of(config, "fine_tuned", "coinrag")
    assert weights.context == place.folder / "model"
    check_soft_tokens(config, weights, "coinrag")
    with pytest.raises(UserError, match=r"trained with 2 packet tokens .* asks for 0"):
        check_soft_tokens(with_changes(config, ["context.packets=null"]), weights, "coinrag")


def test_packets_are_refused_where_they_have_no_place(workplace) -> None:
    activated = ["train.tuning=lora", "train.lora.activated=true", "context.gradient=frozen"]
    for options, said in (
        (["context.positions=original"], "context.positions"),
        (activated, "an activated adapter acts from the query on"),
    ):
        with pytest.raises(UserError, match=said):
            resolve(workplace.arguments("none", *PACKETS, *options))
    with pytest.raises(UserError, match=r"context\.packets=null has none"):
        resolve(workplace.arguments("none", "context.packets={before_tokens: 0, after_tokens: 0}"))
    with pytest.raises(UserError, match=r"a mean is no token that context\.repair could"):
        resolve(workplace.arguments("none", *MEANS, "context.repair={ratio: 0.1}"))
    with pytest.raises(UserError, match=r"isolated nuggets have no chunk"):
        resolve(workplace.arguments("none", *ANCHORS, "context.encoding=isolated"))
