"""What storing slices in fewer bits costs: F1 and logits, on real questions.

    python tests/benchmarks/store_dtypes.py RECIPE [key=value ...] [--questions N]
        [--checkpoint NAME] [--dtypes float32,bfloat16,float16,int8,float8] [--json FILE]

CoinRAG answers the first N questions of the recipe's dev data (their own contexts) from slices in
memory, stored in each dtype in turn. Against the first dtype it prints, for the logits of the first
answer token, the largest and mean absolute difference, the mean KL divergence in nats and how often
another token is the most likely; and of the whole answers F1 with the paired 95% interval of its
difference, and how many differ.
"""

import argparse
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from figures import render, write

from cache_ops.cached import forward_cached
from cache_ops.encode import encode_chunk
from cache_ops.hf import load_tokenizer
from cache_ops.memory_tier import MemoryTier
from cache_ops.records import RecordLayout
from cache_ops.supply import Supply
from data_builders.prompt import PromptTemplate
from eval.checkpoints import load_weights, weights_of
from eval.metrics import token_f1
from eval.online import OnlinePath
from eval.questions import dev_questions
from eval.significance import bootstrap_intervals
from eval.systems import Serving, Width
from recipes.progress import track
from recipes.resolve import resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--checkpoint", choices=("base", "fine_tuned"), default="fine_tuned")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16,int8,float8")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = resolve(arguments.arguments).config
    tokenizer = load_tokenizer(config.model.path)
    template = PromptTemplate(tokenizer, config.prompt)
    weights = weights_of(config, arguments.checkpoint, "coinrag")
    model = load_weights(config, weights.folder, tokenizer)
    width = Width(config.retrieval.k_c, config.retrieval.k)
    dtypes = arguments.dtypes.split(",")
    # A chunk is encoded once for all dtypes.
    encode = lru_cache(maxsize=256)(lambda token_ids: encode_chunk(model, token_ids))
    paths = {}
    serving = Serving(config, template, tokenizer)
    for dtype in dtypes:
        supply = Supply(
            RecordLayout.from_model(model.config, dtype),
            reader=None,
            memory=MemoryTier(2**28),
            encode=lambda token_ids: encode(tuple(token_ids)),
            keep="chunks",
        )
        paths[dtype] = OnlinePath(serving, model, supply)
    scores: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    tokens: dict[str, list[list[int]]] = {dtype: [] for dtype in dtypes}
    logits: dict[str, list[torch.Tensor]] = {dtype: [] for dtype in dtypes}
    for question in track(dev_questions(config)[: arguments.questions], "questions"):
        for dtype, path in paths.items():
            request = path.begin(question, "coinrag", width)
            path.fill(request)
            generation = request.generation
            # The first token by hand, for its logits.
            logits_1V = forward_cached(model, [(generation.cache, generation.next_ids)])
            generation.take(int(logits_1V.argmax()))
            while not generation.done:
                path.advance([request])
            request.release()
            logits[dtype].append(logits_1V[0].float())
            tokens[dtype].append(generation.token_ids)
            text = tokenizer.decode(generation.token_ids, skip_special_tokens=True).strip()
            scores[dtype].append(100 * token_f1(text, question.answers))
    rows = {dtype: compared(dtype, dtypes[0], scores, tokens, logits) for dtype in dtypes}
    for dtype in dtypes:
        rows[dtype]["token_bytes"] = RecordLayout.from_model(model.config, dtype).token_bytes
    print(render(rows, "dtype"))
    write(arguments.json, {"rows": rows})


def compared(
    dtype: str,
    first: str,
    scores: dict[str, list[float]],
    tokens: dict[str, list[list[int]]],
    logits: dict[str, list[torch.Tensor]],
) -> dict[str, Any]:
    exact, stored = torch.stack(logits[first]), torch.stack(logits[dtype])
    gap = (exact - stored).abs()
    log_exact, log_stored = exact.log_softmax(-1), stored.log_softmax(-1)
    kl = (log_exact.exp() * (log_exact - log_stored)).sum(-1)
    points = [own - other for own, other in zip(scores[dtype], scores[first], strict=True)]
    (difference,) = bootstrap_intervals([points], resamples=10000, seed=0)
    return {
        "questions": len(scores[dtype]),
        "largest_logit": float(exact.abs().max()),
        "logits_max_off": float(gap.max()),
        "logits_mean_off": float(gap.mean()),
        "kl_mean": float(kl.mean()),
        "first_token_changed": float((exact.argmax(-1) != stored.argmax(-1)).float().mean()),
        "f1": sum(scores[dtype]) / len(scores[dtype]),
        "f1_difference": difference.mean,
        "low": difference.low,
        "high": difference.high,
        "answers_changed": sum(a != b for a, b in zip(tokens[dtype], tokens[first], strict=True)),
    }


if __name__ == "__main__":
    main()
