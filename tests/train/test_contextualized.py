"""Runs with a contextualizer: what they train, what they leave, and what serves it."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from cache_ops.attention import enable_packed
from cache_ops.contextualizer import (
    CONTEXTUALIZER_FILE,
    ContextualizerSpec,
    contextualizer_saved_in,
    new_contextualizer,
)
from cache_ops.hf import load_config, load_tokenizer
from cache_ops.packing import Example, pack
from cache_ops.plan import PROMPT, Span, plan_prefix
from cache_ops.rope import Rope
from eval.checkpoints import load_served, weights_of
from eval.online import OnlinePath
from eval.questions import arm_questions
from eval.serving import open_serving
from eval.systems import Width
from launch import check
from recipes.arms import Arm
from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.training import TrainConfig
from train.export import open_run, write_export
from train.model_shape import ModelShape, RowShape
from train.planner import Setting, disk_bytes, peak_memory, trained_parameters
from train.sharding import refuse_unsharable

SMALL = "context.contextualizer={width: 16, layers: 1, heads: 2}"
ALONE = [SMALL, "train.tuning=none", "train.learning_rate=1e-2", "train.epochs=2"]
LORA = ["train.tuning=lora", "train.lora.rank=4", "train.learning_rate=1e-2"]
EVALUATED = ["train.evaluate.every_steps=6", "train.evaluate.sample_answers=4"]

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")


def weights(workplace, name: str, part: str = "checkpoint") -> dict[str, Tensor]:
    file = "adapter_model" if part == "adapter" else "model"
    return load_file(workplace.folder / name / part / f"{file}.safetensors")


def contextualizer(workplace, name: str, part: str = "checkpoint") -> dict[str, Tensor]:
    return load_file(workplace.folder / name / part / CONTEXTUALIZER_FILE)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def untrained(workplace, spec: ContextualizerSpec) -> dict[str, Tensor]:
    assert spec == ContextualizerSpec.of(
        load_config(str(workplace.folder / "model")), "coinrag", width=16, layers=1, heads=2
    )
    return dict(new_contextualizer(spec, seed=0).named_parameters())


def store_of(workplace) -> str:
    return f"store.folder={workplace.folder / 'contextualized_kv'}"


@pytest.fixture(scope="module")
def alone(place):
    """Trained over the base model's slices, which another run has stored; evaluated at its end."""
    frozen = ["context.gradient=frozen", store_of(place)]
    place.train_here("plain_frozen", *LORA, *frozen)
    options = [*ALONE, *frozen, *EVALUATED, "store.memory_gib=0.0", "train.save_every_steps=4"]
    place.train_here("alone", *options)
    return options


def test_it_learns_alone_over_a_store_made_before(place, alone) -> None:
    metrics = [line for line in place.metrics("alone") if "loss" in line]
    losses = [line["loss"] for line in metrics]
    assert min(losses[-2:]) < 0.9 * losses[0]
    # Untrained it changes nothing, and neither does an adapter.
    assert losses[0] == place.metrics("plain_frozen")[0]["loss"]
    assert not any(line["prefix_tokens_computed"] for line in metrics)
    base = dict(AutoModelForCausalLM.from_pretrained(place.folder / "model").named_parameters())
    kept = weights(place, "alone")
    assert all(torch.equal(weight, base[name]) for name, weight in kept.items())
    spec = contextualizer_saved_in(place.folder / "alone" / "checkpoint")
    before, after = untrained(place, spec), contextualizer(place, "alone")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], weight) for name, weight in after.items())


def test_what_a_run_leaves_answers_as_the_run_did(place, alone) -> None:
    config = resolve(place.arguments("alone", *alone)).config
    tokenizer = load_tokenizer(config.model.path)
    said = {
        one["question_id"]: one["answer"]
        for one in place.metrics("alone")[-1]["evaluation"]["answers"]
    }
    assert len(said) == 4
    found = {}
    with load_served(config, weights_of(config, "fine_tuned", "coinrag"), tokenizer) as served:
        for name in ("coinrag", "turborag"):
            path = OnlinePath(
                open_serving(config, served, tokenizer, [name]), served.model, served.supply
            )
            width = Width(3, 4 if name == "coinrag" else None)
            for question in arm_questions(Arm("", config, (name,)), None).values():
                request = path.begin(question, name, width)
                path.fill(request)
                while not request.generation.done:
                    path.advance([request])
                request.release()
                found[name, question.question_id] = request
                # It is of the system that it was trained with.
                assert (request.stage_ms["contextualize"] > 0) == (name == "coinrag")
    for question_id, answer in said.items():
        ids = found["coinrag", question_id].generation.token_ids
        assert str(tokenizer.decode(ids, skip_special_tokens=True)).strip() == answer
    assert len(set(said.values())) > 1


