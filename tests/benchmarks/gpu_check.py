"""What a GPU must show, in one run without network, model files or data; writes one JSON.

    bash launch/gpu_check.sh [--out FILE] [--parts NAME ...] [--rehearse]

A model in the shape of Qwen2-7B gets random weights, and questions of random tokens the lengths of
real ones (see `typical_rows.py`). Parts:

- `tests`       the tests that are marked `gpu`;
- `invariants`  in bf16 against fp32: the packed pass by SDPA and by varlen, in logits and
                gradients, and the logits of serving;
- `training`    optimizer steps of 16 samples in packed rows of 4, as the recipe has them: samples
                and tokens a second, MFU (of the model's own operations, without what checkpointing
                computes again), peak memory; LoRA, and full with each optimizer that fits;
- `ways`        forward and backward of one row: packed against two passes and a dense mask (see
                `training_step.py`);
- `ttft`        time to first token of Standard RAG, TurboRAG and CoinRAG, one question at a time,
                slices coming from the host's memory through the package's own serving path;
                planning and tokenizing are not in it.

A part that fails is recorded under `errors` and the exit status is 1; what cannot be run here is
named under `skipped` with the reason. `--rehearse` runs everything in tiny shapes on a CPU.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from figures import percentiles
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from typical_rows import Asked, questions, rows

from cache_ops.attention import Kernel, enable_packed
from cache_ops.cached import RequestCache, enable_cached, forward_cached
from cache_ops.encode import encode_chunk
from cache_ops.layout import Layout, computed, whole_chunks
from cache_ops.memory_tier import MemoryTier
from cache_ops.packing import PackedBatch
from cache_ops.plan import PROMPT
from cache_ops.records import RecordLayout
from cache_ops.rope import Rope
from cache_ops.supply import Supply
from cache_ops.varlen import why_not_varlen
from eval.environment import environment
from recipes.files import write_text

ROOT = Path(__file__).resolve().parent.parent.parent
QWEN2_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass
class Check:
    """A run of the script: where, how large, and what it has found."""

    device: torch.device
    rehearsal: bool
    peak_tflops: float | None
    skipped: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> dict[str, int]:
        """The model's sizes."""
        return TINY if self.rehearsal else QWEN2_7B

    @property
    def step_samples(self) -> int:
        """Samples of an optimizer step."""
        return 2 if self.rehearsal else 16

    @property
    def row_samples(self) -> int:
        """Samples of a packed row."""
        return 1 if self.rehearsal else 4

    @property
    def repeats(self) -> int:
        """Of each timing."""
        return 1 if self.rehearsal else 5

    def model(self, dtype: torch.dtype, layers: int | None = None) -> PreTrainedModel:
        """Random weights, the same at every call."""
        sizes = self.shape | ({"num_hidden_layers": layers} if layers else {})
        config = Qwen2Config(**sizes, max_position_embeddings=4096)
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with self.device:
                model = Qwen2ForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        # The table is made in fp32 whatever the default dtype is.
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        return model

    def asked(self, count: int) -> list[Asked]:
        """Questions in the model's vocabulary."""
        return questions(count, self.shape["vocab_size"])

    def rows(self, model: PreTrainedModel, count: int) -> list[PackedBatch]:
        """Packed rows on the device."""
        packed = rows(self.asked(count), Rope.from_config(model.config), self.row_samples)
        return [row.to(self.device) for row in packed]

    def kernels(self, name: str) -> list[Kernel]:
        """The attention kernels there are; what is missing is noted under that name."""
        reason = why_not_varlen(Qwen2Config(**self.shape), torch.bfloat16, self.device)
        if reason is None:
            return ["sdpa", "varlen"]
        self.skipped[f"{name}: varlen"] = f"varlen attention {reason}"
        return ["sdpa"]

    def note(self, name: str, error: Exception) -> None:
        """Records a failure and shows where it happened."""
        self.errors[name] = f"{type(error).__name__}: {error}"
        traceback.print_exc()

    def sync(self) -> None:
        """Waits for the device, so that a clock read after it is right."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def peak_memory(self, into: dict[str, Any]) -> Iterator[None]:
        """Puts the highest peak of all times inside into `peak_memory_gib`; None on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        yield
        into.setdefault("peak_memory_gib", None)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            into["peak_memory_gib"] = max(peak, into["peak_memory_gib"] or 0.0)


