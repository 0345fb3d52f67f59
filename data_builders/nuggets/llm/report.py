"""What an extraction by a language model did."""

from collections import Counter
from dataclasses import dataclass, field

from data_builders.nuggets.llm.cost import describe
from data_builders.nuggets.llm.journal import Usage
from data_builders.nuggets.llm.outcome import FailureKind


@dataclass
class ExtractionReport:
    """What a run did: usage and cost (USD, None without prices) are this run's alone.

    `failures` counts the texts that are without candidates now, those of earlier runs included.
    """

    texts: int = 0
    reused: int = 0
    answered: int = 0
    usage: Usage = field(default_factory=Usage)
    answers_without_usage: int = 0
    cost: float | None = None
    failures: Counter[FailureKind] = field(default_factory=Counter)

    def __str__(self) -> str:
        chunks = f"{self.texts:,} chunks: {self.answered:,} answered now, {self.reused:,} before"
        return "; ".join([chunks, describe(self.usage, self.cost), *self.failed()])

    def spent(self) -> str:
        """Tokens, cost and failures so far, short enough for a line of progress."""
        dollars = [] if self.cost is None else [f"{self.cost:,.4f} USD"]
        return ", ".join([f"{self.usage.tokens:,} tokens", *dollars, *self.failed()])

    def failed(self) -> list[str]:
        """The failures by kind in words, if there are any."""
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.failures.items()))
        return [f"failed: {kinds}"] if kinds else []