def test_a_stopped_run_goes_on_bit_by_bit(place, alone) -> None:
    whole, run = place.folder / "alone", place.folder / "alone_again"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoint")
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(whole), str(run)))
    state = sorted((run / "state").glob("step-*"))[-1]
    assert 0 < int(state.name.removeprefix("step-")) < 6, "there is something left to do"
    again = place.train_here("alone_again", *alone, "train.resume=true")
    of_loss = [
        [line["loss"] for line in lines if "loss" in line]
        for lines in (again, place.metrics("alone"))
    ]
    assert of_loss[0] == of_loss[1]
    assert equal(contextualizer(place, "alone_again"), contextualizer(place, "alone"))


def test_it_is_trained_fully_beside_an_adapter(workplace) -> None:
    options = [*LORA, "context.gradient=detach", "train.gradient_checkpointing=true"]
    workplace.train_here("beside", *options, SMALL)
    workplace.train_here("without", *options)
    spec = contextualizer_saved_in(workplace.folder / "beside" / "adapter")
    saved = [contextualizer(workplace, "beside", part) for part in ("adapter", "checkpoint")]
    assert equal(*saved)
    assert not any(
        torch.equal(saved[0][name], one) for name, one in untrained(workplace, spec).items()
    )
    adapter = weights(workplace, "beside", "adapter")
    assert adapter.keys() == weights(workplace, "without", "adapter").keys()
    assert weights(workplace, "beside").keys() == weights(workplace, "without").keys()
    first, plain = (workplace.metrics(name)[0] for name in ("beside", "without"))
    assert first["loss"] == plain["loss"]
    assert first["flops"] > plain["flops"]


def test_it_is_trained_after_the_fine_tuning_and_then_stays(workplace) -> None:
    workplace.train_here("tuned", "train.max_steps=2")
    start = f"train.init_from={workplace.folder / 'tuned'}"
    workplace.train_here("corrected", *ALONE, "train.max_steps=2", start)
    assert equal(weights(workplace, "corrected"), weights(workplace, "tuned"))
    start = f"train.init_from={workplace.folder / 'corrected'}"
    for options in ([], [SMALL.replace("16", "32")]):
        with pytest.raises(
            UserError, match=r"was trained with a context\.contextualizer of width=16"
        ):
            workplace.train_here("refused", start, *options)
    path = f"model.path={workplace.folder / 'corrected' / 'checkpoint'}"
    with pytest.raises(UserError, match=r"model\.path .* of width=16 .* asks for none"):
        workplace.train_here("refused", path)
    workplace.train_here("on", *ALONE, "train.max_steps=1", "train.learning_rate=1e-9", start)
    before, after = (contextualizer(workplace, name) for name in ("corrected", "on"))
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)


def test_a_recipe_and_weights_that_differ_are_refused(workplace) -> None:
    workplace.train_here("with", *ALONE, "train.max_steps=1")
    workplace.train_here("none", "train.max_steps=1")

    def refused(name: str, *options: str) -> str:
        config = resolve(workplace.arguments(name, *options)).config
        tokenizer = load_tokenizer(config.model.path)
        with (
            load_served(config, weights_of(config, "fine_tuned", "coinrag"), tokenizer) as served,
            pytest.raises(UserError) as caught,
        ):
            open_serving(config, served, tokenizer, ["coinrag"])
        return str(caught.value)

    assert "trained with a context.contextualizer of none, and the recipe asks for width=16" in (
        refused("none", SMALL)
    )
    assert "of width=16 layers=1 heads=2, and the recipe asks for none" in refused("with")
    # An untrained one changes nothing, so the base model has none.
    config = resolve(workplace.arguments("with", SMALL)).config
    tokenizer = load_tokenizer(config.model.path)
    with load_served(config, weights_of(config, "base", "coinrag"), tokenizer) as served:
        assert open_serving(config, served, tokenizer, ["coinrag"]).contextualizer is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.system=kvlink"], "context.contextualizer .*got it with kvlink"),
        (["train.system=standard_rag"], "or train.system coinrag or turborag"),
        (["context.contextualizer.heads=3"], r"a divisor of context.contextualizer.width \(16\)"),
    ],
)
def test_where_it_means_nothing_it_is_refused(workplace, options, message) -> None:
    with pytest.raises(UserError, match=message):
        resolve(workplace.arguments("refused", SMALL, *options))


