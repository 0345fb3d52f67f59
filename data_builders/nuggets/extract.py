"""The extractors of nugget candidates: short phrases and clauses of a chunk that stand alone.

An extractor gets texts and gives each one's candidates, verbatim or nearly so; `align` locates
them. `llm` is not among those loaded here: its answers come from a journal.
"""

from collections.abc import Callable, Sequence
from typing import Any

from data_builders.models import folder_identity, model_folder
from data_builders.nuggets.instructions import PROMPT_VERSION, READING_VERSION
from data_builders.nuggets.llm.requests import request_settings
from data_builders.nuggets.local_model import batch_size
from data_builders.nuggets.rules import VERSION, rules
from recipes.building import NuggetsConfig

ExtractTexts = Callable[[Sequence[str]], list[list[str]]]


def load_extractor(config: NuggetsConfig) -> ExtractTexts:
    """The extractor of this process: `rules` or `local_model`.

    Raises:
        UserError, ModelNotFoundError: see `local_model.load_local_model`.
    """
    if config.extractor == "rules":
        return lambda texts: [rules(text) for text in texts]
    assert config.extractor == "local_model", config.extractor
    assert config.local_model is not None
    from data_builders.nuggets.local_model import load_local_model

    return load_local_model(config.local_model)


def extractor_identity(config: NuggetsConfig) -> dict[str, Any]:
    """Everything beside a text that decides its candidates, as JSON values.

    Raises:
        UserError: the local model is not there.
    """
    if config.extractor == "rules":
        return {"extractor": "rules", "version": VERSION}
    read = {"extractor": config.extractor, "reading": READING_VERSION}
    if config.extractor == "llm":
        assert config.llm is not None
        return {**read, **request_settings(config.llm)}
    local = config.local_model
    assert local is not None
    return {
        **read,
        "prompt": PROMPT_VERSION,
        "sha256": folder_identity(model_folder(local.path, "nuggets.local_model.path")),
        "dtype": local.dtype,
        "device": local.device.partition(":")[0],
        "batch_size": batch_size(local),
        "max_new_tokens": local.max_new_tokens,
    }
