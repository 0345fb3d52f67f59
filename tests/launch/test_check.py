"""`coinrag check` on a tiny model: what it shows is what is trained on, and what it needs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data_builders.build import build
from launch import check, cli
from launch.check import render
from recipes.errors import UserError
from recipes.resolve import resolve

Recipes = Callable[..., list[str]]


@pytest.fixture
def recipe(recipe: Recipes, tmp_path: Path) -> Recipes:
    """The recipe of a run that is still to begin."""
    return lambda *overrides: recipe(f"train.run_folder={tmp_path / 'new'}", *overrides)


@pytest.fixture
def built(recipe: Recipes, tmp_path: Path) -> Recipes:
    """The recipe over built data, on a machine without the model's weights."""
    build(resolve(recipe()).config, "train")
    (tmp_path / "model" / "model.safetensors").unlink()
    return recipe


def test_samples_are_shown_as_they_are_trained_on(built: Recipes) -> None:
    result = check.check(built(), samples=2)
    assert len(result["samples"]) == 2
    for sample in result["samples"]:
        number = int(sample["question_id"].removeprefix("d-"))
        (form,) = sample["forms"]
        prompt, *slices = form["slices"]
        assert prompt["text"].startswith("<|im_start|>user\nAnswer the question")
        assert f"Where was Persond{number}x1 born?" in form["query"]
        assert form["query"].endswith("<|im_start|>assistant\n")
        assert "".join(form["learned"]) == f"Townd{number}x1<|im_end|>"
        # Slices lie side by side after the prompt and are named by the passage that they are of.
        end = prompt["end"]
        for piece in slices:
            assert piece["position"] == end
            end += piece["end"] - piece["start"]
            assert piece["title"].startswith("Person d")
            assert piece["text"]
    counts = result["counts"]
    assert (counts["samples"], counts["steps"]) == (6, 1)
    assert counts["passes_a_rank_and_step"] == 2
    assert counts["shortened"] == counts["dropped"] == 0
    whole, parts = counts["tokens"]["whole"], ("prefix", "query", "answer")
    assert whole["max"] <= sum(counts["tokens"][part]["max"] for part in parts)
    assert result["fits"]

    text = render(result)
    assert "learned" in text
    assert "›‹<|im_end|>›" in text
    assert "nuggets or chunks" not in text
    assert "fits" in text


def test_what_is_left_out_is_counted_once(built: Recipes) -> None:
    longest = check.check(built(), samples=0)["counts"]["tokens"]["whole"]["max"]
    result = check.check(built(f"train.max_length_tokens={longest - 1}"), samples=6)
    counts = result["counts"]
    assert counts["tokens"]["whole"]["max"] < longest
    assert 0 < counts["shortened"] <= counts["dropped"]
    assert sum(sample["dropped"] for sample in result["samples"]) == counts["dropped"]
    assert render(result).count("train.max_length_tokens") == 1
    assert counts["without_passages"] == 0


def test_samples_that_lose_all_passages_are_warned_of(built: Recipes) -> None:
    tokens = check.check(built(), samples=1)
    shown = tokens["samples"][0]["forms"][0]
    bare = (
        shown["slices"][0]["end"]
        + shown["query_tokens"]
        + tokens["counts"]["tokens"]["answer"]["max"]
    )
    result = check.check(built(f"train.max_length_tokens={bare}"), samples=0)
    assert result["counts"]["without_passages"] == 6
    assert "warning: 6 of them lose all" in render(result)


def test_passes_that_only_keep_ranks_together_are_counted(built: Recipes) -> None:
    one = check.check(built("train.micro_batch_samples=1"), samples=0)["counts"]
    more = check.check(
        built("train.micro_batch_samples=1", "train.effective_batch_samples=8"),
        samples=0,
        processes=4,
    )["counts"]
    # Six samples on four ranks: two of them run a filler, of the shortest sample.
    shortest = more["tokens_of_the_run"] - one["tokens_of_the_run"]
    assert more["passes_a_rank_and_step"] == 2
    assert 0 < shortest <= 2 * one["tokens"]["packed"]["median"]


