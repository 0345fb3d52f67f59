"""What a run is watched for: spikes of its loss, and evaluations that no longer get better."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache_ops.soft_tokens import SoftTokens
from cache_ops.supply import Supply
from recipes.schema import Recipe
from recipes.training import EvaluateConfig

Evaluate = Callable[[], dict[str, Any]]
"""Answers dev questions; all ranks call it and get the same, `f1` in percent among it."""

OpenEvaluator = Callable[
    [
        Recipe,
        Accelerator,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        Mapping[str, SoftTokens],
        Supply | None,
        bool,
    ],
    Evaluate,
]
"""Opened with the model to be trained, its soft tokens, its frozen context, and whether ranks will
split its weights.
"""

SPIKING = ("loss", "gradient_norm")
_MEDIAN_OF_STEPS = 50
_FEWEST_STEPS = 20
_SHOWN_QUESTIONS = 8


@dataclass
class Watch:
    """What is known of a run so far; the same on all ranks, and part of its state."""

    recent: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SPIKING})
    """Of what may spike, the values of the last steps."""
    evaluated_step: int = 0
    best_step: int = 0
    best_f1: float | None = None
    """In percent; None before the first evaluation."""
    without_better: int = 0
    """Evaluations since the F1 last rose."""

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> Self:
        """The watch of a new run, or one whose fields an earlier part of it has left."""
        return cls(**state) if state else cls()

    def spikes(self, values: Mapping[str, Any], factor: float) -> dict[str, dict[str, float]]:
        """What of a step's values is more than `factor` times its median so far; counts the step.

        A median is that of the last 50 steps, of at least 20.
        """
        found = {}
        for name, recent in self.recent.items():
            value = values[name]
            usual = median(recent) if len(recent) >= _FEWEST_STEPS else math.inf
            if value > factor * usual:
                found[name] = {"value": value, "median": usual}
            recent.append(value)
            del recent[:-_MEDIAN_OF_STEPS]
        return found

    def is_due(self, step: int, total_steps: int, options: EvaluateConfig | None) -> bool:
        """Whether an evaluation after `step` of `total_steps` is still to be made."""
        if options is None or step == self.evaluated_step:
            return False
        return step > 0 and (step % options.every_steps == 0 or step == total_steps)

    def note(self, step: int, f1: float) -> bool:
        """Counts the evaluation after `step`; whether it is the best so far, the last of equals."""
        self.evaluated_step = step
        before = -math.inf if self.best_f1 is None else self.best_f1
        self.without_better = 0 if f1 > before else self.without_better + 1
        if f1 < before:
            return False
        self.best_step, self.best_f1 = step, f1
        return True

    def is_exhausted(self, options: EvaluateConfig | None) -> bool:
        """Whether as many evaluations as the recipe's patience have brought nothing better."""
        if options is None or options.patience is None:
            return False
        return self.without_better >= options.patience


def answer_text(answer: Mapping[str, Any]) -> str:
    """What is shown of an answer of an evaluation."""
    return f"{answer['question']} -> {answer['answer']!r}, gold {answer['gold']!r}"


def spike_text(
    step: int, spikes: Mapping[str, Mapping[str, float]], questions: Sequence[str]
) -> str:
    """What the log says of a step's spikes."""
    parts = [
        f"{name.replace('_', ' ')} {one['value']:.4g} is {one['value'] / one['median']:.1f} times "
        f"the usual {one['median']:.4g}"
        for name, one in spikes.items()
    ]
    shown = ", ".join(questions[:_SHOWN_QUESTIONS])
    more = f" and {len(questions) - _SHOWN_QUESTIONS} more" if questions[_SHOWN_QUESTIONS:] else ""
    return f"step {step}: {'; '.join(parts)}; questions {shown}{more}"
