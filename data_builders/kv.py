"""From a recipe to the keys and values of its chunks: which store holds them, what supplies them.

A recipe's store folder holds one store for each set of weights that encodes chunks: `base` for the
model that it names, `fine_tuned` for what its training leaves, and one for each run of `eval.runs`.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache_ops.encode import encode_chunk, encode_chunk_by_base
from cache_ops.fingerprint import Fingerprint
from cache_ops.memory_tier import MemoryTier
from cache_ops.records import RecordLayout, StoreDtype
from cache_ops.store import Store
from cache_ops.store.database import INDEX
from cache_ops.store.errors import ForeignStoreError, StoreExistsError
from cache_ops.store.lock import WAIT_SECONDS
from cache_ops.store.reading import SliceReader
from cache_ops.supply import Supply
from data_builders.key import tokenizer_identity
from recipes.schema import Recipe

log = logging.getLogger(__name__)


def store_folder(config: Recipe, name: str) -> Path | None:
    """Where the slices of some weights are kept between runs; None: nowhere."""
    return Path(config.store.folder) / name if config.store.folder else None


def stored_dtype(config: Recipe, model: PreTrainedModel) -> StoreDtype:
    """The dtype of records: the recipe's choice, or else the model's own."""
    own = cast(StoreDtype, str(model.dtype).removeprefix("torch."))
    return config.store.dtype or own


def open_store(
    config: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    base_weights_only: bool = False,
    create: bool = False,
    wait_seconds: float = WAIT_SECONDS,
) -> Store | None:
    """Opens the recipe's store for what a model encodes; None where the recipe has none.

    Args:
        model: whose weights the store must have been made by.
        name: of the store, inside the recipe's store folder.
        base_weights_only: leave an adapter of peft out of account.
        create: make the store where there is none; otherwise None says so.
        wait_seconds: how long a write waits for another process's.

    Raises:
        ForeignStoreError: the store was made by other weights or settings, or has records of
            another layout; says which.
        StoreError: the folder holds no store, or cannot be written to.
    """
    folder = store_folder(config, name)
    if folder is None or not (create or folder.exists()):
        return None
    settings = config.store
    dtype = stored_dtype(config, model)
    fingerprint = Fingerprint.from_model(
        model,
        dtype,
        tokenizer=tokenizer_identity(tokenizer),
        chunking=f"{config.data.chunk_tokens} tokens",
        base=base_weights_only,
    )
    layout = RecordLayout.from_model(model.config, dtype)
    options: dict[str, Any] = {
        "wait_seconds": wait_seconds,
        "max_bytes": None if settings.max_gib is None else int(settings.max_gib * 2**30),
        "when_full": settings.when_full,
        "shard_bytes": settings.shard_mib << 20,
    }
    if create and not (folder / INDEX).exists():
        # Another process may be making it too.
        with suppress(StoreExistsError):
            Store.create(folder, fingerprint, layout, wait_seconds=WAIT_SECONDS).close()
            log.info("made a new store at %s", folder)
    store = Store.open(folder, fingerprint, **options)
    if store.layout != layout:
        store.close()
        own, wanted = store.layout.as_json(), layout.as_json()
        raise ForeignStoreError(
            folder,
            [
                f"{part.replace('_', ' ')}: the store has {own[part]}, this run {wanted[part]}; "
                "name another store.folder, or delete the store and build it anew"
                for part in own
                if own[part] != wanted[part]
            ],
        )
    return store


def open_supply(
    config: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    writable: bool = False,
    wait_seconds: float = WAIT_SECONDS,
) -> Supply:
    """Opens what supplies a model's slices: memory, then the recipe's store, then the model.

    See `supply_over` and `open_store`.

    Raises:
        ForeignStoreError, StoreError: see `open_store`.
    """
    store = open_store(config, model, tokenizer, name, create=writable, wait_seconds=wait_seconds)
    return supply_over(config, model, store, writable=writable)


def supply_over(
    config: Recipe,
    model: PreTrainedModel,
    store: Store | None,
    *,
    base_weights_only: bool = False,
    writable: bool = False,
    compute: bool = True,
    always_check: bool = False,
) -> Supply:
    """What supplies slices from memory, then from a store, then from the model.

    Args:
        model: encodes chunks, also while its attention is that of packed batches or of cached
            prefixes; nothing else may run it meanwhile.
        store: what `open_store` gave for the model.
        base_weights_only: encode by the weights under an adapter of peft.
        writable: what is computed is added to the store.
        compute: the model encodes what is missing; otherwise that is an error.
        always_check: compare checksums on every read, also where the recipe does not ask for it.
    """
    settings = config.store
    reader = None
    if store is not None:
        reader = SliceReader(
            store, settings.read_threads, check=always_check or settings.check_reads
        )
    encode: Callable[[Sequence[int]], Tensor] | None = None
    if compute:
        encode = partial(encode_chunk_by_base if base_weights_only else encode_chunk, model)
    return Supply(
        RecordLayout.from_model(model.config, stored_dtype(config, model)),
        reader=reader,
        memory=MemoryTier(int(settings.memory_gib * 2**30)) if settings.memory_gib else None,
        encode=encode,
        keep=settings.keep,
        store_computed=writable,
        pin_memory=torch.cuda.is_available(),
    )
