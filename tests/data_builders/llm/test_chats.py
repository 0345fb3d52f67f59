"""Chats that somebody waits for: asked every time, together, under budgets of their own."""

import gc
import logging

import pytest
from scripted_server import chunk

from data_builders.nuggets.llm import chats
from data_builders.nuggets.llm.chats import open_asked_model
from data_builders.nuggets.rules import rules
from recipes.building import LlmConfig
from recipes.errors import UserError


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(chats, "FIRST_BACKOFF_SECONDS", 0.01)


@pytest.fixture
def model(server):
    """Opens a model on the scripted server, with further options of nuggets.llm."""

    def opened(**options):
        defaults = {"model": "scripted", "base_url": server.url, "timeout_seconds": 5.0}
        return open_asked_model(LlmConfig(**(defaults | options)))

    return opened


def chat(text):
    return [{"role": "user", "content": text}]


def test_every_chat_is_asked_every_time(server, model):
    texts = [chunk(number) for number in range(5)]
    ask = model()
    for _ in range(2):
        assert ask([chat(text) for text in texts]) == [rules(text) for text in texts]
    assert [server.calls[text] for text in texts] == [2] * 5
    assert ask([]) == []


def test_a_chat_without_an_answer_has_no_nuggets_and_is_counted(server, model, caplog):
    caplog.set_level(logging.INFO)
    texts = [chunk(1), chunk(2, "garbage"), chunk(3, "error_500"), chunk(4, "error_500:1")]
    ask = model(attempts=2)
    found = ask([chat(text) for text in texts])
    assert found == [rules(texts[0]), [], [], rules(texts[3])]
    assert server.calls[texts[2]] == 2
    del ask
    gc.collect()
    assert "2 of 4 chunks got no nuggets: server_error 1, unreadable_answer 1" in caplog.text
    assert "Online nuggets by scripted: 6 requests" in caplog.text


def test_a_server_that_answers_nothing_ends_the_run(model):
    ask = model(attempts=2)
    with pytest.raises(UserError, match="answered nothing to all 2 chunks of a question"):
        ask([chat(chunk(number, "error_500")) for number in range(2)])
    # It may be back for the next.
    assert ask([chat(chunk(7))]) == [rules(chunk(7))]


def test_budgets_hold_for_the_extractor(model):
    ask = model(max_requests=3)
    ask([chat(chunk(number)) for number in range(3)])
    with pytest.raises(UserError, match=r"nuggets\.llm\.max_requests=3 leaves no room"):
        ask([chat(chunk(9))])


def test_lines_are_asked_for_and_the_form_is_found_by_one_request(server, model):
    server.refuses_max_tokens = True
    texts = [chunk(number) for number in range(4)]
    ask = model()
    assert ask([chat(text) for text in texts]) == [rules(text) for text in texts]
    assert [server.calls[text] for text in texts] == [2, 1, 1, 1]
    assert set(server.forms) == {"text"}


def test_what_no_request_can_pass_ends_the_run(server, model):
    with pytest.raises(UserError, match="does not accept the key"):
        model()([chat(chunk(1)), chat(chunk(2, "unauthorized"))])
    with pytest.raises(UserError, match="does not accept the key"):
        model()([chat(chunk(3, "unauthorized")), chat(chunk(4))])
    assert server.calls[chunk(4)] == 0
