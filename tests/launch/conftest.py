"""A recipe over a few questions, with a tiny model that can be run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from small import data_row, encode_words, tiny_tokenizer, write_rows
from tiny import tiny_model

from data_builders import workers


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A function from overrides to the arguments that name the recipe."""
    monkeypatch.setattr(workers, "load_encoder", lambda config, threads: encode_words)
    tokenizer = tiny_tokenizer()
    for folder, seed in ((tmp_path / "model", 1), (tmp_path / "run" / "checkpoint", 2)):
        tokenizer.save_pretrained(folder)
        model = tiny_model("llama", seed=seed, vocabulary=len(tokenizer))
        model.config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text("{}")
    for split, numbers in {"train": range(6), "dev": range(20, 23)}.items():
        write_rows(tmp_path / f"{split}.jsonl", [data_row(number) for number in numbers])
    values = {
        "name": "tiny",
        "model": {"path": str(tmp_path / "model")},
        "data": {
            "train": [str(tmp_path / "train.jsonl")],
            "dev": [str(tmp_path / "dev.jsonl")],
            "built_root": str(tmp_path / "built"),
            "chunk_tokens": 128,
        },
        "retrieval": {"encoder": str(tmp_path / "encoder"), "k_c": 3, "k": 4},
        "raft": {"noise_probability": 0.0},
        "store": {"folder": str(tmp_path / "stores")},
        "train": {"run_folder": str(tmp_path / "run")},
        "eval": {"max_new_tokens": 6},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))

    def arguments(*overrides: str) -> list[str]:
        return [str(tmp_path / "tiny.yaml"), *overrides]

    return arguments
