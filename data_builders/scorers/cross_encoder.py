"""Scores of texts for questions by FlagEmbedding's rerankers, which read both together.

A score is the model's logit: between 0 and 1, where the library can put it, the best pairs would
all round to the same number.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_builders.encoder import GPU_BATCH_SIZE, torch_threads, without_progress_bars
from data_builders.models import check_device, folder_identity, model_folder
from data_builders.retrieval import rounded
from recipes.errors import UserError
from recipes.retrieval import CrossEncoderConfig

log = logging.getLogger(__name__)

_PATH_OPTION = "retrieval.cross_encoder.path"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

CrossEncoder = Callable[[Sequence[tuple[str, Sequence[str]]]], list[list[float]]]
"""Questions with texts each to a rounded score for each of a question's texts."""


def load_cross_encoder(config: CrossEncoderConfig, threads: int | None) -> CrossEncoder:
    """The FlagEmbedding reranker of the config, on its one device, in float32.

    Threads may share it. The model is freed with the last reference to the function.

    Args:
        config: `batch_size` None is 1 on a CPU and `GPU_BATCH_SIZE` elsewhere. At 1 a score's bits
            do not depend on the pairs beside it.
        threads: PyTorch's threads while scoring, which a score's last bits depend on; None leaves
            them.

    Raises:
        UserError: there is no such model or device on this machine, it is no cross-encoder with
            one score a pair, or its weights are not in safetensors.
    """
    check_cross_encoder(config)
    model = _load_model(config)
    limit = min(config.max_tokens, model.tokenizer.model_max_length)
    seen = {"pairs": 0, "truncated": 0}
    lock = threading.Lock()

    def score(asked: Sequence[tuple[str, Sequence[str]]]) -> list[list[float]]:
        # All in one call, which sorts them by length: the less is padded.
        found = iter(score_pairs([(question, text) for question, texts in asked for text in texts]))
        return [[next(found) for _ in texts] for _, texts in asked]

    def score_pairs(pairs: list[tuple[str, str]]) -> list[float]:
        if not pairs:
            return []
        with lock, torch_threads(threads), without_progress_bars():
            _count_truncated(seen, model.tokenizer, pairs, limit)
            found = model.compute_score(pairs, batch_size=pairs_a_pass(config), max_length=limit)
        logits = np.asarray(found, np.float64)
        if not np.isfinite(logits).all():
            raise UserError(f"{_PATH_OPTION}: {config.path!r} gives NaN or infinite scores")
        return rounded(logits)

    weakref.finalize(score, _report_truncated, seen, limit)
    return score


def pairs_a_pass(config: CrossEncoderConfig) -> int:
    """Pairs a forward pass, which a score's last bits depend on."""
    return config.batch_size or (1 if config.device == "cpu" else GPU_BATCH_SIZE)


def cross_encoder_key(config: CrossEncoderConfig) -> dict[str, Any]:
    """What decides the score of a pair.

    Raises:
        UserError: there is no such model on this machine.
    """
    return {
        "sha256": folder_identity(_folder(config)),
        "max_tokens": config.max_tokens,
        "batch_size": pairs_a_pass(config),
    }


def check_cross_encoder(config: CrossEncoderConfig) -> None:
    """Passes what `load_cross_encoder` can load as far as that is known without its weights.

    Raises:
        UserError: see `load_cross_encoder`.
    """
    from transformers import AutoConfig

    check_device(config.device, "retrieval.cross_encoder.device")
    folder = _folder(config)
    try:
        described = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _unloadable(config, error) from error
    _check_form(config, folder, described)


def _folder(config: CrossEncoderConfig) -> Path:
    try:
        return model_folder(config.path, _PATH_OPTION)
    except UserError as error:
        raise UserError(f"{error}; coinrag train-scorer makes one from scorer.base") from error


def _load_model(config: CrossEncoderConfig) -> Any:
    from FlagEmbedding import FlagReranker

    folder = _folder(config)
    try:
        with without_progress_bars():
            reranker = FlagReranker(str(folder), use_fp16=False, devices=config.device)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unloadable(config, error) from error
    # Weights keep the precision in which they are stored.
    reranker.model.float()
    return reranker


def _unloadable(config: CrossEncoderConfig, error: Exception) -> UserError:
    return UserError(f"{_PATH_OPTION}: {config.path!r} does not load as a cross-encoder: {error}")


def _check_form(config: CrossEncoderConfig, folder: Path, described: Any) -> None:
    """FlagEmbedding takes any model, with random weights for the head that it lacks."""
    form = (described.architectures or ["a model of no stated form"])[0]
    if not form.endswith("ForSequenceClassification") or described.num_labels != 1:
        raise UserError(
            f"{_PATH_OPTION}: {config.path!r} is {form} with {described.num_labels} label(s): "
            "expected a cross-encoder for sequence classification with one label, as "
            "BAAI/bge-reranker-v2-m3"
        )
    # Beside any other file in safetensors the pickled weights would be taken.
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise UserError(
            f"{_PATH_OPTION}: {config.path!r} has no weights in safetensors, and pickled ones are "
            "not read"
        )


def _count_truncated(
    seen: dict[str, int], tokenizer: Any, pairs: Sequence[tuple[str, str]], limit: int
) -> None:
    """FlagEmbedding cuts long pairs and does not say so."""
    questions, texts = zip(*pairs, strict=True)
    found = tokenizer(list(questions), list(texts), truncation=False, verbose=False)["input_ids"]
    truncated = sum(len(ids) > limit for ids in found)
    if truncated and not seen["truncated"]:
        log.warning(
            "a question and a text have more than the %d tokens that the cross-encoder reads: the "
            "text's end is cut off (said once; the number of such pairs follows at the end)",
            limit,
        )
    seen["pairs"] += len(pairs)
    seen["truncated"] += truncated


def _report_truncated(seen: Mapping[str, int], limit: int) -> None:
    if seen["truncated"]:
        log.warning(
            "%d of %d scored pairs have more than %d cross-encoder tokens and were cut there",
            seen["truncated"],
            seen["pairs"],
            limit,
        )
