"""Extraction against a scripted server: each answer and fault, retries, stops and streaming."""

import logging
import subprocess
import sys
import time

import pytest
from scripted_server import CONTENTS, ERRORS, chunk, nuggets

from data_builders.nuggets.llm.cost import estimate
from data_builders.nuggets.llm.run import extract_with_llm
from recipes.errors import UserError


def ask(journal, *texts, **options):
    return extract_with_llm(iter(texts), journal, **options)


def test_candidates_come_back_and_are_asked_for_once(server, open_journal):
    texts = [chunk(number) for number in range(40)]
    with open_journal() as journal:
        report = ask(journal, *texts)
        assert (report.texts, report.answered, report.reused) == (40, 40, 0)
        assert [journal.candidates(text) for text in texts] == [nuggets(text) for text in texts]
        assert all(len(nuggets(text)) == 2 for text in texts)
        assert report.usage.requests == 40
        assert report.usage.input_tokens == sum(200 + len(text) // 4 for text in texts)
        assert report.usage.output_tokens == sum(len(text) // 4 for text in texts)
    with open_journal() as journal:
        report = ask(journal, *texts, chunk(99))
        assert (report.answered, report.reused) == (1, 40)
    assert set(server.calls.values()) == {1}
    # Two in 41 have one key only if a key does not depend on its text.
    assert len(server.keys_seen) == 41


@pytest.mark.parametrize("fault", [*CONTENTS, "refusal", "no_usage"])
def test_each_kind_of_answer(server, open_journal, fault):
    text = chunk(1, fault)
    whole = nuggets(text)
    expected = {
        "truncated": whole[:1],
        "reversed": whole[::-1],
        "duplicate": whole * 2,
        "rewritten": [nugget.upper() for nugget in whole],
        "empty_list": [],
        "truncated_early": "truncated_answer",
        "empty": "unreadable_answer",
        "null": "unreadable_answer",
        "garbage": "unreadable_answer",
        "filtered": "refused",
        "refusal": "refused",
    }.get(fault, whole)
    with open_journal() as journal:
        report = ask(journal, text)
        assert journal.outcome(text) == expected
        failed = isinstance(expected, str)
        assert journal.candidates(text) == (None if failed else expected)
        assert report.failures == ({expected: 1} if failed else {})
        assert report.answers_without_usage == (fault == "no_usage")
        assert report.usage.input_tokens > 100
    # Whatever it was, it was paid for: not asked again, unless that is wanted.
    with open_journal() as journal:
        assert ask(journal, text).failures == report.failures
        assert server.calls[text] == 1
        assert estimate([text], journal).to_ask == 0
        assert estimate([text], journal, retry_failed=True).to_ask == failed
        ask(journal, text, retry_failed=True)
        assert server.calls[text] == 1 + failed


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("rate_limit", "rate_limit"),
        ("rate_limit_date", "rate_limit"),
        ("rate_limit_bare", "rate_limit"),
        ("error_500", "server_error"),
        ("error_503", "server_error"),
        ("html_error", "server_error"),
        ("not_json", "server_error"),
        ("reset", "connection"),
        ("half_answer", "connection"),
        ("hang", "timeout"),
    ],
)
def test_a_passing_fault_is_retried_and_a_lasting_one_is_kept(server, open_journal, fault, kind):
    passing, lasting = chunk(1, f"{fault}:1"), chunk(2, fault)
    options = {"timeout_seconds": 0.5} if fault == "hang" else {}
    with open_journal(attempts=2, **options) as journal:
        report = ask(journal, passing, lasting, chunk(3))
        assert journal.candidates(passing) == nuggets(passing)
        assert journal.outcome(lasting) == kind
        assert report.failures == {kind: 1}
        assert (server.calls[passing], server.calls[lasting]) == (2, 2)
        assert report.usage.requests == 5
        ask(journal, passing, lasting, chunk(3))
        assert (server.calls[passing], server.calls[lasting]) == (2, 2)
        ask(journal, passing, lasting, chunk(3), retry_failed=True)
        assert (server.calls[passing], server.calls[lasting]) == (2, 4)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("too_long", "too_long"), ("moderated", "refused"), ("bad_request", "bad_request")],
)
def test_a_request_that_cannot_succeed_is_not_repeated(server, open_journal, fault, kind):
    text = chunk(1, fault)
    with open_journal() as journal:
        report = ask(journal, text, chunk(2))
        assert journal.outcome(text) == kind
        assert report.failures == {kind: 1}
    assert server.calls[text] == 1


