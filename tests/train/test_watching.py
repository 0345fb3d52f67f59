"""Spikes, evaluations beside a training, early stopping and the best weights."""

import json
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from logged import read_steps
from safetensors.torch import load_file
from small import data_row, write_rows

import eval.compare
import train.watching
from eval.answers import read_answers
from eval.compare import compare
from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.training import EvaluateConfig
from train.step import Stepper
from train.watching import Watch, spike_text

EVALUATED = ["train.evaluate.sample_answers=4", "train.evaluate.keep_best=false"]
SHORT = ["train.max_steps=3", "train.micro_batch_samples=8"]


def values(loss: float, norm: float = 1.0) -> dict[str, float]:
    return {"loss": loss, "gradient_norm": norm}


def test_a_spike_is_found_once_enough_is_usual() -> None:
    watch = Watch()
    early = [watch.spikes(values(9.0 if step == 5 else 1.0), 4.0) for step in range(20)]
    assert not any(early), "no median of so few steps"
    assert watch.spikes(values(4.1), 4.0) == {"loss": {"value": 4.1, "median": 1.0}}
    assert watch.spikes(values(4.0, 1.0), 4.0) == {}
    both = watch.spikes(values(5.0, 8.0), 4.0)
    assert both.keys() == {"loss", "gradient_norm"}
    text = spike_text(23, both, [f"q{number}" for number in range(10)])
    assert text.startswith("step 23: loss 5 is 5.0 times the usual 1; gradient norm 8 is 8.0 times")
    assert text.endswith("questions q0, q1, q2, q3, q4, q5, q6, q7 and 2 more")


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=130), st.integers(0, 129))
def test_spikes_do_not_depend_on_a_stop_in_between(losses, at) -> None:
    whole, part = Watch(), Watch()
    expected = [whole.spikes(values(loss), 2.0) for loss in losses]
    found = []
    for step, loss in enumerate(losses):
        if step == at:
            part = Watch.of(json.loads(json.dumps(vars(part))))
        found.append(part.spikes(values(loss), 2.0))
    assert found == expected
    assert len(part.recent["loss"]) <= 50


@pytest.mark.parametrize(
    ("scores", "patience", "best", "ends_after"),
    [
        ([10.0, 20.0, 15.0, 5.0, 30.0], 2, 2, 4),
        ([10.0, 10.0, 10.0], 2, 3, 3),
        ([0.0, 1.0, 2.0], 1, 3, None),
        ([3.0, 1.0, 2.0, 4.0, 1.0], None, 4, None),
    ],
)
def test_patience_counts_evaluations_without_a_better_one(
    scores, patience, best, ends_after
) -> None:
    options = EvaluateConfig(every_steps=1, patience=patience)
    watch = Watch()
    ended = None
    for step, f1 in enumerate(scores, start=1):
        assert watch.is_due(step, 10, options)
        assert watch.note(step, f1) == (watch.best_step == step)
        assert not watch.is_due(step, 10, options), "one evaluation a step"
        if watch.is_exhausted(options):
            ended = step
            break
    assert (watch.best_step, ended) == (best, ends_after)


def test_evaluations_are_due_at_intervals_and_at_the_end() -> None:
    options = EvaluateConfig(every_steps=4)
    assert [step for step in range(11) if Watch().is_due(step, 10, options)] == [4, 8, 10]
    assert not Watch().is_due(10, 10, None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("full", ["train.mixed_precision=no"]),
        (
            "lora",
            [
                "train.tuning=lora", "train.lora.rank=4", "train.lora.dropout=0.3",
                "train.mixed_precision=bf16", "train.gradient_checkpointing=true",
            ],
        ),
    ],
)  # fmt: skip
def test_a_training_is_bit_by_bit_the_same_with_evaluation(place, name, options) -> None:
    alone = place.train_here(f"{name}_alone", *SHORT, *options)
    beside = place.train_here(
        f"{name}_evaluated", *SHORT, *options, "train.evaluate.every_steps=1", *EVALUATED
    )
    assert [line["step"] for line in beside if "evaluation" in line] == [1, 2, 3]
    steps = read_steps(place.folder / f"{name}_evaluated")
    for key in ("loss", "gradient_norm"):
        assert [line[key] for line in steps] == [line[key] for line in alone]
    one, other = (
        load_file(place.folder / f"{name}_{kind}" / "checkpoint" / "model.safetensors")
        for kind in ("alone", "evaluated")
    )
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_last_evaluation_is_what_a_comparison_says_of_the_checkpoint(
    place, monkeypatch
) -> None:
    run = place.folder / "full_evaluated"
    if not run.exists():
        evaluation = ["train.evaluate.every_steps=3", *EVALUATED]
        place.train_here("full_evaluated", *SHORT, *evaluation)
    for drawing in ("draw_overview", "draw_all", "write_page"):
        monkeypatch.setattr(eval.compare, drawing, lambda *_: None)
    asked = ["eval.systems=[coinrag]", "eval.checkpoints=[fine_tuned]", "eval.warmup_questions=0"]
    row = compare(resolve(place.arguments("full_evaluated", *asked)).config)["results"][0]
    found = place.metrics("full_evaluated")[-1]["evaluation"]
    for name in ("f1", "em", "stop_rate", "questions", "f1_by_dataset"):
        assert found[name] == pytest.approx(row[name]), name
    answers = {a.question_id: a.answer for a in read_answers(run / "compare" / "answers.jsonl")}
    assert len(answers) == 4
    assert {one["question_id"]: one["answer"] for one in found["answers"]} == answers


