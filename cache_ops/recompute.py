"""Cached prefix tokens computed anew with the whole prefix in view: CacheBlend and EPIC.

The first pass of a request computes some rows of the prefix again beside those of the query. In
every layer their new keys and values take the place of the cached ones before anything attends, and
each row sees the keys at positions not above its own, new or cached. What is left in the cache is
what decoding goes on from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cache_ops.cached import CACHED, RequestCache, attend
from cache_ops.hf import decoder
from cache_ops.plan import PrefixPlan


class CheckLayerError(ValueError):
    """The model has no such layer to choose rows at."""

    is_user_error = True


@dataclass(frozen=True)
class FixedRows:
    """The same rows of the prefix in every layer, as EPIC's LegoLink does (Hu et al., 2025)."""

    rows: tuple[int, ...]


def first_rows(plan: PrefixPlan, count: int) -> FixedRows:
    """LegoLink's rows: the first `count` tokens of every slice but the first.

    A chunk's first tokens draw attention as the start of a text does, and in the middle of a prefix
    they should not. The first slice is the start of the text, be it a prompt or a chunk.
    """
    rows: list[int] = []
    start = 0
    for number, piece in enumerate(plan.slices):
        tokens = piece.end - piece.start
        if number:
            rows += range(start, start + min(count, tokens))
        start += tokens
    return FixedRows(tuple(rows))


@dataclass(frozen=True)
class ChosenRows:
    """The rows whose keys or values deviate most, as CacheBlend chooses them (Yao et al., 2025).

    Context is the whole prefix, as in the authors' code: the prompt's tokens count, though they
    deviate by rounding alone and so come last.

    Attributes:
        ratio: share of the context's tokens that go on after the check layer.
        metric: whether values or keys are compared with the cached ones, by the sum of the squared
            differences over heads and dimensions.
        check_layer: the layer that chooses; it and those before it recompute every row. Keys and
            values of layer 0 depend on their own token alone, so it would choose by rounding.
        gradual: later layers choose again among the rows that they recompute. The paper lets the
            share fall from layer to layer with `ratio` as its mean but gives no schedule; here it
            falls linearly from 1.25 to 0.75 of `ratio`, or closer to it where that exceeds 1.
    """

    ratio: float
    metric: Literal["v", "k"]
    check_layer: int
    gradual: bool

    def going_on(self, tokens: int, layers: int) -> dict[int, int]:
        """For each layer that chooses, how many of the context's `tokens` go on.

        Raises:
            CheckLayerError: the check layer is not among the model's `layers`.
        """
        if self.check_layer >= layers:
            raise CheckLayerError(
                f"the check layer is {self.check_layer}, and the model's last one is {layers - 1}"
            )
        last = max(self.check_layer, layers - 2) if self.gradual else self.check_layer
        spread = min(self.ratio / 4, 1 - self.ratio)
        counts = {}
        for layer in range(self.check_layer, last + 1):
            done = (layer - self.check_layer) / (last - self.check_layer or 1)
            share = self.ratio + spread * (1 - 2 * done) * (last > self.check_layer)
            # 0.29 of 100 is 29, although the product is a little less.
            counts[layer] = math.floor(share * tokens + 1e-9)
        return counts


Recompute = FixedRows | ChosenRows


def recomputed_tokens(recompute: Recompute, prefix_tokens: int, layers: int) -> float:
    """Tokens of a prefix that are computed anew, in the mean of a model's layers.

    Raises:
        CheckLayerError: see `ChosenRows.going_on`.
    """
    if isinstance(recompute, FixedRows):
        return float(len(recompute.rows))
    going_on = recompute.going_on(prefix_tokens, layers)
    total, computed = 0, prefix_tokens
    for layer in range(layers):
        total += computed
        computed = going_on.get(layer, computed)
    return total / layers


