"""Filling stores: every chunk of built tables, what was found damaged, or a copy of another store.

Chunks go into the store as they are encoded, shard by shard, so a build that was stopped goes on
where it was.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache_ops.encode import encode_chunk
from cache_ops.fingerprint import Fingerprint
from cache_ops.hf import load_model, load_tokenizer
from cache_ops.plan import anchor_ranges
from cache_ops.records import StoreDtype
from cache_ops.store import Store
from cache_ops.store.errors import ForeignStoreError
from cache_ops.store.reading import SliceReader
from cache_ops.store.stored import (
    NewChunk,
    Ranges,
    chunk_key,
    count_tokens,
    missing_ranges,
    union_ranges,
)
from data_builders.build import load_built
from data_builders.key import SPLITS, tokenizer_identity
from data_builders.kv import open_store
from data_builders.prefix import with_mean_token
from data_builders.prompt import PromptTemplate
from data_builders.tables import Chunk, Tables
from recipes.errors import UserError
from recipes.progress import Progress
from recipes.schema import Recipe

_CHUNKS_A_PAGE = 256
_CHUNKS_A_COPY = 16
_READ_THREADS = 4


@dataclass(frozen=True)
class Filled:
    """What filling a store has done, in distinct chunks; the prompt counts as one."""

    folder: str
    chunks: int
    encoded: int
    removed: int
    tokens: int
    """Tokens that are kept of the chunks."""


class _Wanted(NamedTuple):
    """A chunk and which of its tokens are to be kept."""

    token_ids: Sequence[int]
    ranges: Ranges


def tables_to_store(config: Recipe) -> list[Tables]:
    """The built tables whose chunks the recipe's store is to hold.

    Raises:
        UserError: the recipe has no store, or a split is not built.
    """
    if config.store.folder is None:
        raise UserError(
            "store.folder is null: keys and values are not kept anywhere; name a folder, as in "
            f"store.folder=stores/{config.name}"
        )
    return [load_built(config, split) for split in SPLITS]


def fill_store(
    config: Recipe,
    tables: Sequence[Tables],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: str,
    *,
    remove_others: bool = False,
) -> Filled:
    """Encodes what a checkpoint's store lacks of the prompt and of the chunks of built tables.

    What lies in shards that are missing or not whole is lacking too.

    Args:
        config: the recipe.
        tables: what `tables_to_store` gives.
        model: the checkpoint's weights.
        tokenizer: the recipe's.
        checkpoint: which of the recipe's stores to fill.
        remove_others: remove chunks that none of the tables has.

    Raises:
        ForeignStoreError, StoreError: see `data_builders.kv.open_store` and `Store.add`.
    """
    store = open_store(config, model, tokenizer, checkpoint, create=True)
    assert store is not None, "tables_to_store refuses a recipe without a store"
    prompt_ids = PromptTemplate(tokenizer, config.prompt).prompt_ids
    with store:
        keys: set[bytes] = set()
        missing: set[bytes] = set()
        tokens = 0
        for page in _pages(prompt_ids, tables, config):
            new = {key: wanted for key, wanted in page.items() if key not in keys}
            found = store.locate(list(new))
            if damaged := store.unreadable(found):
                store.mark_lost(damaged)
                for key in damaged:
                    del found[key]
            keys |= new.keys()
            tokens += sum(count_tokens(wanted.ranges) for wanted in new.values())
            missing |= {
                k for k, wanted in new.items() if missing_ranges(found.get(k), wanted.ranges)
            }
        removed = 0
        if remove_others:
            others = {*store.keys(), *store.lost()} - keys
            removed = store.remove(others) if others else 0
        there = len(keys) - len(missing)
        if missing:
            with Progress(f"encode chunks ({checkpoint})", len(keys), "chunks", there) as progress:
                pages = _pages(prompt_ids, tables, config)
                store.add(_encoded(store, model, pages, set(missing), progress))
    return Filled(str(store.folder), len(keys), len(missing), removed, tokens)


def recompute_lost(store: Store, model_folder: str) -> int:
    """Encodes the chunks of a store again that were found damaged, from the tokens that it keeps.

    Returns:
        How many were encoded. A chunk whose tokens are damaged too stays lost.

    Raises:
        ForeignStoreError: the store was filled by another model or tokenizer.
        ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_model`.
        StoreError: see `Store.add`.
    """
    model = load_model(model_folder, _model_dtype(store.fingerprint)).eval()
    model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    own = store.fingerprint
    given = Fingerprint.from_model(
        model,
        store.layout.dtype,
        tokenizer=tokenizer_identity(load_tokenizer(model_folder)),
        # Only the store knows these.
        chunking=own.chunking,
        prompt_visibility=own.prompt_visibility,
    )
    if differences := own.differences(given):
        raise ForeignStoreError(store.folder, differences)
    lost = store.lost()
    # Where it is not known any more what was kept of a chunk, all of it is.
    wanted = {
        key: _Wanted(
            ids, lost[key] if lost[key] and lost[key][-1][1] <= len(ids) else ((0, len(ids)),)
        )
        for key, ids in store.token_ids(list(lost)).items()
    }
    with Progress("encode damaged chunks", len(wanted), "chunks") as progress:
        return store.add(_encoded(store, model, iter([wanted]), set(wanted), progress))


def export_store(store: Store, out: Path, dtype: StoreDtype | None = None) -> int:
    """Copies the chunks of a store into a new one, without dead bytes, and possibly in a dtype.

    The copy appears at `out` when it is whole. Every checksum is compared.

    Returns:
        How many chunks were copied.

    Raises:
        UserError: there is something at `out`, it lies in the store or cannot be made, a chunk is
            damaged or lost, or records that were rounded are to be converted once more.
        RecordRangeError: a value that the dtype cannot hold.
        StoreError: see `Store.create` and `Store.add`.
    """
    layout = replace(store.layout, dtype=dtype or store.layout.dtype)
    described = f"{_model_dtype(store.fingerprint)} model, {layout.dtype} records"
    fingerprint = replace(store.fingerprint, dtype=described)
    if layout != store.layout and store.layout.dtype != _model_dtype(store.fingerprint):
        raise UserError(
            f"{store.folder} holds {store.layout.dtype} of a {_model_dtype(store.fingerprint)} "
            "model: a copy in another dtype would pass for what the model gives; copy a store of "
            "the model's own dtype"
        )
    if out.exists():
        raise UserError(f"{out} exists; name a folder that does not")
    if out.resolve().is_relative_to(store.folder.resolve()):
        raise UserError(f"{out} lies in the store itself; name a folder outside of it")
    if lost := store.lost():
        raise UserError(
            f"{len(lost):,} chunks of {store.folder} are lost, and a copy would lack them: "
            "coinrag cache build with the recipe, or coinrag cache verify --model FOLDER, computes "
            "them again"
        )
    keys = store.keys()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as beside:
            partial = Path(beside) / out.name
            with (
                Store.create(partial, fingerprint, layout) as copy,
                SliceReader(store, _READ_THREADS, check=True) as reader,
                Progress("copy chunks", len(keys), "chunks") as progress,
            ):
                copied = copy.add(_converted(store, copy, reader, keys, progress))
            partial.rename(out)
    except OSError as error:
        raise UserError(f"no copy can be made at {out}: {error}") from error
    return copied


def _pages(
    prompt_ids: Sequence[int], tables: Sequence[Tables], config: Recipe
) -> Iterator[dict[bytes, _Wanted]]:
    """The prompt, then the chunks of all tables by their key, but those of which none is kept."""
    if prompt_ids:
        yield {chunk_key(prompt_ids): _Wanted(prompt_ids, ((0, len(prompt_ids)),))}
    for one in tables:
        for first in range(0, one.count(), _CHUNKS_A_PAGE):
            page = {}
            for chunk in one.at(range(first, min(first + _CHUNKS_A_PAGE, one.count()))):
                token_ids = chunk.token_ids
                if config.context.anchors.summary == "mean":
                    token_ids = with_mean_token(token_ids)
                if ranges := union_ranges(_kept(chunk, config)):
                    page[chunk_key(token_ids)] = _Wanted(token_ids, ranges)
            yield page


def _kept(chunk: Chunk, config: Recipe) -> list[tuple[int, int]]:
    """Which of a chunk's tokens are to be kept: all, or those in a nugget or an anchor."""
    tokens, anchors = len(chunk.token_ids), config.context.anchors
    mean = anchors.summary == "mean"
    if config.store.keep == "chunks":
        return [(0, tokens + mean)]
    if not chunk.nuggets:
        return []
    around = anchor_ranges(tokens, anchors.prefix_tokens, anchors.suffix_tokens, mean)
    return [*chunk.nuggets, *((one.start, one.stop) for one in around if one)]


def _encoded(
    store: Store,
    model: PreTrainedModel,
    pages: Iterator[dict[bytes, _Wanted]],
    missing: set[bytes],
    progress: Progress,
) -> Iterator[NewChunk]:
    """The chunks of the pages that are `missing`, each once, encoded when it is asked for."""
    for page in pages:
        for key, (token_ids, ranges) in page.items():
            if key in missing:
                missing.remove(key)
                kv_TL2HD = encode_chunk(model, token_ids)
                kept_TL2HD = torch.cat([kv_TL2HD[start:end] for start, end in ranges])
                yield NewChunk(token_ids, ranges, store.layout.encode(kept_TL2HD))
                progress.advance()


def _converted(
    store: Store, copy: Store, reader: SliceReader, keys: Sequence[bytes], progress: Progress
) -> Iterator[NewChunk]:
    """The chunks of a store with the records of its copy."""
    for first in range(0, len(keys), _CHUNKS_A_COPY):
        page = keys[first : first + _CHUNKS_A_COPY]
        located = store.locate(page)
        ids: Mapping[bytes, list[int]] = store.token_ids(page)
        for key in page:
            damaged = UserError(
                f"chunk {key.hex()} of {store.folder} is damaged; run coinrag cache verify"
            )
            if key not in located or key not in ids:
                raise damaged
            stored = located[key]
            records_TR = torch.empty(
                (count_tokens(stored.ranges), store.layout.token_bytes), dtype=torch.uint8
            )
            reading = reader.start([(key, start, end) for start, end in stored.ranges], records_TR)
            if reading.wait():
                raise damaged
            yield NewChunk(ids[key], stored.ranges, _in_layout(records_TR, store, copy))
            progress.advance()


def _in_layout(records_TR: Tensor, store: Store, copy: Store) -> Tensor:
    if copy.layout == store.layout:
        return records_TR
    exact = torch.float32 if store.layout.has_scales else store.layout.torch_dtype
    return copy.layout.encode(store.layout.decode(records_TR, exact))


def _model_dtype(fingerprint: Fingerprint) -> str:
    """Of the two dtypes that a fingerprint names, the model's."""
    return fingerprint.dtype.split(" model")[0]
