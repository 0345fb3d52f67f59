"""What a run needs of a machine, and what of that it has: memory, time, disk."""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from cache_ops.packing import PackedBatch
from cache_ops.records import RecordLayout
from launch.commands import Result
from recipes.errors import UserError
from recipes.schema import Recipe
from recipes.sharding import SHARDINGS
from train.context import UsedRanges
from train.model_shape import ModelShape, RowShape
from train.optim import check_optimizer
from train.planner import Setting, disk_bytes, peak_memory, step_flops
from train.run_folder import nearest_folder
from train.sharding import refuse_unsharable

_GIB = 2**30


def memory(
    config: Recipe,
    shape: ModelShape,
    row: RowShape,
    single: RowShape,
    setting: Setting,
    gpu_gib: float | None,
) -> Result:
    """The estimated peak of a rank by part, whether it fits, and if not what would change that.

    Args:
        config: the recipe.
        shape: of its model.
        row: the longest pass.
        single: the longest sample alone.
        setting: how it is trained.
        gpu_gib: memory of a rank's device; None: that of this machine.
    """
    needed = peak_memory(shape, row, setting)
    there, place = available(setting.ranks, gpu_gib)
    fits = needed.device_total <= there
    changes = [] if fits else list(_changes(config, shape, row, single, setting, there))
    return {
        "parts": _gib(needed.device),
        "host_parts": _gib(needed.host),
        "gib": needed.device_total / _GIB,
        "available_gib": there / _GIB,
        "available_on": place,
        "fits": fits,
        "changes": changes,
    }


def _changes(
    config: Recipe,
    shape: ModelShape,
    row: RowShape,
    single: RowShape,
    setting: Setting,
    available: float,
) -> Iterator[Result]:
    """Changes that training takes and that need less, alone and then with checkpointing."""
    train = setting.train
    changes: list[tuple[str, Setting, RowShape]] = []

    def offer(name: str, row: RowShape = row, dtype: str = setting.dtype, **values: object) -> None:
        other = replace(setting, train=train.model_copy(update=values), dtype=dtype)
        if row is single:
            other = replace(other, passes=max(2, setting.passes))
        changes.append((name, other, row))

    if not train.gradient_checkpointing:
        offer("train.gradient_checkpointing=true", gradient_checkpointing=True)
    if single.tokens < row.tokens:
        offer("train.micro_batch_samples=1", row=single, micro_batch_samples=1)
    if train.mixed_precision == "no" and setting.dtype == "float32":
        offer("train.mixed_precision=bf16", mixed_precision="bf16")
    if train.optimizer == "adamw":
        offer("train.optimizer=adamw_8bit", optimizer="adamw_8bit")
    if train.tuning == "full" and setting.dtype == "float32":
        offer(
            "model.dtype=bfloat16 train.optimizer=adamw_stochastic train.mixed_precision=no",
            dtype="bfloat16",
            optimizer="adamw_stochastic",
            mixed_precision="no",
        )
    if train.tuning == "full":
        offer("train.tuning=lora", tuning="lora")
    if setting.sharding == "ddp" and setting.ranks > 1:
        for sharding in SHARDINGS[1:]:
            changes.append((f"--sharding {sharding}", replace(setting, sharding=sharding), row))
    if not train.gradient_checkpointing:
        for name, other, shorter in changes[1:]:
            both = other.train.model_copy(update={"gradient_checkpointing": True})
            name = f"train.gradient_checkpointing=true {name}"
            changes.append((name, replace(other, train=both), shorter))
    for name, other, shorter in changes:
        if not _is_trainable(config, other):
            continue
        needed = peak_memory(shape, shorter, other).device_total
        yield {"change": name, "gib": needed / _GIB, "fits": needed <= available}


def _is_trainable(config: Recipe, setting: Setting) -> bool:
    """Whether the training takes the recipe in another setting."""
    model = config.model.model_copy(update={"dtype": setting.dtype})
    changed = config.model_copy(update={"train": setting.train, "model": model})
    try:
        check_optimizer(changed)
        refuse_unsharable(changed, setting.sharding)
    except UserError:
        return False
    return True


def available(ranks: int, gpu_gib: float | None) -> tuple[float, str]:
    """Bytes for each rank, and on what."""
    if gpu_gib is not None:
        return gpu_gib * _GIB, "the given GPU"
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0)
    return _host_memory() / ranks, "this machine without a GPU"


