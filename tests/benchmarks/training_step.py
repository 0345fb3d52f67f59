"""Forward and backward of one micro-batch: the packed pass against other ways, in one run.

    python tests/benchmarks/training_step.py RECIPE [key=value ...] [--repeats N] [--against WAY]

All ways run on the same rows of the recipe's built training data and the same (already trimmed)
chunk tokens, and compute logits at answer positions only:

- `packed`    the package's pass: one row, no padding;
- `packed_varlen` the same by the flash kernel, on a GPU;
- `checkpointing` the same with gradient checkpointing;
- `bf16`      the same under bf16 autocast;
- `detach`    the same without gradient through the context;
- `frozen`    questions and answers alone, over slices at hand, as in a frozen run whose chunks are
              in the store;
- `two_pass`  chunks padded to the longest, encoded into a transformers cache; slices gathered,
              rotated and padded; questions and answers over that cache;
- `dense`     one row a sample (its prompt, chunks, question and answer), padded to the longest,
              under a dense 4D mask; one set of positions, as block-attention methods train;
- `plain`     a causal LM over as many tokens as `packed`, in one row;
- `plain_rows` the same tokens as rows of the mean segment length: less attention than any way
              that has a prefix.

`two_pass`, `detach`, `frozen` and `checkpointing` must give the loss of `packed`, which the script
checks. Peak memory is measured in a process of its own for each way. Runs on a GPU where there is
one. Prints one JSON object.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from cache_ops.attention import Kernel, enable_packed
from cache_ops.encode import encode_chunk
from cache_ops.hf import decoder
from cache_ops.packing import PackedBatch
from cache_ops.rope import Rope, rotate
from eval.environment import environment

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def packed(model: PreTrainedModel, batch: PackedBatch, kernel: Kernel = "sdpa") -> Tensor:
    enable_packed(model, kernel)
    return cross_entropy(model(**batch.model_inputs()).logits[0].float(), batch.labels_A)


def packed_varlen(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    return packed(model, batch, "varlen")


def checkpointing(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        return packed(model, batch)
    finally:
        model.gradient_checkpointing_disable()


def bf16(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    with torch.autocast(batch.input_ids.device.type, torch.bfloat16):
        return packed(model, batch)


def detached(model: PreTrainedModel, batch: PackedBatch) -> PackedBatch:
    return replace(batch, layout=replace(batch.layout, detach_context=True))


def over_prefix(model: PreTrainedModel, batch: PackedBatch) -> PackedBatch:
    """The row of `pack_over_prefix`, its prefixes encoded by the model as it is."""
    segments, own, prefixes = pieces(batch)
    kv_TL2HD = torch.cat([encode_chunk(model, ids.tolist()) for ids in segments])
    first_own = sum(batch.layout.segment_lengths)
    layout = replace(
        batch.layout,
        segment_lengths=(),
        prefix_rows_P=None,
        prefix_kv_PL2HD=kv_TL2HD[torch.cat(prefixes)],
    )
    return replace(
        batch,
        input_ids=torch.cat(own)[None],
        position_ids=batch.position_ids[:, first_own:],
        layout=layout,
        answer_rows_A=batch.answer_rows_A - first_own,
    )


def two_pass(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    model.set_attn_implementation("sdpa")
    segments, own, prefixes = pieces(batch)
    ids_NT = pad_sequence(segments, batch_first=True)
    width = ids_NT.shape[1]
    lengths = torch.tensor([len(segment) for segment in segments])
    encoded = DynamicCache()
    decoder(model)(
        input_ids=ids_NT,
        attention_mask=(torch.arange(width) < lengths[:, None]).long(),
        past_key_values=encoded,
        use_cache=True,
    )
    # Packed row -> place in the padded chunks.
    starts = lengths.cumsum(0) - lengths
    segment_of_row = torch.repeat_interleave(torch.arange(len(segments)), lengths)
    place_of_row = segment_of_row * width + torch.arange(len(segment_of_row))
    place_of_row -= starts[segment_of_row]
    places_P = place_of_row[batch.layout.prefix_rows_P]

    cosine_PD, sine_PD = batch.layout.cosine_PD, batch.layout.sine_PD
    cache = DynamicCache()
    for number, layer in enumerate(encoded.layers):
        keys_PHD = layer.keys.transpose(1, 2).flatten(0, 1)[places_P]
        values_PHD = layer.values.transpose(1, 2).flatten(0, 1)[places_P]
        keys_PHD = rotate(keys_PHD, cosine_PD[:, None], sine_PD[:, None])
        split = batch.layout.prefix_lengths
        cache.update(
            pad_sequence(keys_PHD.split(split), batch_first=True).transpose(1, 2),
            pad_sequence(values_PHD.split(split), batch_first=True).transpose(1, 2),
            number,
        )
    own_mask = pad_sequence([torch.ones(len(ids), dtype=torch.long) for ids in own], True)
    prefix_mask = pad_sequence([torch.ones(len(p), dtype=torch.long) for p in prefixes], True)
    positions = pad_sequence(
        list(batch.position_ids[0].split(row_lengths(batch))[len(segments) :]), batch_first=True
    )
    hidden_BTC = decoder(model)(
        input_ids=pad_sequence(own, batch_first=True),
        attention_mask=torch.cat((prefix_mask, own_mask), 1),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return answer_loss(model, hidden_BTC[own_mask.bool()], batch)


def dense(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    model.set_attn_implementation("sdpa")
    segments, own, prefixes = pieces(batch)
    lengths = batch.layout.segment_lengths
    starts = torch.tensor([0, *lengths]).cumsum(0)
    segment_of_row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rows, masks, own_places = [], [], []
    for question, prefix in zip(own, prefixes, strict=True):
        used = segment_of_row[prefix].unique().tolist()
        row = torch.cat([*(segments[number] for number in used), question])
        mask = torch.zeros(len(row), len(row), dtype=torch.bool)
        place = 0
        for number in used:
            length = lengths[number]
            block = slice(place, place + length)
            mask[block, block] = torch.ones(length, length, dtype=torch.bool).tril()
            rows_of_segment = prefix[segment_of_row[prefix] == number] - starts[number]
            mask[-len(question) :, place + rows_of_segment] = True
            place += length
        square = torch.ones(len(question), len(question), dtype=torch.bool).tril()
        mask[-len(question) :, -len(question) :] = square
        rows.append(row)
        masks.append(mask)
        own_places.append(torch.arange(place, len(row)))
    width = max(map(len, rows))
    visible = torch.stack(
        [pad(mask, (0, width - len(mask), 0, width - len(mask))) for mask in masks]
    )
    visible |= torch.eye(width, dtype=torch.bool)
    hidden_BTC = decoder(model)(
        input_ids=pad_sequence(rows, batch_first=True),
        attention_mask=visible[:, None],
        use_cache=False,
    ).last_hidden_state
    own_rows = torch.cat(
        [hidden[places] for hidden, places in zip(hidden_BTC, own_places, strict=True)]
    )
    return answer_loss(model, own_rows, batch)


def plain(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    model.set_attn_implementation("sdpa")
    logits = model(
        input_ids=batch.input_ids, logits_to_keep=batch.answer_rows_A, use_cache=False
    ).logits
    return cross_entropy(logits[0].float(), batch.labels_A)


def plain_rows(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    model.set_attn_implementation("sdpa")
    rows = len(row_lengths(batch))
    width = batch.tokens // rows
    ids = batch.input_ids[0, : rows * width].view(rows, width)
    hidden = decoder(model)(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    logits = model.lm_head(hidden[batch.answer_rows_A.clamp(max=len(hidden) - 1)])
    return cross_entropy(logits.float(), batch.labels_A)


WAYS: dict[str, Callable[[PreTrainedModel, PackedBatch], Tensor]] = {
    way.__name__: way
    for way in (packed, packed_varlen, checkpointing, bf16, two_pass, dense, plain, plain_rows)
} | {"detach": packed, "frozen": packed}
ROWS = {"detach": detached, "frozen": over_prefix}
SAME_LOSS = ("two_pass", "detach", "frozen", "checkpointing")


def row_lengths(batch: PackedBatch) -> list[int]:
    return [*batch.layout.segment_lengths, *batch.layout.own_lengths]


def pieces(batch: PackedBatch) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Token ids of the segments, of the examples' own parts, and their prefix rows."""
    parts = batch.input_ids[0].split(row_lengths(batch))
    segments = len(batch.layout.segment_lengths)
    prefixes = batch.layout.prefix_rows_P.split(batch.layout.prefix_lengths)
    return list(parts[:segments]), list(parts[segments:]), list(prefixes)


