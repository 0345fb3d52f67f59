"""`coinrag check` of a distillation: what the teacher needs, and whose answers are shown."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cache_ops.hf import load_config, load_tokenizer
from data_builders.build import build, load_built
from data_builders.prompt import PromptTemplate
from launch import check
from launch.check import render
from recipes.errors import UserError
from recipes.resolve import resolve
from train.teacher import teacher_files
from train.teacher_files import ANSWER

OWN = "train.distillation.answers=teacher"


def test_the_teacher_is_counted_until_it_was_asked(
    recipe: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arguments(*overrides: str) -> list[str]:
        return recipe(f"train.run_folder={tmp_path / 'new'}", *overrides)

    config = resolve(arguments(OWN)).config
    build(config, "train")
    plain = check.check(arguments(), samples=1, tflops=1.0)
    assert "teacher" not in plain

    gold = check.check(arguments("train.distillation.top_k=8"), samples=1, tflops=1.0)
    assert gold["samples"] == plain["samples"]
    standard = check.check(
        arguments("train.system=standard_rag", "train.max_length_tokens=2048"), samples=0, tflops=1
    )
    teacher = gold["teacher"]
    # The texts of Standard RAG, read forward alone and once.
    assert teacher["tokens"] == standard["counts"]["tokens_of_the_run"]
    assert teacher["hours"] == pytest.approx(standard["time"]["hours"] / 3, rel=0.01)
    assert teacher["disk_gib"] * 2**30 == 8 * 8 * gold["counts"]["answer_tokens"]
    assert "teacher: reads" in render(gold)
    assert gold["teacher"]["fits"]
    assert not check.check(arguments(OWN), samples=0, tflops=1.0, gpu_gib=1e-6)["teacher"]["fits"]
    with monkeypatch.context() as patch:
        usage = SimpleNamespace(free=gold["teacher"]["disk_gib"] * 2**30 - 1)
        patch.setattr(shutil, "disk_usage", lambda folder: usage)
        full = check.check(arguments("train.distillation.top_k=8"), samples=0, tflops=1.0)
        assert not full["teacher"]["fits"]

    own = check.check(arguments(OWN), samples=1, tflops=1.0)
    assert own["samples"][0]["forms"][0]["learned"] is None
    assert "learned: the teacher's answer" in render(own)
    assert own["counts"]["tokens"]["answer"]["max"] == config.eval.max_new_tokens

    tokenizer, model = load_tokenizer(config.model.path), load_config(config.model.path)
    template = PromptTemplate(tokenizer, config.prompt)
    files = teacher_files(config, model, template, load_built(config, "train"))
    answer = torch.tensor(tokenizer("won the prize")["input_ids"], dtype=torch.int32)
    for part in files.parts(files.order):
        files.write(part, [(sample, {ANSWER: answer.clone()}) for sample in files.samples(part)])
    asked = check.check(arguments(OWN), samples=1, tflops=1.0)
    assert "".join(asked["samples"][0]["forms"][0]["learned"]) == "won the prize"
    assert asked["teacher"]["tokens"] == 0
    assert "teacher: has been asked before" in render(asked)


def test_a_teacher_that_cannot_tell_so_many_apart_is_refused(
    recipe: Callable[..., list[str]], tmp_path: Path
) -> None:
    config = resolve(recipe()).config
    build(config, "train")
    with pytest.raises(UserError, match=r"train\.distillation\.top_k=4000 .* to null"):
        check.check(recipe(f"train.run_folder={tmp_path / 'new'}", "train.distillation.top_k=4000"))
