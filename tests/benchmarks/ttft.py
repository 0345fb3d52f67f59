"""Time to first token of the systems, from a store on disk, stage by stage.

    python tests/benchmarks/ttft.py RECIPE [key=value ...] [--questions N] [--checkpoint NAME]

The first N questions of the recipe's dev data are asked of its whole dev corpus (embedded,
searched, scored) and served by every system in turn, the order rotated from question to question.
Slices are read from the recipe's store, without a memory tier; what is not stored yet is computed
and stored before the clock starts. Files are in the page cache, since they were read once before:
run `store_reading.py` for cold disks.

Prints the stages' p50, p90 and p99 in milliseconds; for each system the share of its TTFT (without
embedding the question) that is not the forward pass over its online tokens; the ratio of the
systems' TTFT to CoinRAG's; and the bytes and floating-point operations of a query, with what the
same query would need of Qwen2-7B. With `--json FILE` all figures of all questions are written too.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from figures import percentiles, render, write
from transformers import Qwen2Config

from cache_ops.hf import load_tokenizer
from cache_ops.records import RecordLayout
from eval.checkpoints import load_served, weights_of
from eval.online import OnlinePath
from eval.questions import dev_questions
from eval.retriever import Retriever
from eval.serving import open_serving
from eval.systems import SYSTEMS, Width
from recipes.progress import track
from recipes.resolve import resolve
from recipes.schema import Recipe

ORDER = (
    "embed",
    "search",
    "score",
    "extract",
    "plan",
    "read",
    "compute",
    "copy",
    "rotate",
    "prefill",
)
QWEN2_7B = Qwen2Config(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
)


def measure(config: Recipe, checkpoint: str, count: int) -> tuple[list[dict[str, Any]], Any]:
    """One row a question and system; and the model's config."""
    tokenizer = load_tokenizer(config.model.path)
    retriever = Retriever.open(config)
    rows = []
    with load_served(config, weights_of(config, checkpoint, "coinrag"), tokenizer) as served:
        serving = open_serving(config, served, tokenizer, config.eval.systems)
        path = OnlinePath(serving, served.model, served.supply)
        widths = {
            name: Width(
                config.retrieval.k_c, config.retrieval.k if system.selects_nuggets else None
            )
            for name, system in SYSTEMS.items()
            if name in config.eval.systems
        }
        questions = dev_questions(config)[:count]
        for question in track(questions, "store", unit="questions"):
            found = retriever.retrieve(question.question).question
            for name, width in widths.items():
                path.fill(request := path.begin(found, name, width))
                request.release()
        for number, question in enumerate(track(questions, "ask", unit="questions")):
            shift = number % len(widths)
            for name in [*widths][shift:] + [*widths][:shift]:
                retrieved = retriever.retrieve(question.question)
                request = path.begin(retrieved.question, name, widths[name])
                path.fill(request)
                path.advance([request])
                request.release()
                supplied = request.supplied
                rows.append(
                    {
                        "system": name,
                        "embed": retrieved.embed_ms,
                        "search": retrieved.search_ms,
                        "score": retrieved.score_ms,
                        **request.stage_ms,
                        "cached_tokens": request.served.layout.plan.tokens,
                        "active_tokens": request.served.layout.tokens,
                        "online_tokens": request.online_tokens,
                        "bytes_read": 0 if supplied is None else supplied.bytes_read,
                        "tokens_computed": 0 if supplied is None else supplied.tokens_computed,
                    }
                )
    # The first question of each system warms it.
    return rows[len(widths) :], served.model.config


