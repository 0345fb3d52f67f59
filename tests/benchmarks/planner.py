"""The planner's estimate of a training step's peak memory against the measured peak, on a CPU.

    python tests/benchmarks/planner.py RECIPE [key=value ...] [--cases NAME ...] [--json FILE]
    python tests/benchmarks/planner.py --models recipes/MODELS.md

Every case runs in a process of its own: a first optimizer step, then one of two passes over the
longest row of the recipe's run, which is measured in two ways. `tensors` are the bytes of all
tensors alive, at their peak: what the planner counts, and what a GPU's allocator is asked for.
`resident` is the peak of the process's resident memory (`VmHWM`, set back before the step) less
what was resident before the model was loaded. There blocks of a MiB and more are given back when
they are freed (`MALLOC_MMAP_THRESHOLD_`): glibc would else keep those of up to 32 MiB in a heap
with holes, whose size depends on what was freed before; `--heap` measures with them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from alive import Alive
from figures import render, write
from public_models import CONFIGS, PASS_OF_FOUR

from cache_ops.hf import load_config, load_tokenizer
from cache_ops.rope import Rope
from data_builders.build import load_built
from data_builders.prompt import PromptTemplate
from recipes.files import write_text
from recipes.resolve import resolve
from train.batches import BatchOrder
from train.examples import ExampleBuilder
from train.model_shape import ModelShape, RowShape
from train.optim import optimizer_and_schedule, trainable_model
from train.planner import Setting, disk_bytes, peak_memory, step_flops
from train.step import answer_loss

_FULL, _LORA = "train.tuning=full", "train.tuning=lora"
_CHECKPOINTING = "train.gradient_checkpointing=true"
_FP32 = "train.mixed_precision=no"
CASES = {
    "full": (_FULL, _FP32),
    "full, checkpointing": (_FULL, _FP32, _CHECKPOINTING),
    "LoRA": (_LORA, _FP32),
    "LoRA, checkpointing": (_LORA, _FP32, _CHECKPOINTING),
    "full, bf16 autocast": (_FULL, "train.mixed_precision=bf16"),
    "LoRA, bf16 autocast": (_LORA, "train.mixed_precision=bf16"),
}
PASSES = 2

# Who trains which model: a shipped recipe, of which some are for a larger model of the family.
RECIPES = {
    "Qwen/Qwen2-7B-Instruct": "qwen2_7b/coinrag",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2_5_7b/coinrag",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2_5_7b/coinrag",
    "Qwen/Qwen3-1.7B": "qwen3_8b/coinrag",
    "Qwen/Qwen3-8B": "qwen3_8b/coinrag",
    "meta-llama/Llama-3.2-1B-Instruct": "llama3_1_8b/coinrag",
    "meta-llama/Llama-3.2-3B-Instruct": "llama3_1_8b/coinrag",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3_1_8b/coinrag",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral_7b/coinrag",
}
_BF16 = ["model.dtype=bfloat16", "train.mixed_precision=no"]
_LORA = ["train.tuning=lora", *_BF16]
WAYS = {
    "full, fp32 masters": [],
    "full, bf16": ["train.optimizer=adamw_stochastic", *_BF16],
    "LoRA on bf16": _LORA,
}
TRAINING_SAMPLES = 277_280
TFLOPS = 300
RANKS = 8
# With three passages a question they are 399 in IRCoT's data, which goes up with the paper's five.
SAMPLE_TOKENS = 600
PAGE = """# What the recipes need

Estimated by the planner from the models' published shapes; **none of these models was trained
here**. `python tests/benchmarks/planner.py --models recipes/MODELS.md` writes this page.

Assumed: the paper's {samples:,} samples, 16 a step; a longest pass of four samples and {tokens:,}
tokens, {mean} tokens a sample on average; gradient checkpointing; {tflops} TFLOP/s a GPU, about a
third of what an H100 can do in bf16, which was not measured; no state saved on the way. GiB are
2^30 bytes. The hours leave out optimizer steps, saving and reading; the memory leaves out the CUDA
context (about 0.5 GiB) and the allocator's holes. `coinrag check RECIPE --gpu-gib N` counts again
from your own built samples.

Options stand behind the recipe on the command line; that of a smaller model of a family is
`model.path`, given to `coinrag build` too.

- *full, fp32 masters*: the recipe as it is; its weights and moments are fp32, its products bf16.
- *full, bf16*: `{bf16}`
- *LoRA on bf16*: the recipe's neighbour `coinrag_lora`, or `{lora}`

{table}

