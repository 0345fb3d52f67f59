"""`coinrag export` through the command line, with a tiny model."""

import json
import os
import runpy
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain_reading import read_here
from small import encode_words, tiny_tokenizer
from tiny import tiny_model

from eval import retriever
from launch import cli, export, verification
from launch.verification import READER, compare_answers
from launch.whole_texts import Reference
from recipes.errors import UserError
from recipes.resolve import resolve

Recipe = Callable[..., list[str]]
QUESTION = "Where was Persond20x1 born?"


@pytest.fixture
def run(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recipe:
    """A function from overrides to the arguments of a recipe whose finished run is at `run`."""
    monkeypatch.setattr(retriever, "load_encoder", lambda config, threads: encode_words)

    def finished(*overrides: str) -> list[str]:
        resolve(recipe(*overrides)).write(tmp_path / "run")
        return recipe(*overrides)

    return finished


def told(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_an_export_serves_like_its_run(run, capsys, tmp_path, monkeypatch) -> None:
    arguments = run()
    assert cli.main(["build", *arguments]) == 0
    out, store = tmp_path / "out", tmp_path / "exported_store"
    capsys.readouterr()
    # Named from where the user stands; what reads the export stands elsewhere.
    monkeypatch.chdir(tmp_path)
    words = ["export", "run", "out", "--build-store", str(store)]
    assert cli.main([*words, "--questions", "2", "--json"]) == 0
    result = told(capsys)
    verified = result["verification"]
    assert (verified["answers"]["equal"], verified["questions_from"]) == (2, "dev")
    assert verified["logits"]["largest_difference"] < 1e-4
    assert result["store"]["encoded"] == result["store"]["chunks"] > 0
    assert cli.main(["cache", "stat", str(store / "fine_tuned"), "--json"]) == 0
    contract = json.loads((out / "serving.json").read_text())
    assert told(capsys)["fingerprint"] == contract["context"]["store_fingerprint"]

    def answer(*overrides: str) -> dict:
        words = ["--question", QUESTION, "--checkpoint", "fine_tuned", "--json"]
        assert cli.main(["ask", str(out / "recipe.yaml"), *overrides, *words]) == 0
        return told(capsys)["answers"][0]

    own = answer("store.folder=null")
    served = answer(f"train.run_folder={out}", f"store.folder={store}")
    assert served["answer"] == own["answer"]
    assert (served["tokens_computed"], own["tokens_disk"]) == (0, 0)
    assert served["tokens_disk"] == own["tokens_computed"] > 0
    assert "2 equal" in export.render(result)


@pytest.fixture
def reader_here(monkeypatch: pytest.MonkeyPatch) -> None:
    read_here(monkeypatch)


def test_other_weights_are_found_out(run, capsys, tmp_path, monkeypatch, reader_here) -> None:
    run()

    def others(source: Path, folder: Path, *_: object) -> None:
        tiny_model("llama", seed=9, vocabulary=len(tiny_tokenizer())).save_pretrained(folder)

    monkeypatch.setattr("train.export.copy_weights", others)
    words = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--questions", "0"]
    assert cli.main([*words, "--json"]) == 1
    assert "logits differ by up to" in told(capsys)["error"]
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".writing-*"))


def test_without_questions_logits_alone_are_compared(run, capsys, tmp_path, reader_here) -> None:
    run()
    words = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--questions", "0"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "answers were not compared (--questions 0)" in shown
    verified = json.loads((tmp_path / "out" / "verification.json").read_text())
    assert (verified["prompts"], verified["answers"]) == (1, None)
    assert verified["logits"]["largest_difference"] < 1e-4


