"""Ranks that share a model, as the command line starts them: what one process gives, they give."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from logged import read_steps
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cache_ops.contextualizer import CONTEXTUALIZER_FILE
from launch.training import run_training
from recipes.errors import UserError
from recipes.resolve import resolve
from train import step, trainer
from train.optim import trainable_model
from train.sharding import refuse_unshared
from train.tensor_files import TensorFiles

OPTIONS = ("train.max_steps=3", "train.save_every_steps=2", "eval.max_new_tokens=8")
TAUGHT = ("train.distillation.weight=0.3", "train.distillation.answers=teacher")
LORA = ("train.tuning=lora", "train.lora.rank=4", "train.learning_rate=1e-2")
# Dealt by tokens, passes of the ranks are not those of one process.
EVALUATED = (
    "train.evaluate.every_steps=2", "train.evaluate.sample_answers=3", "train.tensorboard=true",
    # Of an odd number, ranks answer different numbers.
    "train.evaluate.questions_per_dataset=3", "train.micro_batch_tokens=250",
)  # fmt: skip
RESUME = "train.resume=true"
CORRECTED = (
    "context.contextualizer={width: 16, layers: 1, heads: 2}",
    "train.gradient_checkpointing=true",
)
IDS = torch.arange(40)[None]

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")


def in_one_process(workplace, name, *overrides):
    workplace.train_here(name, *OPTIONS, *overrides)
    return name


def begun(workplace, finished, name):
    """A run of that name that stands where another one had saved its state."""
    source, folder = workplace.folder / finished, workplace.folder / name
    shutil.copytree(source, folder)
    shutil.rmtree(folder / "checkpoint")
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(source), str(folder)))


def assert_same_steps(workplace, name, other):
    lines, others = (read_steps(workplace.folder / run) for run in (name, other))
    assert [line["step"] for line in lines] == [1, 2, 3]
    for key in {"loss", "gradient_norm", "cross_entropy", "kl"} & others[0].keys():
        expected = pytest.approx([line[key] for line in others], rel=1e-5, abs=1e-5)
        assert [line[key] for line in lines] == expected


def assert_same_run(workplace, name, other):
    assert_same_steps(workplace, name, other)
    first, second = (
        load_file(workplace.folder / run / "checkpoint" / "model.safetensors")
        for run in (name, other)
    )
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], rtol=0, atol=1e-5) for name in first)


def assert_same_answers(workplace, name, other):
    """Of the last evaluation."""
    shared, alone = (workplace.metrics(run)[-1]["evaluation"] for run in (name, other))
    for key in ("questions", "answers", "f1", "em", "stop_rate"):
        assert shared[key] == alone[key], key


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def loaded(workplace, name):
    return AutoModelForCausalLM.from_pretrained(workplace.folder / name / "checkpoint")


def assert_reloads(workplace, name, other):
    expected = logits(loaded(workplace, other))
    assert torch.allclose(logits(loaded(workplace, name)), expected, atol=1e-4)
    adapter = workplace.folder / name / "adapter"
    if adapter.exists():
        base = AutoModelForCausalLM.from_pretrained(workplace.folder / "model")
        untrained = logits(base)
        adapted = logits(PeftModel.from_pretrained(base, adapter))
        assert torch.allclose(adapted, expected, atol=1e-4)
        assert not torch.allclose(adapted, untrained, atol=1e-2)


@pytest.fixture(scope="module")
def full(workplace):
    return in_one_process(workplace, "one_full")


@pytest.fixture(scope="module")
def taught(workplace):
    return in_one_process(workplace, "one_taught", *TAUGHT)


@pytest.fixture(scope="module")
def corrected(workplace):
    return in_one_process(workplace, "one_corrected", *CORRECTED)


@pytest.fixture(scope="module")
def lora(workplace):
    return in_one_process(workplace, "one_lora", *LORA)


@pytest.fixture(scope="module")
def frozen(place):
    """A run over a store that it has filled, also for the dev questions."""
    options = (*LORA, "context.gradient=frozen", f"store.folder={place.folder / 'kv_of_one'}")
    return in_one_process(place, "one_frozen", *options, *EVALUATED), options


@pytest.fixture(
    scope="module",
    params=[
        "ddp",
        pytest.param("zero2", marks=needs_deepspeed),
        pytest.param("zero3", marks=needs_deepspeed),
        "fsdp2",
    ],
)
def sharding(request, place, lora, frozen):
    """A way of sharing by which two ranks have trained, each run in a folder that begins so."""
    sharding = request.param
    begun(place, lora, f"{sharding}_lora")
    # The ranks ask the teacher for themselves.
    for said in (place.folder / "built").glob("teacher-*"):
        shutil.rmtree(said)
    runs = {
        f"{sharding}_full": EVALUATED,
        f"{sharding}_taught": TAUGHT,
        f"{sharding}_corrected": CORRECTED,
        f"{sharding}_lora": (*LORA, RESUME),
        f"{sharding}_frozen": (*frozen[1], *EVALUATED),
    }
    arguments = [place.arguments(name, *OPTIONS, *options) for name, options in runs.items()]
    script = Path(__file__).with_name("successive.py")
    ending = run_training([json.dumps(arguments)], 2, sharding=sharding, script=script)
    assert ending.status == 0, ending.message
    return sharding


@pytest.mark.slow
def test_ranks_train_and_answer_as_one_process_that_their_state_serves(place, full, sharding):
    name, resumed = f"{sharding}_full", f"{sharding}_to_one"
    assert_same_run(place, name, full)
    assert_reloads(place, name, full)
    begun(place, name, resumed)
    in_one_process(place, resumed, RESUME, *EVALUATED)
    assert_same_run(place, resumed, full)
    assert len(list((place.folder / name / "tensorboard").glob("events.*"))) == 1
    assert_same_answers(place, name, resumed)


@pytest.mark.slow
def test_ranks_ask_the_teacher_and_learn_what_one_process_does(place, taught, sharding):
    # Weights whose gradient is nothing but rounding go their own way.
    assert_same_steps(place, f"{sharding}_taught", taught)


@pytest.mark.slow
def test_ranks_train_a_contextualizer_along(place, corrected, sharding):
    assert_same_run(place, f"{sharding}_corrected", corrected)
    shared, alone = (
        load_file(place.folder / name / "checkpoint" / CONTEXTUALIZER_FILE)
        for name in (f"{sharding}_corrected", corrected)
    )
    assert shared.keys() == alone.keys()
    assert all(torch.allclose(shared[name], alone[name], rtol=0, atol=1e-5) for name in alone)


@pytest.mark.slow
def test_a_state_of_one_process_goes_on_with_shared_weights_and_an_adapter(place, lora, sharding):
    name = f"{sharding}_lora"
    assert_same_run(place, name, lora)
    assert_reloads(place, name, lora)


@pytest.mark.slow
def test_ranks_take_frozen_slices_from_a_store(place, frozen, sharding):
    alone, name = frozen[0], f"{sharding}_frozen"
    assert_same_run(place, name, alone)
    assert_same_answers(place, name, alone)
    assert all(line["prefix_tokens_computed"] == 0 for line in read_steps(place.folder / name))


def test_slices_that_ranks_could_not_compute_are_refused_before(workplace, monkeypatch):
    monkeypatch.setattr(trainer, "splits_weights", lambda accelerator: True)
    message = r"train\.tuning=lora computes no slices where .* (\d+) of \1 .* `coinrag cache build`"
    with pytest.raises(UserError, match=message):
        in_one_process(workplace, "unstored", *LORA, "context.gradient=frozen")
    assert not (workplace.folder / "unstored").exists()


def test_dropout_of_the_model_binds_a_run_to_its_number_of_ranks(workplace, full, monkeypatch):
    begun(workplace, full, "of_two")
    state = workplace.folder / "of_two" / "state" / "step-00000002" / "progress.json"
    state.write_text(state.read_text().replace('"ranks": 1', '"ranks": 2'))
    monkeypatch.setattr(TensorFiles, "verify", lambda files: None)

    def dropping(config):
        model = trainable_model(config)
        model.model.layers[0].self_attn.attention_dropout = 0.1
        return model

    monkeypatch.setattr(trainer, "trainable_model", dropping)
    with pytest.raises(UserError, match=r"1; the model's attention_dropout=0\.1 draws random"):
        in_one_process(workplace, "of_two", RESUME)


def test_memory_is_that_of_the_rank_with_the_most(workplace, full, monkeypatch):
    def gather(accelerator, mine_1N):
        return torch.cat((mine_1N, (mine_1N == 0.25) * 99.0))

    monkeypatch.setattr(step, "peak_memory_gib", lambda: 0.25)
    monkeypatch.setattr(Accelerator, "gather", gather)
    (line,) = workplace.train_here("memory", "train.max_steps=1", OPTIONS[-1])
    assert line["peak_memory_gib"] == 99.0
    assert line["loss"] == pytest.approx(workplace.metrics(full)[0]["loss"])


def shared(kind, **plugin):
    """The accelerator of a launcher that asks for a way of sharing."""
    fsdp = SimpleNamespace(cpu_offload=None) if kind == DistributedType.FSDP else None
    offload = {"offload_optimizer_device": "none", "offload_param_device": "none"}
    return SimpleNamespace(
        distributed_type=kind,
        is_fsdp2=plugin.pop("version", 2) == 2 and fsdp is not None,
        state=SimpleNamespace(fsdp_plugin=fsdp),
        deepspeed_plugin=SimpleNamespace(**{"zero_stage": 3} | offload | plugin),
    )


@pytest.mark.parametrize(
    ("accelerator", "overrides", "message"),
    [
        (shared(DistributedType.MEGATRON_LM), [], "MEGATRON_LM is not supported"),
        (shared(DistributedType.FSDP, version=1), [], "FSDP is not supported"),
        (shared(DistributedType.DEEPSPEED, zero_stage=1), [], "DEEPSPEED is not supported"),
        (shared(DistributedType.DEEPSPEED, offload_param_device="nvme"), [], "NVMe"),
        (
            shared(DistributedType.FSDP),
            ["train.optimizer=adamw_8bit"],
            r"train\.optimizer=adamw_8bit .* FSDP2",
        ),
        (
            shared(DistributedType.DEEPSPEED, zero_stage=2),
            ["model.dtype=bfloat16", "train.tuning=lora"],
            r"model\.dtype=bfloat16 under ZeRO-2 needs train\.mixed_precision=bf16",
        ),
        (
            shared(DistributedType.DEEPSPEED),
            ["train.evaluate.every_steps=1", "context.repair.ratio=0.2"],
            r"train\.evaluate with context\.repair .* ZeRO-3",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(workplace, accelerator, overrides, message):
    config = resolve(workplace.arguments("refused", *overrides)).config
    with pytest.raises(UserError, match=message):
        refuse_unshared(accelerator, config)


def test_what_can_be_shared_passes(workplace):
    overrides = ("train.tuning=lora", "context.gradient=frozen", "train.evaluate.every_steps=1")
    config = resolve(workplace.arguments("shared", *overrides)).config
    refuse_unshared(shared(DistributedType.FSDP), config)
    refuse_unshared(shared(DistributedType.DEEPSPEED), config)
