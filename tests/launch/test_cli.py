"""The command line: its surface, its exit statuses and its JSON, through real processes."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import launch
from launch import cli
from recipes.systems import SystemName

ROOT = Path(launch.__file__).resolve().parent.parent

# A change here is a change of the public command line: say so in its commit.
SURFACE = {
    "ask": [
        "--checkpoint",
        "--help",
        "--json",
        "--log",
        "--metrics",
        "--question",
        "--system",
        "-h",
        "RECIPE|KEY=VALUE",
    ],
    "build": [
        "--help",
        "--json",
        "--read-batch",
        "--retry-failed",
        "--stats",
        "--write-batch",
        "-h",
        "RECIPE|KEY=VALUE",
    ],
    "cache build": [
        "--checkpoint",
        "--help",
        "--json",
        "--remove-others",
        "--system",
        "-h",
        "RECIPE|KEY=VALUE",
    ],
    "cache export": ["--dtype", "--help", "--json", "-h", "OUT", "STORE"],
    "cache gc": ["--help", "--json", "-h", "STORE"],
    "cache stat": ["--help", "--json", "-h", "STORE"],
    "cache verify": ["--help", "--json", "--model", "-h", "STORE"],
    "check": [
        "--gpu-gib",
        "--help",
        "--json",
        "--probe",
        "--processes",
        "--samples",
        "--sharding",
        "--tflops",
        "-h",
        "RECIPE|KEY=VALUE",
    ],
    "compare": ["--help", "--json", "-h", "RECIPE|KEY=VALUE"],
    "cost": ["--help", "--json", "--measured", "--picture", "-h", "SCENARIO|KEY=VALUE"],
    "export": [
        "--build-store",
        "--dtype",
        "--form",
        "--help",
        "--json",
        "--questions",
        "-h",
        "OUT",
        "RUN",
    ],
    "inject": [
        "--format",
        "--help",
        "--json",
        "--seed",
        "--share",
        "-h",
        "OUT",
        "QUESTIONS",
    ],
    "nuggets": ["--help", "--json", "--picture", "-h", "RECIPE|KEY=VALUE"],
    "train-scorer": ["--help", "--json", "-h", "RECIPE|KEY=VALUE"],
    "train": [
        "--head",
        "--help",
        "--json",
        "--node-rank",
        "--nodes",
        "--processes",
        "--sharding",
        "-h",
        "RECIPE|KEY=VALUE",
    ],
    "world": [
        "--conversations",
        "--dev",
        "--help",
        "--json",
        "--passages",
        "--seed",
        "--train",
        "-h",
        "OUT",
    ],
}


def _coinrag(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def _surface(parser: argparse.ArgumentParser, name: str = "") -> dict[str, list[str]]:
    """The flags and arguments of each command, those of commands inside commands too."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        words = [word for a in parser._actions for word in a.option_strings or [a.metavar]]
        return {name: sorted(map(str, words))}
    return {
        inner: words
        for group in groups
        for command, inside in group.choices.items()
        for inner, words in _surface(inside, f"{name} {command}".strip()).items()
    }


def test_command_line_surface_is_pinned() -> None:
    assert _surface(cli.parser()) == SURFACE


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from launch import cli; cli.parser().format_help();"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_flags_may_stand_among_the_arguments() -> None:
    parsed = cli.parse(["train", "a", "--json", "k=v", "--processes", "2", "x.y=-1"])
    assert parsed.arguments == ["a", "k=v", "x.y=-1"]
    assert (parsed.json, parsed.processes) == (True, 2)
    parsed = cli.parse(["cache", "build", "a", "--remove-others", "k=v", "--json", "l=w"])
    assert parsed.arguments == ["a", "k=v", "l=w"]
    assert (parsed.json, parsed.remove_others) == (True, True)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["build"],
        ["build", "quickstart", "--jso"],
        ["build", "quickstart", "--stats", "--write-batch", "x"],
        ["train", "quickstart", "--unknown", "seed=1"],
        ["train", "quickstart", "--processes", "0"],
        ["world", "a", "b"],
        ["world", "a", "--train", "x"],
        ["world", "a", "--passages", "500", "--conversations", "2"],
        ["cache"],
        ["cache", "build"],
        ["cache", "verify"],
        ["cache", "stat", "a", "b"],
        ["cache", "export", "a", "b", "--dtype", "int4"],
        ["ask", "quickstart", "--system", "rag"],
        ["cache", "build", "quickstart", "--system", "rag"],
    ],
)
def test_usage_errors_end_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.parse(arguments)
    assert caught.value.code == 2
    assert "usage: coinrag" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["ask"], ["cache", "build"]])