@pytest.mark.parametrize(
    ("overrides", "flags", "said"),
    [
        (["train.optimizer=adamw_8bit"], ["--sharding=fsdp2"], "FSDP2 splits the optimizer"),
        (
            ["context.gradient=frozen", "train.tuning=lora", "store.folder=null"],
            ["--sharding=fsdp2"],
            "run `coinrag cache build` with this recipe, or use --sharding ddp or zero2",
        ),
        (["train.evaluate.every_steps=1"], [], "run `coinrag build`"),
        (["train.evaluate.every_steps=1", "data.dev=[nowhere.jsonl]"], [], "nowhere.jsonl"),
        (["train.attention=varlen"], [], "train.attention=varlen"),
        (["train.run_folder={here}/run"], [], "is in use"),
        (["train.run_folder={here}/tiny.yaml/run"], [], "not a folder that can be written to"),
        (["train.wandb.project=mine"], [], "pip install 'coinrag[wandb]'"),
    ],
)
def test_what_training_refuses_is_refused(
    built: Recipes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    flags: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("train.trackers.is_wandb_available", lambda: False)
    arguments = built(*(one.format(here=tmp_path) for one in overrides))
    ranks = ["--processes", "2"] if flags else []
    assert cli.main(["check", *arguments, *flags, *ranks]) == 2
    assert said in capsys.readouterr().err


def test_only_what_training_takes_is_advised(built: Recipes) -> None:
    sharded = check.check(built(), processes=2, sharding="fsdp2", gpu_gib=1e-6)
    changes = [change["change"] for change in sharded["memory"]["changes"]]
    assert "train.tuning=lora" in changes
    assert not any("adamw_" in change for change in changes)


def test_small_sizes_are_in_mib(built: Recipes) -> None:
    assert "MiB" in render(check.check(built(), samples=0, gpu_gib=2)).split("2.00 GiB")[0]


@pytest.mark.parametrize(
    ("overrides", "forms"),
    [
        (["train.system=block_attention"], 2),
        (["train.system=kvlink"], 1),
        (["train.system=standard_rag"], 1),
        (["context.encoding=isolated"], 1),
        (["context.gradient=frozen", "train.tuning=lora"], 1),
    ],
    ids=["block_attention", "kvlink", "standard_rag", "isolated", "frozen"],
)
def test_every_system_is_shown(built: Recipes, overrides: list[str], forms: int) -> None:
    result = check.check(built(*overrides, "train.max_length_tokens=4096"), samples=1)
    (sample,) = result["samples"]
    assert len(sample["forms"]) == forms
    assert all("born" in form["query"] for form in sample["forms"])
    linked = sum(form["query"].count("<soft>") for form in sample["forms"])
    assert linked == (3 * 5 if "kvlink" in overrides[0] else 0)
    frozen = "frozen" in overrides[0]
    assert ("frozen_context" in result["memory"]["parts"]) == frozen
    # All answer tokens of a form are learned, whatever else it computes.
    assert {len(form["learned"]) for form in sample["forms"]} == {
        len(sample["forms"][0]["learned"])
    }
    assert render(result)


def test_packets_and_means_are_shown_by_name(built: Recipes) -> None:
    options = ["context.packets={before_tokens: 1, after_tokens: 2}", "train.tuning=none"]
    result = check.check(built(*options, "context.anchors.summary=mean"), samples=1)
    ((form,),) = (sample["forms"] for sample in result["samples"])
    nuggets = [piece for piece in form["slices"] if piece["chunk"] != "<prompt>"]
    assert form["query"].count("<soft>") == 3 * len(nuggets)
    means = sum(piece["text"].endswith("<mean>") for piece in nuggets)
    assert means == len({piece["chunk"] for piece in nuggets})
    assert render(result)


def test_what_does_not_fit_is_named_with_what_would_help(
    built: Recipes, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = check.check(built())["memory"]["gib"]
    words = ["check", *built(), "--gpu-gib", str(needed * 0.7), "--processes", "2"]
    assert cli.main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not result["fits"]
    memory = result["memory"]
    assert memory["gib"] == pytest.approx(sum(memory["parts"].values()))
    changes = {change["change"]: change for change in memory["changes"]}
    assert any(change["fits"] for change in changes.values())
    assert "--sharding zero3" in changes
    for change in changes.values():
        assert change["fits"] == (change["gib"] <= memory["available_gib"])
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "train.tuning=lora" in text


def test_time_comes_from_a_given_rate_or_a_real_pass(
    recipe: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(resolve(recipe()).config, "train")
    given = check.check(recipe(), samples=0, tflops=2.0)["time"]
    assert given["hours"] * 3600 * 2e12 == pytest.approx(given["flops"])
    assert "as given" in given["source"]
    lora = check.check(recipe("train.tuning=lora"), samples=0, tflops=2.0)["time"]
    assert lora["flops"] == pytest.approx(given["flops"] * 2 / 3)
    probed = check.check(recipe(), samples=0, probe=True)["time"]
    assert "measured here for the longest pass" in probed["source"]
    with pytest.raises(UserError, match="--probe would run a pass"):
        check.check(recipe(), samples=0, probe=True, gpu_gib=1e-6)


def test_mistakes_end_with_status_2(
    recipe: Recipes, built: Recipes, capsys: pytest.CaptureFixture[str]
) -> None:
    for override, said in (
        ("data.chunk_tokens=99", "coinrag build"),
        ("train.max_length_tokens=5", "more than train.max_length_tokens"),
        ("model.dtype=bfloat16", "loses updates"),
        ("train.init_from=nowhere", "train.init_from: nowhere is not the folder of a run"),
    ):
        assert cli.main(["check", *recipe(override)]) == 2
        assert said in capsys.readouterr().err
    frozen = ["context.gradient=frozen", "train.tuning=lora"]
    assert cli.main(["check", *built(*frozen), "--probe"]) == 2
    assert "--probe cannot time" in capsys.readouterr().err
    assert cli.main(["check", *built(), "--sharding", "zero3"]) == 2
    assert "set --processes" in capsys.readouterr().err
    lora = ["train.tuning=lora", "train.lora.target_modules=[q_project]"]
    assert cli.main(["check", *built(*lora)]) == 2
    assert "q_project not in the model" in capsys.readouterr().err
    activated = [*frozen, "train.lora.activated=true", "prompt.after_passages={question}"]
    assert cli.main(["check", *recipe(*activated)]) == 2
    assert "acts from the query's first words on" in capsys.readouterr().err
    for flag, value, said in (
        ("--samples", "-1", "expected at least 0, got -1"),
        ("--gpu-gib", "0", "expected a finite number above 0"),
        ("--gpu-gib", "inf", "expected a finite number above 0"),
        ("--gpu-gib", "nan", "expected a finite number above 0"),
        ("--sharding", "zero9", "invalid choice"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["check", *recipe(), flag, value])
        assert said in capsys.readouterr().err
