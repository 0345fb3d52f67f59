"""`coinrag check`: what a training would see and need, found without training."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, cast

from launch.commands import RECIPE_HELP, Result
from launch.training import refuse_sharding
from recipes.errors import UserError
from recipes.sharding import SHARDINGS, Sharding

if TYPE_CHECKING:
    from data_builders.tables import Tables
    from train.batches import BatchOrder
    from train.examples import ExampleBuilder, Lengths


def check(
    arguments: Sequence[str],
    *,
    samples: int = 3,
    processes: int = 1,
    sharding: Sharding = "ddp",
    gpu_gib: float | None = None,
    tflops: float | None = None,
    probe: bool = False,
) -> Result:
    """What the training of a recipe sees, and the memory, time and disk that it needs.

    Samples are built and dealt by what the training builds and deals them with; of the model only
    config and tokenizer are read (and, where it is a teacher, its checksum made), unless `probe`
    asks for its longest pass to be run. What does not fit is a finding and no error: a recipe may
    be checked on another machine than it trains on.

    Args:
        arguments: the recipe.
        samples: how many of the first step's are shown in full.
        processes: ranks that share the training.
        sharding: how they share the model, of `SHARDINGS`.
        gpu_gib: memory of each rank's device; None: that of this machine.
        tflops: speed of a rank, 10^12 operations a second; None: of a matrix product here.
        probe: run the longest pass forward and backward here, and count time from it.

    Raises:
        UserError: the recipe is wrong, nothing is built, a sample cannot be trained on, or the
            training would refuse the run: see `launch.refusals`.
        ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_config`.
    """
    from recipes.resolve import resolve

    resolved = resolve(arguments)
    config = resolved.config
    from cache_ops.hf import load_config, load_tokenizer
    from cache_ops.rope import Rope
    from cache_ops.soft_tokens import numbered
    from data_builders.build import load_built
    from data_builders.prompt import PromptTemplate
    from launch import needs
    from launch.refusals import refuse_untrainable
    from launch.teacher_needs import teacher_needs
    from recipes.progress import track
    from recipes.soft_tokens import soft_tokens_for
    from train.batches import BatchOrder
    from train.beside import contextualizer_for
    from train.examples import ExampleBuilder
    from train.model_shape import ModelShape, RowShape
    from train.planner import Setting
    from train.teacher import learned_answers, teacher_files

    model = load_config(config.model.path)
    if processes == 1:
        # With more, what is installed here says nothing of where the run will be.
        refuse_sharding(sharding, processes)
    tokenizer = load_tokenizer(config.model.path)
    template = PromptTemplate(tokenizer, config.prompt)
    here = processes == 1 and gpu_gib is None
    refuse_untrainable(resolved, model, tokenizer, template, sharding, here=here)
    frozen = config.context.gradient == "frozen"
    if frozen and probe:
        raise UserError(
            "--probe cannot time context.gradient=frozen, whose slices come from a store: leave "
            "it out, and time is counted from operations"
        )
    shape = ModelShape.of(model, contextualizer_for(config, model))
    tables = load_built(config, "train")
    soft_tokens = numbered(model.vocab_size, soft_tokens_for(config, config.train.system))
    rope = Rope.from_config(model)
    builder = ExampleBuilder(tables, template, rope, config, soft_tokens)
    lengths = [builder.lengths(index) for index in track(range(len(tables.samples)), "lengths")]

    row_tokens = [length.row_tokens for length in lengths]
    chunk_ids = builder.chunk_ids() if config.train.group_shared_chunks else []
    order = BatchOrder.of(config.train, row_tokens, chunk_ids, ranks=processes, seed=config.seed)
    steps = order.steps_of(config.train)
    longest = builder.micro_batch(order.longest(steps))
    single = builder.micro_batch([row_tokens.index(max(row_tokens))])
    row = RowShape.of(longest, frozen=frozen)
    passes, run_tokens = _work(order, steps)
    setting = Setting(config.train, config.model.dtype, sharding, processes, passes)

    single_row = RowShape.of(single, frozen=frozen)
    memory = needs.memory(config, shape, row, single_row, setting, gpu_gib)
    space = needs.disk_space(config, shape, setting, builder.used_ranges if frozen else None)
    probed = needs.probe(config, longest, memory) if probe else None
    said = None
    if config.train.distillation is not None:
        said = teacher_files(config, model, template, tables)
        answers = learned_answers(config, said)
        builder = ExampleBuilder(tables, template, rope, config, soft_tokens, answers)
    decode = cast(Callable[[Sequence[int]], str], tokenizer.decode)
    shown = order.step_samples(0)[:samples]
    time = needs.time_of(shape, row, setting, run_tokens, tflops, probed)
    result: Result = {
        "samples": [_shown(builder, tables, decode, len(tokenizer), index) for index in shown],
        "counts": _counts(lengths, forms=2 if config.train.system == "block_attention" else 1)
        | {
            "steps": steps,
            "passes_a_rank_and_step": setting.passes,
            "tokens_of_the_longest_pass": row.tokens,
            "tokens_of_the_run": run_tokens,
        },
        "memory": memory,
        "time": time,
        "disk": space,
        "fits": memory["fits"] and space["fits"],
    }
    if said is not None:
        result["teacher"] = teacher_needs(
            config, model, template, tables, said, order.samples_of(steps), setting, gpu_gib,
            seconds_a_flop=3600 * time["hours"] / time["flops"],
        )  # fmt: skip
        result["fits"] = result["fits"] and result["teacher"]["fits"]
    return result


def _work(order: "BatchOrder", steps: int) -> tuple[int, int]:
    """The most passes of a rank in a step, and the packed tokens of all passes of all ranks.

    Passes that a rank only runs for the others to go on count as well. Of several epochs the first
    is looked at.
    """
    looked_at = min(steps, order.steps_per_epoch)
    passes = [
        order.micro_batches(step, rank) for step in range(looked_at) for rank in range(order.ranks)
    ]
    tokens = sum(order.tokens[at] for run in passes for one in run for at in one.indices)
    return max(map(len, passes)), round(tokens * steps / looked_at)


def _counts(lengths: Sequence["Lengths"], forms: int) -> Result:
    """Tokens of a sample at the median, the 99th percentile and at most, and sums.

    Parts are those of the longest of a sample's `forms`; `packed` is all that a pass holds of it.
    """
    import numpy as np

    def spread(values: Sequence[int]) -> dict[str, int]:
        median, high = np.quantile(values, [0.5, 0.99], method="higher")
        return {"median": int(median), "p99": int(high), "max": max(values)}

    return {
        "samples": len(lengths),
        "tokens": {
            "whole": spread([one.tokens for one in lengths]),
            "prefix": spread([one.prefix_tokens for one in lengths]),
            "query": spread(
                [one.tokens - one.prefix_tokens - one.answer_tokens // forms for one in lengths]
            ),
            "answer": spread([one.answer_tokens // forms for one in lengths]),
            "packed": spread([one.row_tokens for one in lengths]),
        },
        "answer_tokens": sum(one.answer_tokens for one in lengths),
        "shortened": sum(one.dropped > 0 for one in lengths),
        "dropped": sum(one.dropped for one in lengths),
        "without_passages": sum(one.all_dropped for one in lengths),
    }


def _shown(
    builder: "ExampleBuilder",
    tables: "Tables",
    decode: Callable[[Sequence[int]], str],
    vocabulary: int,
    index: int,
) -> Result:
    """One sample decoded: for each form its slices, its query, and what of it is learned.

    What a teacher has still to answer is None.
    """
    from cache_ops.plan import PROMPT

    def text(ids: Sequence[int]) -> str:
        # Soft tokens and means are no text.
        parts = groupby(ids, lambda one: "<mean>" if one < 0 else "<soft>" * (one >= vocabulary))
        return "".join(name * len([*run]) if name else decode([*run]) for name, run in parts)

    row = tables.samples[index]
    sample = builder.sample(index)
    known = builder.has_answer(index)
    forms = [
        {
            "slices": [
                {
                    "chunk": piece.chunk,
                    "title": "" if piece.chunk == PROMPT else _title(tables, row, piece.chunk),
                    "start": piece.start,
                    "end": piece.end,
                    "position": piece.position,
                    "text": text(sample.segments[piece.chunk][piece.start : piece.end]),
                }
                for piece in example.plan.slices
            ],
            "query_tokens": len(example.query_ids),
            "query": text(example.query_ids),
            "learned": [text([token]) for token in example.answer_ids] if known else None,
        }
        for example in sample.examples
    ]
    return {
        "question_id": row["question_id"],
        "dataset": row["dataset"],
        "dropped": sample.dropped,
        "forms": forms,
    }


def _title(tables: "Tables", row: Result, name: str) -> str:
    """The title of the chunk that a slice's chunk is, or is cut from."""
    chunk = next(
        chunk for chunk in row["chunk_ids"] if name == chunk or name.startswith(f"{chunk}[")
    )
    return tables.chunk(chunk).title


def add_command(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Describe the command to a parser; `add` takes a name and a help text."""
    command = add("check", "Show what a training would see and need, without training.")
    command.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE", help=RECIPE_HELP)
    command.add_argument(
        "--samples", type=_at_least(0, int), default=3, help="shown in full (default 3)"
    )
    command.add_argument(
        "--processes", type=_at_least(1, int), default=1, help="ranks of the training (default 1)"
    )
    command.add_argument(
        "--sharding",
        choices=SHARDINGS,
        default="ddp",
        help="how ranks share the model (default ddp: each has all of it)",
    )
    command.add_argument(
        "--gpu-gib",
        type=_at_least(0, float),
        metavar="GIB",
        help="memory of each rank's GPU (default: of this machine)",
    )
    command.add_argument(
        "--tflops",
        type=_at_least(0, float),
        metavar="RATE",
        help="speed of each rank in 10^12 operations a second (default: measured here)",
    )
    command.add_argument(
        "--probe", action="store_true", help="run the longest pass here, and count time from it"
    )


def _at_least(least: int, kind: type[int] | type[float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not value >= least or (kind is float and not 0 < value < math.inf):
            expected = "a finite number above" if kind is float else "at least"
            raise argparse.ArgumentTypeError(f"expected {expected} {least}, got {text}")
        return value

    number.__name__ = "number"
    return number


def render(result: Result) -> str:
    """The result for a reader; what is learned is marked, and coloured on a terminal."""
    from launch.check_report import render_check

    return render_check(result, colours=sys.stdout.isatty())
