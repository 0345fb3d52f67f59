"""A run that is killed or interrupted: what had arrived is not paid for again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted_server import chunk, nuggets, serve

from data_builders.nuggets.llm.journal import Journal
from recipes.building import LlmConfig

CONCURRENT, COUNT = 8, 600
TEXTS = [chunk(number) for number in range(COUNT)]
EXTRACTION = f"""
import sys
from pathlib import Path
from scripted_server import chunk
from data_builders.nuggets.llm.journal import Journal
from data_builders.nuggets.llm.run import extract_with_llm
from recipes.exit import run_main
from recipes.building import LlmConfig

config = LlmConfig(model="m", base_url=sys.argv[1], concurrent_requests={CONCURRENT})
texts = (chunk(number) for number in range({COUNT}))
with Journal(Path(sys.argv[2]), config) as journal:
    sys.exit(run_main(lambda: extract_with_llm(texts, journal)))
"""
pytestmark = pytest.mark.slow


def start(server, journal_path):
    return subprocess.Popen(
        [sys.executable, "-c", EXTRACTION, server.url, str(journal_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        stderr=subprocess.PIPE,
        text=True,
    )


def kept(path, server):
    with Journal(path, LlmConfig(model="m", base_url=server.url)) as journal:
        return {text for text in TEXTS if journal.candidates(text) == nuggets(text)}


def wait_for_calls(server, count, process):
    deadline = time.monotonic() + 60
    while server.calls.total() < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_no_answer_that_had_arrived_is_paid_again(tmp_path, capsys):
    kills, moments = 8, random.Random(0)
    path, calls_file = tmp_path / "journal.sqlite", tmp_path / "calls.jsonl"
    with serve(calls_file=calls_file, delay_seconds=0.05) as server:
        kept_before, calls_before = set(), {}
        for _ in range(kills):
            process = start(server, path)
            wait_for_calls(server, server.calls.total() + moments.randrange(1, 80), process)
            time.sleep(0.05 * moments.random())
            process.kill()
            process.wait()
            # Requests on their way to the server arrive.
            time.sleep(0.3)
            kept_now = kept(path, server)
            assert kept_before <= kept_now
            assert all(server.calls[text] == calls_before[text] for text in kept_before)
            kept_before, calls_before = kept_now, dict(server.calls)
        assert 50 < len(kept_before) < COUNT
        process = start(server, path)
        _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
        assert kept(path, server) == set(TEXTS)
        assert all(server.calls[text] == calls_before[text] for text in kept_before)
        repeated = server.calls.total() - COUNT
        assert repeated <= kills * CONCURRENT
        # What was lost in flight is asked again with the same Idempotency-Key.
        assert len(server.keys_seen) == COUNT
        answered = [json.loads(line)["text"] for line in calls_file.read_text().splitlines()]
        assert set(answered) == set(TEXTS)
    with capsys.disabled():
        print(f"\n{kills} kills, {COUNT} chunks: {repeated} requests in flight were repeated")


def test_an_interruption_waits_for_the_answers_in_flight(tmp_path):
    path = tmp_path / "journal.sqlite"
    with serve(delay_seconds=0.3) as server:
        process = start(server, path)
        wait_for_calls(server, 20, process)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "interrupted" in told
        assert len(kept(path, server)) == server.calls.total() < COUNT
