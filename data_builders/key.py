"""What a built data set depends on, and so where it lies: inputs by content, never by path."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from cache_ops.hf import load_tokenizer
from data_builders.encoder import batch_size, encoder_identity
from data_builders.nuggets.extract import extractor_identity
from data_builders.scorers import scorer_key
from data_builders.scorers.cross_encoder import cross_encoder_key
from data_builders.scorers.hidden_ffn import generator_key
from recipes.building import DataFormat
from recipes.errors import UserError
from recipes.schema import Recipe

Split = Literal["train", "dev"]
SPLITS: tuple[Split, ...] = get_args(Split)
# To be raised whenever the same inputs and settings would give other tables or assets.
FORMAT = 5


def build_key(config: Recipe, split: Split) -> dict[str, Any]:
    """Everything that decides the tables of a split; equal keys mean equal tables.

    Raises:
        UserError: a data file, the encoder or an extractor's model is not there.
    """
    retrieval = config.retrieval
    key: dict[str, Any] = {
        "split": split,
        "data_format": split_format(config, split),
        "files_sha256": [_file_digest(path) for path in split_files(config, split)],
        "corpus_sha256": [_file_digest(path) for path in config.data.corpus],
        "rows_per_file": split_rows(config, split),
        "chunks": chunks_key(config),
        "encoder": encoder_key(config),
        "weights": retrieval.weights.model_dump(),
        "bm25": retrieval.bm25,
        "candidates": retrieval.candidates,
        "selection": retrieval.selection,
        "k": retrieval.k,
    }
    if retrieval.budget is not None:
        # Tokens that stand twice are paid twice.
        key["budget"] = {**retrieval.budget.model_dump(), "overlap": retrieval.overlap}
    if retrieval.min_score is not None:
        key["min_score"] = retrieval.min_score
    if (scorer := scorer_key(config)) is not None:
        key["nugget_scorer"] = scorer
    if retrieval.rerank_chunks is not None:
        key["rerank"] = {"chunks": retrieval.rerank_chunks, **pairs_key(config)}
    if retrieval.selection == "two_stage":
        key["k_c"] = retrieval.k_c
    if split == "train":
        key["seed"] = config.seed
        key["noise_probability"] = config.raft.noise_probability
    return key


def chunks_key(config: Recipe) -> dict[str, Any]:
    """What decides the chunks and nuggets of a passage."""
    key = {
        "format": FORMAT,
        "tokenizer_sha256": tokenizer_identity(load_tokenizer(config.model.path)),
        "chunk_tokens": config.data.chunk_tokens,
        "extractor": extractor_identity(config.nuggets),
        "fuzzy_threshold": config.nuggets.fuzzy_threshold,
    }
    if config.nuggets.neighbour_sentences:
        key["neighbour_sentences"] = config.nuggets.neighbour_sentences
    return key


def encoder_key(config: Recipe) -> dict[str, Any]:
    """What decides the vectors of a text."""
    retrieval = config.retrieval
    return {
        "format": FORMAT,
        "sha256": encoder_identity(retrieval.encoder),
        "kind": retrieval.encoder_kind,
        "sparse": retrieval.weights.sparse > 0,
        "colbert": retrieval.weights.colbert > 0,
        "batch_size": batch_size(retrieval),
    }


def pairs_key(config: Recipe) -> dict[str, Any]:
    """What decides the cross-encoder's score of a question and a text."""
    cross_encoder = config.retrieval.cross_encoder
    assert cross_encoder is not None, "a validated recipe that uses one describes it"
    return {"format": FORMAT, **cross_encoder_key(cross_encoder)}


def hidden_key(config: Recipe) -> dict[str, Any]:
    """What decides the generator's vectors of a chunk's nuggets and of a question."""
    return {"format": FORMAT, **generator_key(config)}


def digest(key: dict[str, Any]) -> str:
    """A short name for a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def key_folder(config: Recipe, split: Split, key: dict[str, Any]) -> Path:
    """The folder under `data.built_root` that belongs to a key."""
    return Path(config.data.built_root) / f"{split}-{digest(key)}"


def assets_folder(config: Recipe) -> Path:
    """Where the assets of all builds under `data.built_root` lie."""
    return Path(config.data.built_root) / "assets"


def split_files(config: Recipe, split: Split) -> list[str]:
    """The data files of a split."""
    return config.data.train if split == "train" else config.data.dev


def split_format(config: Recipe, split: Split) -> DataFormat:
    """The format of a split's data files."""
    return config.data.format if split == "train" else config.data.dev_format or config.data.format


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
