"""Prices, estimates and budgets of nugget extraction by a language model."""

from collections.abc import Iterable
from dataclasses import dataclass

from data_builders.nuggets.llm.journal import Journal, Usage
from data_builders.nuggets.llm.outcome import is_settled
from data_builders.nuggets.llm.requests import encode_body, request_body
from recipes.building import LlmConfig

# Results of batch files cost half of what the same requests cost at once (OpenAI's Batch API).
BATCH_PRICE_FACTOR = 0.5
# Of English; an estimate for before the run, never for what was spent.
BYTES_A_TOKEN = 4
# Nuggets repeat most of the text, between quotation marks.
OUTPUT_SHARE_OF_TEXT = 1.2


def cost(config: LlmConfig, online: Usage, batch: Usage) -> float | None:
    """What requests cost in USD at the recipe's prices; None without prices."""
    if config.input_price is None or config.output_price is None:
        return None
    full, half = (
        (usage.input_tokens * config.input_price + usage.output_tokens * config.output_price) / 1e6
        for usage in (online, batch)
    )
    return full + BATCH_PRICE_FACTOR * half


def journal_cost(journal: Journal) -> float | None:
    """What all runs so far cost in USD under the journal's settings; None without prices."""
    return cost(journal.config, journal.spent("online"), journal.spent("batch"))


def describe(usage: Usage, dollars: float | None) -> str:
    """Requests, tokens and cost in words."""
    text = (
        f"{usage.requests:,} requests, {usage.input_tokens:,} input and "
        f"{usage.output_tokens:,} output tokens"
    )
    return text if dollars is None else f"{text}, {dollars:,.4f} USD"


@dataclass(frozen=True)
class Estimate:
    """What is still to be asked of a corpus, and about what that takes; costs are in USD."""

    texts: int
    to_ask: int
    usage: Usage
    online_cost: float | None
    batch_cost: float | None

    def __str__(self) -> str:
        text = (
            f"{self.to_ask:,} of {self.texts:,} chunks to ask, about {self.usage.input_tokens:,} "
            f"input and {self.usage.output_tokens:,} output tokens"
        )
        if self.online_cost is None:
            return f"{text} (without input_price and output_price no cost is known)"
        return (
            f"{text}, about {self.online_cost:,.2f} USD ({self.batch_cost:,.2f} USD by batch files)"
        )


def estimate(texts: Iterable[str], journal: Journal, retry_failed: bool = False) -> Estimate:
    """One pass over the texts without any request: what asking the rest will take, about."""
    config = journal.config
    overhead = len(encode_body(request_body("", config, "json_schema", "max_tokens")))
    count = to_ask = input_tokens = output_tokens = 0
    for text in texts:
        count += 1
        if is_settled(journal.outcome(text), retry_failed):
            continue
        to_ask += 1
        size = len(text.encode("utf-8", "replace"))
        input_tokens += (overhead + size) // BYTES_A_TOKEN
        wanted = int(size / BYTES_A_TOKEN * OUTPUT_SHARE_OF_TEXT)
        output_tokens += min(wanted, config.max_output_tokens)
    usage = Usage(to_ask, input_tokens, output_tokens)
    return Estimate(
        count, to_ask, usage, cost(config, usage, Usage()), cost(config, Usage(), usage)
    )


class Budget:
    """Keeps requests, tokens and cost under the recipe's limits, with what is in flight.

    A request in flight counts with the most it can take, and then with what it took.
    """

    def __init__(
        self, config: LlmConfig, online: Usage | None = None, batch: Usage | None = None
    ) -> None:
        """Starts with what was spent before, by requests at once and in batches."""
        self._config = config
        self._online, self._batch = online or Usage(), batch or Usage()
        self._reserved = Usage()

    @property
    def in_flight(self) -> int:
        """Requests reserved and not settled."""
        return self._reserved.requests

    def lacks(self, most: Usage) -> str | None:
        """The limit that one more request of up to `most` could break; None: it fits."""
        config = self._config
        online = self._online + self._reserved + most
        total = online + self._batch
        if config.max_requests is not None and total.requests > config.max_requests:
            return f"nuggets.llm.max_requests={config.max_requests}"
        if config.max_total_tokens is not None and total.tokens > config.max_total_tokens:
            return f"nuggets.llm.max_total_tokens={config.max_total_tokens}"
        if config.max_cost is not None:
            dollars = cost(config, online, self._batch)
            assert dollars is not None, "max_cost comes with prices"
            if dollars > config.max_cost:
                return f"nuggets.llm.max_cost={config.max_cost}"
        return None

    def reserve(self, most: Usage) -> None:
        """A request is about to be sent."""
        self._reserved += most

    def settle(self, most: Usage, used: Usage) -> None:
        """The request reserved with `most` has ended and took `used`."""
        self._reserved -= most
        self._online += used
