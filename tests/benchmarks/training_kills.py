"""Kills of a training at random moments, and whether what it comes to is the same.

    python tests/benchmarks/training_kills.py [--kills N] [--seed N]

A tiny model is trained through the real command line, once without interruption, once ended by
SIGKILL or SIGTERM again and again and resumed each time, until it has been ended N times and then
comes to its end. It has dropout, and a state after every step, so that many ends fall into the
saving. The loss curve and the final weights of both must be equal bit by bit, SIGTERM must end with
status 0, and no half-written checkpoint may ever be seen. Prints one JSON object.
"""

import argparse
import fcntl
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGTERM

import psutil
import torch
from safetensors.torch import load_file

# The folder of the tests' shared helpers, for a run as a script.
sys.path.insert(0, str(Path(__file__).parents[1]))

from small import data_row, encode_words, tiny_tokenizer, write_rows
from tiny import tiny_model

from data_builders import workers
from data_builders.build import build
from recipes.resolve import resolve

ROOT = Path(__file__).parents[2]
RECIPE = """
name: tiny
model: {{path: {folder}/model}}
data:
  train: [{folder}/train.jsonl]
  dev: [{folder}/dev.jsonl]
  built_root: {folder}/built
  chunk_tokens: 64
retrieval: {{encoder: {folder}/encoder, k_c: 3, k: 4}}
prompt: {{before_passages: "", after_passages: " {{question}}"}}
train:
  tuning: lora
  lora: {{rank: 4, dropout: 0.2}}
  learning_rate: 1e-2
  epochs: {epochs}
  effective_batch_samples: 8
  micro_batch_samples: 2
  max_length_tokens: 400
  save_every_steps: 1
  run_folder: {folder}/unset
"""
STEPS_AN_EPOCH = 3
EXACT = ("step", "loss", "gradient_norm", "learning_rate")


def run_kills(folder: Path, kills: int, seed: int) -> dict[str, object]:
    """Trains without and with kills in a folder, and compares.

    Raises:
        AssertionError: the runs differ, or one ended otherwise than it must.
    """
    _prepare(folder, kills)
    random = Random(seed)
    whole, killed = folder / "whole", folder / "killed"
    process = _start(folder, whole)
    assert process.wait() == 0, "the uninterrupted run failed"
    step_seconds = _lines(whole)[-1]["elapsed_seconds"] / len(_lines(whole))
    ended: Counter[str] = Counter()
    while sum(ended.values()) < kills:
        ended[_end_one(folder, killed, random, step_seconds)] += 1
        assert not (killed / "checkpoint").exists(), "more steps are needed for so many kills"
    assert _start(folder, killed).wait() == 0, "the last run failed"
    steps = [[line[name] for name in EXACT] for line in _lines(whole)]
    assert steps == [[line[name] for name in EXACT] for line in _lines(killed)]
    for file in ("checkpoint/model.safetensors", "adapter/adapter_model.safetensors"):
        one, other = load_file(whole / file), load_file(killed / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file
    assert not list(killed.rglob(".writing-*")), "leftovers of killed runs are there"
    return {"kills": kills, "ended": dict(ended), "steps": len(steps), "equal": True}


def _prepare(folder: Path, kills: int) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    tiny_model("llama", vocabulary=len(tokenizer)).save_pretrained(folder / "model")
    (folder / "encoder").mkdir()
    (folder / "encoder" / "config.json").write_text("{}")
    write_rows(folder / "train.jsonl", [data_row(number) for number in range(22)])
    write_rows(folder / "dev.jsonl", [data_row(number) for number in range(100, 104)])
    recipe = folder / "recipe.yaml"
    # A life is ended within its first three steps.
    recipe.write_text(RECIPE.format(folder=folder, epochs=kills + 1))
    workers.load_encoder = lambda config, threads: encode_words
    build(resolve([str(recipe)]).config, "train")


def _start(folder: Path, run: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "launch.cli", "train", str(folder / "recipe.yaml")]
    command += [f"train.run_folder={run}", "train.resume=true"]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _end_one(folder: Path, run: Path, random: Random, step_seconds: float) -> str:
    """One life of the killed run; how and when it was ended."""
    done = len(_lines(run))
    process = _start(folder, run)
    number = random.choice((SIGKILL, SIGTERM))
    in_set_up = random.random() < 0.15
    while not _is_training(run) or (len(_lines(run)) <= done and not in_set_up):
        assert process.poll() is None, "the run ended by itself"
        time.sleep(0.005)
    time.sleep(random.uniform(0, 2 if in_set_up else (STEPS_AN_EPOCH - 1) * step_seconds))
    if number == SIGTERM:
        process.terminate()
        assert process.wait() == 0, "a run that is asked to stop ends with status 0"
        return "SIGTERM in the set-up" if in_set_up else "SIGTERM"
    # The script, whose launcher then ends too.
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    assert process.wait() != 0
    litter = list(run.rglob(".writing-*"))
    return "SIGKILL while saving" if litter else "SIGKILL"


def _is_training(run: Path) -> bool:
    """Whether a process holds the run's lock."""
    try:
        with (run / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def _lines(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    complete = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    return [line for text in complete if "loss" in (line := json.loads(text))]


def main() -> None:
    """Runs as the module says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run_kills(Path(folder), arguments.kills, arguments.seed)
    print(json.dumps(result | {"seconds": round(time.perf_counter() - began, 1)}))


if __name__ == "__main__":
    main()
