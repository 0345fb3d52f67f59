"""The journal of a language model's answers, so that none is paid for twice.

One SQLite file. An answer is committed, raw, in the moment it arrives and before anything is read
out of it; candidates are parsed at each look-up, so that a better parser needs no new requests.
Why SQLite and not lines of JSON: a million answers are looked up by content without an index in
memory, and an answer, its tokens and its end as a pending request become durable together.

- Write-ahead log with `synchronous=FULL`: a commit survives `kill -9` and the loss of power. It
  costs an fsync, milliseconds beside the second and the money that an answer costs.
- `locking_mode=EXCLUSIVE`: a second build with the same journal is refused, since both would pay
  for the same texts; and no shared memory is needed, which network file systems lack.

What cannot be had: when a process is killed, requests in flight (at most `concurrent_requests`)
may be billed although nobody receives their answers. They are asked again, with the same
Idempotency-Key, which a server may honour. The same goes for a request that timed out.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_builders.nuggets.llm.outcome import Answer, FailureKind, Outcome, read_answer
from data_builders.nuggets.llm.requests import request_settings
from recipes.building import LlmConfig
from recipes.errors import UserError

FORMAT = 1
Channel = Literal["online", "batch"]

_TABLES = """
CREATE TABLE IF NOT EXISTS outcomes (
    key BLOB PRIMARY KEY, failure TEXT, answer TEXT, refusal TEXT, finish_reason TEXT,
    model TEXT, input_tokens INTEGER, output_tokens INTEGER, is_estimate INTEGER
);
CREATE TABLE IF NOT EXISTS spent (
    settings BLOB, channel TEXT, requests INTEGER, input_tokens INTEGER, output_tokens INTEGER,
    PRIMARY KEY (settings, channel)
);
CREATE TABLE IF NOT EXISTS batch_requests (
    key BLOB PRIMARY KEY, settings BLOB, model TEXT, file TEXT, is_pending INTEGER
);
"""


@dataclass(frozen=True)
class Usage:
    """Requests sent and the tokens they were billed for."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.requests + other.requests,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
        )

    def __sub__(self, other: "Usage") -> "Usage":
        return self + Usage(-other.requests, -other.input_tokens, -other.output_tokens)

    @property
    def tokens(self) -> int:
        """Input and output tokens together."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True)
class BatchRequest:
    """A request that was written to a batch file, under these settings or others."""

    is_own: bool
    model: str
    file: Path
    is_pending: bool


class Journal:
    """Answers and failures under one model, server, prompt and output settings.

    A file holds any number of such settings side by side; a journal shows those of its `config`.
    Prices, budgets, timeouts and concurrency are not among them.

    Raises:
        UserError: the file is in use by another process, or is not such a journal.
    """

    def __init__(self, path: Path, config: LlmConfig) -> None:
        self.path, self.config = path, config
        settings = json.dumps(request_settings(config), sort_keys=True)
        self._settings_hash = hashlib.sha256(settings.encode())
        self._settings_key = self._settings_hash.digest()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=1.0, isolation_level=None)
        except (OSError, sqlite3.OperationalError) as error:
            raise UserError(f"{path}: cannot open the journal: {error}") from error
        try:
            self._open()
        except BaseException:
            self._database.close()
            raise

    def _open(self) -> None:
        try:
            self._database.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            (found,) = self._database.execute("PRAGMA user_version").fetchone()
            if found not in (0, FORMAT):
                raise UserError(
                    f"{self.path}: a journal of format {found}, this version writes {FORMAT}; "
                    "use the version that wrote it, or another folder"
                )
            self._database.executescript(f"BEGIN IMMEDIATE; {_TABLES} COMMIT;")
            self._database.execute(f"PRAGMA user_version={FORMAT}")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise UserError(
                    f"{self.path}: another process is using this journal of LLM answers; "
                    "wait for it, or two builds pay for the same texts"
                ) from None
            raise UserError(f"{self.path}: cannot open the journal: {error}") from error
        except sqlite3.DatabaseError as error:
            raise UserError(f"{self.path}: not a journal of LLM answers: {error}") from error

    def key(self, text: str) -> bytes:
        """The content address of the request for a text: SHA-256 of settings and text."""
        digest = self._settings_hash.copy()
        digest.update(b"\0" + text.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def outcome(self, text: str) -> Outcome | None:
        """What became of a text; None: it was not asked, or its answer was lost with the run."""
        row = self._database.execute(
            "SELECT failure, answer, refusal, finish_reason FROM outcomes WHERE key = ?",
            (self.key(text),),
        ).fetchone()
        if row is None:
            return None
        failure, answer, refusal, finish_reason = row
        return failure or read_answer(answer, refusal, finish_reason)

    def has_outcome(self, key: bytes) -> bool:
        """Whether a request has an answer or a failure."""
        found = self._database.execute("SELECT 1 FROM outcomes WHERE key = ?", (key,))
        return found.fetchone() is not None

    def candidates(self, text: str) -> list[str] | None:
        """The candidates of a text; None: the request failed or was not made."""
        outcome = self.outcome(text)
        return outcome if isinstance(outcome, list) else None

    def record_answer(self, key: bytes, answer: Answer, channel: Channel = "online") -> None:
        """Keep an answer and count what it cost."""
        with self.transaction():
            self._database.execute(
                "INSERT OR REPLACE INTO outcomes VALUES (?, NULL, ?, ?, ?, ?, ?, ?, ?)",
                (
                    key,
                    answer.text,
                    answer.refusal,
                    answer.finish_reason,
                    answer.model,
                    answer.input_tokens,
                    answer.output_tokens,
                    answer.is_estimate,
                ),
            )
            self.record_spending(Usage(1, answer.input_tokens, answer.output_tokens), channel)

    def record_failure(self, key: bytes, kind: FailureKind) -> None:
        """Keep that a text got no answer; an answer that could not be used is never overwritten."""
        self._database.execute(
            "INSERT INTO outcomes (key, failure) VALUES (?, ?) ON CONFLICT (key) "
            "DO UPDATE SET failure = excluded.failure WHERE failure IS NOT NULL",
            (key, kind),
        )

    def record_spending(self, usage: Usage, channel: Channel = "online") -> None:
        """Add to what was spent under these settings."""
        self._database.execute(
            "INSERT INTO spent VALUES (?, ?, ?, ?, ?) ON CONFLICT (settings, channel) DO UPDATE "
            "SET requests = requests + excluded.requests, "
            "input_tokens = input_tokens + excluded.input_tokens, "
            "output_tokens = output_tokens + excluded.output_tokens",
            (
                self._settings_key,
                channel,
                usage.requests,
                usage.input_tokens,
                usage.output_tokens,
            ),
        )

    def spent(self, channel: Channel) -> Usage:
        """What was spent under these settings by all runs so far."""
        row = self._database.execute(
            "SELECT requests, input_tokens, output_tokens FROM spent "
            "WHERE settings = ? AND channel = ?",
            (self._settings_key, channel),
        ).fetchone()
        return Usage(*row) if row else Usage()

    def expect_batch_results(self, file: Path, keys: Iterable[bytes]) -> None:
        """Keep which requests stand in a batch file."""
        where = str(file.resolve())
        with self.transaction():
            self._database.executemany(
                "INSERT OR REPLACE INTO batch_requests VALUES (?, ?, ?, ?, TRUE)",
                ((key, self._settings_key, self.config.model, where) for key in keys),
            )

    def batch_request(self, key: bytes) -> BatchRequest | None:
        """What is known of a request by the key that its result names."""
        row = self._database.execute(
            "SELECT settings = ?, model, file, is_pending FROM batch_requests WHERE key = ?",
            (self._settings_key, key),
        ).fetchone()
        return BatchRequest(bool(row[0]), row[1], Path(row[2]), bool(row[3])) if row else None

    def batch_result_came(self, key: bytes) -> None:
        """A batch request has its result, whatever it is."""
        self._database.execute("UPDATE batch_requests SET is_pending = FALSE WHERE key = ?", (key,))

    def pending_batches(self) -> dict[Path, int]:
        """Batch files under these settings that still exist, and how many results each lacks."""
        rows = self._database.execute(
            "SELECT file, count(*) FROM batch_requests WHERE settings = ? AND is_pending "
            "GROUP BY file ORDER BY file",
            (self._settings_key,),
        )
        counts = {Path(file): count for file, count in rows}
        return {file: count for file, count in counts.items() if file.exists()}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is recorded inside becomes durable together, or not at all."""
        if self._database.in_transaction:
            yield
            return
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def close(self) -> None:
        """Release the file."""
        self._database.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
