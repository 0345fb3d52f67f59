"""The check of a GPU machine: its rehearsal, and how it ends when a part fails."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "gpu_check.sh"


def figures(found: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a report with its path."""
    if isinstance(found, dict):
        for name, value in found.items():
            yield from figures(value, f"{path}/{name}")
    elif isinstance(found, list):
        for value in found:
            yield from figures(value, path)
    elif isinstance(found, (int, float)) and not isinstance(found, bool):
        yield path, found


def test_rehearsal_measures_every_part(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    for absent in ("datasets", "deepspeed", "FlagEmbedding", "faiss", "rapidfuzz"):
        stub = tmp_path / "absent" / f"{absent}.py"
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"raise ModuleNotFoundError('no {absent}', name={absent!r})\n")
    ended = subprocess.run(
        ["bash", str(SCRIPT), "--rehearse", "--out", str(out)],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONPATH": str(tmp_path / "absent"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(out.read_text())
    assert not [reason for reason in report["skipped"].values() if "not installed" in reason]
    assert report["complete"] is report["rehearsal"] is True
    assert report["errors"] == {}
    assert {"hardware", "torch", "transformers", "date", "cuda"} <= report["environment"].keys()
    # Whatever is not measured without a GPU is named.
    assert {"mfu", "tests", "invariants: varlen", "training: bf16 optimizers"} <= report[
        "skipped"
    ].keys()

    assert {"sdpa_logits_relative_error", "serving_logits_relative_error"} < report[
        "invariants"
    ].keys()
    assert [name.split(",")[0] for name in report["training"]] == ["lora", "lora", "full"]
    for setting in report["training"].values():
        ratio = setting["tokens_per_second"] / setting["samples_per_second"]
        assert 300 < ratio < 900
    assert report["ways"]["packed"]["packed_is_faster_times"] == 1
    assert report["ways"].keys() == {"packed", "two_pass", "dense", "plain"}
    systems = report["ttft"]
    assert systems["turborag"]["active_tokens"] == systems["standard_rag"]["active_tokens"]
    assert systems["coinrag"]["active_tokens"] < 0.6 * systems["turborag"]["active_tokens"]
    measured = {name: report[name] for name in ("invariants", "training", "ways", "ttft")}
    for path, value in figures(measured):
        assert isfinite(value), path
        assert value > 0, path
        assert any(
            unit in path
            for unit in ("error", "seconds", "per_second", "nats", "times", "_ms", "over_coinrag",
                         "tokens", "questions")
        ), path  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    path = ROOT / "tests" / "benchmarks" / "gpu_check.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def test_a_failing_part_is_recorded_and_the_others_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(check: object) -> dict:
        raise AssertionError("varlen is off by 0.3")

    monkeypatch.setitem(script.PARTS, "tests", broken)
    monkeypatch.setitem(script.PARTS, "ttft", lambda check: {"coinrag": {"questions": 1}})
    out = tmp_path / "check.json"
    assert script.main(["--rehearse", "--out", str(out), "--parts", "tests", "ttft"]) == 1
    report = json.loads(out.read_text())
    assert report["errors"] == {"tests": "AssertionError: varlen is off by 0.3"}
    assert report["ttft"] == {"coinrag": {"questions": 1}}
    assert report["complete"] is True


def test_what_does_not_fit_is_no_failure(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(check: object, setting: Any) -> dict:
        if setting.tuning == "full":
            raise torch.OutOfMemoryError("tried to allocate 100 GiB")
        return {"step_seconds": 1.0}

    monkeypatch.setattr(script, "_train", too_large)
    check = script.Check(torch.device("cpu"), rehearsal=True, peak_tflops=None)
    assert len(script.training(check)) == 2
    kept = check.skipped["training: full, adamw, sdpa, gradient checkpointing"]
    assert kept == "does not fit: tried to allocate 100 GiB"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_no_gpu_is_said_in_words(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--out", str(tmp_path / "check.json")]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