@pytest.mark.parametrize("fault", ["unauthorized", "forbidden", "no_model", "quota"])
def test_what_no_request_can_pass_ends_the_run_at_the_first(server, open_journal, fault):
    texts = [chunk(number, fault) for number in range(20)]
    with open_journal() as journal:
        with pytest.raises(UserError, match=str(ERRORS[fault][0])):
            ask(journal, *texts)
        assert server.calls.total() == 1
        assert journal.outcome(texts[0]) is None


@pytest.mark.parametrize("fault", ["rate_limit:1", "rate_limit_date:1", "error_503:1"])
def test_the_wait_that_a_server_asks_for_is_kept(open_journal, fault):
    text = chunk(1, fault)
    started = time.time()
    with open_journal() as journal:
        ask(journal, text)
        assert journal.candidates(text) == nuggets(text)
    # A date has whole seconds: it is between 0 and 1 s from then.
    assert time.time() - started >= (0.2 if "date" not in fault else 0.0)


def test_a_long_wait_ends_the_run(server, open_journal):
    text = chunk(1, "rate_limit_long")
    with open_journal() as journal:
        with pytest.raises(UserError, match="asks to wait 86,400 s"):
            ask(journal, text)
        assert journal.outcome(text) is None
    assert server.calls[text] == 1


def test_a_wait_holds_for_all_requests(server, open_journal):
    server.delay_seconds = 0.02
    texts = [chunk(0), chunk(1, "rate_limit:1"), *(chunk(number) for number in range(2, 30))]
    with open_journal(concurrent_requests=4) as journal:
        report = ask(journal, *texts)
    assert report.answered == 30
    # The three beside the refused one had begun; the rest waited with it.
    gaps = [after - before for before, after in zip(server.times, server.times[1:], strict=False)]
    assert max(gaps) >= 0.15


def test_a_server_that_is_down_ends_the_run_and_fails_no_text(open_journal, server):
    texts = [chunk(number) for number in range(500)]
    server.shutdown()
    server.server_close()
    with open_journal(attempts=2) as journal:
        with pytest.raises(UserError, match=r"no usable answer to 16 chunks in a row.*Connect"):
            ask(journal, *texts)
        assert all(journal.outcome(text) is None for text in texts)
        assert journal.spent("online").requests <= 2 * (16 + 16)
    with open_journal(attempts=2) as journal, pytest.raises(UserError, match="to 3 chunks"):
        ask(journal, *texts[:3])


def test_a_model_that_is_no_use_ends_the_run_with_its_answers_kept(server, open_journal):
    texts = [chunk(number, "garbage") for number in range(200)]
    with open_journal(concurrent_requests=4) as journal:
        with pytest.raises(UserError, match=r"answers of no use \(unreadable_answer\)"):
            ask(journal, *texts)
        asked = [text for text in texts if journal.outcome(text) == "unreadable_answer"]
    assert 10 <= len(asked) <= 14
    assert server.calls.total() == len(asked)


def test_failures_far_apart_do_not_end_a_run(open_journal):
    texts = [chunk(number, "garbage" if number % 3 else None) for number in range(60)]
    with open_journal(concurrent_requests=2) as journal:
        report = ask(journal, *texts)
    assert (report.answered, report.failures["unreadable_answer"]) == (20, 40)


