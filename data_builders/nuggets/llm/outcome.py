"""What became of a request: nugget candidates, or the kind of its failure."""

from dataclasses import dataclass
from typing import Literal, get_args

from data_builders.nuggets.instructions import parse_candidates

FailureKind = Literal[
    "rate_limit",
    "server_error",
    "timeout",
    "connection",
    "bad_request",
    "too_long",
    "refused",
    "truncated_answer",
    "unreadable_answer",
]
FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)
TRANSIENT: frozenset[FailureKind] = frozenset(
    {"rate_limit", "server_error", "timeout", "connection"}
)

Outcome = list[str] | FailureKind
"""Candidates (an empty list is an answer too), or the kind of failure."""


@dataclass(frozen=True)
class Answer:
    """A chat completion as it came: `text` is the raw answer and `model` the server's own name.

    Without usage in the response the token counts are estimates, and `is_estimate` says so.
    """

    text: str | None
    refusal: str | None
    finish_reason: str | None
    model: str | None
    input_tokens: int
    output_tokens: int
    is_estimate: bool = False


class RequestFailedError(Exception):
    """A request without an answer.

    `wait_seconds` is what the server asked for. `ask_again`: the request was refused for its form
    and the client will use another one, so that this does not count as an attempt.
    """

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        wait_seconds: float | None = None,
        ask_again: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind, self.wait_seconds, self.ask_again = kind, wait_seconds, ask_again


def read_answer(text: str | None, refusal: str | None, finish_reason: str | None) -> Outcome:
    """The candidates in an answer; of one that was cut off, its complete entries."""
    if refusal:
        return "refused"
    try:
        candidates = parse_candidates(text or "")
    except ValueError:
        candidates = None
    if finish_reason == "length" and not candidates:
        return "truncated_answer"
    if finish_reason == "content_filter" and not candidates:
        return "refused"
    return "unreadable_answer" if candidates is None else candidates


def is_settled(outcome: Outcome | None, retry_failed: bool) -> bool:
    """Whether a text need not be asked: it has candidates, or failed and is not to be retried."""
    return outcome is not None and not (retry_failed and isinstance(outcome, str))
