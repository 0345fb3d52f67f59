"""A nugget's score by a small trained network over two vectors, FFN([enc(nugget); enc(question)]).

Added to the cosine of the two vectors it begins as a bi-encoder and learns what to correct; alone
it has to learn from the training questions how to compare at all.

The vectors are the retrieval encoder's, or the generator's own: a nugget's is the mean of the last
hidden states over its span in the chunk's forward pass, a question's the mean over its tokens, read
alone. `coinrag train-scorer` trains the network. Its folder:

config.json       which vectors it takes, how wide they and it are, and whose they are
ffn.safetensors   the weights, fp32
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data_builders.encoded import Encoder
from data_builders.encoder import encoder_identity
from data_builders.models import folder_identity, model_folder
from data_builders.retrieval import rounded
from data_builders.tables import Chunk
from recipes.errors import UserError
from recipes.retrieval import HiddenFfnConfig
from recipes.schema import Recipe

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "ffn.safetensors"
FORMAT = 1
# A softmax over cosines is too even to learn from.
_COSINE_WEIGHT = 10.0
_PATH_OPTION = "retrieval.hidden_ffn.path"

Vectors = NDArray[np.float32]


class NuggetVectors(NamedTuple):
    """Where the network's input comes from."""

    of_question: Callable[[str], Vectors]
    """A question's text to its vector `[dimensions]`."""
    of_nuggets: Callable[[Chunk], Vectors]
    """A chunk with nuggets to theirs, `[nuggets, dimensions]`."""


def encoder_vectors(encoded: Encoder) -> NuggetVectors:
    """The dense vectors of the retrieval encoder."""
    return NuggetVectors(
        lambda question: encoded([question])[0].dense,
        lambda chunk: np.stack([text.dense for text in encoded(chunk.nugget_texts)]),
    )


class NuggetFfn(nn.Module):
    """Scores rows of nuggets for rows of questions; N rows, E dimensions."""

    def __init__(self, dimensions: int, width: int, *, add_cosine: bool) -> None:
        super().__init__()
        self.nugget_norm = nn.LayerNorm(dimensions)
        self.question_norm = nn.LayerNorm(dimensions)
        self.hidden = nn.Linear(2 * dimensions, width)
        self.score = nn.Linear(width, 1)
        self.cosine_weight = nn.Parameter(torch.tensor(_COSINE_WEIGHT)) if add_cosine else None
        if add_cosine:
            nn.init.zeros_(self.score.weight)

    def forward(self, nuggets_NE: Tensor, questions_NE: Tensor) -> Tensor:
        """scores_N: one number a row, higher for a better nugget."""
        normed = self.nugget_norm(nuggets_NE), self.question_norm(questions_NE)
        hidden = nn.functional.gelu(self.hidden(torch.cat(normed, dim=-1)))
        scores_N: Tensor = self.score(hidden).squeeze(-1)
        if self.cosine_weight is None:
            return scores_N
        cosines_N = nn.functional.cosine_similarity(nuggets_NE, questions_NE, dim=-1)
        return scores_N + self.cosine_weight * cosines_N


@dataclass(frozen=True)
class Described:
    """What a network's folder says of it."""

    vectors: str
    dimensions: int
    width: int
    add_cosine: bool
    made_for: str
    """Of the vectors that it was trained on, as `vectors_identity` says."""
    format: int = FORMAT


def score_by_ffn(
    ffn: NuggetFfn, vectors: NuggetVectors
) -> Callable[[str, Sequence[Chunk]], list[list[float]]]:
    """The network as a `NuggetScorer`. Threads may share it.

    It computes in float64, where a score, once rounded, does not depend on the nuggets beside it.
    """
    ffn = ffn.double().eval()

    @torch.inference_mode()
    def score(question: str, chunks: Sequence[Chunk]) -> list[list[float]]:
        query_E = torch.from_numpy(vectors.of_question(question).astype(np.float64))
        rows: list[list[float]] = []
        for chunk in chunks:
            if not chunk.nuggets:
                rows.append([])
                continue
            nuggets_NE = torch.from_numpy(vectors.of_nuggets(chunk).astype(np.float64))
            rows.append(rounded(ffn(nuggets_NE, query_E.expand_as(nuggets_NE)).numpy()))
        return rows

    return score


