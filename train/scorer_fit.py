"""Fitting a network over vectors: a listwise softmax loss, by Adam, as long as it falls held out.

In shape suffixes, N is nuggets of one question or of several, E the dimensions of a vector.
"""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data_builders.scorers.hidden_ffn import NuggetFfn
from recipes.errors import UserError
from recipes.retrieval import HiddenFfnConfig
from recipes.scorer import ScorerConfig
from train.scorer_lists import NuggetList
from train.scorer_measure import best_epoch, measured, recall, told

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VectorList:
    """A question with its nuggets as the network sees them."""

    of: NuggetList
    question_E: Tensor
    nuggets_NE: Tensor


@dataclass(frozen=True)
class Fitted:
    """The network of the best epoch, and what every epoch came to; epoch 0 is before training."""

    ffn: NuggetFfn
    epochs: list[dict[str, Any]]
    best: int


def fit(
    learned: Sequence[VectorList],
    held_out: Sequence[VectorList],
    section: HiddenFfnConfig,
    config: ScorerConfig,
) -> Fitted:
    """Trains a network; the same lists, settings and number of threads give the same one.

    Args:
        learned: all of them teach.
        held_out: at least one has an answering nugget.
        section: the network's form.
        config: how it is trained.

    Raises:
        UserError: the loss is no longer finite.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        dimensions = len(learned[0].question_E)
        ffn = NuggetFfn(dimensions, section.width, add_cosine=section.add_cosine)
        order = torch.Generator().manual_seed(config.seed)
        optimizer = torch.optim.AdamW(
            ffn.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        epochs = [_measured(0, ffn, held_out)]
        best, kept = 0, copy.deepcopy(ffn)
        for epoch in range(1, config.epochs + 1):
            loss = _epoch(ffn, learned, optimizer, order, config.batch_questions)
            if not math.isfinite(loss):
                raise UserError(
                    f"scorer.learning_rate {config.learning_rate:g}: the loss of epoch {epoch} is "
                    "no longer finite; lower it"
                )
            epochs.append({**_measured(epoch, ffn, held_out), "loss": loss})
            logger.info("epoch %d: %s", epoch, told(epochs[-1]))
            best = best_epoch(epochs)
            if best == epoch:
                kept = copy.deepcopy(ffn)
            elif epoch - best >= config.patience:
                break
    return Fitted(kept, epochs, best)


def _epoch(
    ffn: NuggetFfn,
    learned: Sequence[VectorList],
    optimizer: torch.optim.Optimizer,
    order: torch.Generator,
    batch_questions: int,
) -> float:
    """One pass over the questions; their mean loss."""
    total = 0.0
    for batch in torch.randperm(len(learned), generator=order).split(batch_questions):
        lists = [learned[at] for at in batch.tolist()]
        loss = listwise_loss(ffn, lists)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(lists)
    return total / len(learned)


def listwise_loss(ffn: NuggetFfn, lists: Sequence[VectorList]) -> Tensor:
    """The mean over questions of -log of the probability that a softmax gives its good nuggets.

    With one good nugget it is ListNet's top-one cross-entropy (Cao et al., ICML 2007).
    """
    scores_N = ffn(
        torch.cat([one.nuggets_NE for one in lists]),
        torch.cat([one.question_E.expand_as(one.nuggets_NE) for one in lists]),
    )
    parts = scores_N.split([len(one.nuggets_NE) for one in lists])
    losses = [
        part.logsumexp(0) - part[one.of.good_N].logsumexp(0)
        for part, one in zip(parts, lists, strict=True)
    ]
    return torch.stack(losses).mean()


@torch.no_grad()
def _measured(epoch: int, ffn: NuggetFfn, held_out: Sequence[VectorList]) -> dict[str, Any]:
    answered = [one for one in held_out if one.of.answering]

    def scores(one: VectorList) -> list[list[float]]:
        found = ffn(one.nuggets_NE, one.question_E.expand_as(one.nuggets_NE))
        sizes = [len(chunk.nuggets) for chunk in one.of.chunks]
        return [part.tolist() for part in found.split(sizes)]

    recalls = recall([one.of for one in answered], [scores(one) for one in answered])
    return measured(epoch, listwise_loss(ffn, answered).item(), recalls)
