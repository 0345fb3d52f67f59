"""Asks a language model for the nuggets of many texts at once, under budgets, into a journal."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from data_builders.nuggets.llm.cost import Budget, Estimate, cost, describe, journal_cost
from data_builders.nuggets.llm.failures import FailureStreak
from data_builders.nuggets.llm.journal import Journal, Usage
from data_builders.nuggets.llm.outcome import (
    TRANSIENT,
    Answer,
    FailureKind,
    RequestFailedError,
    is_settled,
    read_answer,
)
from data_builders.nuggets.llm.report import ExtractionReport
from data_builders.nuggets.llm.requests import most_input_tokens
from recipes.errors import UserError
from recipes.progress import Progress

if TYPE_CHECKING:
    from data_builders.nuggets.llm.client import Client

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.5, 30.0
# Texts looked up in the journal before arrived answers get their turn.
_LOOKUPS_AT_ONCE = 100


def extract_with_llm(
    texts: Iterable[str],
    journal: Journal,
    *,
    retry_failed: bool = False,
    estimate: Estimate | None = None,
) -> ExtractionReport:
    """Ask for the nuggets of each text that the journal has no outcome of.

    Args:
        texts: distinct chunk texts, read as a stream: memory does not grow with their number.
        retry_failed: ask again for texts whose requests failed or whose answers were of no use.
        estimate: of the same texts, shown before the first request and as the end of progress.

    Raises:
        UserError: no request can succeed, the server is down, a budget is used up, or some texts
            stand in batch files whose results were not read. What was answered is in the journal.
    """
    try:
        from data_builders.nuggets.llm.client import Client
    except ModuleNotFoundError as error:
        if error.name != "openai":
            raise
        raise UserError(
            "nuggets.extractor=llm needs the openai package: pip install coinrag[llm]"
        ) from None
    if pending := journal.pending_batches():
        listed = ", ".join(f"{file} ({count:,})" for file, count in pending.items())
        raise UserError(
            f"batch files whose results were not read: {listed}; read the results first, so that "
            "nothing is paid twice, or delete the files to ask at once"
        )
    client = Client(journal.config)
    if estimate is not None:
        logger.info("Nuggets by %s: %s", journal.config.model, estimate)
    run = _Run(client, journal, retry_failed)
    total = None if estimate is None else estimate.to_ask
    with Progress(f"Nuggets by {journal.config.model}", total, "chunks") as run.progress:
        asyncio.run(run.ask_all(texts))
    logger.info("Nuggets by %s: %s", journal.config.model, run.report)
    return run.report


class _Run:
    """Workers that share one stream of texts, one client, one budget and one way to stop."""

    progress: Progress

    def __init__(self, client: "Client", journal: Journal, retry_failed: bool) -> None:
        self._client, self._journal, self._retry_failed = client, journal, retry_failed
        self._config = journal.config
        # What all runs under these settings have spent: a killed one does not get a fresh budget.
        self._budget = Budget(journal.config, journal.spent("online"), journal.spent("batch"))
        self.report = ExtractionReport(cost=cost(self._config, Usage(), Usage()))
        self._problem: BaseException | None = None
        self._stopping = asyncio.Event()
        self._settled = asyncio.Event()
        self._first_asked = asyncio.Event()
        self._not_before = 0.0
        self._streak = FailureStreak(journal)

    async def ask_all(self, texts: Iterable[str]) -> None:
        """Ask for all texts; on an interruption, wait for what is in flight and was paid for."""
        todo = self._unsettled(texts)
        workers = [
            asyncio.create_task(self._work(todo, number))
            for number in range(self._config.concurrent_requests)
        ]
        try:
            await asyncio.wait(workers)
        except asyncio.CancelledError:
            logger.info("stopping: waiting for %d requests in flight", self._budget.in_flight)
            self._stop(KeyboardInterrupt())
            await asyncio.wait(workers)
            raise
        finally:
            await self._client.close()
        problem = self._problem or self._streak.finish()
        if problem is not None:
            raise problem

    async def _work(self, todo: Iterator[str | None], number: int) -> None:
        # The first text goes alone: it finds the request's form, or that nothing works.
        if number:
            await self._first_asked.wait()
        try:
            for text in todo:
                if self._stopping.is_set():
                    break
                if text is None:
                    await asyncio.sleep(0)
                else:
                    await self._ask(text)
                    self._first_asked.set()
        except Exception as error:
            # The others still finish what is in flight.
            self._stop(error)
        finally:
            self._first_asked.set()

    def _unsettled(self, texts: Iterable[str]) -> Iterator[str | None]:
        """Texts to ask, and None now and then between texts that need not be."""
        for text in texts:
            self.report.texts += 1
            outcome = self._journal.outcome(text)
            if not is_settled(outcome, self._retry_failed):
                yield text
                continue
            self.report.reused += 1
            if isinstance(outcome, str):
                self.report.failures[outcome] += 1
            if self.report.reused % _LOOKUPS_AT_ONCE == 0:
                yield None

    async def _ask(self, text: str) -> None:
        """One text, up to its answer or its last attempt."""
        key = self._journal.key(text)
        attempt = 0
        while True:
            body = self._client.body(text)
            most = Usage(1, most_input_tokens(body), self._config.max_output_tokens)
            await self._pause(self._not_before - time.monotonic())
            if not await self._has_budget(most):
                return
            failure = await self._send(key, body, most)
            if failure is None:
                return
            if failure.ask_again:
                continue
            attempt += 1
            if failure.kind not in TRANSIENT or attempt >= self._config.attempts:
                self._count_failure(failure.kind, self._streak.failed(key, failure))
                return
            await self._back_off(attempt, failure.wait_seconds)

    async def _send(
        self, key: bytes, body: dict[str, Any], most: Usage
    ) -> RequestFailedError | None:
        """One request, and its answer into the journal; why there is none, if it can be retried."""
        self._budget.reserve(most)
        answer, failure, used = None, None, Usage(1)
        try:
            answer = await self._client.ask(body)
            used = Usage(1, answer.input_tokens, answer.output_tokens)
            self._journal.record_answer(key, answer)
        except RequestFailedError as error:
            self._journal.record_spending(used)
            failure = error
        except UserError as error:
            self._journal.record_spending(used)
            self._stop(error)
        finally:
            self._budget.settle(most, used)
            self._settled.set()
        self.report.usage += used
        self.report.cost = cost(self._config, self.report.usage, Usage())
        if answer is not None:
            self._take_answer(answer)
        return failure

    async def _has_budget(self, most: Usage) -> bool:
        """Waits while only requests in flight stand in the way; False: the run is stopping."""
        while not self._stopping.is_set():
            lacking = self._budget.lacks(most)
            if lacking is None:
                return True
            if not self._budget.in_flight:
                self._stop(UserError(self._budget_message(lacking)))
                break
            self._settled.clear()
            await self._settled.wait()
        return False

    def _budget_message(self, lacking: str) -> str:
        spent = self._journal.spent("online") + self._journal.spent("batch")
        return (
            f"{lacking} leaves no room for another request: "
            f"{describe(spent, journal_cost(self._journal))} so far, {self.report.answered:,} "
            "chunks answered by this run; all answers are kept. Raise the limit and run again"
        )

    async def _back_off(self, attempt: int, wait_seconds: float | None) -> None:
        if wait_seconds is None:
            longest = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
            await self._pause(longest * random.uniform(0.5, 1.0))
            return
        # The server's wait holds for all; a little apart, so that they do not all come at once.
        self._not_before = max(self._not_before, time.monotonic() + wait_seconds)
        await self._pause(wait_seconds + FIRST_BACKOFF_SECONDS * random.random())

    async def _pause(self, seconds: float) -> None:
        """Wait, but not once the run is stopping."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)

    def _take_answer(self, answer: Answer) -> None:
        self._streak.answered()
        self.report.answers_without_usage += answer.is_estimate
        outcome = read_answer(answer.text, answer.refusal, answer.finish_reason)
        if isinstance(outcome, str):
            self._count_failure(outcome, self._streak.useless(outcome))
        else:
            self._streak.usable()
            self.report.answered += 1
            self._show()

    def _count_failure(self, kind: FailureKind, problem: UserError | None) -> None:
        self.report.failures[kind] += 1
        if problem is not None:
            self._stop(problem)
        self._show()

    def _stop(self, problem: BaseException) -> None:
        """No new requests from now on; the first problem is the one that is told."""
        self._problem = self._problem or problem
        self._stopping.set()
        self._settled.set()

    def _show(self) -> None:
        self.progress.note = self.report.spent()
        self.progress.advance()
