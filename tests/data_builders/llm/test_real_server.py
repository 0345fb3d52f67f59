"""The protocol against a real server: `transformers serve` with the small instruct model.

It takes a JSON schema without keeping to it, so that the answers of so small a model are prose as
often as lists: what is shown is that requests are taken, and usage, models and errors understood.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from data_builders.nuggets.llm.journal import Journal
from data_builders.nuggets.llm.run import extract_with_llm
from recipes.building import LlmConfig
from recipes.errors import UserError

MODEL = Path(__file__).parents[3] / "models" / "smollm2-135m-instruct"
TEXTS = [
    "Lake Orrin is a reservoir in the north of Valdia, built between 1931 and 1936.",
    "Grace O'Malley was a pirate queen. She met Elizabeth I in 1593.",
    "The mill at Hartsby closed in 1962 and is a museum today.",
]
SERVE = shutil.which("transformers", path=str(Path(sys.executable).parent))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="the model smollm2-135m-instruct is absent"),
    pytest.mark.skipif(SERVE is None, reason="the command transformers is absent"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [SERVE, "serve", str(MODEL), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--device", "cpu"],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 180
        while not is_healthy(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=30)


def is_healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def config(url, **options):
    options = {"model": str(MODEL), "max_output_tokens": 96, "concurrent_requests": 2} | options
    return LlmConfig(base_url=url, timeout_seconds=300.0, **options)


def test_answers_and_usage_come_and_nothing_is_asked_twice(url, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Journal(tmp_path / "journal.sqlite", config(url)) as journal:
        report = extract_with_llm(TEXTS, journal)
        assert report.answered + report.failures.total() == len(TEXTS)
        assert set(report.failures) <= {"unreadable_answer", "truncated_answer"}
        assert report.usage.requests == len(TEXTS)
        assert report.answers_without_usage == 0
        # The prompt is more than 200 tokens.
        assert report.usage.input_tokens > 200 * len(TEXTS)
        assert 0 < report.usage.output_tokens <= 96 * len(TEXTS)
        again = extract_with_llm(TEXTS, journal)
        assert (again.reused, again.usage.requests) == (len(TEXTS), 0)
        outcomes = [journal.outcome(text) for text in TEXTS]
    with capsys.disabled():
        print(f"\n{report}\n{outcomes}")


def test_a_model_that_is_not_served_ends_the_run(url, tmp_path):
    wrong = config(url, model="no/such-model")
    with (
        Journal(tmp_path / "journal.sqlite", wrong) as journal,
        pytest.raises(UserError, match="no/such-model"),
    ):
        extract_with_llm(TEXTS, journal)
