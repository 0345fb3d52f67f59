"""Asks a model about a few texts at once, for an answer that somebody waits for.

Nothing is looked up in the journal or kept there: the time that an answer takes is part of what is
measured. Budgets therefore hold for each extractor that is opened, and not over all runs.
"""

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TYPE_CHECKING

from data_builders.nuggets.instructions import Messages
from data_builders.nuggets.llm.cost import Budget, cost, describe
from data_builders.nuggets.llm.journal import Usage
from data_builders.nuggets.llm.outcome import (
    TRANSIENT,
    FailureKind,
    Outcome,
    RequestFailedError,
    read_answer,
)
from data_builders.nuggets.llm.requests import most_input_tokens, server_url
from recipes.building import LlmConfig
from recipes.errors import UserError

if TYPE_CHECKING:
    from data_builders.nuggets.llm.client import Client

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.5


def open_asked_model(config: LlmConfig) -> Callable[[Sequence[Messages]], list[list[str]]]:
    """A function from chats to each one's candidates, in the order in which the model gave them.

    A chat that gets no usable answer in `attempts` requests has no candidates; how many there were,
    by kind, is logged when the function is freed.

    Raises:
        UserError: the openai package or the key is missing. From the function, `UserError`: no
            request can succeed, the server is down, or a budget is used up.
    """
    try:
        from data_builders.nuggets.llm.client import Client
    except ModuleNotFoundError as error:
        if error.name != "openai":
            raise
        raise UserError(
            "systems.online_nuggets.extractor=llm needs the openai package: "
            "pip install coinrag[llm]"
        ) from None
    asking = _Asking(Client(config), config)
    # One loop for all calls, so that connections stay open from one to the next.
    loop = asyncio.new_event_loop()
    Thread(target=_work, args=(loop,), name="online nuggets", daemon=True).start()

    def ask(chats: Sequence[Messages]) -> list[list[str]]:
        return asyncio.run_coroutine_threadsafe(asking.all(chats), loop).result()

    weakref.finalize(ask, _close, loop, asking, config)
    return ask


def _work(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _close(loop: asyncio.AbstractEventLoop, asking: "_Asking", config: LlmConfig) -> None:
    """Tells what was spent and what failed, and has the connections closed."""

    async def close() -> None:
        await asking.client.close()
        loop.stop()

    asyncio.run_coroutine_threadsafe(close(), loop)
    log.info(
        "Online nuggets by %s: %s",
        config.model,
        describe(asking.spent, cost(config, asking.spent, Usage())),
    )
    if asking.failures:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(asking.failures.items()))
        log.warning(
            "%d of %d chunks got no nuggets: %s", asking.failures.total(), asking.chats, kinds
        )


class _Asking:
    """A client, what it has spent, and how its chats ended."""

    def __init__(self, client: "Client", config: LlmConfig) -> None:
        self.client, self._config = client, config
        self.chats = 0
        self.failures: Counter[FailureKind] = Counter()
        self.spent = Usage()
        self._budget = Budget(config)
        self._form_is_known = False

    async def all(self, chats: Sequence[Messages]) -> list[list[str]]:
        """The candidates of every chat."""
        if not chats:
            return []
        at_once = asyncio.Semaphore(self._config.concurrent_requests)

        async def ask(chat: Messages) -> Outcome:
            async with at_once:
                return await self._ask(chat)

        # The first goes alone: it finds the request's form, or that nothing works.
        alone = 0 if self._form_is_known else 1
        outcomes = [await ask(chat) for chat in chats[:alone]]
        self._form_is_known = True
        rest = [ask(chat) for chat in chats[alone:]]
        for outcome in await asyncio.gather(*rest, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            outcomes.append(outcome)
        failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if failures and len(failures) == len(chats) and TRANSIENT.issuperset(failures):
            raise UserError(
                f"{server_url(self._config)} answered nothing to all {len(chats)} chunks of a "
                f"question ({', '.join(sorted(set(failures)))}): run again when it does"
            )
        self.chats += len(chats)
        self.failures.update(failures)
        return [[] if isinstance(outcome, str) else outcome for outcome in outcomes]

    async def _ask(self, chat: Messages) -> Outcome:
        """One chat, up to its answer or its last attempt."""
        attempt = 0
        while True:
            try:
                return await self._send(chat)
            except RequestFailedError as failure:
                if failure.ask_again:
                    continue
                attempt += 1
                if failure.kind not in TRANSIENT or attempt >= self._config.attempts:
                    log.debug("no nuggets: %s", failure)
                    return failure.kind
                wait = failure.wait_seconds
                await asyncio.sleep(FIRST_BACKOFF_SECONDS * attempt if wait is None else wait)

    async def _send(self, chat: Messages) -> Outcome:
        body = {**self.client.body(""), "messages": chat}
        # Lines are asked for.
        body.pop("response_format", None)
        most = Usage(1, most_input_tokens(body), self._config.max_output_tokens)
        if lacking := self._budget.lacks(most):
            raise UserError(f"{lacking} leaves no room for another request: raise it")
        self._budget.reserve(most)
        used = Usage(1)
        try:
            answer = await self.client.ask(body)
            used = Usage(1, answer.input_tokens, answer.output_tokens)
        finally:
            self._budget.settle(most, used)
            self.spent += used
        return read_answer(answer.text, answer.refusal, answer.finish_reason)