The last column is for one rank of {ranks} with `--processes {ranks} --sharding zero3`,
`train.micro_batch_samples=2` and `train.mixed_precision=bf16`. The paper reports a peak of 75.8 GB
and about 140 GPU hours for Qwen2-7B on one GPU. Fp32 masters, 16 bytes a weight, are 122 GB and do
not fit that; bf16 weights, gradients and moments, 8 bytes, are 61 GB and leave 15 GB for
activations. The hours here count operations alone: they are a lower bound.
"""


def measure(arguments: list[str]) -> dict[str, float | str]:
    """One case in this process: tokens of the row, measured and estimated GiB, and their ratio."""
    config = resolve(arguments).config
    tables = load_built(config, "train")
    template = PromptTemplate(load_tokenizer(config.model.path), config.prompt)
    model_config = load_config(config.model.path)
    builder = ExampleBuilder(tables, template, Rope.from_config(model_config), config)
    lengths = [builder.lengths(index) for index in range(len(tables.samples))]
    tokens = [length.row_tokens for length in lengths]
    order = BatchOrder.of(config.train, tokens, builder.chunk_ids(), ranks=1, seed=config.seed)
    batch = builder.micro_batch(order.longest(order.steps_per_epoch))
    if config.train.tuning == "lora":
        import peft  # noqa: F401

    before = resident("VmRSS")
    model = trainable_model(config)
    optimizer, _ = optimizer_and_schedule(model, config.train, 10)
    mixed = config.train.mixed_precision == "bf16"

    def step(passes: int) -> None:
        for _ in range(passes):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                logits_1AV = model(**batch.model_inputs()).logits
            answer_loss(logits_1AV[0], batch.labels_A).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(1)
    state = [part for parts in optimizer.state.values() for part in parts.values()]
    Path("/proc/self/clear_refs").write_text("5")
    with Alive([*model.parameters(), *state]) as alive:
        step(PASSES)
    measured = resident("VmHWM") - before

    setting = Setting(config.train, config.model.dtype, passes=PASSES)
    memory = peak_memory(ModelShape.of(model_config), RowShape.of(batch), setting)
    parts = " + ".join(f"{size / 2**30:.2f} {name}" for name, size in memory.device.items())
    return {
        "tokens": batch.tokens,
        "estimated GiB": memory.device_total / 2**30,
        "tensors GiB": alive.peak / 2**30,
        "resident GiB": measured / 2**30,
        "estimated / tensors": memory.device_total / alive.peak,
        "estimated / resident": memory.device_total / measured,
        "parts in GiB": parts,
    }


def models_page() -> str:
    """What every recipe's model needs, tuned in every way."""
    rows = {}
    pass_of_two = RowShape(*(count / 2 for count in astuple(PASS_OF_FOUR)))
    for name, model in CONFIGS.items():
        shape = ModelShape.of(model)
        own = resolve([RECIPES[name]]).config.model.path == name
        for way, options in WAYS.items():
            config = resolve([RECIPES[name], "train.gradient_checkpointing=true", *options]).config
            alone = Setting(config.train, config.model.dtype, passes=4)
            one = peak_memory(shape, PASS_OF_FOUR, alone)
            # ZeRO keeps masters of its own, so it splits what computes in bf16 by autocast alone.
            mixed = config.train.model_copy(update={"mixed_precision": "bf16"})
            shared = replace(alone, train=mixed, sharding="zero3", ranks=RANKS, passes=1)
            each: float | str = "not split"
            if mixed.optimizer == "adamw":
                each = round(peak_memory(shape, pass_of_two, shared).device_total / 2**30, 1)
            flops = step_flops(shape, PASS_OF_FOUR, config.train)
            flops *= TRAINING_SAMPLES * SAMPLE_TOKENS / PASS_OF_FOUR.tokens
            rows[f"{name}, {way}"] = {
                "recipe": RECIPES[name] + ("" if own else f" model.path={name}"),
                "1 GPU, GiB": round(one.device_total / 2**30, 1),
                "GPU hours": round(flops / TFLOPS / 1e12 / 3600),
                "disk, GiB": round(sum(disk_bytes(shape, alone).values()) / 2**30, 1),
                f"each of {RANKS}, GiB": each,
            }
    return PAGE.format(
        samples=TRAINING_SAMPLES,
        tokens=PASS_OF_FOUR.tokens,
        mean=SAMPLE_TOKENS,
        tflops=TFLOPS,
        bf16=" ".join(WAYS["full, bf16"]),
        lora=" ".join(_LORA),
        ranks=RANKS,
        table=render(rows, "model and tuning"),
    )


def resident(field: str) -> int:
    """Bytes of this process by a field of /proc/self/status."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "a Linux kernel"
    return int(found[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arguments", nargs="*", metavar="RECIPE|KEY=VALUE")
    parser.add_argument("--models", type=Path, help="write this page of estimates; measure nothing")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--heap", action="store_true", help="with the allocator as it is")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.models:
        write_text(options.models, models_page())
        return
    if options.here:
        print(json.dumps(measure(options.arguments)))
        return
    rows = {}
    for case in options.cases:
        command = [sys.executable, __file__, *options.arguments, *CASES[case], "--here"]
        environment = os.environ | (
            {} if options.heap else {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        )
        ended = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        rows[case] = json.loads(ended.stdout)
        print(f"{case}: {rows[case]}", file=sys.stderr)
    print(render(rows, "case"))
    write(options.json, {"arguments": options.arguments, "cases": rows})


if __name__ == "__main__":
    main()