def run_tests(check: Check) -> dict[str, Any]:
    """The tests marked `gpu`, by pytest in a process of its own."""
    if check.rehearsal:
        check.skipped["tests"] = "a rehearsal has no GPU"
        return {}
    try:
        import hypothesis  # noqa: F401
        import pytest  # noqa: F401
    except ImportError as error:
        check.skipped["tests"] = f"{error.name} is not installed"
        return {}
    marked = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *map(str, marked)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"pytest ended with {ended.returncode}:\n{ended.stdout[-3000:]}")
    return {"pytest": ended.stdout.strip().splitlines()[-1]}


def invariants(check: Check) -> dict[str, Any]:
    """Errors of bf16 against fp32, relative: of logits to the largest, of gradients in norm.

    Raises:
        AssertionError: varlen or serving is further off than SDPA in bf16 by more than half of
            that, or anything is off by a tenth.
    """
    layers = min(4, check.shape["num_hidden_layers"])
    wide, narrow = check.model(torch.float32, layers), check.model(torch.bfloat16, layers)
    narrow.load_state_dict(wide.state_dict())
    wide.load_state_dict(narrow.state_dict())
    (row,) = check.rows(wide, check.row_samples)
    expected, gradient = _logits_and_gradient(wide, row, "sdpa")
    errors: dict[str, Any] = {}
    for kernel in check.kernels("invariants"):
        logits, found = _logits_and_gradient(narrow, row, kernel)
        errors[f"{kernel}_logits_relative_error"] = _error(logits, expected)
        off = float((found - gradient).norm() / gradient.norm())
        errors[f"{kernel}_gradient_relative_error"] = off
    served = torch.cat([_served_logits(narrow, one) for one in check.asked(check.row_samples)])
    first = torch.tensor([len(one.answer_ids) for one in check.asked(check.row_samples)]).cumsum(0)
    starts = torch.cat((torch.zeros(1, dtype=torch.long), first[:-1])).to(check.device)
    errors["serving_logits_relative_error"] = _error(served, expected[starts])
    for name, error in errors.items():
        sdpa = errors[
            "sdpa_gradient_relative_error" if "grad" in name else "sdpa_logits_relative_error"
        ]
        assert error <= min(0.1, 1.5 * sdpa + 0.005), f"{name} is {error}; SDPA's is {sdpa}"
    return errors


