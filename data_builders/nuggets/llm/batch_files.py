"""Requests as files for OpenAI's Batch API, at half the price, and their results back.

A request's `custom_id` is its content address in the journal, so that results can come in any
order, in any number of files, and more than once.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from data_builders.nuggets.llm.cost import cost, describe
from data_builders.nuggets.llm.journal import Journal, Usage
from data_builders.nuggets.llm.outcome import FailureKind, is_settled, read_answer
from data_builders.nuggets.llm.requests import encode_body, request_body
from data_builders.nuggets.llm.responses import completion, error_message, failure_kind
from recipes.errors import UserError

logger = logging.getLogger(__name__)

# Limits of one file.
MAX_REQUESTS, MAX_BYTES = 50_000, 200_000_000
_RESULTS_A_COMMIT = 1_000
_PROBLEMS_SHOWN = 5

Skipped = Literal["malformed", "unknown_request", "other_settings", "read_before", "not_processed"]


def write_batch_files(
    texts: Iterable[str], journal: Journal, folder: Path, *, retry_failed: bool = False
) -> list[Path]:
    """Write requests for what has no outcome in the journal and stands in no batch file.

    A batch file that exists and whose results were not read counts as under way; delete it to have
    its requests written again. With `output: auto` the requests ask for a JSON schema.

    Args:
        texts: distinct chunk texts, read as a stream.
        folder: for `requests-00001.jsonl` and so on, each within the API's limits.

    Raises:
        UserError: the folder holds request files already.
    """
    if existing := sorted(folder.glob("requests-*.jsonl")):
        raise UserError(f"{existing[0]}: this folder holds batch requests already; choose another")
    pending = journal.pending_batches()
    under_way = set(pending)
    lines = (
        (key, _request_line(key, text, journal))
        for text in texts
        if not is_settled(journal.outcome(text), retry_failed)
        and not _is_under_way(journal, key := journal.key(text), under_way)
    )
    paths: list[Path] = []
    waiting = next(lines, None)
    if waiting is None:
        where = f"; {sum(pending.values()):,} are under way in {min(pending)}" if pending else ""
        logger.info("%s: no requests to write%s", folder, where)
        return paths
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot write batch requests: {error.strerror}") from error
    while waiting is not None:
        path = folder / f"requests-{len(paths) + 1:05d}.jsonl"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            keys, waiting = _fill(file, waiting, lines)
            file.flush()
            os.fsync(file.fileno())
        # Known before it exists under its name: a file is never sent whose results are unknown.
        journal.expect_batch_results(path, keys)
        partial.rename(path)
        paths.append(path)
        logger.info("%s: %d requests", path, len(keys))
    return paths


def _is_under_way(journal: Journal, key: bytes, files: set[Path]) -> bool:
    request = journal.batch_request(key)
    return request is not None and request.is_pending and request.file in files


def _fill(
    file: BinaryIO, first: tuple[bytes, bytes], lines: Iterator[tuple[bytes, bytes]]
) -> tuple[list[bytes], tuple[bytes, bytes] | None]:
    """Write lines up to the limits; the keys written, and the line that did not fit."""
    keys: list[bytes] = []
    size = 0
    waiting: tuple[bytes, bytes] | None = first
    while waiting is not None:
        key, line = waiting
        if len(keys) == MAX_REQUESTS or (keys and size + len(line) > MAX_BYTES):
            break
        file.write(line)
        keys.append(key)
        size += len(line)
        waiting = next(lines, None)
    return keys, waiting


def _request_line(key: bytes, text: str, journal: Journal) -> bytes:
    config = journal.config
    mode = "json_schema" if config.output == "auto" else config.output
    line = {
        "custom_id": key.hex(),
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": request_body(text, config, mode, "max_completion_tokens"),
    }
    return encode_body(line) + b"\n"


@dataclass
class BatchReport:
    """What result files held: usage and cost (USD, None without prices) are theirs alone.

    `failures` are kept in the journal like those of any request. `skipped` lines are not: lines
    that are no results, results of requests that were never written or have other settings, those
    in the journal already, and requests that were not processed (expired, cancelled), which are
    asked again.
    """

    answered: int = 0
    usage: Usage = field(default_factory=Usage)
    answers_without_usage: int = 0
    cost: float | None = None
    failures: Counter[FailureKind] = field(default_factory=Counter)
    skipped: Counter[Skipped] = field(default_factory=Counter)

    def __str__(self) -> str:
        kinds = [*sorted(self.failures.items()), *sorted(self.skipped.items())]
        counts = ", ".join(f"{kind} {count:,}" for kind, count in kinds)
        told = [f"{self.answered:,} answered", describe(self.usage, self.cost), counts]
        return "; ".join(filter(None, told))


def read_batch_files(paths: Sequence[Path], journal: Journal) -> BatchReport:
    """Take the results in output files and error files of batches into the journal.

    Reading a file again changes nothing.

    Raises:
        UserError: a file cannot be read, or not one line of them is a result of the journal's
            requests; says what they are instead.
    """
    report = BatchReport()
    problems: list[str] = []
    for path in paths:
        try:
            with path.open("rb") as file:
                _read_results(file, path, journal, report, problems)
        except OSError as error:
            raise UserError(f"{path}: cannot read batch results: {error.strerror}") from error
    taken = report.answered + report.failures.total() + report.skipped["read_before"]
    if problems and not taken and not report.skipped["not_processed"]:
        raise UserError(f"no result of this recipe's requests: {problems[0]}")
    for problem in problems[:_PROBLEMS_SHOWN]:
        logger.warning("%s", problem)
    report.cost = cost(journal.config, Usage(), report.usage)
    logger.info("Nuggets by %s, batch results: %s", journal.config.model, report)
    return report


def _read_results(
    file: BinaryIO, path: Path, journal: Journal, report: BatchReport, problems: list[str]
) -> None:
    lines = enumerate(file, start=1)
    while block := list(islice(lines, _RESULTS_A_COMMIT)):
        with journal.transaction():
            for number, line in block:
                if line.strip() and (problem := _take_result(line, journal, report)):
                    problems.append(f"{path}:{number}: {problem}")


def _take_result(line: bytes, journal: Journal, report: BatchReport) -> str | None:
    """One line into journal and report; what is wrong with it, if it is no result of ours."""
    try:
        result = json.loads(line)
        key = bytes.fromhex(result["custom_id"])
        response, error = result.get("response"), result.get("error")
        status = response.get("status_code", 200) if response else None
        body = response.get("body") if response else None
    except (ValueError, TypeError, KeyError, AttributeError):
        report.skipped["malformed"] += 1
        return "expected a batch result, JSON with custom_id and response, on one line"
    request = journal.batch_request(key)
    if request is None:
        report.skipped["unknown_request"] += 1
        return f"no request with custom_id {key.hex()} was written from this journal"
    if not request.is_own:
        report.skipped["other_settings"] += 1
        return (
            f"the request was for model {request.model!r}, or with another prompt or other output "
            f"settings than nuggets.llm of this recipe (model {journal.config.model!r})"
        )
    if not request.is_pending:
        report.skipped["read_before"] += 1
        return None
    journal.batch_result_came(key)
    if status is None:
        report.skipped["not_processed"] += 1
        return f"not processed: {error_message(json.dumps(error))}"
    _record_response(key, status, body, journal, report)
    return None


def _record_response(
    key: bytes, status: int, body: Any, journal: Journal, report: BatchReport
) -> None:
    try:
        answer = completion(body, {}) if status < 400 else None
    except ValueError:
        answer = None
    if answer is None:
        kind = failure_kind(status, json.dumps(body)) if status >= 400 else "server_error"
        # A whole batch is not ended by one result; a wrong model fails before it is processed.
        report.failures[kind or "bad_request"] += 1
        journal.record_failure(key, kind or "bad_request")
        return
    journal.record_answer(key, answer, "batch")
    report.usage += Usage(1, answer.input_tokens, answer.output_tokens)
    report.answers_without_usage += answer.is_estimate
    outcome = read_answer(answer.text, answer.refusal, answer.finish_reason)
    if isinstance(outcome, str):
        report.failures[outcome] += 1
    else:
        report.answered += 1