def flops(config: Any, online: float, active: float) -> float:
    """Multiply-adds count two: linear layers over the online tokens, and their attention."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    hidden = config.hidden_size
    linear = hidden * (2 * width + 2 * kv_width) + 3 * hidden * config.intermediate_size
    # Causal: an online token sees the prefix and half of its fellows.
    attention = 2 * width * (active + online / 2)
    head = hidden * config.vocab_size
    return 2 * (config.num_hidden_layers * online * (linear + attention) + head)


def summary(rows: list[dict[str, Any]], model_config: Any, token_bytes: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in dict.fromkeys(row["system"] for row in rows):
        mine = [row for row in rows if row["system"] == name]
        stages = {stage: [row.get(stage, 0.0) for row in mine] for stage in ORDER}
        ttft = [sum(row.get(stage, 0.0) for stage in ORDER) for row in mine]
        known = [total - row["embed"] for total, row in zip(ttft, mine, strict=True)]
        online = statistics.mean(row["online_tokens"] for row in mine)
        active = statistics.mean(row["active_tokens"] for row in mine)
        cached = statistics.mean(row["cached_tokens"] for row in mine)
        prefix = statistics.mean(row["bytes_read"] for row in mine)
        prefill_s = statistics.mean(stages["prefill"]) / 1e3
        work = flops(model_config, online, cached)
        result[name] = {
            "questions": len(mine),
            "ttft_ms": percentiles(ttft),
            "ttft_without_embed_ms": percentiles(known),
            "stages_ms": {stage: percentiles(values) for stage, values in stages.items()},
            "share_beside_prefill": 1 - sum(stages["prefill"]) / sum(known),
            "active_tokens": active,
            "online_tokens": online,
            "bytes_read": prefix,
            "bytes_over_nugget_bytes": prefix / (cached * token_bytes) if cached else None,
            "tokens_computed": sum(row["tokens_computed"] for row in mine),
            "gflop": work / 1e9,
            "gflop_per_second": work / 1e9 / prefill_s,
            "qwen2_7b": {
                "gflop": flops(QWEN2_7B, online, cached) / 1e9,
                "bytes_read_bf16": int(
                    cached * RecordLayout.from_model(QWEN2_7B, "bfloat16").token_bytes
                ),
            },
        }
    return result


def shown(systems: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One row a figure, one column a system."""
    figures: dict[str, Any] = {
        **{f"{stage}, ms": lambda s, stage=stage: s["stages_ms"][stage] for stage in ORDER},
        "TTFT, ms": lambda s: s["ttft_ms"],
        "TTFT without embed, ms": lambda s: s["ttft_without_embed_ms"],
        "share beside prefill": lambda s: s["share_beside_prefill"],
        "active tokens": lambda s: s["active_tokens"],
        "online tokens": lambda s: s["online_tokens"],
        "MiB read": lambda s: s["bytes_read"] / 2**20,
        "GFLOP": lambda s: s["gflop"],
        "GFLOP/s": lambda s: s["gflop_per_second"],
        "GFLOP of Qwen2-7B": lambda s: s["qwen2_7b"]["gflop"],
        "MiB read of Qwen2-7B in bf16": lambda s: s["qwen2_7b"]["bytes_read_bf16"] / 2**20,
    }
    if "coinrag" in systems:
        ours = systems["coinrag"]["ttft_ms"]
        figures["TTFT over CoinRAG's"] = lambda s: {q: s["ttft_ms"][q] / ours[q] for q in ours}
    return {
        name: {system: figure(found) for system, found in systems.items()}
        for name, figure in figures.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--checkpoint", choices=("base", "fine_tuned"), default="base")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = resolve(arguments.arguments).config
    with tempfile.TemporaryDirectory() as scratch:
        folder = config.store.folder or scratch
        store = config.store.model_copy(update={"folder": folder, "memory_gib": 0.0})
        config = config.model_copy(update={"store": store})
        rows, model_config = measure(config, arguments.checkpoint, arguments.questions + 1)
    token_bytes = RecordLayout.from_model(
        model_config, config.store.dtype or config.model.dtype
    ).token_bytes
    result = summary(rows, model_config, token_bytes)
    print(render(shown(result), "p50 / p90 / p99, or mean"))
    write(arguments.json, {"systems": result, "rows": rows})


if __name__ == "__main__":
    main()
