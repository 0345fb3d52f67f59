"""Greedy answers from the store, from memory and from the packed training pass, on real questions.

    python tests/benchmarks/serving_equals_training.py RECIPE [key=value ...] [--questions N]
        [--checkpoint NAME]

In fp32 all three must be the same tokens. The packed pass is given the engine's answer and must
find each of its tokens most likely after those before it, the stop token included, which is the
same as decoding greedily with it. What the recipe's store lacks is computed and stored first; a
recipe without one gets a store of its own for the run. Prints one JSON object; exit status 1 if
any answer differs.
"""

import argparse
import json
import sys
import tempfile

import torch

from cache_ops.attention import enable_packed
from cache_ops.cached import enable_cached
from cache_ops.contextualizer import contextualizer_saved_in, load_contextualizer
from cache_ops.hf import load_tokenizer
from cache_ops.packing import Example, pack
from cache_ops.rope import Rope
from cache_ops.soft_tokens import add_soft_tokens, load_soft_tokens
from data_builders.kv import open_supply
from data_builders.prompt import PromptTemplate
from eval.checkpoints import load_weights, weights_of
from eval.environment import environment
from eval.online import OnlinePath, OnlineRequest
from eval.questions import dev_questions
from eval.systems import SYSTEMS, Serving, Width
from recipes.progress import track
from recipes.resolve import resolve
from recipes.soft_tokens import soft_tokens_for


def answer(path: OnlinePath, request: OnlineRequest) -> list[int]:
    """The answer's tokens, without the stop token."""
    path.fill(request)
    while not request.generation.done:
        path.advance([request])
    request.release()
    return request.generation.token_ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--checkpoint", choices=("base", "fine_tuned"), default="fine_tuned")
    parser.add_argument("--system", choices=("coinrag", "turborag"), default="coinrag")
    arguments = parser.parse_args()
    config = resolve(arguments.arguments).config
    tokenizer = load_tokenizer(config.model.path)
    template = PromptTemplate(tokenizer, config.prompt)
    weights = weights_of(config, arguments.checkpoint, arguments.system)
    model = load_weights(config, weights.folder, tokenizer)
    rope = Rope.from_config(model.config)
    selects = SYSTEMS[arguments.system].selects_nuggets
    width = Width(config.retrieval.k_c, config.retrieval.k if selects else None)
    if (wanted := soft_tokens_for(config, arguments.system)) and weights.trained:
        soft_tokens = load_soft_tokens(model, weights.folder, wanted)
    else:
        soft_tokens = add_soft_tokens(model, wanted, config.seed)
    contextualizer = None
    if weights.trained and contextualizer_saved_in(weights.folder) is not None:
        contextualizer = load_contextualizer(weights.folder, model.config).to(model.device)
    serving = Serving(
        config, template, tokenizer, soft_tokens=soft_tokens, contextualizer=contextualizer
    )
    counts = dict.fromkeys(
        ("questions", "tokens", "memory_differs", "packed_differs", "tokens_disk"), 0
    )
    smallest_margin = float("inf")
    with tempfile.TemporaryDirectory() as scratch:
        disk, memory = (
            open_supply(
                config.model_copy(update={"store": config.store.model_copy(update=changes)}),
                model, tokenizer, weights.context_store, writable=True,
            )
            for changes in (
                {"folder": config.store.folder or scratch, "memory_gib": 0.0},
                {"folder": None, "memory_gib": 4.0},
            )
        )  # fmt: skip
        questions = dev_questions(config)[: arguments.questions]
        for question in track(questions, "questions"):
            answers = []
            for supply in (disk, memory):
                path = OnlinePath(serving, model, supply)
                fetch = path.begin(question, arguments.system, width).fetch
                if fetch is not None:
                    fetch.wait().release()
                request = path.begin(question, arguments.system, width)
                answers.append(answer(path, request))
                assert request.supplied is not None, "every prefix holds the prompt"
                assert not request.supplied.tokens_computed, "the first fetch has stored everything"
                counts["tokens_disk"] += request.supplied.tokens_disk
            from_disk, from_memory = answers
            ended = list(from_disk)
            if request.generation.stopped:
                ended.append(next(iter(template.stop_ids)))
            served = request.served
            example = Example.of(served.layout, template.query_ids(question.question), ended)
            enable_packed(model)
            with torch.no_grad():
                batch = pack([example], served.segments, rope)
                logits_AV = model(**batch.model_inputs(served.contextualizer)).logits[0]
            enable_cached(model)
            best = logits_AV.topk(2, dim=-1)
            packed = best.indices[:, 0].tolist()
            if request.generation.stopped and packed and packed[-1] in template.stop_ids:
                packed[-1] = ended[-1]
            smallest_margin = min(
                smallest_margin, float((best.values[:, 0] - best.values[:, 1]).min())
            )
            counts["questions"] += 1
            counts["tokens"] += len(ended)
            counts["memory_differs"] += from_memory != from_disk
            counts["packed_differs"] += packed != ended
        disk.close()
        memory.close()
    print(json.dumps({**counts, "smallest_margin": smallest_margin, "environment": environment()}))
    return int(bool(counts["memory_differs"] or counts["packed_differs"]))


if __name__ == "__main__":
    sys.exit(main())