def _host_memory() -> int:
    """Bytes of this machine's memory, or of the part that a container may use."""
    found = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None, "a Linux kernel"
    total = int(found[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def disk_space(
    config: Recipe,
    shape: ModelShape,
    setting: Setting,
    used_ranges: Callable[[], list[UsedRanges]] | None,
) -> Result:
    """What the run writes by part, whether its disk has room for that.

    `used_ranges` are what a frozen context has in its store; None: there is none.
    """
    parts = disk_bytes(shape, setting)
    if used_ranges is not None and config.store.folder:
        tokens = sum(end - start for _, ranges in used_ranges() for start, end in ranges)
        head_dim = shape.query // shape.heads
        dtype = config.store.dtype or config.model.dtype
        layout = RecordLayout(shape.layers, shape.key_value // head_dim, head_dim, dtype)
        parts["store"] = tokens * layout.token_bytes
    folder = Path(config.train.run_folder)
    free = shutil.disk_usage(nearest_folder(folder)).free
    total = sum(parts.values())
    return {
        "parts": _gib(parts),
        "gib": total / _GIB,
        "free_gib": free / _GIB,
        "fits": total <= free,
    }


def probe(config: Recipe, batch: PackedBatch, estimate: Result) -> float:
    """Seconds that the run's longest pass takes here, forward and backward, once warm.

    Raises:
        UserError: it is estimated to need more memory than this machine has.
    """
    if not estimate["fits"]:
        raise UserError(
            f"--probe would run a pass that is estimated to need {estimate['gib']:.1f} GiB of "
            f"{estimate['available_gib']:.1f} GiB; without --probe the check says what would fit"
        )
    from cache_ops.attention import enable_packed
    from cache_ops.contextualizer import contextualizer_of
    from train.attention import attention_kernel
    from train.beside import put_beside
    from train.optim import trainable_model
    from train.step import answer_loss

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = trainable_model(config)
    put_beside(trained, config, Path(config.model.path))
    enable_packed(trained, attention_kernel(config, trained.config, device))
    model: torch.nn.Module = trained
    model.to(device)
    batch = batch.to(device)
    mixed = config.train.mixed_precision == "bf16"
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            logits_1AV = model(**batch.model_inputs(contextualizer_of(trained))).logits
        answer_loss(logits_1AV[0], batch.labels_A).backward()
        _wait(device)
        seconds = time.perf_counter() - started
    return seconds


def time_of(
    shape: ModelShape,
    row: RowShape,
    setting: Setting,
    run_tokens: int,
    tflops: float | None,
    probed: float | None,
) -> Result:
    """Hours of forward and backward passes of a run, operations, and what the speed comes from."""
    flops = step_flops(shape, row, setting.train) * run_tokens / row.tokens
    # Ranks have a GPU each; on a machine without one they share its cores.
    ranks = setting.ranks if torch.cuda.is_available() or tflops is not None else 1
    if probed is not None:
        seconds = probed * run_tokens / row.tokens / ranks
        source = f"{probed:.2f} s measured here for the longest pass, without optimizer and saving"
    else:
        rate = tflops or _matrix_product_tflops(shape, setting)
        seconds = flops / (rate * 1e12) / ranks
        source = f"operations at {rate:.3g} TFLOP/s " + (
            "as given"
            if tflops is not None
            else "of a bare matrix product here, which a training step does not reach"
        )
    return {"hours": seconds / 3600, "flops": flops, "source": source}


def _matrix_product_tflops(shape: ModelShape, setting: Setting) -> float:
    """10^12 operations a second of a product with a matrix as wide as the model's MLP."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if setting.compute_bytes == 2 else torch.float32
    rows_TC = torch.ones(512, shape.hidden, dtype=dtype, device=device)
    weight_CF = torch.ones(shape.hidden, shape.mlp, dtype=dtype, device=device)
    rows_TC @ weight_CF
    _wait(device)
    repeats, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < 0.2:
        rows_TC @ weight_CF
        _wait(device)
        repeats += 1
    return repeats * 2 * len(rows_TC) * shape.hidden * shape.mlp / elapsed / 1e12


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _gib(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: size / _GIB for name, size in parts.items()}
