"""What the engine tells of each request: a JSON line, and sums as Prometheus text."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

STAGES = (
    "wait", "embed", "search", "score", "plan", "read", "copy", "rotate", "prefill",
)  # fmt: skip
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class RequestReport:
    """One request: what its prefix was made of, and where its time went.

    `stage_ms` has an entry for each of `STAGES`: waiting for the engine, embedding the question,
    searching chunks, scoring nuggets, planning (the query's tokenization included), waiting for
    slices (read, or computed where there are none), copying and rotating them into place, and the
    forward pass up to the first token. Together they are the time to first token (TTFT).
    """

    question: str
    answer: str
    checkpoint: str
    system: str
    k_c: int
    k: int | None
    active_tokens: int
    """Tokens in the KV cache before the query."""
    online_tokens: int
    """Tokens computed before the first answer token: the query's, and what is not cached."""
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
        self._lock = Lock()
        self._file = None if log is None else log.open("a", encoding="utf-8")
        self._registry = CollectorRegistry()
        counter, labels = self._counter, ("checkpoint", "system")
        self._requests = counter("requests", "Requests answered", *labels)
        self._failures = counter("failed_requests", "Requests that ended in an error", *labels)
        self._prefix = counter("prefix_tokens", "Prefix tokens by where they came from", "source")
        self._bytes = counter("read_bytes", "Bytes of slices read from disk")
        self._answer = counter("answer_tokens", "Answer tokens")
        self._ttft = self._histogram("ttft_seconds", "Time to first token", *labels)
        self._stages = self._histogram("stage_seconds", "Time to first token by stage", "stage")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"coinrag_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"coinrag_{name}", text, labels, registry=self._registry, buckets=_SECONDS)

    def answered(self, report: RequestReport) -> None:
        """Counts and logs a request."""
        self._requests.labels(report.checkpoint, report.system).inc()
        for source in ("memory", "disk", "computed"):
            self._prefix.labels(source).inc(getattr(report, f"tokens_{source}"))
        self._bytes.inc(report.bytes_read)
        self._answer.inc(report.new_tokens)
        self._ttft.labels(report.checkpoint, report.system).observe(report.ttft_ms / 1e3)
        for stage, milliseconds in report.stage_ms.items():
            self._stages.labels(stage).observe(milliseconds / 1e3)
        if self._file is not None:
            line = json.dumps(asdict(report), ensure_ascii=False) + "\n"
            with self._lock:
                self._file.write(line)
                self._file.flush()

    def failed(self, checkpoint: str, system: str) -> None:
        """Counts a request that ended in an error."""
        self._failures.labels(checkpoint, system).inc()

    def prometheus_text(self) -> str:
        """All sums in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