def test_nothing_has_the_name_before_it_is_verified(run, capsys, tmp_path, monkeypatch) -> None:
    run()
    out = tmp_path / "out"
    seen = []

    def killed(source: object, folder: Path, form: str, *_: object) -> None:
        seen.append((out.exists(), (folder / "serving.json").is_file(), form))
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "verify", killed)
    assert cli.main(["export", str(tmp_path / "run"), str(out), "--questions", "0"]) == 130
    assert seen == [(False, True, "merged")]
    assert not out.exists()
    assert not list(tmp_path.glob(".writing-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_clears_up(run, capsys, tmp_path, monkeypatch, number) -> None:
    run()
    out, reader = tmp_path / "out", tmp_path / "reader.py"
    # A reader that never ends has the export stopped once it is waited for: before, while it is
    # being started, nobody could end it.
    reader.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\n"
        "time.sleep(1)\n"
        f"os.kill(os.getppid(), {int(number)})\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(verification, "READER", reader)
    before = signal.getsignal(number)
    words = ["export", str(tmp_path / "run"), str(out), "--questions", "0", "--json"]
    assert cli.main(words) == 130
    assert told(capsys)["status"] == 130
    assert signal.getsignal(number) == before
    assert not out.exists()
    assert not list(tmp_path.glob(".writing-*"))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_store_that_fails_leaves_the_export(
    run, capsys, tmp_path, monkeypatch, reader_here
) -> None:
    def failing(**_: object) -> None:
        raise UserError("no room for the store")

    assert cli.main(["build", *run()]) == 0
    monkeypatch.setattr("launch.cache.build", failing)
    out, store = tmp_path / "out", tmp_path / "exported_store"
    words = ["export", str(tmp_path / "run"), str(out), "--questions", "0", "--json"]
    assert cli.main([*words, "--build-store", str(store)]) == 2
    said = f"no room for the store; the export {out} is complete, its store is not"
    assert told(capsys)["error"] == said
    assert (out / "verification.json").is_file()


def test_what_cannot_be_exported_is_told(run, capsys, tmp_path, monkeypatch) -> None:
    run()
    folder, out = tmp_path / "run", tmp_path / "out"

    def refused(*words: str, source: Path = folder, target: Path = out) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert cli.main(["export", str(source), str(target), *words]) == 2
        assert sorted(tmp_path.rglob("*")) == before
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    assert "is not the folder of a run" in refused(source=tmp_path / "nowhere")
    assert f"did you mean {folder}?" in refused(source=folder / "checkpoint")
    assert f"there is something at {folder}" in refused(target=folder)
    assert "there is something at" in refused(target=folder / "recipe.yaml")
    assert "OUT: " in (said := refused(target=folder / "recipe.yaml" / "out"))
    assert "recipe.yaml is not a folder that can be written to" in said
    (folder / "state").mkdir()
    assert f"OUT: {folder}/state/out lies in {folder}/state" in refused(
        target=folder / "state" / "out"
    )
    recipe_file = folder / "recipe.yaml"
    assert "--build-store: " in (said := refused("--build-store", str(recipe_file)))
    assert "recipe.yaml is not a folder that can be written to" in said
    assert "has no adapter (train.tuning=full)" in refused("--form", "adapter")
    assert "--questions 0 leaves answers" in refused()
    assert "run `coinrag build`" in refused("--build-store", str(tmp_path / "store"))
    with monkeypatch.context() as patch:
        patch.setattr(export, "_SPARE_BYTES", shutil.disk_usage(tmp_path).total)
        assert "GiB free" in refused("--questions", "0")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(tmp_path / "gone")})
    )
    assert "an adapter stays as it was trained" in refused("--form", "adapter", "--dtype=bfloat16")
    assert "no model at" in refused("--form", "adapter")
    run("train.system=standard_rag")
    assert "serves without a store" in refused("--build-store", str(tmp_path / "store"))
    shutil.move(folder / "checkpoint", tmp_path / "moved")
    assert "is not finished" in refused()
    with pytest.raises(SystemExit):
        cli.main(["export", str(folder), str(out), "--questions", "-1"])


def test_weights_that_cannot_be_read_are_told(run, capsys, tmp_path) -> None:
    run()
    weights = tmp_path / "run" / "checkpoint" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert (
        cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--questions", "0"]) == 2
    )
    error = capsys.readouterr().err
    assert f"{weights.parent} cannot be read" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_the_reader_has_no_network(reader_here) -> None:
    runpy.run_path(str(READER))
    blocked = pytest.raises(OSError, match="blocked while an export is verified")
    with socket.create_server(("127.0.0.1", 0)) as server, blocked:
        socket.create_connection(server.getsockname(), timeout=5)


def test_only_a_near_tie_excuses_another_answer() -> None:
    places = [{5: 2.0, 6: 1.9}, {7: 3.0, 8: 1.0}]
    reference = Reference(torch.zeros(9), [5, 7], places)
    cases = [[5, 7], [6, 7], [6], [5, 8], [5], [5, 7, 1], [4, 7]]
    found = compare_answers([reference] * len(cases), cases, near=0.2)
    assert (found["equal"], found["near_ties"], found["different"]) == (1, 2, [3, 4, 5, 6])
    strict = compare_answers([reference], [[6, 7]], near=0.05)
    assert strict["different"] == [0]