@pytest.mark.parametrize(
    ("refused", "form"),
    [
        ([], "json_schema"),
        (["json_schema"], "json_object"),
        (["json_schema", "json_object"], "text"),
    ],
)
def test_the_strictest_form_that_the_server_takes_is_found_once(
    server, open_journal, refused, form
):
    server.refused_forms = tuple(refused)
    with open_journal(attempts=1) as journal:
        report = ask(journal, *(chunk(number) for number in range(20)))
    assert report.answered == 20
    assert server.forms == {**dict.fromkeys(refused, 1), form: 20}
    # The answers are found again whatever the server takes by then.
    server.refused_forms = ()
    with open_journal(attempts=1) as journal:
        assert ask(journal, chunk(3)).reused == 1


def test_a_form_that_the_recipe_names_is_not_changed(server, open_journal):
    server.refused_forms = ("json_schema",)
    with open_journal(output="json_schema") as journal:
        report = ask(journal, chunk(1))
        assert journal.outcome(chunk(1)) == "bad_request"
    assert report.failures == {"bad_request": 1}


def test_the_name_of_the_length_limit_is_found(server, open_journal):
    server.refuses_max_tokens = True
    with open_journal(attempts=1) as journal:
        report = ask(journal, *(chunk(number) for number in range(5)))
    assert (report.answered, report.usage.requests) == (5, 6)


def test_concurrency_is_bounded_and_texts_are_read_as_a_stream(server, open_journal):
    server.delay_seconds = 0.02
    ahead = []

    def texts():
        for number in range(100):
            ahead.append(number + 1 - server.calls.total())
            yield chunk(number)

    with open_journal(concurrent_requests=5) as journal:
        extract_with_llm(texts(), journal)
    assert server.most_at_once == 5
    assert max(ahead) <= 5 + 1


def test_a_fault_of_the_source_ends_the_run_with_its_answers_kept(server, open_journal):
    server.delay_seconds = 0.1

    def texts():
        yield from (chunk(number) for number in range(6))
        raise RuntimeError("the disk is gone")

    with open_journal(concurrent_requests=4) as journal:
        with pytest.raises(RuntimeError, match="the disk is gone"):
            extract_with_llm(texts(), journal)
        assert all(journal.candidates(chunk(number)) for number in range(6))


def test_progress_and_report_tell_tokens_cost_and_failures(open_journal, capsys, caplog):
    caplog.set_level(logging.INFO)
    texts = [chunk(0), chunk(1, "garbage"), chunk(2, "too_long"), chunk(3)]
    with open_journal(input_price=1.0, output_price=10.0) as journal:
        report = ask(journal, *texts, estimate=estimate(texts, journal))
    assert "4 of 4 chunks to ask, about" in caplog.text
    assert "USD by batch files" in caplog.text
    shown = capsys.readouterr().err
    assert "4/4 chunks" in shown
    assert f"{report.usage.tokens:,} tokens, {report.cost:,.4f} USD" in shown
    assert "failed: too_long 1, unreadable_answer 1" in shown
    usage = report.usage
    assert report.cost == pytest.approx((usage.input_tokens + 10 * usage.output_tokens) / 1e6)
    assert str(report) in caplog.text
    assert (report.texts, report.reused, report.answered, usage.requests) == (4, 0, 2, 4)
    assert report.failures == {"unreadable_answer": 1, "too_long": 1}


def test_the_missing_package_is_named(tmp_path):
    code = (
        "import sys; sys.modules['openai'] = None\n"
        "from pathlib import Path; from data_builders.nuggets.llm.journal import Journal\n"
        "from data_builders.nuggets.llm.run import extract_with_llm\n"
        "from recipes.building import LlmConfig\n"
        "extract_with_llm([], Journal(Path(sys.argv[1]), LlmConfig(model='m')))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "journal")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install coinrag[llm]" in process.stderr
