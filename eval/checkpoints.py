"""The weights that answer, and those that encode what is answered from."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from cache_ops.cached import enable_cached
from cache_ops.closing import Closing
from cache_ops.hf import check_vocabulary, load_model
from cache_ops.links import Links, add_links, links_saved_in, load_links
from cache_ops.store.lock import WAIT_SECONDS
from cache_ops.supply import Supply
from data_builders.kv import open_supply
from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.schema import Recipe

Checkpoint = Literal["base", "fine_tuned"]


@dataclass(frozen=True)
class Weights:
    """Whose weights answer, and whose keys and values they answer from."""

    folder: Path
    context: Path
    context_store: str
    """The name of the store of what `context` encodes, inside `store.folder`."""
    trained: bool
    """Whether they are what a training has left."""


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
        return Weights(base, base, "base", trained=False)
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
    recipe = run / "recipe.yaml"
    trained = resolve([str(recipe)]).config if recipe.is_file() else config
    if trained.context.gradient == "frozen":
        return Weights(folder, base, "base", trained=True)
    name = "fine_tuned"
    if run.resolve() != Path(config.train.run_folder).resolve():
        name += f"-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]}"
    return Weights(folder, folder, name, trained=True)


def _base_folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    # A name in the local Hugging Face cache.
    return Path(str(cached_file(path, "config.json", local_files_only=True))).parent


def check_links(config: Recipe, weights: Weights) -> None:
    """Passes weights that have the link tokens that a recipe asks KVLink for.

    Raises:
        UserError: they were trained with another number a document, or without any.
    """
    wanted, trained = config.systems.kvlink.link_tokens, links_saved_in(weights.folder)
    if weights.trained and trained != wanted:
        raise UserError(
            f"{weights.folder} was trained with {trained} link tokens a document, "
            f"systems.kvlink.link_tokens asks for {wanted}; eval.runs.kvlink names a run of "
            "train.system=kvlink"
        )


@dataclass(frozen=True)
class Served(Closing):
    """Weights in memory, with what supplies their slices; a context manager."""

    model: PreTrainedModel
    supply: Supply
    weights: Weights
    _links: dict[tuple[int, int], Links] = field(default_factory=dict, repr=False)

    def links(self, config: Recipe, documents: int) -> Links | None:
        """KVLink's link tokens as a recipe asks for them: those trained, or the base's untrained.

        Raises:
            UserError: see `check_links`.
        """
        check_links(config, self.weights)
        wanted = config.systems.kvlink.link_tokens
        if wanted and (documents, wanted) not in self._links:
            if self.weights.trained:
                links = load_links(self.model, self.weights.folder)
            else:
                links = add_links(self.model, documents, wanted, config.seed)
            self._links[documents, wanted] = links
        return self._links.get((documents, wanted))

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
        ForeignStoreError, StoreError: see `data_builders.kv.open_store`.
    """
    model = load_weights(config, weights.folder, tokenizer)
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
    return Served(model, supply, weights)


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
