"""A tiny model, tokenizer and built data set, and training through the real command line."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from small import data_row, encode_words, tiny_tokenizer, write_rows
from tiny import tiny_model

from data_builders import workers
from data_builders.build import build
from eval.in_training import open_evaluator
from launch.training import SCRIPT, run_training
from recipes.resolve import resolve
from train import recorder
from train.trainer import train
from train.watching import OpenEvaluator

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
  learning_rate: 1e-3
  effective_batch_samples: 8
  micro_batch_samples: 2
  max_length_tokens: 400
  run_folder: {folder}/run
"""


@dataclass(frozen=True)
class Workplace:
    """A folder with everything a training run needs."""

    folder: Path

    def arguments(self, name: str, *overrides: str) -> list[str]:
        """The recipe and overrides of a run in a folder of that name."""
        recipe = str(self.folder / "recipe.yaml")
        return [recipe, f"train.run_folder={self.folder / name}", *overrides]

    def train(self, name: str, *overrides: str, processes: int = 1) -> list[dict[str, Any]]:
        """Trains as `coinrag train` does and returns the metrics."""
        ending = run_training(self.arguments(name, *overrides), processes)
        assert ending.status == 0, ending.message
        return self.metrics(name)

    def train_here(
        self, name: str, *overrides: str, evaluator: OpenEvaluator = open_evaluator
    ) -> list[dict[str, Any]]:
        """Trains in this process, which saves a start, and returns the metrics."""
        with pytest.MonkeyPatch.context() as patch:
            # Drawing takes longer than training here.
            patch.setattr(recorder, "draw_curves", lambda lines, path: None)
            try:
                train(resolve(self.arguments(name, *overrides)), evaluator)
            finally:
                AcceleratorState._reset_state(reset_partial_state=True)
        return self.metrics(name)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The lines of a run's metrics file."""
        lines = (self.folder / name / "metrics.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def refused(self, name: str, *overrides: str) -> str:
        """The message with which the script itself refuses; its exit status must be 2."""
        ended = subprocess.run(
            [sys.executable, str(SCRIPT), *self.arguments(name, *overrides)],
            capture_output=True,
            text=True,
            cwd=SCRIPT.parent.parent,
        )
        assert ended.returncode == 2, ended.stderr
        assert "Traceback" not in ended.stderr
        return ended.stderr


# A module's own: runs of two modules may have the same name.
@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Twenty-two training rows: two full steps of eight and one of six."""
    folder = tmp_path_factory.mktemp("training")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    tiny_model("llama", vocabulary=len(tokenizer)).save_pretrained(folder / "model")
    (folder / "encoder").mkdir()
    (folder / "encoder" / "config.json").write_text("{}")
    write_rows(folder / "train.jsonl", [data_row(number) for number in range(22)])
    write_rows(folder / "dev.jsonl", [data_row(number) for number in range(100, 104)])
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "load_encoder", lambda config, threads: encode_words)
        build(resolve([str(folder / "recipe.yaml")]).config, "train")
    return Workplace(folder)


@pytest.fixture(scope="module")
def place(workplace: Workplace) -> Workplace:
    """The workplace, with dev data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "load_encoder", lambda config, threads: encode_words)
        build(resolve([str(workplace.folder / "recipe.yaml")]).config, "dev")
    return workplace
