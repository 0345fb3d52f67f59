"""Batch request files, and result files back, also results that are not ours."""

import json
import logging

import pytest
from scripted_server import as_json, chunk, nuggets

from data_builders.nuggets.instructions import NUGGETS_SCHEMA, messages
from data_builders.nuggets.llm import batch_files
from data_builders.nuggets.llm.batch_files import read_batch_files, write_batch_files
from data_builders.nuggets.llm.journal import Journal, Usage
from data_builders.nuggets.llm.outcome import Answer
from data_builders.nuggets.llm.run import extract_with_llm
from recipes.building import LlmConfig
from recipes.errors import UserError

TEXTS = [chunk(number) for number in range(10)]
PRICES = {"input_price": 2.0, "output_price": 8.0}


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "journal.sqlite", LlmConfig(model="mini", **PRICES)) as opened:
        yield opened


def lines_of(paths):
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


def result(request, status=200, content=None, reason="stop", error=None):
    """What the API makes of a request line."""
    text = request["body"]["messages"][-1]["content"].removeprefix("Text:\n")
    content = as_json(nuggets(text)) if content is None else content
    body = {
        "model": "mini-2026-01-01",
        "choices": [{"message": {"content": content}, "finish_reason": reason}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }
    if status >= 400:
        body = {"error": {"message": error, "code": error}}
    return {
        "id": "batch_req_1",
        "custom_id": request["custom_id"],
        "response": {"status_code": status, "request_id": "r", "body": body},
        "error": None,
    }


def write_results(path, results):
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in results]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_requests_are_what_the_api_takes_and_results_come_in_any_order(journal, tmp_path):
    paths = write_batch_files(iter(TEXTS), journal, tmp_path / "batch")
    assert [path.name for path in paths] == ["requests-00001.jsonl"]
    requests = lines_of(paths)
    assert [request["body"]["messages"] for request in requests] == [messages(t) for t in TEXTS]
    for request, text in zip(requests, TEXTS, strict=True):
        assert request.keys() == {"custom_id", "method", "url", "body"}
        assert (request["method"], request["url"]) == ("POST", "/v1/chat/completions")
        assert request["custom_id"] == journal.key(text).hex()
        form = request["body"].pop("response_format")
        assert form["json_schema"]["schema"] == NUGGETS_SCHEMA
        del request["body"]["messages"]
        assert request["body"] == {
            "model": "mini",
            "max_completion_tokens": 1024,
            "temperature": 0.0,
        }
    requests = lines_of(paths)
    output = write_results(tmp_path / "out.jsonl", [result(r) for r in requests[::-1]])
    report = read_batch_files([output], journal)
    assert (report.answered, report.usage) == (10, Usage(10, 1000, 200))
    assert report.cost == pytest.approx((1000 * 2 + 200 * 8) / 1e6 / 2)
    assert [journal.candidates(text) for text in TEXTS] == [nuggets(text) for text in TEXTS]
    assert journal.spent("batch") == report.usage
    # Nothing is left to write or to ask, and reading again costs nothing.
    assert write_batch_files(TEXTS, journal, tmp_path / "batch 2") == []
    again = read_batch_files([output], journal)
    assert (again.answered, again.skipped) == (0, {"read_before": 10})
    assert journal.spent("batch") == report.usage


def test_files_keep_the_limits(journal, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_files, "MAX_REQUESTS", 4)
    paths = write_batch_files(TEXTS, journal, tmp_path / "few")
    assert [len(lines_of([path])) for path in paths] == [4, 4, 2]
    whole = b"".join(path.read_bytes() for path in paths)
    for path in paths:
        path.unlink()
    line = max(map(len, whole.splitlines(keepends=True)))
    monkeypatch.setattr(batch_files, "MAX_REQUESTS", 100)
    monkeypatch.setattr(batch_files, "MAX_BYTES", 3 * line)
    paths = write_batch_files(TEXTS, journal, tmp_path / "small")
    assert b"".join(path.read_bytes() for path in paths) == whole
    assert all(path.stat().st_size <= 3 * line for path in paths)
    assert len(paths) == 4


def test_requests_under_way_are_neither_written_nor_asked_again(journal, tmp_path):
    first = write_batch_files(TEXTS[:6], journal, tmp_path / "first")
    second = write_batch_files(TEXTS, journal, tmp_path / "second")
    assert len(lines_of(second)) == 4
    with pytest.raises(UserError, match=r"first/requests-00001.jsonl \(6\).*second.*\(4\)"):
        extract_with_llm(TEXTS, journal)
    # Files that are gone were not sent.
    for path in (*first, *second):
        path.unlink()
    assert len(lines_of(write_batch_files(TEXTS, journal, tmp_path / "third"))) == 10


