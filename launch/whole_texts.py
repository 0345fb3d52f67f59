"""Whole texts of a run's questions, and what its checkpoint gives for them in our own path."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cache_ops.cached import RequestCache, forward_cached
from cache_ops.encode import encode_chunk
from cache_ops.hf import load_config
from cache_ops.plan import PROMPT, PrefixPlan, Slice
from cache_ops.rope import Rope
from data_builders.build import load_built
from data_builders.key import Split
from data_builders.tables import Tables
from eval.checkpoints import load_weights
from eval.decoding import Generation
from eval.systems import SYSTEMS, Question, Serving, Width
from recipes.errors import UserError
from recipes.exit import is_users
from train.export import Form, Run, base_of

_CANDIDATES = 8


@dataclass(frozen=True)
class Prompt:
    """One whole text: prompt and passages, then the query."""

    question: str
    passages: str
    text_ids: list[int]
    query_ids: list[int]


@dataclass
class Reference:
    """What the run's checkpoint gives: the logits_V after the prompt, and its greedy answer.

    `token_ids` ends with the stop token where one was given; `candidates` has the likeliest tokens
    with their logits, of each of its places.
    """

    logits_V: Tensor
    token_ids: list[int] = field(default_factory=list)
    candidates: list[dict[int, float]] = field(default_factory=list)


def prompts_of(run: Run, questions: int) -> tuple[list[Prompt], Split | None]:
    """Questions of a run's built data, dev before train, spread evenly over the split.

    With 0 questions there is one prompt, without passages.

    Raises:
        UserError: nothing is built, or not at hand.
    """
    if not questions:
        ask = "Who wrote it?"
        template = run.template
        return [Prompt(ask, "", template.prompt_ids, template.query_ids(ask))], None
    tables, split = _tables(run)
    rows = range(len(tables.samples))
    chosen = rows[:: max(1, len(rows) // questions)][:questions]
    limit = load_config(str(run.checkpoint)).max_position_embeddings
    serving = Serving(run.config, run.template, run.tokenizer, max_positions=limit)
    return [_prompt(tables, row, serving) for row in chosen], split


def _tables(run: Run) -> tuple[Tables, Split]:
    splits: tuple[Split, Split] = ("dev", "train")
    for split in splits:
        try:
            return load_built(run.config, split), split
        except Exception as error:
            if not is_users(error):
                raise
            why = error
    raise UserError(
        f"--questions: the run's built data is not at hand ({why}); --questions 0 leaves answers "
        "out of the verification"
    ) from why


def _prompt(tables: Tables, row: int, serving: Serving) -> Prompt:
    sample = tables.samples[row]
    chunks = [tables.chunk(chunk_id) for chunk_id in sample["chunk_ids"]]
    question = Question(
        question_id=sample["question_id"],
        dataset=sample["dataset"],
        question=sample["question"],
        answers=sample["answers"],
        chunks=chunks,
        nugget_scores=[],
        gold_chunk_ids=[],
    )
    width = Width(serving.config.retrieval.k_c, None)
    request = SYSTEMS["standard_rag"].request(question, width, serving)
    return Prompt(
        question.question,
        "".join(piece.text for piece in request.evidence),
        list(request.layout.online_ids),
        serving.template.query_ids(question.question),
    )


def references_of(
    run: Run, form: Form, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[Reference]:
    """What the run's checkpoint gives, in our own path.

    An activated adapter leaves the text before the query to its base model.
    """
    model = load_weights(run.config, run.checkpoint, run.tokenizer)
    base = None
    if form == "adapter" and (run.adapter or {}).get("alora_invocation_tokens"):
        base = load_weights(run.config, Path(base_of(run)), run.tokenizer)
    return [_reference(run, model, base, prompt, max_new_tokens) for prompt in prompts]


@torch.inference_mode()
def _reference(
    run: Run,
    model: PreTrainedModel,
    base: PreTrainedModel | None,
    prompt: Prompt,
    max_new_tokens: int,
) -> Reference:
    plan, kv_TL2HD, online = PrefixPlan(()), None, [*prompt.text_ids, *prompt.query_ids]
    if base is not None:
        plan = PrefixPlan((Slice(PROMPT, 0, len(prompt.text_ids), 0),))
        kv_TL2HD, online = encode_chunk(base, prompt.text_ids), prompt.query_ids
    room = len(online) + max_new_tokens
    cache = RequestCache(plan, kv_TL2HD, Rope.from_config(model.config), room=room)
    generation = Generation(
        cache, online, stop_ids=run.template.stop_ids, max_new_tokens=max_new_tokens
    )
    reference = None
    while not generation.done:
        logits_V = forward_cached(model, [(cache, generation.next_ids)])[0].float().cpu()
        reference = reference or Reference(logits_V)
        best = logits_V.topk(min(_CANDIDATES, len(logits_V)))
        tokens = best.indices.tolist()
        reference.candidates.append(dict(zip(tokens, best.values.tolist(), strict=True)))
        reference.token_ids.append(tokens[0])
        generation.take(tokens[0])
    assert reference is not None, "an answer has at least one token"
    return reference
