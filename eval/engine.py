"""The online path: a question in, an answer out, from chunks and slices made ready beforehand.

One thread does all the computing, so that requests never compete for cores or device. It takes what
questions are waiting, retrieves and plans, has slices read while it tokenizes, and then brings all
answers under way one token further by one forward pass, over and over. Requests join and leave
between passes.
"""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from cache_ops.closing import Closing
from cache_ops.hf import load_tokenizer
from eval.asked import Asked, Reply
from eval.checkpoints import Checkpoint, load_served, weights_of
from eval.online import OnlinePath, OnlineRequest
from eval.retriever import Retriever
from eval.serving import open_serving
from eval.systems import SYSTEMS, Width
from eval.telemetry import RequestReport, Telemetry
from eval.trained_with import warn_of_other_training
from recipes.errors import UserError
from recipes.schema import Recipe

_Running = tuple[Asked, OnlineRequest]


class Engine(Closing):
    """A checkpoint, a system and a corpus, answering questions; a context manager."""

    def __init__(
        self,
        config: Recipe,
        checkpoint: Checkpoint,
        system: str,
        *,
        path: OnlinePath,
        retriever: Retriever,
        telemetry: Telemetry,
    ) -> None:
        """Starts the engine over its opened parts; see `open`."""
        self._checkpoint, self._system = checkpoint, system
        self._tokenizer, self._retriever = path.serving.tokenizer, retriever
        self._path = path
        k = config.retrieval.k if SYSTEMS[system].selects_nuggets else None
        self._width = Width(config.retrieval.k_c, k)
        self._at_once = config.eval.concurrent_requests
        self._telemetry = telemetry
        self._waiting: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        config: Recipe,
        checkpoint: Checkpoint = "base",
        system: str = "coinrag",
        *,
        log: Path | None = None,
    ) -> Self:
        """Loads weights, corpus and store of a recipe.

        The corpus is that of the built dev split. Slices come from memory, from the recipe's store
        if it names one, and from the model, which adds what it has computed to the store.

        Args:
            config: the recipe.
            checkpoint: whose weights answer.
            system: one of `eval.systems.SYSTEMS`.
            log: where each request is appended as a line of JSON.

        Raises:
            UserError: nothing is built, there is no such checkpoint, or `log` cannot be written.
            ForeignStoreError: the store was made by other weights or settings.
            ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_model`.
        """
        telemetry = Telemetry(log)
        tokenizer = load_tokenizer(config.model.path)
        retriever = Retriever.open(config)
        weights = weights_of(config, checkpoint, system)
        warn_of_other_training(config, weights, system)
        # Answers do not wait for another process that writes to the store.
        served = load_served(config, weights, tokenizer, wait_seconds=0.0)
        serving = open_serving(config, served, tokenizer, [system])
        path = OnlinePath(serving, served.model, served.supply)
        return cls(config, checkpoint, system, path=path, retriever=retriever, telemetry=telemetry)

    def ask(self, question: str) -> Asked:
        """Hands a question in and returns at once; its answer streams from what is returned."""
        asked = Asked(question, self._tokenizer)
        with self._closing:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._waiting.put(asked)
        return asked

    def answer(self, question: str) -> Reply:
        """Answers a question. May be called from many threads."""
        return self.ask(question).reply()

    def answer_all(self, questions: Sequence[str]) -> list[Reply]:
        """Answers many questions together, at most `eval.concurrent_requests` at a time."""
        return [asked.reply() for asked in [self.ask(question) for question in questions]]

    def prometheus_text(self) -> str:
        """Counts and times of all requests so far, in Prometheus' text format."""
        return self._telemetry.prometheus_text(self._path.supply)

    def close(self) -> None:
        """Answers what was asked, then frees everything."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._waiting.put(None)
        self._thread.join()
        try:
            self._path.supply.close()
        finally:
            self._telemetry.close()

    # The engine's thread

    def _work(self) -> None:
        running: list[_Running] = []
        open_ = True
        while open_ or running:
            arrived, open_ = self._arrivals(len(running), open_)
            running += self._begin(arrived)
            if running:
                running = self._advance(running)

    def _arrivals(self, running: int, open_: bool) -> tuple[list[Asked], bool]:
        """Questions to take in now, and whether more may come; waits if nothing else is to do."""
        arrived: list[Asked] = []
        while open_ and running + len(arrived) < self._at_once:
            try:
                asked = self._waiting.get(block=not (running or arrived))
            except queue.Empty:
                break
            if asked is None:
                return arrived, False
            arrived.append(asked)
        return arrived, open_

    def _begin(self, arrived: Sequence[Asked]) -> list[_Running]:
        """Brings questions to where their first token can be computed."""
        begun = []
        for asked in arrived:
            with self._failing(asked):
                found = self._retriever.retrieve(asked.question)
                request = self._path.begin(found.question, self._system, self._width)
                request.stage_ms |= {
                    "embed": found.embed_ms, "search": found.search_ms, "score": found.score_ms,
                }  # fmt: skip
                begun.append((asked, request))
        # All reads are under way before the first is waited for.
        ready = []
        for asked, request in begun:
            with self._failing(asked):
                self._path.fill(request)
                self._refuse_too_long(request)
                ready.append((asked, request))
        return ready

    def _advance(self, running: Sequence[_Running]) -> list[_Running]:
        """One token for every answer under way; those that are not done."""
        # First passes of their own kind come alone: if one fails, the others are as they were.
        apart = [one for one in running if one[1].generation.first_pass is not None]
        if apart and len(running) > 1:
            together = [one for one in running if one[1].generation.first_pass is None]
            left = [left for one in apart for left in self._advance([one])]
            return [*(self._advance(together) if together else []), *left]
        try:
            self._path.advance([request for _, request in running])
        except Exception as error:
            if len(running) == 1:
                self._fail(running[0][0], error)
                return []
            # One of them may be too much for the device, and none has grown.
            return [left for one in running for left in self._advance([one])]
        for asked, request in running:
            generation = request.generation
            # The token that ends an answer is no part of it.
            if not generation.stopped:
                asked.push(generation.token_ids[-1])
            if generation.done:
                reply = self._reply(asked, request)
                asked.end(reply)
                self._telemetry.answered(reply.report)
        for _, request in running:
            # What was computed is stored when nobody waits for a first token any more.
            if not request.released:
                request.release()
        return [one for one in running if not one[1].generation.done]

    def _refuse_too_long(self, request: OnlineRequest) -> None:
        most = self._path.model.config.max_position_embeddings
        if (needed := request.last_position) > most:
            raise UserError(
                f"the question takes {request.online_tokens} tokens, with its prefix and answer up "
                f"to {needed} positions; the model was trained for {most}"
            )

    @contextmanager
    def _failing(self, asked: Asked) -> Iterator[None]:
        """An error ends the question and not the engine."""
        try:
            yield
        except Exception as error:
            self._fail(asked, error)

    def _fail(self, asked: Asked, error: Exception) -> None:
        self._telemetry.failed(self._checkpoint, self._system)
        asked.end(error)

    def _reply(self, asked: Asked, request: OnlineRequest) -> Reply:
        generation, supplied = request.generation, request.supplied
        text = str(self._tokenizer.decode(generation.token_ids, skip_special_tokens=True)).strip()
        assert generation.first_token is not None, "a finished answer has had a first token"
        ttft_ms = (generation.first_token - asked.since) * 1e3
        # What the stages leave over was spent waiting, also for requests beside it.
        waited = max(0.0, ttft_ms - sum(request.stage_ms.values()))
        report = RequestReport(
            question=asked.question,
            answer=text,
            evidence=self._evidence(request),
            checkpoint=self._checkpoint,
            system=self._system,
            k_c=self._width.k_c,
            k=self._width.k,
            active_tokens=request.served.layout.tokens,
            online_tokens=request.online_tokens,
            recomputed_tokens=request.recomputed_tokens,
            new_tokens=len(generation.token_ids),
            stopped=generation.stopped,
            tokens_memory=supplied.tokens_memory if supplied else 0,
            tokens_disk=supplied.tokens_disk if supplied else 0,
            tokens_computed=supplied.tokens_computed if supplied else 0,
            bytes_read=supplied.bytes_read if supplied else 0,
            batch_requests=request.batch_requests,
            stage_ms={"wait": waited, **request.stage_ms},
            ttft_ms=ttft_ms,
            total_ms=(time.perf_counter() - asked.since) * 1e3,
        )
        return Reply(text, generation.token_ids, report)

    def _evidence(self, request: OnlineRequest) -> list[str]:
        if SYSTEMS[self._system].selects_nuggets:
            return [piece.text for piece in request.served.evidence]
        titles = {chunk.chunk_id: chunk.title for chunk in request.question.chunks}
        return [titles[piece.chunk_id] for piece in request.served.evidence]
