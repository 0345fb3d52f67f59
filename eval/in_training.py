"""Answers to dev questions while a model is being trained, by the path that serves them.

The weights at hand answer, from chunks that they encode anew in every evaluation or, over frozen
context, from the base model's slices. Nothing that a training depends on is changed: not the
weights, not a random generator, and the attention and the mode that it trains in are put back.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, cast

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache_ops.cached import enable_cached
from cache_ops.contextualizer import contextualizer_of
from cache_ops.soft_tokens import SoftTokens
from cache_ops.supply import Supply
from data_builders.kv import supply_over
from data_builders.prompt import PromptTemplate
from eval.lockstep import Lockstep
from eval.metrics import exact_match, token_f1
from eval.online import OnlinePath, OnlineRequest
from eval.questions import arm_questions
from eval.systems import SYSTEMS, Question, Serving, Width
from eval.systems.coinrag import check_repair
from recipes.arms import Arm
from recipes.schema import Recipe
from recipes.training import EvaluateConfig


def open_evaluator(
    config: Recipe,
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    soft_tokens: Mapping[str, SoftTokens],
    frozen: Supply | None,
    split: bool = False,
) -> Callable[[], dict[str, Any]]:
    """Makes what evaluates a model; to be called before the training, whose mistakes it finds.

    Args:
        config: the recipe; `train.evaluate` is set.
        accelerator: its ranks share the questions.
        model: the model to be trained, outside of what wraps it.
        tokenizer: the recipe's.
        soft_tokens: the model's, which are trained along.
        frozen: supplies the base model's slices, where the context is frozen.
        split: the ranks will hold a part of the weights each.

    Returns:
        A function that all ranks must call, and that gives all of them the same: `f1`,
        `f1_by_dataset` and `em` in percent, `stop_rate` as a share, `questions`, `seconds`, and
        some `answers` beside the gold ones.

    Raises:
        UserError: no dev data is built.
        MissingSlicesError: slices that dev questions need are not stored and cannot be computed.
    """
    check_repair(config, model.config.num_hidden_layers)
    options = config.train.evaluate
    assert options is not None, "an evaluation was asked for"
    system = config.train.system
    asked = arm_questions(Arm("", config, (system,)), options.questions_per_dataset)
    questions = list(asked.values())
    width = Width(
        config.retrieval.k_c, config.retrieval.k if SYSTEMS[system].selects_nuggets else None
    )
    template = PromptTemplate(tokenizer, config.prompt)
    max_positions = model.config.max_position_embeddings
    serving = Serving(
        config,
        template,
        tokenizer,
        soft_tokens=soft_tokens,
        contextualizer=contextualizer_of(model),
        max_positions=max_positions,
    )
    if frozen is not None and not frozen.computes:
        path = OnlinePath(serving, model, frozen)
        for question in questions:
            fetch = path.begin(question, system, width).fetch
            if fetch is not None:
                fetch.wait().release()

    def evaluate() -> dict[str, Any]:
        start = time.perf_counter()
        rank, ranks = accelerator.process_index, accelerator.num_processes
        at_once = config.eval.concurrent_requests
        answers: list[dict[str, Any]] = []
        with _serving(model), accelerator.autocast():
            lockstep = Lockstep(model, accelerator) if split else None
            answering = cast(PreTrainedModel, lockstep) if lockstep else model
            # A new supply, for what the weights encoded at the last evaluation is stale.
            supply = frozen or supply_over(config, answering, None)
            path = OnlinePath(serving, answering, supply)
            mine = questions[rank::ranks]
            for first in range(0, len(mine), at_once):
                answers += _answers(path, mine[first : first + at_once], system, width)
            if lockstep is not None:
                lockstep.finish()
        everyone: list[dict[str, Any]] = gather_object(answers)
        by_id = {answer["question_id"]: answer for answer in everyone}
        ordered = [by_id[question.question_id] for question in questions]
        return _summary(ordered, options) | {"seconds": round(time.perf_counter() - start, 3)}

    return evaluate


@contextmanager
def _serving(model: PreTrainedModel) -> Iterator[None]:
    """Makes a model in training answer over cached prefixes meanwhile."""
    attention, training = model.config._attn_implementation, model.training
    enable_cached(model)
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.train(training)


def _answers(
    path: OnlinePath, questions: Sequence[Question], system: str, width: Width
) -> Iterator[dict[str, Any]]:
    """Answers questions together, token by token."""
    requests = [path.begin(question, system, width) for question in questions]
    for request in requests:
        path.fill(request)
    path.advance(requests)
    for request in requests:
        request.release()
    while unfinished := [one for one in requests if not one.generation.done]:
        path.advance(unfinished)
    for request in requests:
        yield _answer(path, request)


def _answer(path: OnlinePath, request: OnlineRequest) -> dict[str, Any]:
    question, generation = request.question, request.generation
    decoded = path.serving.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
    text = str(decoded).strip()
    return {
        "question_id": question.question_id,
        "dataset": question.dataset,
        "question": question.question,
        "answer": text,
        "gold": question.answers,
        "f1": token_f1(text, question.answers),
        "em": exact_match(text, question.answers),
        "stopped": generation.stopped,
    }


def _summary(answers: Sequence[dict[str, Any]], options: EvaluateConfig) -> dict[str, Any]:
    """Means in percent, and answers at even distances, the same ones in every evaluation."""
    by_dataset = defaultdict(list)
    for answer in answers:
        by_dataset[answer["dataset"]].append(answer["f1"])
    shown = min(options.sample_answers, len(answers))
    return {
        "f1": 100 * fmean(answer["f1"] for answer in answers),
        "f1_by_dataset": {name: 100 * fmean(found) for name, found in by_dataset.items()},
        "em": 100 * fmean(answer["em"] for answer in answers),
        "stop_rate": fmean(answer["stopped"] for answer in answers),
        "questions": len(answers),
        "answers": [answers[at * len(answers) // shown] for at in range(shown)],
    }
