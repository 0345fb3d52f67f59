import sys
from pathlib import Path

import pytest

# The scripted server is also a script; beside it is where it is found.
sys.path.insert(0, str(Path(__file__).parent))

from scripted_server import serve

from data_builders.nuggets.llm import run
from data_builders.nuggets.llm.journal import Journal
from recipes.building import LlmConfig

KEY = "sk-test-0123456789abcdef"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr(run, "FIRST_BACKOFF_SECONDS", 0.01)


@pytest.fixture
def server():
    with serve() as running:
        yield running


@pytest.fixture
def open_journal(server, tmp_path):
    """Opens the test's journal for the scripted server, with further options of nuggets.llm."""

    def opened(**options):
        defaults = {"model": "scripted", "base_url": server.url, "timeout_seconds": 5.0}
        return Journal(tmp_path / "journal.sqlite", LlmConfig(**(defaults | options)))

    return opened
