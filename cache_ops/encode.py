"""A chunk's keys and values by one forward pass over the whole chunk."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cache_ops.attention import PACKED, PACKED_VARLEN
from cache_ops.cached import CACHED
from cache_ops.hf import decoder
from cache_ops.means import with_mean
from cache_ops.plan import MEAN_TOKEN
from cache_ops.rope import Rope


@torch.no_grad()
def encode_chunks(model: PreTrainedModel, chunks: Sequence[Sequence[int]]) -> list[Tensor]:
    """Encodes several chunks, each alone, in one forward pass; otherwise as `encode_chunk`.

    Shorter ones are padded at their ends, which what comes before cannot see.
    """
    longest = max(map(len, chunks))
    padded = [[*ids, *[0] * (longest - len(ids))] for ids in chunks]
    kv_BTL2HD = _encode(model, torch.tensor(padded, device=model.device))
    return [kv_TL2HD[: len(ids)] for kv_TL2HD, ids in zip(kv_BTL2HD, chunks, strict=True)]


@torch.no_grad()
def encode_chunk(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Encodes a chunk alone, from position 0, without the prompt in view.

    Args:
        model: a supported causal LM. One that was made to take packed batches or requests over
            cached prefixes attends in the ordinary way (sdpa) meanwhile.
        token_ids: the chunk's tokens, or those of the static prompt; at least one. A `MEAN_TOKEN`
            behind them asks for the record of their mean.

    Returns:
        kv_TL2HD: token-major keys (index 0, after RoPE at chunk positions) and values (index 1),
        in the model's dtype and on its device: one nugget is one contiguous range.
    """
    if token_ids[-1] == MEAN_TOKEN:
        return with_mean(encode_chunk(model, token_ids[:-1]), Rope.from_config(model.config))
    return _encode(model, torch.tensor([list(token_ids)], device=model.device))[0]


def _encode(model: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """kv_BTL2HD of rows that stand at positions from 0."""
    positions_BT = torch.arange(ids_BT.shape[1], device=model.device).expand_as(ids_BT)
    cache = DynamicCache()
    with _ordinary_attention(model):
        decoder(model)(
            input_ids=ids_BT, position_ids=positions_BT, past_key_values=cache, use_cache=True
        )
    filled: list[Any] = cache.layers
    layers = [
        torch.stack((layer.keys, layer.values), dim=1).permute(0, 3, 1, 2, 4) for layer in filled
    ]
    return torch.stack(layers, dim=2)


@torch.no_grad()
def span_means(
    model: PreTrainedModel, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]
) -> Tensor:
    """What a chunk that is encoded alone says of each of its spans: the mean last hidden state.

    Args:
        model: as for `encode_chunk`.
        token_ids: the chunk's tokens.
        spans: half-open token ranges in it, at least one.

    Returns:
        means_NE: fp32, one row a span, on the model's device. The hidden states are those behind
        the last norm.
    """
    ids_BT = torch.tensor([list(token_ids)], device=model.device)
    with _ordinary_attention(model):
        hidden_TE = decoder(model)(input_ids=ids_BT, use_cache=False).last_hidden_state[0].float()
    return torch.stack([hidden_TE[start:end].mean(0) for start, end in spans])


def encode_chunk_by_base(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Encodes a chunk by the weights that stay while an adapter or soft tokens are being trained.

    Bit by bit what `encode_chunk` gives with the base model: adapter of peft, dropout and gradient
    checkpointing are off, and on again afterwards.
    """
    adapted: Any = model
    training = model.training
    model.eval()
    try:
        if not hasattr(model, "disable_adapter"):
            return encode_chunk(model, token_ids)
        with adapted.disable_adapter():
            return encode_chunk(adapted.get_base_model(), token_ids)
    finally:
        model.train(training)


@contextmanager
def _ordinary_attention(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    if before not in (PACKED, PACKED_VARLEN, CACHED):
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
