"""From a question with its evidence to the first token and on: the path that every system shares.

Stages: plan the prefix and have its slices read; tokenize the query meanwhile; lay the slices into
the request's cache; compute the query; decode greedily.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cache_ops.cached import RequestCache
from cache_ops.encode import encode_chunks
from cache_ops.plan import PrefixPlan
from cache_ops.recompute import forward_recomputing, recomputed_tokens
from cache_ops.rope import Rope
from cache_ops.supply import Supplied, Supply, Supplying
from eval.decoding import Generation, advance
from eval.systems import SYSTEMS, Question, Request, Serving, Width


@dataclass
class OnlineRequest:
    """A question under way; `begin`, then `fill`, then `advance` until the generation is done.

    Then `release` it. `stage_ms` tells where the time to first token went, see `telemetry.STAGES`.
    """

    question: Question
    served: Request
    fetch: Supplying | None
    stage_ms: dict[str, float]
    supplied: Supplied | None = None
    online_tokens: int = 0
    recomputed_tokens: float = 0.0
    """Cached tokens that the first pass computes anew, in the mean of the layers."""
    batch_requests: int = 0
    last_position: int = 0
    """One past the position that the longest answer can reach."""
    released: bool = False
    generation: Generation = field(init=False)

    def release(self) -> None:
        """Gives the slices' memory back and stores what was computed; once the first token is out.

        It may take as long as a write to disk.
        """
        self.released = True
        if self.supplied is not None:
            self.supplied.release()


class OnlinePath:
    """A model with what all of its requests share."""

    def __init__(self, serving: Serving, model: PreTrainedModel, supply: Supply) -> None:
        self.model, self.serving, self.supply = model, serving, supply
        self._limit = serving.config.eval.max_new_tokens
        self._rope = Rope.from_config(model.config)
        on_gpu = model.device.type == "cuda"
        self._side_stream = torch.cuda.Stream(model.device) if on_gpu else None

    def begin(self, question: Question, system: str, width: Width) -> OnlineRequest:
        """Plans the prefix and has its slices read; returns while they are."""
        start = time.perf_counter()
        served = SYSTEMS[system].request(question, width, self.serving)
        plan_ms = _ms_since(start) - served.extract_ms
        stage_ms = {"extract": served.extract_ms, "plan": plan_ms, "read": 0.0, "copy": 0.0}
        fetch = None
        if cached := [
            p for p in served.layout.plan.slices if p.chunk not in served.online_segments
        ]:
            start = time.perf_counter()
            nuggets = {chunk.chunk_id: chunk.nuggets for chunk in question.chunks}
            if served.parallel is not None:
                # Its chunks begin with the prompt, so that spans are not theirs.
                nuggets = {}
            # What the page cache and the memory tier hold is copied at once.
            fetch = self.supply.start(PrefixPlan(tuple(cached)), served.segments, nuggets)
            stage_ms["read"] = _ms_since(start)
        return OnlineRequest(question, served, fetch, stage_ms)

    @torch.inference_mode()
    def fill(self, request: OnlineRequest) -> None:
        """Tokenizes the query, waits for the slices, and makes the request's cache of them."""
        start = time.perf_counter()
        served, plan = request.served, request.served.layout.plan
        query_ids = self.serving.template.query_ids(request.question.question)
        online_ids = [*served.layout.online_ids, *query_ids]
        request.stage_ms["plan"] += _ms_since(start)

        kv_TL2HD = None
        if request.fetch is not None:
            kv_TL2HD = self._load(request, request.fetch)
        if served.online_segments:
            start = time.perf_counter()
            kv_TL2HD = self._with_online_segments(served, kv_TL2HD)
            request.stage_ms["compute"] = _ms_since(start)
        start = time.perf_counter()
        # Without any between the slices, all follow the prefix.
        positions = served.layout.positions_with(len(query_ids)) if served.layout.online_ids else ()
        cache = RequestCache(
            plan,
            kv_TL2HD,
            self._rope,
            room=len(online_ids) + self._limit,
            first_positions=positions,
            parallel=served.parallel,
            contextualizer=served.contextualizer,
        )
        if self._side_stream is not None and kv_TL2HD is not None:
            cache.lay_ahead(self.model.dtype, self._side_stream)
        request.stage_ms["copy"] += _ms_since(start) - cache.lay_seconds * 1e3
        first_pass = None
        if served.recompute is not None:
            prefix_ids = served.prefix_ids()
            layers = self.model.config.num_hidden_layers
            request.recomputed_tokens = recomputed_tokens(served.recompute, len(prefix_ids), layers)
            first_pass = partial(
                forward_recomputing, self.model, cache, served.recompute, prefix_ids, online_ids
            )
        request.online_tokens = len(online_ids)
        request.last_position = served.layout.length + len(query_ids) + self._limit
        request.generation = Generation(
            cache,
            online_ids,
            stop_ids=self.serving.template.stop_ids,
            max_new_tokens=self._limit,
            first_pass=first_pass,
        )

    def _with_online_segments(self, served: Request, cached_TL2HD: Tensor | None) -> Tensor:
        """The prefix in the plan's order, with what no cache can hold encoded now."""
        names = sorted(served.online_segments)
        encoded = encode_chunks(self.model, [served.segments[name] for name in names])
        online = dict(zip(names, encoded, strict=True))
        pieces = []
        taken = 0
        for piece in served.layout.plan.slices:
            if piece.chunk in online:
                pieces.append(online[piece.chunk][piece.start : piece.end])
                continue
            assert cached_TL2HD is not None, "the other slices were supplied"
            tokens = piece.end - piece.start
            pieces.append(cached_TL2HD[taken : taken + tokens].to(self.model.dtype))
            taken += tokens
        return torch.cat(pieces)

    def _load(self, request: OnlineRequest, fetch: Supplying) -> Tensor:
        """The slices on the model's device; to a GPU each goes as it arrives from disk."""
        start = time.perf_counter()
        layout, records_TR = self.supply.layout, fetch.records_TR
        # Not narrower than they are stored: keys are rotated before they are rounded.
        dtype = torch.float32 if layout.has_scales else layout.torch_dtype
        if self._side_stream is None:
            request.supplied = fetch.wait()
            request.stage_ms["read"] += _ms_since(start)
            start = time.perf_counter()
            kv_TL2HD = layout.decode(records_TR, dtype)
            request.stage_ms["copy"] += _ms_since(start)
            return kv_TL2HD
        with torch.cuda.stream(self._side_stream):
            on_device_TR = torch.empty_like(records_TR, device=self.model.device)
            for first, end in fetch.ready():
                on_device_TR[first:end].copy_(records_TR[first:end], non_blocking=True)
            request.supplied = fetch.wait()
            request.stage_ms["read"] += _ms_since(start)
            return layout.decode(on_device_TR, dtype)

    def advance(self, requests: Sequence[OnlineRequest]) -> None:
        """Brings every unfinished answer one token further, all in one forward pass."""
        start = time.perf_counter()
        advance(self.model, [request.generation for request in requests])
        pass_ms = _ms_since(start)
        for request in requests:
            if not request.batch_requests:
                request.batch_requests = len(requests)
                self._note_first_token(request, pass_ms)

    def _note_first_token(self, request: OnlineRequest, pass_ms: float) -> None:
        stage_ms, cache = request.stage_ms, request.generation.cache
        computed = request.supplied.seconds["compute"] * 1e3 if request.supplied else 0.0
        stage_ms["compute"] = stage_ms.get("compute", 0.0) + computed
        stage_ms["read"] -= computed
        stage_ms["rotate"] = cache.rotate_seconds * 1e3
        stage_ms["copy"] += cache.copy_seconds * 1e3
        stage_ms["contextualize"] = cache.contextualize_seconds * 1e3
        # On a CPU the prefix is laid inside the forward pass.
        stage_ms["prefill"] = pass_ms - (0.0 if self._side_stream else cache.lay_seconds * 1e3)


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
