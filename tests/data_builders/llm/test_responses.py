"""What servers say, read right: completions of any shape, errors of any wording, waits."""

import email.utils
import sqlite3
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_builders.nuggets.llm.outcome import FAILURE_KINDS, Answer, read_answer
from data_builders.nuggets.llm.responses import (
    completion,
    error_message,
    failure_kind,
    retry_after_seconds,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
MESSAGES = st.fixed_dictionaries({}, optional={"content": JSON, "refusal": JSON})
COMPLETIONS = st.fixed_dictionaries(
    {"choices": st.lists(st.fixed_dictionaries({"message": MESSAGES | JSON}), max_size=2) | JSON},
    optional={
        "model": JSON,
        "usage": st.fixed_dictionaries({}, optional={"prompt_tokens": JSON}) | JSON,
    },
)


@given(COMPLETIONS | JSON)
def test_any_json_is_an_answer_that_can_be_kept_or_is_none(response):
    try:
        answer = completion(response, {"messages": []})
    except ValueError:
        return
    database = sqlite3.connect(":memory:")
    kept = database.execute("SELECT ?, ?, ?, ?, ?, ?", tuple(vars(answer).values())[:6]).fetchone()
    assert Answer(*kept, answer.is_estimate) == answer
    outcome = read_answer(answer.text, answer.refusal, answer.finish_reason)
    assert outcome in FAILURE_KINDS or all(isinstance(nugget, str) for nugget in outcome)


def test_content_in_parts_and_odd_usage_lose_no_paid_answer():
    parts = [{"type": "text", "text": '{"nuggets": '}, {"type": "text", "text": '["a"]}'}]
    choice = {"message": {"content": parts}, "finish_reason": "stop"}
    for usage in (None, [], {"prompt_tokens": "7", "completion_tokens": 1}, {"prompt_tokens": -1}):
        answer = completion({"choices": [choice], "usage": usage}, {"messages": ["x" * 400]})
        assert answer.text == '{"nuggets": ["a"]}'
        assert answer.is_estimate
        assert answer.input_tokens > 100
        assert read_answer(answer.text, None, "stop") == ["a"]


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (400, "This model's maximum context length is 8192 tokens", "too_long"),
        (413, "Request Entity Too Large", "too_long"),
        (400, '{"error": {"code": "content_filter"}}', "refused"),
        (403, "Your input was flagged", "refused"),
        (403, "no access", None),
        (401, "", None),
        (402, "Insufficient Balance", None),
        (404, "", None),
        (400, '{"error": {"code": "model_not_found"}}', None),
        (400, "The model `x` does not exist", None),
        (429, "slow down", "rate_limit"),
        (429, '{"error": {"code": "insufficient_quota"}}', None),
        (408, "", "timeout"),
        (504, "", "timeout"),
        (409, "", "server_error"),
        (500, "", "server_error"),
        (529, "overloaded", "server_error"),
        (422, "temperature", "bad_request"),
    ],
)
def test_the_kind_of_an_error(status, text, kind):
    assert failure_kind(status, text) == kind


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after-ms": "1500", "retry-after": "7"}, 1.5),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
    ],
)
def test_the_wait_a_response_asks_for(headers, seconds):
    assert retry_after_seconds(headers) == seconds


def test_the_wait_until_a_date():
    headers = {"retry-after": email.utils.formatdate(time.time() + 60, usegmt=True)}
    assert 58 < retry_after_seconds(headers) <= 60


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"error": {"message": "no"}}', "no"),
        ('{"error": "no"}', "no"),
        ('{"detail": "no"}', "no"),
        ("<html>no</html>", "<html>no</html>"),
        ("[1]", "[1]"),
        ("null", "null"),
    ],
)
def test_the_message_of_an_error(text, message):
    assert error_message(text) == message
