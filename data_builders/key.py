"""What a built data set depends on, and so where it lies: inputs by content, never by path."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from cache_ops.hf import load_tokenizer
from data_builders.retrieval import encoder_identity
from recipes.errors import UserError
from recipes.schema import Recipe

Split = Literal["train", "dev"]
# To be raised whenever the same inputs and settings would give other tables.
FORMAT = 3


def build_key(config: Recipe, split: Split) -> dict[str, Any]:
    """Everything that decides the tables of a split; equal keys mean equal tables.

    Raises:
        UserError: a data file or the encoder is not there.
    """
    key: dict[str, Any] = {
        "format": FORMAT,
        "split": split,
        "data_format": config.data.format,
        "files_sha256": [_file_digest(path) for path in split_files(config, split)],
        "rows_per_file": split_rows(config, split),
        "tokenizer_sha256": tokenizer_identity(load_tokenizer(config.model.path)),
        "chunk_tokens": config.data.chunk_tokens,
        "extractor": config.nuggets.extractor,
        "fuzzy_threshold": config.nuggets.fuzzy_threshold,
        "encoder_sha256": encoder_identity(config.retrieval.encoder),
        "encoder_kind": config.retrieval.encoder_kind,
        "k_c": config.retrieval.k_c,
        "k": config.retrieval.k,
    }
    if split == "train":
        key["seed"] = config.seed
        key["noise_probability"] = config.raft.noise_probability
    return key


def key_folder(config: Recipe, split: Split, key: dict[str, Any]) -> Path:
    """The folder under `data.built_root` that belongs to a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return Path(config.data.built_root) / f"{split}-{digest[:16]}"


def split_files(config: Recipe, split: Split) -> list[str]:
    """The data files of a split."""
    return config.data.train if split == "train" else config.data.dev


def split_rows(config: Recipe, split: Split) -> int | None:
    """How many rows of each file a split uses at most; None: all."""
    data = config.data
    return data.train_rows_per_file if split == "train" else data.dev_rows_per_file


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256, in hex, of how text becomes token ids; not of chat template or padding settings."""
    pipeline = json.loads(tokenizer.backend_tokenizer.to_str())
    for call_setting in ("truncation", "padding"):
        pipeline.pop(call_setting, None)
    return hashlib.sha256(json.dumps(pipeline, sort_keys=True).encode()).hexdigest()


def _file_digest(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot read data file: {error.strerror}") from error
