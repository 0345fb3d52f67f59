"""The forward passes of a distillation's teacher, which have no gradient."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cache_ops.cached import RequestCache, forward_cached
from cache_ops.packing import Example, pack
from cache_ops.plan import PrefixPlan
from cache_ops.rope import Rope
from recipes.training import DistillationConfig
from train.distillation import Target
from train.teacher_files import ANSWER, Said

# Of one pass, unless a single text is longer: without gradients that takes less than a step.
PASS_TOKENS = 8192


@contextmanager
def as_it_began(model: PreTrainedModel, device: torch.device) -> Iterator[PreTrainedModel]:
    """The model without its new adapter, on a device, not in training; afterwards as before."""
    adapted: Any = model
    module: nn.Module = model
    has_adapter = hasattr(model, "get_base_model")
    base: PreTrainedModel = adapted.get_base_model() if has_adapter else model
    attention, training, home = base.config._attn_implementation, model.training, model.device
    model.eval()
    module.to(device)
    try:
        with adapted.disable_adapter() if has_adapter else nullcontext():
            yield base
    finally:
        base.set_attn_implementation(attention)
        module.to(home)
        model.train(training)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def groups_of(examples: Sequence[Example]) -> Iterator[list[int]]:
    """Places of neighbours that go through the model together."""
    group: list[int] = []
    tokens = 0
    for place, example in enumerate(examples):
        needed = len(example.query_ids) + len(example.answer_ids)
        if group and tokens + needed > PASS_TOKENS:
            yield group
            group, tokens = [], 0
        group.append(place)
        tokens += needed
    yield group


def read_answers(
    teacher: PreTrainedModel, examples: Sequence[Example], distillation: DistillationConfig
) -> Iterator[Said]:
    """What the teacher expects in the place of each token of given answers."""
    batch = pack(examples, {}, Rope.from_config(teacher.config)).to(teacher.device)
    logits_AV = teacher(**batch.model_inputs()).logits[0]
    target = Target.of(logits_AV, distillation.temperature, distillation.top_k)
    start = 0
    for example in examples:
        end = start + len(example.answer_ids)
        yield _said(example.answer_ids, target.rows(start, end))
        start = end


def give_answers(
    teacher: PreTrainedModel,
    examples: Sequence[Example],
    stop_ids: frozenset[int],
    longest: int,
    distillation: DistillationConfig,
) -> Iterator[Said]:
    """The teacher's own greedy answers, and what it expected in the place of each token.

    An answer that ends in time has the token that ended it.
    """
    rope = Rope.from_config(teacher.config)
    rooms = [len(example.query_ids) + longest for example in examples]
    caches = [RequestCache(PrefixPlan(()), None, rope, room=room) for room in rooms]
    next_ids = [list(example.query_ids) for example in examples]
    answers: list[list[int]] = [[] for _ in examples]
    targets: list[list[Target]] = [[] for _ in examples]
    running = list(range(len(examples)))
    while running:
        logits_BV = forward_cached(teacher, [(caches[at], next_ids[at]) for at in running])
        target = Target.of(logits_BV, distillation.temperature, distillation.top_k)
        tokens = logits_BV.argmax(dim=-1).tolist()
        for row, (at, token) in enumerate(zip(running, tokens, strict=True)):
            answers[at].append(token)
            targets[at].append(target.rows(row, row + 1))
            next_ids[at] = [token]
        running = [
            at for at in running if answers[at][-1] not in stop_ids and len(answers[at]) < longest
        ]
    for answer, rows in zip(answers, targets, strict=True):
        yield _said(answer, Target.joined(rows))


def _said(answer_ids: Sequence[int], target: Target) -> Said:
    kept: dict[str, Tensor] = {ANSWER: torch.tensor(answer_ids, dtype=torch.int32)}
    # A slice would be kept with the memory of the whole pass.
    return kept | {name: value.cpu().clone() for name, value in target._asdict().items()}
