"""Learning the answers' distributions of a teacher, beside the answers themselves.

In shapes, A are answer tokens, V the vocabulary, K the tokens of it that a teacher tells apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from recipes.training import DistillationConfig
from train.teacher_files import TeacherFiles


class Target(NamedTuple):
    """What a teacher expects in the place of each answer token.

    Its K most likely tokens and their log-probabilities, and that of all other tokens together
    (-inf where there are none), at the temperature of the distillation.
    """

    ids_AK: Tensor
    """int32"""
    log_probs_AK: Tensor
    """fp32, as is `log_rest_A`."""
    log_rest_A: Tensor

    @classmethod
    def of(cls, logits_AV: Tensor, temperature: float, top_k: int | None) -> Self:
        """The target in a teacher's logits; without `top_k` of the whole vocabulary."""
        log_probs_AV = (logits_AV.float() / temperature).log_softmax(dim=-1)
        top = log_probs_AV.topk(top_k or log_probs_AV.shape[1], dim=-1)
        return cls(top.indices.int(), top.values, _rest(log_probs_AV, top.indices))

    @classmethod
    def joined(cls, targets: Sequence[Self]) -> Self:
        """The answer tokens of several targets, one after the other."""
        return cls(*(torch.cat(columns) for columns in zip(*targets, strict=True)))

    def to(self, device: torch.device) -> Self:
        """The same target on `device`."""
        return type(self)(*(column.to(device) for column in self))

    def rows(self, start: int, end: int) -> Self:
        """The target of the answer tokens `[start, end)`."""
        return type(self)(*(column[start:end] for column in self))


def divergence(logits_AV: Tensor, target: Target, temperature: float) -> Tensor:
    """KL(teacher || student) in nats, summed over the answer tokens, times `temperature` squared.

    The square keeps gradients as large as those of cross-entropy (Hinton et al., 2015, section 2).
    Where the target tells only K tokens apart, all others count as one. Joining outcomes never
    raises a divergence, so this is a lower bound of that over the whole vocabulary, and what the
    student expects among the others is left to it.

    Args:
        logits_AV: the student's.
        target: the teacher's, on the same device.
        temperature: the target's.
    """
    log_probs_AV = (logits_AV.float() / temperature).log_softmax(dim=-1)
    ids_AK = target.ids_AK.long()
    apart_AK = target.log_probs_AK - log_probs_AV.gather(1, ids_AK)
    kl = (target.log_probs_AK.exp() * apart_AK).sum()
    if ids_AK.shape[1] < log_probs_AV.shape[1]:
        apart_A = target.log_rest_A - _rest(log_probs_AV, ids_AK)
        kl = kl + (target.log_rest_A.exp() * apart_A).sum()
    return kl * temperature**2


@dataclass(frozen=True)
class Distillation:
    """The objective of a run that learns from a teacher."""

    config: DistillationConfig
    files: TeacherFiles

    def target(self, indices: Sequence[int], answer_tokens: Sequence[int]) -> Target:
        """The target of a packed row of these samples.

        `answer_tokens` of each count all forms in which it is learned; the teacher says the same of
        each form.
        """
        targets = []
        for index, tokens in zip(indices, answer_tokens, strict=True):
            one = Target(*self.files.read(index, Target._fields))
            forms, left = divmod(tokens, len(one.log_rest_A))
            assert not left, "a teacher's target has the answer's tokens"
            targets += [one] * forms
        return Target.joined(targets)

    def loss(self, cross_entropy: Tensor, kl: Tensor) -> Tensor:
        """Both mixed by weight."""
        weight = self.config.weight
        return (1 - weight) * cross_entropy + weight * kl


def _rest(log_probs_AV: Tensor, ids_AK: Tensor) -> Tensor:
    """The log-probability of all tokens but `ids_AK`; 1 - p would lose its digits."""
    return log_probs_AV.scatter(1, ids_AK, -torch.inf).logsumexp(dim=-1)