def answer_loss(model: PreTrainedModel, own_hidden: Tensor, batch: PackedBatch) -> Tensor:
    first_own = sum(batch.layout.segment_lengths)
    logits = model.lm_head(own_hidden[batch.answer_rows_A - first_own])
    return cross_entropy(logits.float(), batch.labels_A)


def step(way: str, model: PreTrainedModel, batch: PackedBatch) -> tuple[float, float]:
    """(seconds, loss) of one forward and backward."""
    with DEVICE:
        if way in ROWS:
            batch = ROWS[way](model, batch)
        start = time.perf_counter()
        loss = WAYS[way](model, batch)
        loss.backward()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds, float(loss.detach())


def peak_memory_gib() -> float:
    """Of the GPU, or of this program alone; getrusage would count its parent's at the fork, too."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**20


def load(arguments: list[str], count: int) -> tuple[PreTrainedModel, list[PackedBatch]]:
    # The ways alone are used where neither data nor what reads them is installed.
    from cache_ops.hf import load_tokenizer
    from data_builders.build import load_built
    from data_builders.prompt import PromptTemplate
    from recipes.resolve import resolve
    from train.batches import BatchOrder
    from train.examples import ExampleBuilder
    from train.optim import trainable_model

    config = resolve(arguments).config
    tables = load_built(config, "train")
    model = trainable_model(config)
    template = PromptTemplate(load_tokenizer(config.model.path), config.prompt)
    builder = ExampleBuilder(tables, template, Rope.from_config(model.config), config)
    micro = config.train.micro_batch_samples
    order = BatchOrder([1] * len(tables.samples), micro, micro, 1, config.seed)
    batches = [builder.micro_batch(order.step_samples(number)) for number in range(count)]
    return model.to(DEVICE), [batch.to(DEVICE) for batch in batches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE")
    parser.add_argument("--repeats", type=int, default=5, help="micro-batches timed, each once")
    default = [way for way in WAYS if way != "packed_varlen" or DEVICE.type == "cuda"]
    parser.add_argument("--against", nargs="+", choices=WAYS, default=default)
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        model, batches = load(options.arguments, 1)
        for _ in range(2):
            step(options.memory_of, model, batches[0])
        print(peak_memory_gib())
        return

    ways = list(dict.fromkeys(["packed", *options.against]))
    model, batches = load(options.arguments, options.repeats)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for way in ways:
        step(way, model, batches[0])
    for batch in batches:
        losses = {}
        for way in ways:
            taken, losses[way] = step(way, model, batch)
            seconds[way].append(taken)
            print(f"{way}: {taken:.2f} s", file=sys.stderr)
        for way in SAME_LOSS:
            if abs(losses.get(way, losses["packed"]) - losses["packed"]) > 1e-4 * losses["packed"]:
                raise SystemExit(f"{way} and packed disagree: {losses}")
    # Each micro-batch gives one ratio, measured within seconds; the median sheds disturbances.
    ratios = {
        way: statistics.median(
            other / ours for other, ours in zip(seconds[way], seconds["packed"], strict=True)
        )
        for way in ways
    }
    memory = {
        way: float(
            subprocess.run(
                [sys.executable, __file__, *options.arguments, "--memory-of", way],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for way in ways
    }
    report = {
        "environment": environment(),
        "arguments": options.arguments,
        "tokens_a_micro_batch": [batch.tokens for batch in batches],
        "tokens_of_frozen": [sum(batch.layout.own_lengths) for batch in batches],
        "median_seconds": {way: statistics.median(values) for way, values in seconds.items()},
        "speed_of_packed_relative_to": ratios,
        "peak_memory_gib": memory,
        "memory_of_packed_relative_to": {
            way: memory["packed"] / gib for way, gib in memory.items()
        },
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
