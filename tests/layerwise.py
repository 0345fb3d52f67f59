"""A decoder run layer by layer and row by row, independent of the package's own operations.

Of transformers' model only the projections, norms and MLPs are used; rotation, attention and the
replacing of cached rows are written out. Rows attend one by one, each to the keys whose positions
are not above its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

Weights = Callable[[Tensor], Tensor]
"""Logits [heads, keys] of one row's queries to attention weights [heads, keys]."""


@dataclass
class Pass:
    """Logits of the last row, and each layer's keys and values as [rows, heads, dimensions]."""

    logits: Tensor
    keys: list[Tensor]
    values: list[Tensor]


@torch.no_grad()
def slow_pass(
    model: PreTrainedModel,
    ids: Sequence[int],
    positions: Sequence[int],
    rows: Sequence[int] | None = None,
    cached: Pass | None = None,
    narrow: Callable[[int, list[int], Pass, Pass], list[int]] | None = None,
    weigh: Weights = lambda logits: logits.softmax(dim=-1),
) -> Pass:
    """Computes `rows` of a text over the cached keys and values of its others.

    Args:
        model: any supported one.
        ids: tokens of all rows.
        positions: where all rows stand.
        rows: those that are computed, all by default.
        cached: keys and values of the rows from the first one on.
        narrow: from the layer, the rows in hand, what was cached and what the layer now has to the
            rows that go on.
        weigh: how logits become weights; rows that a query does not see are -inf.
    """
    config, body = model.config, model.model
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    rows = list(range(len(ids))) if rows is None else list(rows)
    places = torch.tensor(positions)
    # Only the frequencies come from the model; YaRN's factor is in its tables.
    tables = body.rotary_emb(torch.zeros(1), places[None])
    cosine, sine = tables[0][0][:, None], tables[1][0][:, None]
    embedded = body.embed_tokens(torch.tensor(ids))
    hidden = {row: embedded[row] for row in rows}
    done = Pass(torch.empty(0), [], [])
    for number, layer in enumerate(body.layers):
        attention = layer.self_attn
        normed = layer.input_layernorm(torch.stack([hidden[row] for row in rows]))
        query = attention.q_proj(normed).unflatten(-1, (heads, -1))
        key = attention.k_proj(normed).unflatten(-1, (groups, -1))
        value = attention.v_proj(normed).unflatten(-1, (groups, -1))
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = (turned(states, cosine[rows], sine[rows]) for states in (query, key))
        keys = torch.zeros(len(ids), *key.shape[1:])
        values = torch.zeros(len(ids), *value.shape[1:])
        if cached is not None:
            keys[: len(cached.keys[number])] = cached.keys[number]
            values[: len(cached.values[number])] = cached.values[number]
        keys[rows], values[rows] = key, value
        done.keys.append(keys)
        done.values.append(values)
        going = rows
        if narrow is not None and cached is not None:
            going = narrow(number, rows, cached, done)
        attended = []
        for row in going:
            own = query[rows.index(row)].unflatten(0, (groups, -1))
            logits = torch.einsum("ghd,kgd->ghk", own, keys).flatten(0, 1) * own.shape[-1] ** -0.5
            share = weigh(logits.masked_fill(places > places[row], float("-inf")))
            share = share.unflatten(0, (groups, -1))
            attended.append(torch.einsum("ghk,kgd->ghd", share, values).flatten())
        states = torch.stack([hidden[row] for row in going])
        states = states + attention.o_proj(torch.stack(attended))
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        hidden = dict(zip(going, states, strict=True))
        rows = going
    done.logits = model.lm_head(body.norm(hidden[rows[-1]]))
    return done


def turned(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """States [rows, heads, dimensions] at their positions."""
    half = states.shape[-1] // 2
    crossed = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return states * cosine + crossed * sine


def side_by_side(passes: Sequence[Pass]) -> Pass:
    """Segments that were computed apart, as one prefix."""
    keys = [torch.cat(layer) for layer in zip(*(one.keys for one in passes), strict=True)]
    values = [torch.cat(layer) for layer in zip(*(one.values for one in passes), strict=True)]
    return Pass(torch.empty(0), keys, values)
