"""Tells a text that fails by itself from a server that is down or a model that is no use."""

from data_builders.nuggets.llm.journal import Journal
from data_builders.nuggets.llm.outcome import FailureKind, RequestFailedError
from data_builders.nuggets.llm.requests import server_url
from recipes.errors import UserError

# A run ends when this many texts in a row fail (or one for each concurrent request, if more).
FAILURES_IN_A_ROW = 10


class FailureStreak:
    """The texts that failed since the last usable answer.

    Requests without an answer become the texts' own failures, kept in the journal, only when an
    answer to another text follows: the failures of a server that is down are not kept, so that the
    next run asks again.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._limit = max(FAILURES_IN_A_ROW, journal.config.concurrent_requests)
        self._unanswered: list[tuple[bytes, FailureKind]] = []
        self._length = 0
        self._last = ""
        self._ever_answered = False

    def answered(self) -> None:
        """The server gave an answer, usable or not."""
        self._ever_answered = True
        self._keep()

    def usable(self) -> None:
        """An answer had candidates, or the empty list."""
        self._length = 0

    def useless(self, kind: FailureKind) -> UserError | None:
        """An answer was of no use; the reason to end the run, if the streak is too long."""
        return self._extend(f"answers of no use ({kind})")

    def failed(self, key: bytes, failure: RequestFailedError) -> UserError | None:
        """A text got no answer; the reason to end the run, if the streak is too long."""
        self._unanswered.append((key, failure.kind))
        return self._extend(str(failure))

    def finish(self) -> UserError | None:
        """At the end of the texts: keep the last failures, or say that the server seems away.

        It seems so when nothing came from it; failures of earlier runs, asked again, do not tell.
        """
        away = {kind for _, kind in self._unanswered} <= {"connection", "timeout"}
        fresh = any(not self._journal.has_outcome(key) for key, _ in self._unanswered)
        if away and fresh and not self._ever_answered:
            return self._problem()
        self._keep()
        return None

    def _keep(self) -> None:
        with self._journal.transaction():
            for key, kind in self._unanswered:
                self._journal.record_failure(key, kind)
        self._unanswered.clear()

    def _extend(self, message: str) -> UserError | None:
        self._length += 1
        self._last = message
        return self._problem() if self._length >= self._limit else None

    def _problem(self) -> UserError:
        return UserError(
            f"{server_url(self._journal.config)} had no usable answer to {self._length} chunks in "
            f"a row, the last time: {self._last}. All answers are kept; chunks without any are "
            "asked again by the next run"
        )
