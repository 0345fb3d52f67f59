"""Greedy answers over cached prefixes, one request or many at a time.

Positions are always passed explicitly; `generate()` would guess them from the cache's length.
"""

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor
from transformers import PreTrainedModel

from cache_ops.cached import RequestCache, forward_cached


class Generation:
    """One greedy answer under way.

    Attributes:
        next_ids: the tokens to compute next.
        token_ids: the answer so far, without the stop token.
        stopped: a stop token has ended it.
        done: it has ended, by a stop token or at the limit.
        first_token: `time.perf_counter()` when the first token was known.
    """

    def __init__(
        self,
        cache: RequestCache,
        online_ids: Sequence[int],
        *,
        stop_ids: AbstractSet[int],
        max_new_tokens: int,
        first_pass: Callable[[], Tensor] | None = None,
    ) -> None:
        """Answers after `online_ids` (at least one), which are computed over the cache's prefix.

        `first_pass` computes them in a way of its own, and gives the logits_1V after the last one.
        """
        assert online_ids, "a request computes at least one token online"
        self.cache = cache
        self.token_ids: list[int] = []
        self.stopped = self.done = False
        self.first_token: float | None = None
        self.next_ids = online_ids
        self.first_pass = first_pass
        self._stop_ids = stop_ids
        self._limit = max_new_tokens

    def take(self, token: int) -> None:
        """Goes on with the most likely next token."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
            self.first_pass = None
        self.stopped = token in self._stop_ids
        if not self.stopped:
            self.token_ids.append(token)
            self.next_ids = [token]
        self.done = self.stopped or len(self.token_ids) == self._limit


def advance(model: PreTrainedModel, generations: Sequence[Generation]) -> None:
    """Brings each of the unfinished answers one token further.

    All share one forward pass, but those whose first pass is of its own kind.
    """
    shared = [one for one in generations if one.first_pass is None]
    if shared:
        logits_BV = forward_cached(model, [(one.cache, one.next_ids) for one in shared])
        # Reading the tokens is the one device synchronisation.
        for one, token in zip(shared, logits_BV.argmax(dim=-1).tolist(), strict=True):
            one.take(token)
    for one in generations:
        if one.first_pass is not None:
            one.take(int(one.first_pass().argmax()))
