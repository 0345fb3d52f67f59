"""The weights that answer, and those that encode what is answered from."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from cache_ops.cached import enable_cached
from cache_ops.closing import Closing
from cache_ops.contextualizer import (
    Contextualizer,
    contextualizer_saved_in,
    load_contextualizer,
)
from cache_ops.hf import check_vocabulary, load_model
from cache_ops.soft_tokens import (
    SoftTokens,
    add_soft_tokens,
    load_soft_tokens,
    soft_tokens_saved_in,
)
from cache_ops.store.lock import WAIT_SECONDS
from cache_ops.supply import Supply
from data_builders.kv import open_supply
from recipes.context import ContextualizerConfig
from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.schema import Recipe
from recipes.soft_tokens import GROUPS, soft_tokens_for

Checkpoint = Literal["base", "fine_tuned"]


@dataclass(frozen=True)
class Weights:
    """Whose weights answer, and whose keys and values they answer from."""

    folder: Path
    context: Path
    context_store: str
    """The name of the store of what `context` encodes, inside `store.folder`."""
    run: Path | None = None
    """The folder of the run that left them; None for the base model."""

    @property
    def trained(self) -> bool:
        """Whether they are what a training has left."""
        return self.run is not None


def weights_of(config: Recipe, checkpoint: Checkpoint, system: str) -> Weights:
    """The weights of a checkpoint as a system uses them.

    Fine-tuned ones are those of the system's run, `eval.runs`, or else of `train.run_folder`. What
    they answer from is encoded by themselves, unless they were trained over frozen context; the
    run folder's recipe says so, whatever the recipe at hand says.

    Raises:
        UserError: the training has left no checkpoint, or the run folder's recipe cannot be read.
    """
    base = _base_folder(config.model.path)
    if checkpoint == "base":
        return Weights(base, base, "base")
    run = Path(getattr(config.eval.runs, system) or config.train.run_folder)
    # An export of a run has the weights beside its contract.
    folder = run if (run / "serving.json").is_file() else run / "checkpoint"
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} is an adapter alone: export the run with --form merged, or let "
            f"eval.runs.{system} name the run itself"
        )
    if not (folder / "config.json").is_file():
        raise UserError(
            f"no fine-tuned checkpoint at {folder}: run coinrag train with this recipe first "
            f"(eval.runs.{system} names another run), or use the base model alone "
            "(eval.checkpoints=[base], --checkpoint base)"
        )
    trained = run_recipe(run) or config
    if trained.context.gradient == "frozen":
        return Weights(folder, base, "base", run)
    name = "fine_tuned"
    if run.resolve() != Path(config.train.run_folder).resolve():
        name += f"-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]}"
    return Weights(folder, folder, name, run)


def run_recipe(run: Path) -> Recipe | None:
    """The recipe that a run was trained with, or None where its folder has none.

    Raises:
        UserError: it cannot be read.
    """
    path = run / "recipe.yaml"
    return resolve([str(path)]).config if path.is_file() else None


def _base_folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    # A name in the local Hugging Face cache.
    return Path(str(cached_file(path, "config.json", local_files_only=True))).parent


def check_soft_tokens(config: Recipe, weights: Weights, system: str) -> None:
    """Passes weights that have the soft tokens that a recipe asks for in a system.

    Raises:
        UserError: they were trained with another number, or without any.
    """
    if not weights.trained:
        return
    wanted, saved = soft_tokens_for(config, system), soft_tokens_saved_in(weights.folder)
    for name, group in GROUPS.items():
        if group.system != system:
            continue
        asked, trained = (found[name][1] if name in found else 0 for found in (wanted, saved))
        if asked != trained:
            raise UserError(
                f"{weights.folder} was trained with {trained} {group.label}, {group.option} asks "
                f"for {asked}; eval.runs.{system} names a run of train.system={system}"
            )


def check_contextualizer(config: Recipe, weights: Weights, system: str) -> None:
    """Passes weights whose contextualizer is that which a recipe asks for in a system.

    Of the base model nothing is asked: an untrained one changes nothing. Of another system than the
    recipe trains, the weights have what their own training has left.

    Raises:
        UserError: they were trained with another one, or without any.
        ContextualizerError: its file is damaged.
    """
    if not weights.trained or system != config.train.system:
        return
    spec, asked = contextualizer_saved_in(weights.folder), config.context.contextualizer
    trained = None
    if spec is not None and spec.system == system:
        trained = ContextualizerConfig(**spec.options)
    if trained != asked:
        raise UserError(
            f"{weights.folder} was trained with a context.contextualizer of {trained or 'none'}, "
            f"and the recipe asks for {asked or 'none'}: set it to the former, or let "
            f"eval.runs.{system} name another run"
        )


@dataclass(frozen=True)
class Served(Closing):
    """Weights in memory, with what supplies their slices; a context manager."""

    model: PreTrainedModel
    supply: Supply
    weights: Weights
    contextualizer: Contextualizer | None = None
    """The weights' own, for the system that they were trained with."""
    _soft_tokens: dict[str, dict[str, SoftTokens]] = field(default_factory=dict, repr=False)

    def soft_tokens(self, config: Recipe, systems: Sequence[str]) -> dict[str, SoftTokens]:
        """The soft tokens that a recipe asks for: those trained, or the base's untrained.

        Raises:
            UserError: see `check_soft_tokens`.
        """
        wanted: dict[str, tuple[int, int]] = {}
        for system in systems:
            check_soft_tokens(config, self.weights, system)
            wanted |= soft_tokens_for(config, system)
        if not wanted:
            return {}
        asked = repr(wanted)
        if asked not in self._soft_tokens:
            if self.weights.trained:
                groups = load_soft_tokens(self.model, self.weights.folder, wanted)
            else:
                groups = add_soft_tokens(self.model, wanted, config.seed)
            self._soft_tokens[asked] = groups
        return self._soft_tokens[asked]

    def close(self) -> None:
        """Closes what supplies slices."""
        self.supply.close()


def load_served(
    config: Recipe,
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase,
    *,
    wait_seconds: float = WAIT_SECONDS,
) -> Served:
    """Loads weights, and opens where their slices come from.

    Args:
        config: the recipe; its `store` section says where slices are kept.
        weights: what to load.
        tokenizer: must fit the weights.
        wait_seconds: how long a write to the store waits for another process's.

    Raises:
        ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_model`.
        ContextualizerError: see `cache_ops.contextualizer.load_contextualizer`.
        ForeignStoreError, StoreError: see `data_builders.kv.open_store`.
    """
    model = load_weights(config, weights.folder, tokenizer)
    contextualizer = None
    if weights.trained and contextualizer_saved_in(weights.folder) is not None:
        contextualizer = load_contextualizer(weights.folder, model.config)
        contextualizer = contextualizer.requires_grad_(False).to(model.device, model.dtype)
    encoder = model
    if weights.context != weights.folder:
        encoder = load_weights(config, weights.context, tokenizer)
    supply = open_supply(
        config,
        encoder,
        tokenizer,
        weights.context_store,
        writable=True,
        wait_seconds=wait_seconds,
    )
    return Served(model, supply, weights, contextualizer)


def load_weights(
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
