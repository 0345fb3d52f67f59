"""Two-stage dense retrieval: the top k_c chunks of a question, then the top k nuggets inside them.

The CoinRAG paper's selection, with FlagEmbedding encoders. Scores are cosines rounded to
`SCORE_DECIMALS`, and equal scores keep their order: ranks do not depend on how texts are batched.
"""

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recipes.errors import UserError
from recipes.schema import RetrievalConfig

Embeddings = NDArray[np.float32]
Encoder = Callable[[Sequence[str]], Embeddings]
"""Texts to unit-length float32 rows `[texts, dimensions]`."""

SCORE_DECIMALS = 5
MAX_TEXT_TOKENS = 512


def load_encoder(config: RetrievalConfig) -> Encoder:
    """The FlagEmbedding model of the config, on its one device, in float32.

    Raises:
        UserError: there is no such model or device on this machine.
    """
    _check_device(config.device)
    folder = str(encoder_folder(config.encoder))
    from FlagEmbedding import BGEM3FlagModel, FlagModel

    common = {"use_fp16": False, "devices": config.device}
    try:
        with _without_progress_bars():
            if config.encoder_kind == "bge_m3":
                model = BGEM3FlagModel(folder, **common)
            else:
                pooling = {"flag_cls": "cls", "flag_mean": "mean"}[config.encoder_kind]
                model = FlagModel(folder, pooling_method=pooling, **common)
    except (OSError, ValueError) as error:
        raise UserError(
            f"retrieval.encoder: {config.encoder!r} does not load as "
            f"encoder_kind {config.encoder_kind}: {error}"
        ) from error

    def encode(texts: Sequence[str]) -> Embeddings:
        with _without_progress_bars():
            found = model.encode(
                list(texts), batch_size=config.batch_size or 1, max_length=MAX_TEXT_TOKENS
            )
        dense = found["dense_vecs"] if isinstance(found, dict) else found
        return unit_rows(np.asarray(dense))

    return encode


def _check_device(device: str) -> None:
    import torch

    kind, _, number = device.partition(":")
    mps = int(torch.backends.mps.is_available())
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": mps}
    if int(number or 0) >= counts[kind]:
        there = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        raise UserError(f"retrieval.device: no {device} on this machine; it has {there}")


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """FlagEmbedding and transformers draw bars of their own on stderr, also outside terminals."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def unit_rows(rows: NDArray[np.floating]) -> Embeddings:
    """Rows scaled to unit length, in float32; zero rows stay zero."""
    exact = rows.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    return (exact / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def encoder_folder(encoder: str) -> Path:
    """The folder of an encoder given by path or by a name in the local Hugging Face cache.

    Raises:
        UserError: neither is there. Nothing is downloaded.
    """
    # An unknown user's home stays as it is written.
    with contextlib.suppress(RuntimeError):
        folder = Path(encoder).expanduser()
        if (folder / "config.json").is_file():
            return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(encoder, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"retrieval.encoder: no encoder at {encoder!r}: expected a folder with config.json, or "
            "a name in the local Hugging Face cache (nothing is downloaded)"
        ) from error


def encoder_identity(encoder: str) -> str:
    """SHA-256, in hex, of the names and contents of the encoder's files."""
    folder = encoder_folder(encoder)
    digest = hashlib.sha256()
    names = {".json", ".txt", ".model", ".safetensors", ".bin", ".pt"}
    for path in sorted(folder.rglob("*")):
        if path.suffix in names and path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def cosine_scores(query: Embeddings, rows: Embeddings) -> list[float]:
    """Rounded cosines of one unit vector with unit rows, as exact float32 values."""
    # Elementwise products in float64: unlike a matrix product, independent of the other rows.
    products = (rows.astype(np.float64) * query.astype(np.float64)).sum(axis=1)
    scores: list[float] = np.round(products, SCORE_DECIMALS).astype(np.float32).tolist()
    return scores


def top(scores: Sequence[float], count: int) -> list[int]:
    """Indices of the highest scores, best first; the earlier index wins a tie."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]


def select_nuggets(
    nugget_scores: Sequence[Sequence[float]],
    nuggets: Sequence[Sequence[tuple[int, int]]],
    k: int,
) -> list[tuple[int, int]]:
    """The best `k` nuggets of the retrieved chunks, as (chunk index, nugget index), best first.

    Args:
        nugget_scores: for each chunk in rank order, a score for each of its nuggets.
        nuggets: likewise, each nugget's token span in its chunk.
        k: how many nuggets at most.

    Ties go to the better chunk rank, then to the earlier position in the chunk.
    """
    order = sorted(
        (-score, chunk, nuggets[chunk][nugget], nugget)
        for chunk, scores in enumerate(nugget_scores)
        for nugget, score in enumerate(scores)
    )
    return [(chunk, nugget) for _, chunk, _, nugget in order[:k]]
