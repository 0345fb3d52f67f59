"""What the engine tells of each request: a JSON line, and sums as Prometheus text."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from cache_ops.supply import Supply
from recipes.errors import UserError

logger = logging.getLogger(__name__)
# When a series began is of no use here, and doubles the text.
disable_created_metrics()

STAGES = (
    "wait", "embed", "search", "score", "extract", "plan", "read", "compute", "copy", "rotate",
    "contextualize", "prefill",
)  # fmt: skip
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class RequestReport:
    """One request: what its prefix was made of, and where its time went.

    `stage_ms` has an entry for each of `STAGES`: waiting for the engine, embedding the question,
    searching chunks, scoring nuggets, having nuggets extracted for the question, planning (the
    query's tokenization included), looking slices up and reading them, computing those that are
    neither in memory nor on disk, copying and rotating them into place and correcting them by the
    weights' contextualizer (on CUDA: queueing that), and the forward pass up to the first token.
    Together they are the time to first token (TTFT).
    """

    question: str
    answer: str
    evidence: list[str]
    """Nugget texts, best first; titles of the chunks where whole chunks are served."""
    checkpoint: str
    system: str
    k_c: int
    k: int | None
    active_tokens: int
    """Tokens in the KV cache before the query."""
    online_tokens: int
    """Tokens computed before the first answer token: the query's, and what is not cached."""
    recomputed_tokens: float
    """Cached tokens computed anew beside them, in the mean of the layers."""
    new_tokens: int
    stopped: bool
    tokens_memory: int
    tokens_disk: int
    tokens_computed: int
    """Active tokens whose slices came from memory, from disk, and from the model just now."""
    bytes_read: int
    batch_requests: int
    """Requests that shared the forward pass of the first token."""
    stage_ms: dict[str, float]
    ttft_ms: float
    total_ms: float


class Telemetry:
    """Counts requests, and appends each to a file of JSON lines if one is given."""

    def __init__(self, log: Path | None) -> None:
        """Opens the file.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self._file = None if log is None else log.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write the log of requests, {log}: {error.strerror}") from error
        self._registry = CollectorRegistry()
        counter, labels = self._counter, ("checkpoint", "system")
        self._requests = counter("requests", "Requests answered", *labels)
        self._failures = counter("failed_requests", "Requests that ended in an error", *labels)
        self._prefix = counter("prefix_tokens", "Prefix tokens, by source", *labels, "source")
        self._not_stored = Gauge(
            "coinrag_chunks_not_stored",
            "Computed chunks that the store did not take",
            ("reason",),
            registry=self._registry,
        )
        self._memory = Gauge(
            "coinrag_memory_tier",
            "What the tier of slices in memory holds and has been asked",
            ("count",),
            registry=self._registry,
        )
        self._bytes = counter("read_bytes", "Bytes of slices read from disk", *labels)
        self._answer = counter("answer_tokens", "Answer tokens", *labels)
        self._ttft = self._histogram("ttft_seconds", "Time to first token", *labels)
        self._stages = self._histogram(
            "stage_seconds", "Time to first token, by stage", *labels, "stage"
        )
        self._total = self._histogram("request_seconds", "Time to the whole answer", *labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"coinrag_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"coinrag_{name}", text, labels, registry=self._registry, buckets=_SECONDS)

    def answered(self, report: RequestReport) -> None:
        """Counts and logs a request."""
        whose = (report.checkpoint, report.system)
        self._requests.labels(*whose).inc()
        for source in ("memory", "disk", "computed"):
            self._prefix.labels(*whose, source).inc(getattr(report, f"tokens_{source}"))
        self._bytes.labels(*whose).inc(report.bytes_read)
        self._answer.labels(*whose).inc(report.new_tokens)
        self._ttft.labels(*whose).observe(report.ttft_ms / 1e3)
        self._total.labels(*whose).observe(report.total_ms / 1e3)
        for stage, milliseconds in report.stage_ms.items():
            self._stages.labels(*whose, stage).observe(milliseconds / 1e3)
        if self._file is not None:
            line = json.dumps(asdict(report), ensure_ascii=False) + "\n"
            try:
                self._file.write(line)
                self._file.flush()
            except OSError as error:
                logger.warning("requests are answered but no longer logged: %s", error)
                self._file = None

    def failed(self, checkpoint: str, system: str) -> None:
        """Counts a request that ended in an error."""
        self._failures.labels(checkpoint, system).inc()

    def prometheus_text(self, supply: Supply) -> str:
        """All sums in Prometheus' text format, with those that the supply keeps."""
        for reason, chunks in supply.not_stored.items():
            self._not_stored.labels(reason).set(chunks)
        if supply.memory is not None:
            for name, count in asdict(supply.memory.counts()).items():
                self._memory.labels(name).set(count)
        return generate_latest(self._registry).decode()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
