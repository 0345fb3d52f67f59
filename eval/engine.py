"""The online path: a cached prefix, the tokens computed over it, and a greedy decode loop.

Positions are always passed explicitly; `generate()` would guess them from the cache's length.
Clock: time to first token (TTFT) starts with chunk keys and values in the model's memory, and
holds the load, rotation and assembly of the prefix, the prefill of the online tokens and the
choice of the first token. Encoding chunks is offline work and lies before the clock.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cache_ops.assemble import assemble
from cache_ops.encode import encode_chunk
from cache_ops.plan import PrefixPlan
from cache_ops.rope import Rope


@dataclass(frozen=True)
class Completion:
    """One greedy answer: its tokens without the stop token, and what it took."""

    token_ids: list[int]
    stopped: bool
    """Whether a stop token ended it, and not the token limit."""
    ttft_ms: float


@torch.inference_mode()
def encode_chunks(
    model: PreTrainedModel, chunks: Iterable[tuple[str, Sequence[int]]]
) -> tuple[dict[str, Tensor], float]:
    """Encode (id, token ids) pairs each alone, and say how many milliseconds that took.

    Returns kv_TL2HD by id (see `encode_chunk`), on the model's device; an id that comes twice is
    encoded once, and one without tokens is left out.
    """
    start = _now_ms(model.device)
    chunk_kv = {chunk_id: encode_chunk(model, ids) for chunk_id, ids in dict(chunks).items() if ids}
    return chunk_kv, _now_ms(model.device) - start


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    rope: Rope,
    plan: PrefixPlan,
    online_ids: Sequence[int],
    chunk_kv: Mapping[str, Tensor],
    *,
    stop_ids: AbstractSet[int],
    max_new_tokens: int,
) -> Completion:
    """Serve one request: assemble `plan` from `chunk_kv`, prefill `online_ids`, decode greedily.

    `online_ids` (at least one) follow the prefix at positions `plan.length, plan.length + 1, …`.
    """
    assert online_ids, "a request computes at least one token online"
    start = _now_ms(model.device)
    cache = assemble(plan, chunk_kv, rope)
    token = _next_token(model, online_ids, plan.length, cache)
    # Reading the token was the one device synchronisation, so the clock can be read as it is.
    ttft_ms = time.perf_counter() * 1e3 - start

    position = plan.length + len(online_ids)
    token_ids: list[int] = []
    while token not in stop_ids:
        token_ids.append(token)
        if len(token_ids) == max_new_tokens:
            return Completion(token_ids, stopped=False, ttft_ms=ttft_ms)
        token = _next_token(model, [token], position, cache)
        position += 1
    return Completion(token_ids, stopped=True, ttft_ms=ttft_ms)


def _next_token(
    model: PreTrainedModel, token_ids: Sequence[int], position: int, cache: DynamicCache
) -> int:
    """Run tokens at `position…` over the cache, which grows by them; the most likely next one."""
    ids_1T = torch.tensor([token_ids], device=model.device)
    positions_1T = torch.arange(position, position + len(token_ids), device=model.device)[None]
    logits_11V = model(
        input_ids=ids_1T,
        position_ids=positions_1T,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return int(logits_11V[0, -1].argmax())


def _now_ms(device: torch.device) -> float:
    """The clock, once the device has finished what was queued before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3