@torch.inference_mode()
def forward_recomputing(
    model: PreTrainedModel,
    cache: RequestCache,
    recompute: Recompute,
    prefix_ids: Sequence[int],
    online_ids: Sequence[int],
) -> Tensor:
    """A request's first pass, with rows of its prefix computed anew; `forward_cached` goes on.

    Args:
        model: one that `enable_cached` has seen.
        cache: of the request, nothing computed over it yet; it grows by the online tokens.
        recompute: which rows of the prefix.
        prefix_ids: tokens of all rows of the prefix, in the plan's order.
        online_ids: tokens to compute at the next positions, at least one.

    Returns:
        logits_1V: of the token after the last one.

    Raises:
        CheckLayerError: the model has too few layers.
    """
    assert model.config._attn_implementation == CACHED, "the model takes no cached prefixes"
    assert len(prefix_ids) == cache.prefix_tokens, "a token for every row of the prefix"
    body: Any = decoder(model)
    rows: Sequence[int] = range(len(prefix_ids))
    going_on: Mapping[int, int] = {}
    metric: Literal["v", "k"] = "v"
    if isinstance(recompute, FixedRows):
        rows = recompute.rows
    else:
        going_on, metric = recompute.going_on(len(prefix_ids), len(body.layers)), recompute.metric
    step = RecomputingStep(cache, rows, len(online_ids), going_on, metric, model.device)
    ids_C = torch.tensor([*prefix_ids, *online_ids], device=model.device)
    hidden_1TE = body.get_input_embeddings()(ids_C[None, step.rows_T])
    cosine_1TD, sine_1TD = body.rotary_emb(hidden_1TE, step.positions_C[None, step.rows_T])
    for layer in body.layers:
        attended_1TE, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(hidden_1TE),
            position_embeddings=(cosine_1TD, sine_1TD),
            attention_mask=None,
            cached=step,
        )
        hidden_1TE = hidden_1TE + attended_1TE
        if step.kept_T is not None:
            hidden_1TE = hidden_1TE[:, step.kept_T]
            cosine_1TD, sine_1TD = cosine_1TD[:, step.kept_T], sine_1TD[:, step.kept_T]
        hidden_1TE = hidden_1TE + layer.mlp(layer.post_attention_layernorm(hidden_1TE))
    cache.advance(len(online_ids))
    return model.get_output_embeddings()(body.norm(hidden_1TE[0, -1:]))


class RecomputingStep:
    """A pass over one request's cache; see `cached.Step`.

    Attributes:
        positions_C: of the prefix and of the online tokens.
        rows_T: the rows that the next layer computes, ascending, the online tokens' last.
        kept_T: which of the last layer's rows those are, where it has chosen.
    """

    def __init__(
        self,
        cache: RequestCache,
        rows: Sequence[int],
        online_tokens: int,
        going_on: Mapping[int, int],
        metric: Literal["v", "k"],
        device: torch.device,
    ) -> None:
        self.positions_C = cache.positions(online_tokens).to(device)
        prefix = cache.prefix_tokens
        online = range(prefix, prefix + online_tokens)
        self.rows_T = torch.tensor([*rows, *online], dtype=torch.long, device=device)
        self.kept_T: Tensor | None = None
        self._cache, self._online_tokens = cache, online_tokens
        self._going_on, self._metric = going_on, metric
        self._visible_TC = self._visible()

    def attend(
        self, layer: int, query_1QTD: Tensor, key_1HTD: Tensor, value_1HTD: Tensor, scaling: float
    ) -> Tensor:
        """Puts new keys and values into their rows; rows that do not go on attend to nothing."""
        keys_1HCD, values_1HCD = self._cache.laid(layer, key_1HTD, self._online_tokens)
        self.kept_T = None
        if layer in self._going_on:
            cached_1HCD = values_1HCD if self._metric == "v" else keys_1HCD
            new_1HTD = value_1HTD if self._metric == "v" else key_1HTD
            self.kept_T = self._most_deviating(cached_1HCD, new_1HTD, self._going_on[layer])
        keys_1HCD.index_copy_(2, self.rows_T, key_1HTD)
        values_1HCD.index_copy_(2, self.rows_T, value_1HTD)
        if self.kept_T is None:
            return attend(query_1QTD, keys_1HCD, values_1HCD, self._visible_TC, scaling)
        self.rows_T = self.rows_T[self.kept_T]
        self._visible_TC = self._visible()
        attended_1TQD = query_1QTD.new_zeros(query_1QTD.shape).transpose(1, 2)
        attended_1TQD[:, self.kept_T] = attend(
            query_1QTD[:, :, self.kept_T], keys_1HCD, values_1HCD, self._visible_TC, scaling
        )
        return attended_1TQD

    def _most_deviating(self, cached_1HCD: Tensor, new_1HTD: Tensor, count: int) -> Tensor:
        """The `count` of the prefix's rows that have changed most, and all online ones."""
        prefix = len(self.rows_T) - self._online_tokens
        change_1HTD = new_1HTD[:, :, :prefix].float() - cached_1HCD[:, :, self.rows_T[:prefix]]
        deviation_T = change_1HTD.square().sum(dim=(0, 1, 3))
        # Equal ones in their order.
        most_T = deviation_T.sort(descending=True, stable=True).indices[:count]
        online_T = torch.arange(prefix, len(self.rows_T), device=most_T.device)
        return torch.cat((most_T.sort().values, online_T))

    def _visible(self) -> Tensor:
        return self.positions_C[None] <= self.positions_C[self.rows_T, None]