def test_a_folder_with_requests_is_refused(journal, tmp_path):
    write_batch_files(TEXTS[:1], journal, tmp_path)
    with pytest.raises(UserError, match="holds batch requests already"):
        write_batch_files(TEXTS, journal, tmp_path)


def test_only_what_is_without_outcome_is_written(journal, tmp_path):
    journal.record_answer(journal.key(TEXTS[0]), Answer('["a"]', None, "stop", "m", 1, 1))
    journal.record_failure(journal.key(TEXTS[1]), "timeout")
    assert len(lines_of(write_batch_files(TEXTS, journal, tmp_path / "fresh"))) == 8
    (path,) = write_batch_files(TEXTS, journal, tmp_path / "failed", retry_failed=True)
    assert [line["custom_id"] for line in lines_of([path])] == [journal.key(TEXTS[1]).hex()]


def test_failures_are_kept_by_kind_and_what_expired_is_asked_again(journal, tmp_path):
    requests = lines_of(write_batch_files(TEXTS, journal, tmp_path / "batch"))
    expired = {"code": "batch_expired", "message": "This request expired."}
    output = write_results(
        tmp_path / "out.jsonl",
        [
            result(requests[0]),
            result(requests[1], content="no list"),
            result(requests[2], content='{"nuggets": ["a", "b', reason="length"),
            result(requests[3]) | {"response": {"status_code": 200, "body": None}},
        ],
    )
    errors = write_results(
        tmp_path / "errors.jsonl",
        [
            result(requests[4], 400, error="context_length_exceeded"),
            result(requests[5], 500, error="oops"),
            result(requests[6], 404, error="model_not_found"),
            {"custom_id": requests[7]["custom_id"], "response": None, "error": expired},
        ],
    )
    report = read_batch_files([output, errors], journal)
    outcomes = [journal.outcome(text) for text in TEXTS]
    assert outcomes == [
        nuggets(TEXTS[0]),
        "unreadable_answer",
        ["a"],
        "server_error",
        "too_long",
        "server_error",
        "bad_request",
        None,
        None,
        None,
    ]
    assert report.answered == 2
    assert report.failures == {
        "unreadable_answer": 1,
        "server_error": 2,
        "too_long": 1,
        "bad_request": 1,
    }
    assert report.skipped == {"not_processed": 1}
    # The expired one goes into the next file; two others are still under way in the first.
    (path,) = write_batch_files(TEXTS, journal, tmp_path / "rest")
    assert [line["custom_id"] for line in lines_of([path])] == [requests[7]["custom_id"]]
    assert journal.pending_batches()[tmp_path / "batch" / "requests-00001.jsonl"] == 2


def test_lines_that_are_no_results_of_ours_are_named_and_skipped(journal, tmp_path, caplog):
    requests = lines_of(write_batch_files(TEXTS[:2], journal, tmp_path / "batch"))
    with_other_model = tmp_path / "other" / "requests-00001.jsonl"
    journal.close()
    with Journal(journal.path, LlmConfig(model="large")) as other:
        write_batch_files(TEXTS[:1], other, with_other_model.parent)
    foreign = result(requests[0]) | {"custom_id": "ab" * 32}
    torn = json.dumps(result(requests[1]))[:-30]
    lines = [
        result(requests[0]),
        "[1, 2]",
        result(requests[0]) | {"custom_id": "request-1"},
        "",
        foreign,
        result(lines_of([with_other_model])[0]),
        torn,
    ]
    output = write_results(tmp_path / "out.jsonl", lines)
    with Journal(journal.path, journal.config) as reopened:
        report = read_batch_files([output], reopened)
        assert report.answered == 1
        assert report.skipped == {"malformed": 3, "unknown_request": 1, "other_settings": 1}
        # A torn line's request is still awaited: the whole file can be read again.
        assert reopened.outcome(TEXTS[1]) is None
        output = write_results(tmp_path / "out.jsonl", [*lines[:-1], result(requests[1])])
        assert read_batch_files([output], reopened).answered == 1
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{output}:2: expected a batch result" in told[0]
    assert any(f"{output}:6: the request was for model 'large'" in line for line in told)
    with (
        Journal(journal.path, LlmConfig(model="third")) as third,
        pytest.raises(UserError, match=r"no result of this recipe's requests: .*:1: .*'mini'"),
    ):
        read_batch_files([output], third)


def test_files_that_cannot_be_read_are_named(journal, tmp_path):
    with pytest.raises(UserError, match=r"missing\.jsonl: cannot read batch results"):
        read_batch_files([tmp_path / "missing.jsonl"], journal)
