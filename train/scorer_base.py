"""What a cross-encoder is fine-tuned from: `scorer.base`, as a classifier of one label."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from data_builders.encoder import without_progress_bars
from data_builders.models import check_device, model_folder
from recipes.errors import UserError
from recipes.retrieval import CrossEncoderConfig
from recipes.scorer import ScorerConfig

logger = logging.getLogger(__name__)

_BASE_OPTION = "scorer.base"
_PATH_OPTION = "retrieval.cross_encoder.path"
_DEVICE_OPTION = "retrieval.cross_encoder.device"


def refuse_untrainable(section: CrossEncoderConfig, config: ScorerConfig) -> None:
    """Passes a recipe whose cross-encoder can be trained, as far as is known without its weights.

    Raises:
        UserError: nothing to start from or it is not there, a path that names a model which is
            there already, or a device that is not there or not the only one.
    """
    _base_folder(config)
    check_device(section.device, _DEVICE_OPTION)
    if section.device.startswith("cuda") and torch.cuda.device_count() > 1:
        raise UserError(
            f"{_DEVICE_OPTION}: {section.device}, but the training takes one GPU and sees "
            f"{torch.cuda.device_count()}: start it with CUDA_VISIBLE_DEVICES=N and set "
            f"{_DEVICE_OPTION}=cuda"
        )
    try:
        known = model_folder(section.path, _PATH_OPTION)
    except UserError:
        return
    raise UserError(f"{_PATH_OPTION}: {section.path} is in use, by {known}; choose another")


def _base_folder(config: ScorerConfig) -> Path:
    if config.base is None:
        raise UserError(
            f"{_BASE_OPTION}: null, but a cross-encoder starts from a model; the recipe "
            f"options/cross_encoder names one, or set {_BASE_OPTION} to an encoder or a reranker, "
            "as BAAI/bge-reranker-v2-m3"
        )
    return model_folder(config.base, _BASE_OPTION)


def load_base(config: ScorerConfig) -> tuple[Any, Any]:
    """The base as transformers' classifier in float32, and its tokenizer; a new head is drawn.

    Raises:
        UserError: it does not load so, its weights are not in safetensors or some are missing, or
            its tokenizer cannot pad.
    """
    folder = _base_folder(config)
    try:
        with without_progress_bars(), _errors_alone():
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                folder,
                num_labels=1,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{_BASE_OPTION}: {config.base!r} does not load as a classifier of one label with "
            f"weights in safetensors: {error}"
        ) from error
    if tokenizer.pad_token is None:
        raise UserError(
            f"{_BASE_OPTION}: the tokenizer of {config.base!r} has no token to pad with: expected "
            "an encoder or a reranker"
        )
    missing = sorted(loaded["missing_keys"])
    body = f"{model.base_model_prefix}."
    if lacking := [name for name in missing if name.startswith(body) and "pooler" not in name]:
        raise UserError(
            f"{_BASE_OPTION}: {config.base!r} lacks {len(lacking)} weights of the model that its "
            f"config.json describes, as {lacking[0]}"
        )
    if missing:
        logger.info("%s: new are %s", config.base, ", ".join(missing))
    return model, tokenizer


@contextmanager
def _errors_alone() -> Iterator[None]:
    """transformers draws a table of the weights that a base lacks."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
