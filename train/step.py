"""One optimizer step: packed passes, their loss, the gradients, the update.

The loss of a step is the mean over the answer tokens of its whole effective batch (all ranks, all
accumulated micro-batches), so it does not depend on how the batch was dealt.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from cache_ops.contextualizer import Contextualizer
from cache_ops.packing import PackedBatch
from train.batches import BatchOrder, MicroBatch
from train.context import FrozenContext
from train.distillation import Distillation, Target, divergence
from train.examples import ExampleBuilder, Lengths
from train.sharding import WHOLE_MODEL_ON_EACH_RANK, zero_stage
from train.throughput import peak_memory_gib

PHASES = ("data", "forward", "backward", "optimizer")


class DivergedError(FloatingPointError):
    """Loss or gradient are no longer finite; the user can change the settings or the data."""

    is_user_error = True


@dataclass
class Stepper:
    """What every step of a run needs."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Optimizer
    builder: ExampleBuilder
    order: BatchOrder
    lengths: list[Lengths]
    frozen: FrozenContext | None
    max_grad_norm: float
    flops: Callable[[PackedBatch], int]
    """Operations that a pass needs, see `throughput.flops_of`."""
    distillation: Distillation | None = None
    """Mixed into the loss; None: cross-entropy alone."""
    contextualizer: Contextualizer | None = None
    """The model's own, which corrects prefixes."""
    _terms: dict[str, float] = field(default_factory=dict)
    """What a mixed loss is mixed of, each summed over a step's passes."""
    _counted: Counter[str] = field(default_factory=Counter)
    _seconds: dict[str, float] = field(default_factory=dict)

    def step(self, number: int) -> dict[str, Any]:
        """Optimizer step `number`, from 0; its loss, gradient norm and throughput over all ranks.

        Raises:
            DivergedError: loss or gradient are no longer finite; names the questions of the
                passes whose loss is not, or all of the step if only the gradient is not.
        """
        start = time.perf_counter()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._counted = Counter(packed_tokens=0, filler_tokens=0, flops=0)
        self._terms = {}
        accelerator = self.accelerator
        samples = self.order.step_samples(number)
        answer_tokens = sum(self.lengths[index].answer_tokens for index in samples)
        micro_batches = self.order.micro_batches(number, accelerator.process_index)
        losses = [
            self._pass(micro_batch, answer_tokens, last=at == len(micro_batches))
            for at, micro_batch in enumerate(micro_batches, start=1)
        ]
        totals, counts = self._totals(torch.stack(losses).sum())
        means = {name: total / answer_tokens for name, total in totals.items()}
        loss_mean = means["loss"]
        gradient_norm = self._update() if math.isfinite(loss_mean) else math.nan
        if not math.isfinite(gradient_norm):
            suspects = _not_finite(micro_batches, losses) or samples
            raise DivergedError(
                f"step {number + 1}: loss {loss_mean}, gradient norm {gradient_norm}; "
                f"questions {', '.join(self.builder.question_ids(suspects))}. Look at these "
                "questions, or lower train.learning_rate, in a new run"
            )
        seconds = time.perf_counter() - start
        return {
            **means,
            "gradient_norm": gradient_norm,
            "answer_tokens": answer_tokens,
            **counts,
            "samples_per_second": round(len(samples) / seconds, 4),
            "tokens_per_second": round(counts["packed_tokens"] / seconds, 2),
            "seconds": round(seconds, 4),
            **{f"seconds_{phase}": round(taken, 4) for phase, taken in self._seconds.items()},
        }

    def probe(self, steps: int) -> None:
        """Runs the longest pass of `steps` steps forward and backward, to no effect.

        Called after a first step, when optimizer and gradients have their memory, it shows at once
        whether a later pass would find too little. All ranks run the same pass, whose loss counts
        nothing; random generators and all weights stay as they were.
        """
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        with torch.random.fork_rng(devices):
            longest = MicroBatch(self.order.longest(steps), counts=False)
            self._pass(longest, 1, last=False)
        if self._engine is None:
            self.optimizer.zero_grad()
        if self.frozen is not None:
            self.frozen.take_tokens()

    @property
    def _engine(self) -> Any:
        """DeepSpeed's engine, which is the prepared model; None without it."""
        return self.model if zero_stage(self.accelerator) else None

    def _pass(self, micro_batch: MicroBatch, answer_tokens: int, *, last: bool) -> Tensor:
        """Forward and backward of one packed row; its summed loss."""
        accelerator, engine = self.accelerator, self._engine
        with self._phase("data"):
            batch = self.builder.micro_batch(micro_batch.indices, self.frozen)
            self._counted["packed_tokens"] += batch.tokens
            if micro_batch.counts:
                self._counted["flops"] += self.flops(batch)
            else:
                self._counted["filler_tokens"] += batch.tokens
            batch = batch.to(accelerator.device)
            target = None
            if self.distillation is not None:
                learned = [self.lengths[index].answer_tokens for index in micro_batch.indices]
                target = self.distillation.target(micro_batch.indices, learned)
        # Split gradients are reduced after every pass, since no rank has room for whole ones.
        waits = not last and accelerator.distributed_type in WHOLE_MODEL_ON_EACH_RANK
        with accelerator.no_sync(self.model) if waits else nullcontext():
            with self._phase("forward"):
                logits_1AV = self.model(**batch.model_inputs(self.contextualizer)).logits
                loss = answer_loss(logits_1AV[0], batch.labels_A) * micro_batch.counts
                if target is not None:
                    loss = self._mixed(loss, logits_1AV[0], target, micro_batch)
            with self._phase("backward"):
                # Ranks average their gradients, so each multiplies by their number.
                weighed = loss * (accelerator.num_processes / answer_tokens)
                if engine is None:
                    accelerator.backward(weighed)
                else:
                    engine.set_gradient_accumulation_boundary(last)
                    engine.backward(weighed)
        return loss.detach()

    def _mixed(
        self, loss: Tensor, logits_AV: Tensor, target: Target, micro_batch: MicroBatch
    ) -> Tensor:
        """The summed cross-entropy `loss` of a pass mixed with its divergence from the teacher."""
        assert self.distillation is not None, "there is a target"
        target = target.to(logits_AV.device)
        temperature = self.distillation.config.temperature
        kl = divergence(logits_AV, target, temperature) * micro_batch.counts
        for name, term in {"cross_entropy": loss, "kl": kl}.items():
            self._terms[name] = self._terms.get(name, 0.0) + term.item()
        return self.distillation.loss(loss, kl)

    def _update(self) -> float:
        """Clips the gradients and applies them; their norm before.

        Nothing is applied if that is not finite, but by DeepSpeed, which tells it afterwards.
        """
        with self._phase("optimizer"):
            if self._engine is not None:
                self._engine.step()
                return float(self._engine.get_global_grad_norm())
            parameters = self.model.parameters()
            norm = self.accelerator.clip_grad_norm_(parameters, self.max_grad_norm)
            norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            if math.isfinite(norm):
                self.optimizer.step()
                self.optimizer.zero_grad()
            return norm

    def _totals(self, loss_sum: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """The summed loss and its terms, and the tokens and operations of a step, over all ranks.

        Of their memory the most that one has held.
        """
        counts = dict(self._counted)
        if self.frozen is not None:
            counts |= self.frozen.take_tokens()
        losses = {"loss": loss_sum.item(), **self._terms}
        mine = torch.tensor(
            [peak_memory_gib(), *losses.values(), *counts.values()],
            dtype=torch.float64,
            device=loss_sum.device,
        )
        all_RN = self.accelerator.gather(mine[None])
        _, *totals = all_RN.sum(dim=0).tolist()
        peak = {"peak_memory_gib": round(all_RN[:, 0].max().item(), 3)}
        summed = dict(zip(losses, totals, strict=False))
        return summed, dict(zip(counts, map(int, totals[len(losses) :]), strict=True)) | peak

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds[name] += time.perf_counter() - start


def _not_finite(micro_batches: Sequence[MicroBatch], losses: Sequence[Tensor]) -> list[int]:
    """Samples of the passes, on all ranks, whose loss is not finite; all ranks must call it."""
    mine = [
        index
        for micro_batch, loss in zip(micro_batches, losses, strict=True)
        if not torch.isfinite(loss)
        for index in micro_batch.indices
    ]
    everyone: list[int] = gather_object(mine)
    return list(dict.fromkeys(everyone))


def answer_loss(logits_AV: Tensor, labels_A: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over the answer tokens, in fp32."""
    return cross_entropy(logits_AV.float(), labels_A, reduction="sum")