def write_ffn(folder: Path, ffn: NuggetFfn, described: Described) -> None:
    """Writes the files of a network into an empty folder."""
    (folder / CONFIG_FILE).write_text(json.dumps(asdict(described), indent=1), encoding="utf-8")
    weights = {name: part.contiguous() for name, part in ffn.state_dict().items()}
    save_file(weights, folder / WEIGHTS_FILE)


def load_ffn(config: Recipe) -> NuggetFfn:
    """The trained network of a recipe, made sure to be for the vectors that it will be given.

    Raises:
        UserError: as `ffn_key`; or it was trained with another model's vectors, or is damaged.
    """
    section = _section(config)
    described = _described(section)
    if described.made_for != vectors_identity(config):
        whose = "retrieval.encoder with its kind"
        if section.vectors == "generator":
            whose = "model.path"
        raise UserError(
            f"{_PATH_OPTION}: {section.path} was trained on the vectors of another model than "
            f"{whose}: set that back, or train a scorer for this one into another folder"
        )
    try:
        ffn = NuggetFfn(described.dimensions, described.width, add_cosine=described.add_cosine)
        ffn.load_state_dict(load_file(Path(section.path) / WEIGHTS_FILE))
    except (OSError, SafetensorError, RuntimeError, TypeError) as error:
        raise _damaged(section, error) from error
    return ffn


def ffn_key(config: Recipe) -> dict[str, Any]:
    """What decides the network's scores, beside the retrieval encoder.

    Raises:
        UserError: no trained network lies there, or it is one for other vectors or of another
            width than the recipe says.
    """
    section = _section(config)
    _described(section)
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            with (Path(section.path) / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise _damaged(section, error) from error
    key: dict[str, Any] = {"sha256": digest.hexdigest()}
    if section.vectors == "generator":
        key["generator"] = generator_key(config)
    return key


def generator_key(config: Recipe) -> dict[str, Any]:
    """What decides the generator's vectors.

    Raises:
        UserError: there is no such model on this machine.
    """
    return {"sha256": _model_identity(config.model.path), "dtype": config.model.dtype}


def vectors_identity(config: Recipe) -> str:
    """Whose vectors the recipe's network takes: the model's content and, of encoders, the kind.

    Raises:
        UserError: there is no such model on this machine.
    """
    if _section(config).vectors == "generator":
        return _model_identity(config.model.path)
    return f"{config.retrieval.encoder_kind} {encoder_identity(config.retrieval.encoder)}"


def _section(config: Recipe) -> HiddenFfnConfig:
    section = config.retrieval.hidden_ffn
    assert section is not None, "a validated recipe describes it"
    return section


def _described(section: HiddenFfnConfig) -> Described:
    path = Path(section.path) / CONFIG_FILE
    try:
        described = Described(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UserError(
            f"{_PATH_OPTION}: no trained scorer in {section.path}: coinrag train-scorer makes one "
            "with the same recipe"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{_PATH_OPTION}: {path} describes no scorer: {error}") from error
    if described.format != FORMAT:
        raise UserError(
            f"{_PATH_OPTION}: the scorer in {section.path} has format {described.format}, this "
            f"version reads {FORMAT}: train one into another folder"
        )
    for name in ("vectors", "width", "add_cosine"):
        found, wanted = (json.dumps(getattr(one, name)) for one in (described, section))
        if found != wanted:
            raise UserError(
                f"{_PATH_OPTION}: the scorer in {section.path} has {name} {found}, "
                f"the recipe wants {wanted}: set retrieval.hidden_ffn.{name}={found}, or train "
                "one into another folder"
            )
    return described


def _damaged(section: HiddenFfnConfig, error: Exception) -> UserError:
    return UserError(f"{_PATH_OPTION}: {section.path} is damaged: {error}")


def _model_identity(name: str) -> str:
    """Hashes gigabytes once, as long as no file is touched."""
    folder = model_folder(name, "model.path")
    files = (entry.stat() for entry in os.scandir(folder) if entry.is_file())
    return _folder_identity(folder, tuple((file.st_size, file.st_mtime_ns) for file in files))


@lru_cache
def _folder_identity(folder: Path, touched: tuple[tuple[int, int], ...]) -> str:
    return folder_identity(folder)