def scripted(scores: dict[int, float], kept: dict[int, dict[str, torch.Tensor]]) -> Callable:
    """What opens an evaluator that gives these scores and keeps copies of the weights."""

    def open_evaluator(config: Any, accelerator: Any, model: Any, *_: Any) -> Callable:
        def evaluate() -> dict[str, Any]:
            number = len(kept) + 1
            kept[number] = {n: w.detach().clone() for n, w in model.named_parameters()}
            f1 = scores[number]
            means = {"f1": f1, "f1_by_dataset": {"d": f1}, "em": 0.0, "stop_rate": 1.0}
            return {**means, "questions": 4, "answers": [], "seconds": 0.1}

        return evaluate

    return open_evaluator


def test_a_run_ends_early_and_leaves_its_best_weights(place) -> None:
    kept: dict[int, dict[str, torch.Tensor]] = {}
    options = ["train.epochs=3", "train.evaluate.every_steps=1", "train.evaluate.patience=2"]
    scores = scripted({1: 10.0, 2: 30.0, 3: 20.0, 4: 29.0}, kept)
    place.train_here("early", *options, "train.micro_batch_samples=8", evaluator=scores)
    run = place.folder / "early"
    assert [line["step"] for line in read_steps(run)] == [1, 2, 3, 4], "of nine"
    left = load_file(run / "checkpoint" / "model.safetensors")
    assert all(torch.equal(weight, kept[2][name]) for name, weight in left.items())
    assert not all(torch.equal(weight, kept[4][name]) for name, weight in left.items())


def test_scores_of_zero_are_told(place, caplog) -> None:
    options = ["train.max_steps=1", "train.evaluate.every_steps=1"]
    place.train_here("zeros", *options, evaluator=scripted({1: 0.0}, {}))
    assert "every evaluation found an F1 of 0" in caplog.text


def test_spikes_of_a_run_name_the_questions_of_their_step(place, caplog, monkeypatch) -> None:
    step_of = Stepper.step

    def high_in_the_end(self: Stepper, number: int) -> dict[str, Any]:
        found = step_of(self, number)
        return {**found, "loss": found["loss"] * (10 if number >= 4 else 1)}

    monkeypatch.setattr(train.watching, "_FEWEST_STEPS", 3)
    monkeypatch.setattr(Stepper, "step", high_in_the_end)
    lines = place.train_here("spikes", "train.epochs=2", "train.micro_batch_samples=8")
    steps = read_steps(place.folder / "spikes")
    assert [line["step"] for line in steps] == list(range(1, 7)), "other lines are no steps"
    spikes = [line for line in lines if "spike" in line]
    assert [line["step"] for line in spikes] == [5, 6]
    questions = [line["spike"].pop("questions") for line in spikes]
    assert [len(set(asked)) for asked in questions] == [8, 6]
    assert set(questions[0]).isdisjoint(questions[1]), "both steps are of one epoch"
    for line, asked in zip(spikes, questions, strict=True):
        assert line["spike"].keys() == {"loss"}
        assert line["spike"]["loss"]["value"] == steps[line["step"] - 1]["loss"]
        said = [one for one in caplog.messages if one.startswith(f"step {line['step']}: loss")]
        assert len(said) == 1
        assert asked[0] in said[0]


def test_evaluation_without_built_dev_data_is_refused_before_anything_is_written(place) -> None:
    other = write_rows(place.folder / "unbuilt.jsonl", [data_row(200)])
    with pytest.raises(UserError, match="run `coinrag build`"):
        place.train_here("undeveloped", "train.evaluate.every_steps=1", f"data.dev=[{other}]")
    assert not (place.folder / "undeveloped" / "recipe.yaml").exists()
