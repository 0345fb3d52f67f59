"""One optimizer step: what the probe leaves behind, and what a step does that is not finite."""

import math

import pytest
import torch

from recipes.exit import is_users
from train.step import Stepper, answer_loss

DROPOUT = ("train.tuning=lora", "train.lora.rank=2", "train.lora.dropout=0.3", "train.max_steps=2")


def test_the_probe_runs_the_longest_pass_and_changes_nothing(workplace, monkeypatch):
    run_pass = Stepper._pass
    passes = []

    def recorded(self, micro_batch, answer_tokens, *, last):
        before = self._counted["packed_tokens"]
        loss = run_pass(self, micro_batch, answer_tokens, last=last)
        passes.append((micro_batch.counts, self._counted["packed_tokens"] - before))
        return loss

    monkeypatch.setattr(Stepper, "_pass", recorded)
    probed = workplace.train_here("probed", *DROPOUT)
    (probe,) = [tokens for counts, tokens in passes if not counts]
    assert probe == max(tokens for _, tokens in passes)
    monkeypatch.setattr(Stepper, "probe", lambda self, steps: None)
    unprobed = workplace.train_here("unprobed", *DROPOUT)
    for key in ("loss", "gradient_norm", "packed_tokens"):
        assert [line[key] for line in probed] == [line[key] for line in unprobed]


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_names_its_questions_and_updates_nothing(
    workplace, monkeypatch, what
):
    update, weights = Stepper._update, {}

    def spoiled(self):
        weights.update({name: w.detach().clone() for name, w in self.model.named_parameters()})
        if what == "gradient":
            next(iter(self.model.parameters())).grad.fill_(torch.inf)
        try:
            return update(self)
        finally:
            for name, weight in self.model.named_parameters():
                assert torch.equal(weight, weights[name]), name

    passes = []

    def spoiled_loss(logits, labels):
        passes.append(len(labels))
        return answer_loss(logits, labels) * (math.nan if len(passes) == 2 else 1)

    if what == "loss":
        monkeypatch.setattr("train.step.answer_loss", spoiled_loss)
    monkeypatch.setattr(Stepper, "_update", spoiled)
    message = r"step 1: .*(nan|inf); questions \S+, .*lower train.learning_rate"
    with pytest.raises(FloatingPointError, match=message) as raised:
        workplace.train_here(f"not_finite_{what}")
    assert is_users(raised.value)
    assert "resume" not in str(raised.value)
    # Of four passes of two samples, the one that spoils the loss; of a gradient all may be.
    assert str(raised.value).count("d-") == (2 if what == "loss" else 8)
    # A loss that is not finite is found before anything is applied.
    assert bool(weights) == (what == "gradient")