def test_weights_that_are_split_are_not_evaluated(workplace) -> None:
    options = ["train.evaluate.every_steps=1", "train.evaluate.sample_answers=0"]
    config = resolve(workplace.arguments("refused", SMALL, *options)).config
    refuse_unsharable(config, "zero2")
    for sharding in ("zero3", "fsdp2"):
        with pytest.raises(UserError, match=r"train\.evaluate with context\.contextualizer"):
            refuse_unsharable(config, sharding)


def test_a_check_tries_and_counts_it(workplace) -> None:
    plain, found = (
        check.check(
            workplace.arguments("new", *options), samples=0, tflops=1.0, probe=bool(options)
        )
        for options in ([], [SMALL])
    )
    assert found["time"]["source"].endswith(
        "measured here for the longest pass, without optimizer and saving"
    )
    assert found["time"]["flops"] > plain["time"]["flops"]
    for part in ("weights", "optimizer", "activations"):
        assert found["memory"]["parts"][part] > plain["memory"]["parts"][part]


@pytest.mark.parametrize("system", ["coinrag", "turborag"])
def test_an_export_takes_it_along(workplace, tmp_path, system) -> None:
    options = [SMALL, f"train.system={system}"]
    if system == "coinrag":
        options += ["context.anchors.prefix_tokens=2", "context.packets={before_tokens: 2}"]
    workplace.train_here(f"export-{system}", *ALONE, *options, "train.max_steps=1")
    run = workplace.folder / f"export-{system}"
    write_export(open_run(run), tmp_path, dtype="bfloat16", exported_with={})
    assert equal(load_file(tmp_path / CONTEXTUALIZER_FILE), contextualizer(workplace, run.name))
    assert not any(name.startswith("read.") for name in load_file(tmp_path / "model.safetensors"))
    described = json.loads((tmp_path / "serving.json").read_text())
    sizes = {"width": 16, "layers": 1, "heads": 2}
    assert described["contextualizer"] == {"file": CONTEXTUALIZER_FILE, **sizes}
    if system == "coinrag":
        assert described["prefix"]["anchors"]["prefix_tokens"] == 2
        packets = {"before_tokens": 2, "after_tokens": 2}
        assert described["prefix"]["packets"] == packets
        assert described["soft_tokens"]["groups"] == {
            f"packets_{side}": {"places": 1, "tokens_a_place": 2} for side in ("before", "after")
        }
    config = resolve(workplace.arguments(str(tmp_path), *options)).config
    tokenizer = load_tokenizer(config.model.path)
    with load_served(config, weights_of(config, "fine_tuned", system), tokenizer) as served:
        assert open_serving(config, served, tokenizer, [system]).contextualizer_of(system)


def test_the_planner_counts_it(workplace) -> None:
    model = tiny_model("llama", layers=4)
    spec = ContextualizerSpec.of(model.config, "coinrag", width=48, layers=2, heads=3)
    plain, shape = ModelShape.of(model.config), ModelShape.of(model.config, spec)
    chunks = {PROMPT: [3] * 10, "a": [1] * 100}
    plan = plan_prefix([Span("a", 10, 90)], prompt_length=10, chunk_ranks=["a"])
    batch = pack([Example(plan, [5] * 8, [6] * 5)] * 3, chunks, Rope.from_config(model.config))
    row = RowShape.of(batch)
    contextual = new_contextualizer(spec, seed=0)
    model.requires_grad_(False)
    enable_packed(model)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    states = torch.randn(2, 1, 2, 270, 16).unbind()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        changed = contextual(0, *states, (90, 90, 90))
    # It sees into no other form of attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        contextual(0, *states, (90, 90, 90))
    own = {weight.untyped_storage().data_ptr() for weight in contextual.parameters()}
    measured = sum(size for place, size in kept.items() if place not in own)
    settings = Setting(TrainConfig(run_folder="run", tuning="none"), "float32")
    estimated = [peak_memory(one, row, settings).device["activations"] for one in (shape, plain)]
    assert changed[0].requires_grad
    assert (estimated[0] - estimated[1]) / 4 == pytest.approx(measured, rel=0.1)
    assert shape.contextualizer_flops(row) / 4 == counter.get_total_flops()
    assert trained_parameters(shape, settings.train) == spec.parameters
    full = replace(settings, train=TrainConfig(run_folder="run"))
    grown = disk_bytes(shape, full)["checkpoint"] - disk_bytes(plain, full)["checkpoint"]
    assert grown == 4 * spec.parameters
