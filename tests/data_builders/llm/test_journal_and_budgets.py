"""What is kept, what it cost, and what stops a run before it costs too much."""

import sqlite3

import pytest
from pydantic import ValidationError
from scripted_server import chunk, nuggets

from data_builders.nuggets.llm.cost import estimate, journal_cost
from data_builders.nuggets.llm.journal import Journal, Usage
from data_builders.nuggets.llm.outcome import Answer
from data_builders.nuggets.llm.run import extract_with_llm
from recipes.building import LlmConfig
from recipes.errors import UserError

TEXTS = [chunk(number) for number in range(30)]
ANSWER = Answer('{"nuggets": ["a"]}', None, "stop", "m", 10, 5)


def journal_at(tmp_path, **options):
    return Journal(tmp_path / "journal.sqlite", LlmConfig(**({"model": "m"} | options)))


@pytest.mark.parametrize(
    ("option", "value", "is_shared"),
    [
        ("model", "other", False),
        ("base_url", "http://localhost:1/v1", False),
        ("output", "text", False),
        ("max_output_tokens", 7, False),
        ("temperature", None, False),
        ("concurrent_requests", 3, True),
        ("timeout_seconds", 3.0, True),
        ("attempts", 3, True),
        ("max_requests", 3, True),
        ("api_key_variable", "OTHER", True),
    ],
)
def test_answers_belong_to_what_decides_them(tmp_path, option, value, is_shared):
    with journal_at(tmp_path) as journal:
        journal.record_answer(journal.key("text"), ANSWER)
    with journal_at(tmp_path, **{option: value}) as journal:
        assert journal.candidates("text") == (["a"] if is_shared else None)
        assert journal.spent("online") == (Usage(1, 10, 5) if is_shared else Usage())
        assert journal.candidates("another text") is None


def test_a_failure_never_replaces_an_answer_but_an_answer_a_failure(tmp_path):
    useless = Answer("no list", None, "stop", "m", 10, 5)
    with journal_at(tmp_path) as journal:
        key = journal.key("text")
        journal.record_failure(key, "timeout")
        assert journal.outcome("text") == "timeout"
        journal.record_answer(key, useless)
        journal.record_failure(key, "timeout")
        assert journal.outcome("text") == "unreadable_answer"
        journal.record_answer(key, ANSWER)
        assert journal.outcome("text") == ["a"]
        # Both answers were paid for.
        assert journal.spent("online") == Usage(2, 20, 10)


def test_what_the_server_said_is_kept_as_it_came(server, open_journal, tmp_path):
    with open_journal() as journal:
        extract_with_llm([chunk(1, "prose")], journal)
    (row,) = sqlite3.connect(tmp_path / "journal.sqlite").execute(
        "SELECT answer, finish_reason, model, failure FROM outcomes"
    )
    assert row[0].startswith("Sure! Here are the nuggets:")
    assert row[1:] == ("stop", "scripted-2026-01-01", None)


def test_text_that_utf_8_cannot_hold_is_asked_and_found(server, open_journal):
    text = chunk(1) + " \ud800"
    with open_journal() as journal:
        extract_with_llm([text], journal)
        assert journal.candidates(text) == nuggets(chunk(1) + " ?")
        assert journal.candidates(chunk(1) + " ?") is None


def test_a_second_process_is_refused(tmp_path):
    with journal_at(tmp_path), pytest.raises(UserError, match="another process is using"):
        journal_at(tmp_path)
    journal_at(tmp_path).close()


def test_files_that_are_no_journal_are_refused(tmp_path):
    path = tmp_path / "journal.sqlite"
    path.write_text("something else entirely, and long enough to be read as a header" * 20)
    with pytest.raises(UserError, match="not a journal"):
        journal_at(tmp_path)
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=99")
    with pytest.raises(UserError, match="format 99"):
        journal_at(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="cannot open"):
        journal_at(tmp_path)


def test_no_more_than_max_requests_in_all_runs(server, open_journal):
    server.delay_seconds = 0.01
    for limit, calls in [(7, 7), (7, 7), (12, 12)]:
        with open_journal(max_requests=limit) as journal:
            with pytest.raises(UserError, match=rf"max_requests={limit} .*{calls} requests.*kept"):
                extract_with_llm(TEXTS, journal)
            assert server.calls.total() == calls == journal.spent("online").requests
            assert sum(journal.candidates(text) is not None for text in TEXTS) == calls
    with open_journal(max_requests=30) as journal:
        assert extract_with_llm(TEXTS, journal).answered == 18


def test_repeated_requests_count_too(server, open_journal):
    texts = [chunk(number, "error_500") for number in range(5)]
    with open_journal(max_requests=6, attempts=4) as journal:
        with pytest.raises(UserError, match="max_requests=6"):
            extract_with_llm(texts, journal)
        assert server.calls.total() == journal.spent("online").requests == 6


@pytest.mark.parametrize("concurrent", [1, 16])
@pytest.mark.parametrize("answers", [0.5, 3.2, 10.0])
def test_tokens_stay_under_their_budget(server, open_journal, concurrent, answers):
    # The most that one request can take, of which an answer takes about a tenth.
    limit = int(answers * 2600)
    server.delay_seconds = 0.005
    texts = [chunk(number) for number in range(400)]
    with open_journal(
        max_total_tokens=limit, max_output_tokens=300, concurrent_requests=concurrent
    ) as journal:
        with pytest.raises(UserError, match=f"max_total_tokens={limit}"):
            extract_with_llm(texts, journal)
        spent = journal.spent("online")
    assert spent.tokens <= limit
    # It ends for want of room for one more, not earlier.
    assert spent.tokens > limit - 2600
    assert (spent.requests > 0) == (answers > 1)


def test_cost_stays_under_its_budget_with_batches_at_half(server, open_journal):
    prices = {"input_price": 100.0, "output_price": 1000.0, "max_output_tokens": 100}
    with open_journal(**prices) as journal:
        journal.record_answer(journal.key("text"), ANSWER, "batch")
        assert journal_cost(journal) == pytest.approx((10 * 100 + 5 * 1000) / 1e6 / 2)
        journal.record_answer(journal.key("text 2"), ANSWER)
        before = journal_cost(journal)
        assert before == pytest.approx((10 * 100 + 5 * 1000) / 1e6 * 1.5)
    with open_journal(max_cost=before + 0.6, **prices) as journal:
        with pytest.raises(UserError, match=r"max_cost=.*USD"):
            extract_with_llm(TEXTS, journal)
        assert before < journal_cost(journal) <= before + 0.6
        assert 1 <= server.calls.total() < 30


@pytest.mark.parametrize("option", ["max_cost", "input_price", "output_price"])
def test_cost_needs_both_prices(option):
    with pytest.raises(ValidationError, match="cost needs both prices"):
        LlmConfig(model="m", **{option: 1.0})


def test_an_estimate_counts_what_is_left(server, open_journal):
    with open_journal(input_price=1.0, output_price=1.0) as journal:
        whole = estimate(TEXTS, journal)
        report = extract_with_llm(TEXTS[:10], journal)
        rest = estimate(TEXTS, journal)
    assert (whole.texts, whole.to_ask, rest.texts, rest.to_ask) == (30, 30, 30, 20)
    assert rest.usage.tokens == pytest.approx(whole.usage.tokens * 2 / 3, rel=0.01)
    assert rest.online_cost == pytest.approx(rest.usage.tokens / 1e6)
    assert rest.batch_cost == pytest.approx(rest.online_cost / 2)
    assert 0.5 < whole.usage.input_tokens / 3 / report.usage.input_tokens < 2.5
