"""The slow, plain way to answer from sliced chunks, independent of the package's own operations.

Nothing is rotated here: to obtain a slice at a new position, the whole chunk is encoded by an
ordinary transformers forward whose positions start so that the slice lands where the plan says.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cache_ops.packing import Example
from cache_ops.plan import PrefixPlan


def prefix_cache(
    model: PreTrainedModel, plan: PrefixPlan, chunk_ids: Mapping[str, Sequence[int]]
) -> DynamicCache:
    """The prefix of a plan, every slice computed at its new position; gradients flow through it."""
    layers = range(model.config.num_hidden_layers)
    keys: list[list[Tensor]] = [[] for _ in layers]
    values: list[list[Tensor]] = [[] for _ in layers]
    for piece in plan.slices:
        ids = torch.tensor([list(chunk_ids[piece.chunk])])
        offset = piece.position - piece.start
        cache = DynamicCache()
        model.model(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1])[None] + offset,
            past_key_values=cache,
            use_cache=True,
        )
        for layer in layers:
            keys[layer].append(cache.layers[layer].keys[:, :, piece.start : piece.end])
            values[layer].append(cache.layers[layer].values[:, :, piece.start : piece.end])
    prefix = DynamicCache()
    if plan.slices:
        for layer in layers:
            prefix.update(torch.cat(keys[layer], 2), torch.cat(values[layer], 2), layer)
    return prefix


def answer_logits(
    model: PreTrainedModel,
    example: Example,
    chunk_ids: Mapping[str, Sequence[int]],
    encoder: PreTrainedModel | None = None,
) -> Tensor:
    """Logits [answer tokens, vocabulary] that predict the example's answer, in two passes.

    With `encoder` that model encodes the chunks, and no gradient flows through it.
    """
    if encoder is None:
        cache = prefix_cache(model, example.plan, chunk_ids)
    else:
        with torch.no_grad():
            cache = prefix_cache(encoder, example.plan, chunk_ids)
    own_ids = torch.tensor([[*example.query_ids, *example.answer_ids]])
    positions = torch.arange(own_ids.shape[1])[None] + example.plan.length
    logits = model(
        input_ids=own_ids, position_ids=positions, past_key_values=cache, use_cache=True
    ).logits[0]
    first = len(example.query_ids) - 1
    return logits[first : first + len(example.answer_ids)]
