"""Attention of one or many requests over cached prefixes, registered as `coinrag_cached`.

Requests of different lengths stand in one row without padding: linear layers see all tokens, and
attention goes request by request over that request's own keys. What is visible is decided by
positions alone. A prefix is laid layer by layer: on a CPU just before the layer attends to it, on
CUDA ahead of the forward pass on a stream of its own, so that the first layers need not wait for
the last.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from cache_ops.assemble import Rotation
from cache_ops.contextualizer import Contextualizer
from cache_ops.parallel import ParallelAttention, attend_in_parallel
from cache_ops.plan import PrefixPlan
from cache_ops.rope import Rope

CACHED = "coinrag_cached"


def enable_cached(model: PreTrainedModel) -> None:
    """Makes the model's forward one of `forward_cached`."""
    model.set_attn_implementation(CACHED)


class RequestCache:
    """Keys and values of one request: its prefix, then every token computed over it.

    Attributes:
        prefix_tokens: tokens of the prefix.
        parallel: how attention to the prefix's chunks is reweighted, if there are any and it is.
        rotate_seconds, copy_seconds, contextualize_seconds: what laying the prefix has taken so
            far; on CUDA, queueing it.
    """

    def __init__(
        self,
        plan: PrefixPlan,
        kv_TL2HD: Tensor | None,
        rope: Rope,
        *,
        room: int,
        first_positions: Sequence[int] = (),
        parallel: ParallelAttention | None = None,
        contextualizer: Contextualizer | None = None,
    ) -> None:
        """Prepares a cache; nothing is copied on a CPU until a layer asks.

        Args:
            plan: the prefix.
            kv_TL2HD: its tokens in its order, at chunk positions (see `assemble.gather`), in any
                floating dtype, on the model's device; None for an empty plan.
            rope: the model's RoPE.
            room: how many tokens will be computed over the prefix at most.
            first_positions: ascending positions of the first of them, which may lie between the
                prefix's; the others follow without gaps, right after the prefix if it is empty.
            parallel: how computed tokens, which all follow the prefix, attend to its chunks.
            contextualizer: corrects the prefix; None: it stays as it is.
        """
        if parallel is not None and first_positions:
            assert first_positions[0] >= plan.length, "all chunks lie before what is computed"
        assert (0 if kv_TL2HD is None else len(kv_TL2HD)) == plan.tokens, "plan and tokens differ"
        self.rotate_seconds = self.copy_seconds = self.contextualize_seconds = 0.0
        self._contextualizer = contextualizer
        self._prefix_TL2HD = kv_TL2HD
        self._rotation = None
        if kv_TL2HD is not None:
            self._rotation = Rotation.of(plan, rope, kv_TL2HD.device)
        self._tokens = self.prefix_tokens = plan.tokens
        chunk_tokens = plan.tokens - (parallel.shared_tokens if parallel else 0)
        self.parallel = parallel if chunk_tokens else None
        positions = [
            torch.arange(piece.end - piece.start) + piece.position for piece in plan.slices
        ]
        positions.append(torch.tensor(first_positions, dtype=torch.long))
        following = first_positions[-1] + 1 if first_positions else plan.length
        positions.append(torch.arange(room - len(first_positions)) + following)
        self._positions_C = torch.cat(positions)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._laid: dict[int, torch.cuda.Event] = {}

    @property
    def lay_seconds(self) -> float:
        """All that laying the prefix has taken so far."""
        return self.rotate_seconds + self.copy_seconds + self.contextualize_seconds

    def lay_ahead(self, dtype: torch.dtype, stream: "torch.cuda.Stream") -> None:
        """Queues all layers on another CUDA stream; each layer's attention waits for its own."""
        assert self._prefix_TL2HD is not None, "an empty prefix has nothing to lay"
        consumer = torch.cuda.current_stream()
        stream.wait_stream(consumer)
        # Outside of inference mode, so that passes outside of it can write to what is laid.
        with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad():
            _, layers, _, heads, dimensions = self._prefix_TL2HD.shape
            like = self._prefix_TL2HD.new_empty((1, heads, 0, dimensions), dtype=dtype)
            for layer in range(layers):
                self._layers[layer] = self._lay(layer, like)
                self._laid[layer] = torch.cuda.Event()
                self._laid[layer].record(stream)
                for states in self._layers[layer]:
                    states.record_stream(consumer)

    def append(self, layer: int, key_1HTD: Tensor, value_1HTD: Tensor) -> tuple[Tensor, Tensor]:
        """Puts computed keys and values behind a layer's others, in place; all of them so far."""
        keys_1HCD, values_1HCD = self.laid(layer, key_1HTD, key_1HTD.shape[2])
        keys_1HCD[:, :, self._tokens :] = key_1HTD
        values_1HCD[:, :, self._tokens :] = value_1HTD
        return keys_1HCD, values_1HCD

    def laid(self, layer: int, like_1HTD: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values so far and the places of the next `count`, to be written to."""
        if layer not in self._layers:
            self._layers[layer] = self._lay(layer, like_1HTD)
        elif layer in self._laid:
            torch.cuda.current_stream().wait_event(self._laid.pop(layer))
        end = self._tokens + count
        keys_1HCD, values_1HCD = self._layers[layer]
        return keys_1HCD[:, :, :end], values_1HCD[:, :, :end]

    def visible(self, count: int) -> Tensor | None:
        """For the next `count` tokens [count, all]: key position <= query position.

        None for a single token, which follows all keys, and for the first tokens of an empty cache,
        which are plainly causal.
        """
        positions_C = self.positions(count)
        if count == 1 or not self._tokens:
            return None
        return positions_C[None] <= positions_C[self._tokens :, None]

    def positions(self, count: int) -> Tensor:
        """Where all tokens so far stand, and the next `count`."""
        end = self._tokens + count
        assert end <= len(self._positions_C), "more tokens than the cache has room for"
        return self._positions_C[:end]

    def next_positions(self, count: int) -> Tensor:
        """Where the next `count` computed tokens stand."""
        return self.positions(count)[self._tokens :]

    def advance(self, count: int) -> None:
        """Counts `count` tokens as appended in every layer."""
        self._tokens += count
        # Every layer has been laid by now.
        self._prefix_TL2HD = None

    def _lay(self, layer: int, like_1HTD: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values with room for all tokens, the prefix rotated into them."""
        shape = (1, like_1HTD.shape[1], len(self._positions_C), like_1HTD.shape[3])
        keys_1HCD, values_1HCD = like_1HTD.new_empty(shape), like_1HTD.new_empty(shape)
        if self._prefix_TL2HD is not None and self._rotation is not None:
            prefix = len(self._prefix_TL2HD)
            start = time.perf_counter()
            out_THD = keys_1HCD[0, :, :prefix].transpose(0, 1)
            self._rotation.into(self._prefix_TL2HD[:, layer, 0], out_THD)
            rotated = time.perf_counter()
            values_1HCD[0, :, :prefix] = self._prefix_TL2HD[:, layer, 1].transpose(0, 1)
            self.rotate_seconds += rotated - start
            copied = time.perf_counter()
            self.copy_seconds += copied - rotated
            if self._contextualizer is not None:
                prefix_1HPD = keys_1HCD[:, :, :prefix], values_1HCD[:, :, :prefix]
                corrected_1HPD = self._contextualizer(layer, *prefix_1HPD, (prefix,))
                for laid_1HPD, states_1HPD in zip(prefix_1HPD, corrected_1HPD, strict=True):
                    laid_1HPD.copy_(states_1HPD)
                self.contextualize_seconds += time.perf_counter() - copied
        return keys_1HCD, values_1HCD


class Step(Protocol):
    """One forward pass over cached prefixes; passed to the model as `cached=`."""

    def attend(
        self, layer: int, query_1QTD: Tensor, key_1HTD: Tensor, value_1HTD: Tensor, scaling: float
    ) -> Tensor:
        """Keeps a layer's new keys and values, and attends over the cached ones: [1, T, Q, D]."""


@dataclass(frozen=True)
class CachedStep:
    """The next tokens of many requests, each over its own cache."""

    caches: tuple[RequestCache, ...]
    lengths: tuple[int, ...]
    visible: tuple[Tensor | None, ...]

    def attend(
        self, layer: int, query_1QTD: Tensor, key_1HTD: Tensor, value_1HTD: Tensor, scaling: float
    ) -> Tensor:
        """See `Step`; every request's tokens are appended to its cache."""
        lengths = list(self.lengths)
        outputs = []
        for cache, query, key, value, visible in zip(
            self.caches,
            query_1QTD.split(lengths, dim=2),
            key_1HTD.split(lengths, dim=2),
            value_1HTD.split(lengths, dim=2),
            self.visible,
            strict=True,
        ):
            keys, values = cache.append(layer, key, value)
            if cache.parallel is None:
                outputs.append(attend(query, keys, values, visible, scaling))
            else:
                chunks = slice(cache.parallel.shared_tokens, cache.prefix_tokens)
                outputs.append(
                    attend_in_parallel(
                        query, keys, values, visible, scaling, cache.parallel, chunks
                    )
                )
        return torch.cat(outputs, dim=1)


@torch.inference_mode()
def forward_cached(
    model: PreTrainedModel, inputs: Sequence[tuple[RequestCache, Sequence[int]]]
) -> Tensor:
    """Computes tokens (at least one a request) at each request's next positions.

    Args:
        model: one that `enable_cached` has seen.
        inputs: distinct caches, each with its new tokens; the caches grow by them.

    Returns:
        logits_BV: for each request, of the token after its last one.
    """
    lengths = tuple(len(ids) for _, ids in inputs)
    device = model.device
    positions = [
        cache.next_positions(length) for (cache, _), length in zip(inputs, lengths, strict=True)
    ]
    masks = [cache.visible(length) for (cache, _), length in zip(inputs, lengths, strict=True)]
    step = CachedStep(
        caches=tuple(cache for cache, _ in inputs),
        lengths=lengths,
        visible=tuple(None if mask is None else mask.to(device) for mask in masks),
    )
    logits_1BV = model(
        input_ids=torch.tensor([[token for _, ids in inputs for token in ids]], device=device),
        position_ids=torch.cat(positions)[None].to(device),
        cached=step,
        use_cache=False,
        logits_to_keep=torch.tensor(lengths, device=device).cumsum(0) - 1,
    ).logits
    for cache, length in zip(step.caches, lengths, strict=True):
        cache.advance(length)
    return logits_1BV[0]


def cached_attention(
    module: nn.Module,
    query_1QTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cached: Step | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends as `cached` says; returns [1, T, Q, D].

    Raises:
        ValueError: the model was called without `cached=`, or with a padding mask.
    """
    if cached is None or attention_mask is not None:
        raise ValueError(
            "this model takes requests over cached prefixes only (forward_cached); "
            "call set_attn_implementation('sdpa') to use it otherwise"
        )
    layer: Any = module.layer_idx
    return cached.attend(layer, query_1QTD, key_1HTD, value_1HTD, scaling), None


def attend(
    query_1QTD: Tensor,
    keys_1HCD: Tensor,
    values_1HCD: Tensor,
    visible_TC: Tensor | None,
    scaling: float,
) -> Tensor:
    """Softmax attention to the visible keys; [1, T, Q, D].

    Without `visible_TC` a single query sees all keys, and several are plainly causal.
    """
    return scaled_dot_product_attention(
        query_1QTD,
        keys_1HCD,
        values_1HCD,
        attn_mask=visible_TC,
        is_causal=visible_TC is None and query_1QTD.shape[2] > 1,
        scale=scaling,
        enable_gqa=query_1QTD.shape[1] != keys_1HCD.shape[1],
    ).transpose(1, 2)


def _no_mask(*_: Any, **__: Any) -> None:
    """Visibility is the step's business; transformers builds no mask."""


AttentionInterface.register(CACHED, cached_attention)
AttentionMaskInterface.register(CACHED, _no_mask)
