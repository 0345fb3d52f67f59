"""Frozen context: chunk keys and values of the base model, whatever the training has changed.

They come from memory, from the recipe's `base` store, or from the base weights under the disabled
adapter, so that a store that was made before the training serves the trained model too.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache_ops.packing import Example
from cache_ops.plan import PrefixPlan
from cache_ops.store import Store
from cache_ops.store.stored import Ranges, chunk_key, missing_ranges
from cache_ops.supply import Supply
from data_builders.kv import open_store, store_folder, supply_over
from recipes.errors import UserError
from recipes.schema import Recipe

UsedRanges = tuple[Sequence[int], Ranges]
"""The tokens of a chunk, and the ranges of it that some prefix holds."""

_SOURCES = ("memory", "disk", "computed")


class FrozenContext:
    """The prefixes of micro-batches as keys and values of the base model."""

    def __init__(self, supply: Supply, dtype: torch.dtype) -> None:
        self.supply = supply
        self._dtype = dtype
        self._tokens: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()

    def prefix(
        self,
        examples: Sequence[Example],
        chunk_ids: Mapping[str, Sequence[int]],
        nuggets: Mapping[str, Sequence[tuple[int, int]]],
    ) -> Tensor:
        """The slices of all examples' plans as kv_PL2HD, keys at chunk positions, on the CPU.

        `nuggets` are the token ranges of each chunk, which are kept should it be computed.
        """
        pieces = tuple(piece for example in examples for piece in example.plan.slices)
        with self.supply.fetch(PrefixPlan(pieces), chunk_ids, nuggets) as supplied:
            self._tokens["memory"] += supplied.tokens_memory
            self._tokens["disk"] += supplied.tokens_disk
            self._tokens["computed"] += supplied.tokens_computed
            # The records' memory is the next micro-batch's once they are released.
            return self.supply.layout.decode(supplied.records_TR, self._dtype).clone()

    def take_tokens(self) -> dict[str, int]:
        """Prefix tokens since the last call, by where they came from."""
        new = self._tokens - self._taken
        self._taken = self._tokens.copy()
        return {f"prefix_tokens_{source}": new[source] for source in _SOURCES}

    def report(self) -> str:
        """Where the prefix tokens of this process have come from, in words."""
        memory, disk, computed = (self._tokens[source] for source in _SOURCES)
        return f"{memory} from memory, {disk} from the store, {computed} computed"

    def close(self) -> None:
        """Closes the store."""
        self.supply.close()


def open_frozen_context(
    config: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    used_ranges: Callable[[], list[UsedRanges]],
    *,
    writable: bool,
    split: bool = False,
) -> FrozenContext:
    """Opens the base model's slices for a run of `model`, which is still untrained.

    Where the base weights stay they compute what is missing, and with `writable` a store keeps it.
    See `computes_slices` for when they do not, so that a store must hold every slice of
    `used_ranges()`.

    Raises:
        UserError: slices that are not in a store, and that could not be computed.
        ForeignStoreError, StoreError: see `data_builders.kv.open_store`.
    """
    has_base = config.train.tuning != "full"
    computes = computes_slices(config, split=split)
    store = open_store(
        config,
        model,
        tokenizer,
        "base",
        base_weights_only=has_base,
        create=computes and writable,
    )
    if not computes:
        refuse_missing(config, store, used_ranges())
    supply = supply_over(
        config,
        model,
        store,
        base_weights_only=has_base,
        writable=computes and writable,
        compute=computes,
        # Beside a step it costs nothing, and no one sees what a wrong slice has taught a model.
        always_check=True,
    )
    return FrozenContext(supply, model.dtype)


def computes_slices(config: Recipe, *, split: bool) -> bool:
    """Whether a rank that lacks a slice of a frozen context computes it.

    Full fine-tuning leaves no base weights to compute with, and of weights that are `split` between
    ranks no rank has more than its part.
    """
    return config.train.tuning != "full" and not split


def refuse_storeless(config: Recipe) -> None:
    """Refuses a run that computes no slices and names no store.

    Raises:
        UserError
    """
    if not config.store.folder:
        raise _unstored(config, "store.folder is not set")


def refuse_missing(config: Recipe, store: Store | None, used: Sequence[UsedRanges]) -> None:
    """Refuses a run for which slices are missing and that could not compute them.

    Raises:
        UserError: says how many chunks of how many, and what makes them.
    """
    keys = [chunk_key(token_ids) for token_ids, _ in used]
    stored = store.locate(keys) if store is not None else {}
    for key in store.unreadable(stored) if store is not None else ():
        del stored[key]
    missing = sum(
        bool(missing_ranges(stored.get(key), ranges))
        for key, (_, ranges) in zip(keys, used, strict=True)
    )
    if missing:
        folder = store_folder(config, "base")
        place = f"the store at {folder}" if folder else "a store (store.folder is not set)"
        raise _unstored(
            config,
            f"{missing} of {len(used)} chunks (the prompt counts as one) are not in {place}",
        )


def _unstored(config: Recipe, found: str) -> UserError:
    tuning = config.train.tuning
    why, instead = "changes the base weights", "train.tuning=lora"
    if tuning != "full":
        why = "computes no slices where ranks split the weights (ZeRO-3, FSDP2)"
        instead = "--sharding ddp or zero2"
    return UserError(
        f"context.gradient=frozen with train.tuning={tuning} {why}, so all slices must be stored "
        f"before; {found}: set store.folder and run `coinrag cache build` with this recipe, or use "
        f"{instead}"
    )