def _logits_and_gradient(
    model: PreTrainedModel, row: PackedBatch, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Logits at the answers, and the loss's gradient in all matrices of the first layer."""
    enable_packed(model, kernel)
    logits = model(**row.model_inputs()).logits[0].float()
    loss = torch.nn.functional.cross_entropy(logits, row.labels_A)
    weights = [w for w in model.model.layers[0].parameters() if w.dim() == 2]
    gradients = torch.autograd.grad(loss, weights)
    return logits.detach(), torch.cat([gradient.flatten().float() for gradient in gradients])


def _served_logits(model: PreTrainedModel, one: Asked) -> Tensor:
    """Logits of the first answer token over encoded, sliced and rotated chunks."""
    chunk_kv = {name: encode_chunk(model, ids) for name, ids in one.chunks.items()}
    kv = torch.cat([chunk_kv[p.chunk][p.start : p.end] for p in one.plan.slices])
    enable_cached(model)
    rope = Rope.from_config(model.config)
    cache = RequestCache(one.plan, kv, rope, room=len(one.query_ids))
    return forward_cached(model, [(cache, one.query_ids)]).float()


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@dataclass(frozen=True)
class Setting:
    """One way to train."""

    tuning: str
    optimizer: str
    kernel: Kernel
    checkpointing: bool
    compiled: bool = False
    """torch.compile of what is the same for every row: MLPs and norms."""

    @property
    def name(self) -> str:
        """As the report names it."""
        checkpointing = ", gradient checkpointing" if self.checkpointing else ""
        compiled = ", compiled" if self.compiled else ""
        return f"{self.tuning}, {self.optimizer}, {self.kernel}{checkpointing}{compiled}"

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights: plain AdamW over all of them needs fp32, under autocast."""
        masters = self.tuning == "full" and self.optimizer == "adamw"
        return torch.float32 if masters else torch.bfloat16


def training(check: Check) -> dict[str, Any]:
    """Speed and memory of each setting; one that runs out of memory is noted as not fitting."""
    kernels = check.kernels("training")
    settings = [
        Setting("lora", "adamw", kernel, checkpointing)
        for kernel in kernels
        for checkpointing in (False, True)
    ]
    settings.append(Setting("full", "adamw", kernels[-1], True))
    if check.rehearsal:
        check.skipped["training: bf16 optimizers"] = "a rehearsal trains in fp32"
        check.skipped["training: compiled"] = "compiling takes longer than the rehearsal"
    else:
        settings.append(Setting("lora", "adamw", kernels[-1], False, compiled=True))
        for optimizer in ("adamw_stochastic", "adamw_8bit"):
            settings.append(Setting("full", optimizer, kernels[-1], True))
    report = {}
    for setting in settings:
        try:
            report[setting.name] = _train(check, setting)
        except torch.OutOfMemoryError as error:
            check.skipped[f"training: {setting.name}"] = f"does not fit: {error}"
        except ModuleNotFoundError as error:
            check.skipped[f"training: {setting.name}"] = f"{error.name} is not installed"
        except Exception as error:
            check.note(f"training: {setting.name}", error)
        _free()
    return report


def _train(check: Check, setting: Setting) -> dict[str, Any]:
    from recipes.training import LoraConfig, TrainConfig
    from train.adapters import with_adapter
    from train.model_shape import ModelShape, RowShape
    from train.optim import optimizer_and_schedule

    model = check.model(setting.dtype)
    enable_packed(model, setting.kernel)
    batches = check.rows(model, check.step_samples)
    shape = ModelShape.of(model.config)
    forward = sum(shape.forward_flops(RowShape.of(batch)) for batch in batches)
    # An adapter needs no gradient of the weights that it is put on.
    operations = forward * (2 if setting.tuning == "lora" else 3)
    if setting.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if setting.tuning == "lora":
        model = with_adapter(model, LoraConfig())
    if setting.compiled:
        for layer in model.modules():
            if isinstance(layer, Qwen2DecoderLayer):
                for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
                    part.compile(dynamic=True)
    model.train()
    config = TrainConfig(
        run_folder="none", tuning=setting.tuning, optimizer=setting.optimizer, warmup_fraction=0.0
    )
    optimizer, _ = optimizer_and_schedule(model, config, 100)
    masters = setting.dtype == torch.float32
    autocast = torch.autocast(check.device.type, torch.bfloat16) if masters else nullcontext()
    labels = sum(len(batch.labels_A) for batch in batches)

    def step() -> float:
        total = 0.0
        for batch in batches:
            with autocast:
                logits = model(**batch.model_inputs()).logits[0]
            loss = torch.nn.functional.cross_entropy(
                logits.float(), batch.labels_A, reduction="sum"
            )
            (loss / labels).backward()
            total += float(loss.detach()) / labels
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    report: dict[str, Any] = {}
    with check.peak_memory(report):
        losses = [step()]
        seconds = []
        for _ in range(check.repeats):
            check.sync()
            start = time.perf_counter()
            losses.append(step())
            check.sync()
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    assert all(torch.tensor(losses).isfinite()), f"losses are {losses}"
    achieved = operations / median / 1e12
    return report | {
        "step_seconds": median,
        "samples_per_second": check.step_samples / median,
        "tokens_per_second": sum(batch.tokens for batch in batches) / median,
        "tflop_per_second": achieved,
        "mfu": achieved / check.peak_tflops if check.peak_tflops else None,
        "losses_nats": losses,
    }


def ways(check: Check) -> dict[str, Any]:
    """Seconds and memory of one row's forward and backward in each way, and the losses' spread."""
    from training_step import WAYS

    model = check.model(torch.bfloat16).train()
    batches = check.rows(model, check.row_samples * check.repeats)
    # Several forms of the packed pass are the same to the kernels.
    names = ["packed", "two_pass", "dense", "plain"]
    if "varlen" in check.kernels("ways"):
        names.insert(1, "packed_varlen")
    report: dict[str, dict[str, Any]] = {name: {} for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for batch in [batches[0], *batches]:
        for name in names:
            check.sync()
            with check.device, check.peak_memory(report[name]):
                start = time.perf_counter()
                loss = WAYS[name](model, batch)
                loss.backward()
                check.sync()
                seconds[name].append(time.perf_counter() - start)
            losses.setdefault(name, float(loss.detach()))
            model.zero_grad()
    for name in names:
        # The first round is a warm-up.
        ratios = [
            other / ours for other, ours in zip(seconds[name], seconds["packed"], strict=True)
        ]
        report[name] |= {
            "seconds": statistics.median(seconds[name][1:]),
            "packed_is_faster_times": statistics.median(ratios[1:]),
            "loss_nats": losses[name],
        }
    for name in {"two_pass", "packed_varlen"} & set(names):
        off = abs(losses[name] - losses["packed"]) / losses["packed"]
        assert off < 0.02, f"{name} and packed disagree in bf16: {losses}"
    return dict(report)


def ttft(check: Check) -> dict[str, Any]:
    """Percentiles over the questions, the systems asked in turns."""
    model = check.model(torch.bfloat16).eval()
    rope = Rope.from_config(model.config)
    on_gpu = check.device.type == "cuda"
    stream = torch.cuda.Stream() if on_gpu else None
    supply = Supply(
        RecordLayout.from_model(model.config, "bfloat16"),
        reader=None,
        memory=MemoryTier(32 << 30),
        encode=lambda ids: encode_chunk(model, ids),
        keep="chunks",
        pin_memory=on_gpu,
    )
    layouts: dict[str, Callable[[Asked], Layout]] = {
        "standard_rag": lambda one: computed([t for ids in one.chunks.values() for t in ids]),
        "turborag": lambda one: whole_chunks(
            [(name, len(ids)) for name, ids in one.chunks.items() if name != PROMPT],
            len(one.chunks[PROMPT]),
        ),
        "coinrag": lambda one: Layout(one.plan),
    }
    milliseconds: dict[str, list[float]] = {name: [] for name in layouts}
    active: dict[str, list[int]] = {name: [] for name in layouts}
    asked = check.asked(2 if check.rehearsal else 30)
    for one in asked:
        # Encodes and keeps the chunks.
        supply.fetch(layouts["turborag"](one).plan, one.chunks).release()
    enable_cached(model)
    for number, one in enumerate([asked[0], *asked]):
        for name, layout_of in layouts.items():
            layout = layout_of(one)
            check.sync()
            start = time.perf_counter()
            _first_token(model, layout, one, supply, rope, stream)
            if number:
                milliseconds[name].append((time.perf_counter() - start) * 1e3)
                active[name].append(layout.tokens + len(one.query_ids))
    supply.close()
    ours = statistics.median(milliseconds["coinrag"])
    return {
        name: {
            "ttft_ms": percentiles(values),
            "median_over_coinrag": statistics.median(values) / ours,
            "active_tokens": statistics.mean(active[name]),
            "questions": len(values),
        }
        for name, values in milliseconds.items()
    }


@torch.inference_mode()
def _first_token(
    model: PreTrainedModel,
    layout: Layout,
    one: Asked,
    supply: Supply,
    rope: Rope,
    stream: "torch.cuda.Stream | None",
) -> int:
    kv_TL2HD = supplied = None
    if layout.plan.slices:
        supplied = supply.fetch(layout.plan, one.chunks)
        with torch.cuda.stream(stream) if stream else nullcontext():
            on_device_TR = supplied.records_TR.to(model.device, non_blocking=True)
            kv_TL2HD = supply.layout.decode(on_device_TR, model.dtype)
    online = [*layout.online_ids, *one.query_ids]
    cache = RequestCache(layout.plan, kv_TL2HD, rope, room=len(online))
    if stream is not None and kv_TL2HD is not None:
        cache.lay_ahead(model.dtype, stream)
    token = int(forward_cached(model, [(cache, online)]).argmax())
    if supplied is not None:
        supplied.release()
    return token


def _known_peak_tflops() -> float | None:
    try:
        from train.throughput import bf16_peak
    except ModuleNotFoundError:
        return None
    peak = bf16_peak(torch.cuda.get_device_name())
    return None if peak is None else peak / 1e12


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


PARTS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "tests": run_tests,
    "invariants": invariants,
    "training": training,
    "ways": ways,
    "ttft": ttft,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts and writes the report after each; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--peak-tflops", type=float, help="of the GPU in dense bf16, for the MFU")
    options = parser.parse_args(arguments)
    if not (options.rehearse or torch.cuda.is_available()):
        print("error: no CUDA GPU; --rehearse runs in tiny shapes on a CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.rehearse else "cuda")
    check = Check(device, options.rehearse, options.peak_tflops)
    if check.peak_tflops is None and device.type == "cuda":
        check.peak_tflops = _known_peak_tflops()
    if check.peak_tflops is None:
        check.skipped["mfu"] = "the device's peak is not known; --peak-tflops gives it"
    report: dict[str, Any] = {
        "environment": {**environment(), "cuda": torch.version.cuda, "device": device.type},
        "rehearsal": options.rehearse,
        "model": {**check.shape, "weights": "random"},
        "peak_tflops": check.peak_tflops,
        "errors": check.errors,
        "skipped": check.skipped,
        "complete": False,
    }
    for name in options.parts:
        print(f"{name} ...", file=sys.stderr)
        start = time.perf_counter()
        try:
            report[name] = PARTS[name](check)
        except Exception as error:
            check.note(name, error)
        _free()
        report.setdefault("seconds_by_part", {})[name] = round(time.perf_counter() - start, 1)
        report["complete"] = name == options.parts[-1]
        write_text(options.out, json.dumps(report, indent=1) + "\n")
    print(f"written to {options.out}", file=sys.stderr)
    return 1 if check.errors else 0


if __name__ == "__main__":
    sys.exit(main())
