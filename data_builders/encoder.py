"""Embeddings of texts by FlagEmbedding encoders, on one device and in one process."""

import contextlib
import io
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_builders.encoded import Encoded, Encoder, unit_rows
from data_builders.models import check_device, folder_identity, model_folder
from recipes.errors import UserError
from recipes.retrieval import RetrievalConfig

log = logging.getLogger(__name__)

ENCODER_OPTION = "retrieval.encoder"
MAX_TEXT_TOKENS = 512
GPU_BATCH_SIZE = 32
# Files that BGE-M3 has beside its weights; without both, FlagEmbedding takes random ones.
BGE_M3_HEADS = ("sparse_linear.pt", "colbert_linear.pt")


def load_encoder(config: RetrievalConfig, threads: int | None) -> Encoder:
    """The FlagEmbedding model of the config, on its one device, in float32.

    Only what `config.weights` counts is computed. The model is freed with the last reference to the
    function.

    Args:
        config: `batch_size` None is 1 on a CPU and `GPU_BATCH_SIZE` elsewhere. At 1 a text's
            bits do not depend on the texts beside it.
        threads: PyTorch's threads while encoding, which a vector's last bits depend on; None
            leaves them.

    Raises:
        UserError: there is no such model or device on this machine, the model lacks the heads of
            `sparse` or `colbert`, or its weights are pickled code.
    """
    check_device(config.device, "retrieval.device")
    folder = model_folder(config.encoder, ENCODER_OPTION)
    _check_heads(config, folder)
    model = _load_model(config, folder)
    limit = min(MAX_TEXT_TOKENS, model.tokenizer.model_max_length)
    wanted: dict[str, bool] = {}
    if config.encoder_kind == "bge_m3":
        wanted["return_sparse"] = config.weights.sparse > 0
        wanted["return_colbert_vecs"] = config.weights.colbert > 0
    seen = {"texts": 0, "truncated": 0}

    def encode(texts: Sequence[str]) -> list[Encoded]:
        if not texts:
            return []
        _count_truncated(seen, model.tokenizer, texts, limit)
        with torch_threads(threads), without_progress_bars():
            found = model.encode(
                list(texts), batch_size=batch_size(config), max_length=limit, **wanted
            )
        return _encoded(found if isinstance(found, Mapping) else {"dense_vecs": found}, config)

    weakref.finalize(encode, _report_truncated, seen, limit)
    return encode


def batch_size(config: RetrievalConfig) -> int:
    """Texts a forward pass, which a vector's last bits depend on."""
    return config.batch_size or (1 if config.device == "cpu" else GPU_BATCH_SIZE)


def _load_model(config: RetrievalConfig, folder: Path) -> Any:
    import pickle

    from FlagEmbedding import BGEM3FlagModel, FlagModel

    common = {"use_fp16": False, "devices": config.device}
    try:
        with without_progress_bars():
            if config.encoder_kind == "bge_m3":
                return BGEM3FlagModel(str(folder), **common)
            pooling = {"flag_cls": "cls", "flag_mean": "mean"}[config.encoder_kind]
            return FlagModel(str(folder), pooling_method=pooling, **common)
    # PyTorch's restricted unpickler, behind .bin and .pt files, refuses whatever is no tensor.
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(
            f"{ENCODER_OPTION}: {config.encoder!r} does not load as "
            f"encoder_kind {config.encoder_kind}: {error}"
        ) from error


def _encoded(found: Mapping[str, Any], config: RetrievalConfig) -> list[Encoded]:
    dense = unit_rows(np.asarray(found["dense_vecs"]))
    if not np.isfinite(dense).all():
        raise UserError(f"{ENCODER_OPTION}: {config.encoder!r} gives NaN or infinite embeddings")
    lexical = found.get("lexical_weights") or [None] * len(dense)
    tokens = found.get("colbert_vecs") or [None] * len(dense)
    return [
        Encoded(
            # A copy: a row of the batch would keep the whole batch in memory.
            row.copy(),
            None if weights is None else _lexical(weights),
            None if vectors is None else vectors.astype(np.float16),
        )
        for row, weights, vectors in zip(dense, lexical, tokens, strict=True)
    ]


def _lexical(weights: Mapping[str, float]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    pairs = sorted((int(token), weight) for token, weight in weights.items())
    return (
        np.array([token for token, _ in pairs], dtype=np.int32),
        np.array([weight for _, weight in pairs], dtype=np.float32),
    )


def _count_truncated(
    seen: dict[str, int], tokenizer: Any, texts: Sequence[str], limit: int
) -> None:
    """FlagEmbedding cuts long texts and does not say so."""
    found = tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
    truncated = sum(len(ids) > limit for ids in found)
    if truncated and not seen["truncated"]:
        log.warning(
            "a text has more than the %d tokens that the encoder reads: only its start is "
            "embedded (said once; the number of such texts follows at the end)",
            limit,
        )
    seen["texts"] += len(texts)
    seen["truncated"] += truncated


def _report_truncated(seen: Mapping[str, int], limit: int) -> None:
    if seen["truncated"]:
        log.warning(
            "%d of %d embedded texts have more than %d encoder tokens and were cut there",
            seen["truncated"],
            seen["texts"],
            limit,
        )


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """PyTorch computes with `count` threads meanwhile; None leaves them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """FlagEmbedding and transformers draw bars of their own on stderr, also outside terminals."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _check_heads(config: RetrievalConfig, folder: Path) -> None:
    if not (config.weights.sparse or config.weights.colbert):
        return
    if missing := [name for name in BGE_M3_HEADS if not (folder / name).is_file()]:
        raise UserError(
            f"{ENCODER_OPTION}: {config.encoder!r} has no {' and no '.join(missing)}, which "
            "retrieval.weights.sparse and retrieval.weights.colbert need"
        )


def encoder_identity(encoder: str) -> str:
    """SHA-256, in hex, of the names and contents of the encoder's files.

    Raises:
        UserError: there is no such model on this machine.
    """
    return folder_identity(model_folder(encoder, ENCODER_OPTION))
