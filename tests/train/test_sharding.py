"""Ranks that share a model, through the real command line: what one process gives, they give."""

import shutil
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from logged import read_steps
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from launch.cli import main
from recipes.errors import UserError
from recipes.resolve import resolve
from train.sharding import refuse_unshared

LORA = ("train.tuning=lora", "train.lora.rank=4", "train.learning_rate=1e-2")
OPTIONS = ("train.max_steps=3", "train.save_every_steps=2")
# Dealt by tokens, passes of the ranks are not those of one process.
EVALUATED = (
    "train.evaluate.every_steps=3", "train.evaluate.sample_answers=4", "train.tensorboard=true",
    "train.micro_batch_tokens=250",
)  # fmt: skip
IDS = torch.arange(40)[None]

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")


def in_one_process(workplace, name, *overrides):
    workplace.train_here(name, *OPTIONS, *overrides)
    return name


def on_two_ranks(workplace, name, sharding, *overrides):
    arguments = workplace.arguments(name, *OPTIONS, *overrides)
    assert main(["train", *arguments, "--processes", "2", "--sharding", sharding]) == 0


def begun(workplace, finished, name):
    """A run of that name that stands where another one had saved its state."""
    source, folder = workplace.folder / finished, workplace.folder / name
    shutil.copytree(source, folder)
    shutil.rmtree(folder / "checkpoint")
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(source), str(folder)))


def assert_same_run(workplace, name, other):
    lines, others = (read_steps(workplace.folder / run) for run in (name, other))
    assert [line["step"] for line in lines] == [1, 2, 3]
    for key in ("loss", "gradient_norm"):
        expected = pytest.approx([line[key] for line in others], rel=1e-5, abs=1e-5)
        assert [line[key] for line in lines] == expected
    first, second = (
        load_file(workplace.folder / run / "checkpoint" / "model.safetensors")
        for run in (name, other)
    )
    assert first.keys() == second.keys()
    for weight in first:
        assert torch.allclose(first[weight], second[weight], atol=1e-5, rtol=0), weight


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
def lora(workplace):
    return in_one_process(workplace, "one_lora", *LORA)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "overrides"),
    [
        ("ddp", EVALUATED),
        pytest.param("zero2", EVALUATED, marks=needs_deepspeed),
        pytest.param("zero3", (), marks=needs_deepspeed),
        ("fsdp2", ()),
    ],
)
def test_ranks_train_and_answer_as_one_process_that_their_state_serves(
    place, full, sharding, overrides
):
    on_two_ranks(place, sharding, sharding, *overrides)
    assert_same_run(place, sharding, full)
    assert_reloads(place, sharding, full)
    resumed = f"{sharding}_to_one"
    begun(place, sharding, resumed)
    in_one_process(place, resumed, "train.resume=true", *overrides)
    assert_same_run(place, resumed, full)
    if overrides:
        assert len(list((place.folder / sharding / "tensorboard").glob("events.*"))) == 1
        shared, alone = (place.metrics(name)[-1]["evaluation"] for name in (sharding, resumed))
        for name in ("questions", "answers", "f1", "em", "stop_rate"):
            assert shared[name] == alone[name], name


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [pytest.param("zero3", marks=needs_deepspeed), "fsdp2"])
def test_a_state_of_one_process_goes_on_with_shared_weights_and_an_adapter(
    workplace, lora, sharding
):
    name = f"one_to_{sharding}_lora"
    begun(workplace, lora, name)
    on_two_ranks(workplace, name, sharding, "train.resume=true", *LORA)
    assert_same_run(workplace, name, lora)
    assert_reloads(workplace, name, lora)


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
            ["context.gradient=frozen", "train.tuning=lora"],
            r"context\.gradient=frozen .* ZeRO-3",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(workplace, accelerator, overrides, message):
    config = resolve(workplace.arguments("refused", *overrides)).config
    with pytest.raises(UserError, match=message):
        refuse_unshared(accelerator, config)


def test_what_can_be_shared_passes(workplace):
    config = resolve(workplace.arguments("shared", "train.tuning=lora")).config
    refuse_unshared(shared(DistributedType.FSDP), config)
    refuse_unshared(shared(DistributedType.DEEPSPEED), config)
