"""The weights that answer, and those that encode what is answered from."""

from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from cache_ops.cached import enable_cached
from cache_ops.hf import check_vocabulary, load_model
from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.schema import Recipe

Checkpoint = Literal["base", "fine_tuned"]


def weights_folder(config: Recipe, checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint's weights.

    Raises:
        UserError: the recipe's training has left no checkpoint.
    """
    if checkpoint == "base":
        path = config.model.path
        if Path(path).is_dir():
            return Path(path)
        # A name in the local Hugging Face cache.
        return Path(str(cached_file(path, "config.json", local_files_only=True))).parent
    folder = Path(config.train.run_folder) / "checkpoint"
    if not (folder / "config.json").is_file():
        raise UserError(
            f"no fine-tuned checkpoint at {folder}: run coinrag train with this recipe first, or "
            "use the base model alone (eval.checkpoints=[base], --checkpoint base)"
        )
    return folder


def context_checkpoint(config: Recipe, checkpoint: Checkpoint) -> Checkpoint:
    """Whose keys and values a checkpoint answers from.

    Its own, unless it was trained over frozen context; the run folder's recipe says so, whatever
    the recipe at hand says.

    Raises:
        UserError: the run folder's recipe cannot be read.
    """
    if checkpoint == "base":
        return "base"
    trained = Path(config.train.run_folder) / "recipe.yaml"
    if trained.is_file():
        config = resolve([str(trained)]).config
    return "base" if config.context.gradient == "frozen" else checkpoint


def load_served(
    config: Recipe, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Loads weights onto the GPU if there is one, for `cache_ops.cached.forward_cached`.

    Raises:
        ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_model`.
    """
    model = load_model(str(folder), config.model.dtype)
    check_vocabulary(model, tokenizer)
    enable_cached(model)
    return model.eval().to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