def test_every_system_of_a_recipe_is_taken(command: list[str]) -> None:
    for name in get_args(SystemName):
        assert cli.parse([*command, "quickstart", "--system", name]).system == name
    assert cli.parse([*command, "quickstart"]).system == "coinrag"


@pytest.mark.parametrize("command", ["build", "train", "compare", "ask", "cache build"])
def test_wrong_recipe_ends_with_two_and_one_message(command: str) -> None:
    done = _coinrag(*command.split(), "quickstart", "train.epoch=2", "--json", "seed=x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: 2 mistakes in the recipe:\n")
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert (report["command"], report["status"]) == (command, 2)
    assert "did you mean train.epochs?" in report["error"]


def test_usage_errors_have_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "quickstart", "--processes", "0", "--json"])
    shown = capsys.readouterr()
    assert json.loads(shown.out)["status"] == 2
    assert "expected at least 1" in shown.err


def test_json_takes_a_name_that_is_no_unicode() -> None:
    done = _coinrag("build", os.fsdecode(b"caf\xff"), "--json")
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["status"] == 2


def test_a_world_that_cannot_be_written_ends_with_two(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "dev.jsonl").mkdir(parents=True)
    for folder in ("file", "file/below", "taken"):
        done = _coinrag("world", folder, "--train", "3", "--dev", "2", folder=tmp_path)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(f"error: cannot write a world into {folder}: ")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["dev.jsonl"]


def test_stdout_is_empty_when_a_command_fails_without_json() -> None:
    done = _coinrag("build", "quikstart")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean quickstart?" in done.stderr


@pytest.mark.parametrize(
    ("raised", "status"),
    [("KeyboardInterrupt()", 130), ("RuntimeError('ours')", 1), ("Marked('theirs')", 2)],
)
def test_exit_status_of_what_a_command_raises(raised: str, status: int) -> None:
    code = f"""
import sys
from launch import cli
class Marked(ValueError):
    is_user_error = True
def compare(arguments):
    raise {raised}
cli.compare = compare
sys.exit(cli.main(["compare", "quickstart", "--json"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert json.loads(done.stdout.splitlines()[-1])["status"] == status
    assert ("Traceback" in done.stderr) == (status == 1)


def test_training_failure_passes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch import training
    from recipes.exit import Ending

    monkeypatch.setattr(training, "run_training", lambda *a, **k: Ending(2, "used run folder"))
    assert cli.main(["train", "quickstart", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["error"]) == (2, "used run folder")


def test_world_is_written_where_asked(tmp_path: Path) -> None:
    done = _coinrag("world", "out", "--train", "3", "--dev", "2", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["folder"] == "out"
    rows = [(tmp_path / "out" / f"{split}.jsonl").read_text("utf-8") for split in ("train", "dev")]
    assert [len(text.splitlines()) for text in rows] == [3, 2]


def test_conversations_are_written_beside_the_world(tmp_path: Path) -> None:
    words = ["world", "out", "--train", "3", "--dev", "30", "--conversations", "4", "--json"]
    done = _coinrag(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["conversations"] == 4
    told = (tmp_path / "out" / "conversations.jsonl").read_text("utf-8")
    assert len(told.splitlines()) == 4


def test_a_test_set_for_prompt_injection_comes_with_the_settings_that_measure_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from data_builders.world import write_world
    from recipes.resolve import resolve

    write_world(tmp_path, train_questions=3, dev_questions=2, seed=0)
    out = tmp_path / "two words"
    words = ["inject", str(tmp_path / "dev.jsonl"), str(out)]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    told, *steps = shown.splitlines()
    assert told == "2 of 2 questions attacked; measure with"
    (*build, built), (*compare, overrides) = ([*s[:3], s[3:]] for s in map(shlex.split, steps))
    assert (build, compare) == (["coinrag", "build", "RECIPE"], ["coinrag", "compare", "RECIPE"])
    assert built == overrides
    config = resolve(["quickstart", *overrides]).config
    assert config.data.dev == [str(out / "questions.jsonl")]
    assert (config.data.dev_format, config.eval.output) == ("jsonl", str(out / "compare"))
    assert config.eval.injections is not None
    assert len(Path(config.eval.injections).read_text("utf-8").splitlines()) == 2
    assert cli.main([*words, "--format", "hotpot", "--json"]) == 2
    assert "--format: expected one of ircot, jsonl" in capsys.readouterr().out
