"""Optimizers: small steps move weights, states survive a file bit by bit, what is refused."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.training import TrainConfig
from train import optim
from train.optim import (
    check_optimizer,
    optimizer_and_schedule,
    restore_state,
    state_tensors,
)
from train.planner import optimizer_bytes

STEPS = 100
MAGNITUDES = (0.02, 0.3, 1.0)
KINDS = [
    ("adamw", torch.float32),
    ("adamw_8bit", torch.float32),
    ("adamw_8bit", torch.bfloat16),
    ("adamw_stochastic", torch.bfloat16),
]


class Layer(nn.Module):
    """A matrix that moments of 8 bits are kept for, and a bias too small for that."""

    def __init__(self, dtype: torch.dtype, rows: torch.Tensor | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        rows = torch.randn(64, 128, generator=generator) if rows is None else rows
        self.weight = nn.Parameter(rows.to(dtype))
        self.bias = nn.Parameter(torch.zeros(64, dtype=dtype))


def setting(optimizer: str) -> TrainConfig:
    return TrainConfig(
        optimizer=optimizer,
        learning_rate=5e-6,
        warmup_fraction=0.0,
        schedule="constant",
        run_folder="run",
    )


def take_steps(layer, optimizer, schedule, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 + step)
        direction = torch.linspace(-3, 3, layer.weight.numel()).view_as(layer.weight)
        noise = torch.randn(layer.weight.shape, generator=generator)
        layer.weight.grad = ((direction + noise) * 1e-4).to(layer.weight.dtype)
        layer.bias.grad = layer.weight.grad[:, 0].clone()
        optimizer.step()
        schedule.step()


def displacement(optimizer: str, dtype: torch.dtype) -> torch.Tensor:
    """How far rows of each magnitude have come after some steps, [magnitudes, weights]."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(len(MAGNITUDES), 2**14, generator=generator).sign()
    start = (signs * torch.tensor(MAGNITUDES)[:, None]).bfloat16()
    # Each magnitude sees the same gradients.
    layer = Layer(dtype, start.view(len(MAGNITUDES), 64, -1).transpose(0, 1).reshape(64, -1))
    before = layer.weight.detach().float().clone()
    take_steps(layer, *optimizer_and_schedule(layer, setting(optimizer), STEPS), 0, STEPS)
    moved = (layer.weight.detach().float() - before).view(64, len(MAGNITUDES), -1)
    return moved.transpose(0, 1).reshape(len(MAGNITUDES), -1)


@pytest.fixture(scope="module")
def in_fp32() -> torch.Tensor:
    return displacement("adamw", torch.float32)


def along(moved: torch.Tensor, reference: torch.Tensor) -> list[float]:
    """The part of the reference's way that each magnitude has gone, 1 for all of it."""
    return ((moved * reference).sum(1) / reference.square().sum(1)).tolist()


@pytest.mark.parametrize(("optimizer", "dtype"), KINDS[1:])
def test_small_steps_move_weights_as_fp32_does(in_fp32, optimizer, dtype) -> None:
    assert in_fp32.abs().mean() > 0.3 * STEPS * 5e-6
    gone = along(displacement(optimizer, dtype), in_fp32)
    assert gone == pytest.approx([1.0] * len(MAGNITUDES), abs=0.1)


def test_small_steps_are_lost_by_plain_adamw_on_bf16(in_fp32) -> None:
    gone = along(displacement("adamw", torch.bfloat16), in_fp32)
    assert gone == pytest.approx([0.0] * len(MAGNITUDES), abs=0.1)


@pytest.mark.parametrize(("optimizer", "dtype"), KINDS)
def test_interrupted_is_uninterrupted_bit_by_bit(tmp_path, optimizer, dtype) -> None:
    config = setting(optimizer)
    whole = Layer(dtype)
    through = optimizer_and_schedule(whole, config, 6)
    take_steps(whole, *through, 0, 6)

    first = Layer(dtype)
    halfway = optimizer_and_schedule(first, config, 6)
    take_steps(first, *halfway, 0, 3)
    kept = state_tensors(first, halfway[0])
    plain = {f"{name}.{key}": part for name, parts in kept.items() for key, part in parts.items()}
    save_file(plain | {"start": first.weight, "bias": first.bias}, tmp_path / "state.safetensors")

    read = load_file(tmp_path / "state.safetensors")
    second = Layer(dtype, read.pop("start"))
    second.bias.data.copy_(read.pop("bias"))
    again = optimizer_and_schedule(second, config, 6)
    named: dict[str, dict[str, torch.Tensor]] = {}
    for path, part in read.items():
        name, _, key = path.rpartition(".")
        named.setdefault(name, {})[key] = part
    restore_state(second, again[0], named)
    # Whatever else draws random numbers changes nothing.
    torch.rand(7)
    take_steps(second, *again, 3, 6)

    assert torch.equal(second.weight, whole.weight)
    assert torch.equal(second.bias, whole.bias)
    for name, parts in state_tensors(whole, through[0]).items():
        resumed = state_tensors(second, again[0])[name]
        assert parts.keys() == resumed.keys()
        assert all(torch.equal(part, resumed[key]) for key, part in parts.items())


@pytest.mark.parametrize(("optimizer", "dtype"), KINDS)
def test_the_state_has_the_bytes_that_the_planner_counts(optimizer, dtype) -> None:
    layer = Layer(dtype)
    made = optimizer_and_schedule(layer, setting(optimizer), 1)
    take_steps(layer, *made, 0, 1)
    parts = state_tensors(layer, made[0])["weight"]
    size = sum(part.nbytes for key, part in parts.items() if key != "step")
    assert size == optimizer_bytes(optimizer, dtype.itemsize) * layer.weight.numel()


def test_what_does_not_fit_is_refused_with_what_does(workplace, monkeypatch) -> None:
    def refused(*options: str) -> str:
        with pytest.raises(UserError) as caught:
            check_optimizer(resolve(workplace.arguments("new", *options)).config)
        return str(caught.value)

    bf16, stochastic = "model.dtype=bfloat16", "train.optimizer=adamw_stochastic"
    assert "use train.optimizer=adamw_stochastic or adamw_8bit, model.dtype=float32" in refused(
        bf16
    )
    assert "model.dtype=float32 weights are kept in fp32" in refused(stochastic)
    assert "an adapter's weights are kept in fp32" in refused(bf16, stochastic, "train.tuning=lora")
    for fitting in ([bf16, stochastic], ["train.optimizer=adamw_8bit"]):
        check_optimizer(resolve(workplace.arguments("new", *fitting)).config)
    monkeypatch.setattr(optim, "find_spec", lambda name: None)
    assert "pip install 'coinrag[optim]'" in refused(bf16, stochastic)


@pytest.mark.parametrize("optimizer", ["adamw_stochastic", "adamw_8bit"])
def test_a_bf16_run_learns_and_resumes_bit_by_bit(workplace, optimizer) -> None:
    options = ["model.dtype=bfloat16", f"train.optimizer={optimizer}", "train.epochs=2"]
    metrics = workplace.train_here(optimizer, *options, "train.save_every_steps=4")
    assert metrics[-1]["loss"] < 0.9 * metrics[0]["loss"]
    folder = workplace.folder / optimizer / "checkpoint"
    saved = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    shutil.rmtree(folder)
    again = workplace.train_here(
        optimizer, *options, "train.save_every_steps=4", "train.resume=true"
    )
    assert [line["loss"] for line in again] == [line["loss"] for line in metrics]
    resumed = load_file(folder / "model.safetensors")
    assert all(torch.equal(weight, resumed[name]) for name, weight in saved.items())
