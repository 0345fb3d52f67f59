"""A new run on the weights of a finished one (`train.init_from`)."""

import logging
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cache_ops.fingerprint import describe_rope
from cache_ops.hf import load_config, load_tokenizer
from data_builders.key import tokenizer_identity
from recipes.errors import UserError
from recipes.resolve import Resolved
from recipes.schema import Recipe
from train.beside import check_beside
from train.run_folder import changes, finished_run

logger = logging.getLogger(__name__)

# What the tensors of a model and their meaning depend on.
_SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip


def starting_weights(config: Recipe) -> str:
    """The model that a recipe starts from: that of the run `train.init_from`, or `model.path`."""
    init_from = config.train.init_from
    return config.model.path if init_from is None else str(Path(init_from) / "checkpoint")


def check_lineage(resolved: Resolved, tokenizer: PreTrainedTokenizerBase, *, report: bool) -> None:
    """Passes a recipe whose `train.init_from`, or else `model.path`, has weights for it.

    Args:
        resolved: the recipe.
        tokenizer: that of its model.
        report: log the settings in which the two runs differ.

    Raises:
        UserError: there is no finished run, or it is of another architecture, tokenizer or number
            of soft tokens, or the context is frozen.
        SoftTokensError, ContextualizerError: see `train.beside.check_beside`.
        ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_config`.
    """
    config = resolved.config
    if config.train.init_from is None:
        check_beside(config, Path(config.model.path), f"model.path {config.model.path}")
        return
    run = Path(config.train.init_from)
    earlier = finished_run(run, "train.init_from")
    checkpoint = run / "checkpoint"
    ours, theirs = load_config(config.model.path), load_config(str(checkpoint))
    differing = [
        f"{name} {getattr(ours, name, None)} there {getattr(theirs, name, None)}"
        for name in _SHAPE
        if getattr(ours, name, None) != getattr(theirs, name, None)
    ]
    if describe_rope(ours) != describe_rope(theirs):
        differing.append(f"RoPE {describe_rope(ours)} there {describe_rope(theirs)}")
    if differing:
        raise UserError(
            f"train.init_from {run} trained another architecture than model.path "
            f"{config.model.path}: {', '.join(differing)}; set model.path to "
            f"{earlier.config.model.path}"
        )
    if tokenizer_identity(tokenizer) != tokenizer_identity(load_tokenizer(str(checkpoint))):
        raise UserError(
            f"train.init_from {run} was trained with another tokenizer than that of model.path "
            f"{config.model.path}; set model.path to {earlier.config.model.path}"
        )
    if config.context.gradient == "frozen":
        raise UserError(
            "context.gradient=frozen trains over what the weights of model.path have encoded, and "
            "train.init_from starts from others: use context.gradient=full or detach, or set "
            f"model.path={checkpoint} in place of train.init_from"
        )
    check_beside(config, checkpoint, f"train.init_from {run}")
    if report:
        changed = [
            line for line in changes(earlier, resolved) if not line.startswith("train.init_from:")
        ]
        told = ":\n  " + "\n  ".join(changed) if changed else " are the same"
        logger.info("starts from the weights of %s; settings there -> here%s", run, told)
