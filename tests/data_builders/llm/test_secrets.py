"""The key comes from the environment and is found nowhere else, whatever a server says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_server import FAULTS, chunk

from data_builders.nuggets.llm.batch_files import write_batch_files
from data_builders.nuggets.llm.journal import Journal
from data_builders.nuggets.llm.run import extract_with_llm
from recipes.building import LlmConfig
from recipes.errors import UserError
from recipes.resolve import resolve

SECRET = "sk-proj-Very_Secret.0123456789"

# All faults in one process with every logger at its loudest; each in a journal of its own.
ALL_FAULTS = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.DEBUG)
from scripted_server import FAULTS, chunk
from data_builders.nuggets.llm import run
from data_builders.nuggets.llm.batch_files import write_batch_files
from data_builders.nuggets.llm.journal import Journal
from recipes.exit import run as ending
from recipes.building import LlmConfig

run.FIRST_BACKOFF_SECONDS = 0.01
url, folder = sys.argv[1], Path(sys.argv[2])
config = LlmConfig(model="m", base_url=url, timeout_seconds=0.5, attempts=1)
for fault in FAULTS:
    with Journal(folder / fault, config) as journal:
        ended = ending(lambda: print(run.extract_with_llm([chunk(1, fault)], journal)))
        print(fault, ended, journal.outcome(chunk(1, fault)))
        write_batch_files([chunk(2)], journal, folder / f"{fault}-batch")
        print(config, repr(journal), vars(journal))
raise SystemExit(0)
"""


def test_no_fault_brings_the_key_into_output_logs_or_files(server, tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", ALL_FAULTS, server.url, str(tmp_path)],
        env={
            "PATH": "",
            "OPENAI_API_KEY": SECRET,
            "OPENAI_LOG": "debug",
            "PYTHONPATH": str(Path(__file__).parent),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    # The server knew it and said it, and the logs were loud.
    assert set(server.authorizations) == {f"Bearer {SECRET}"}
    assert "Retry-After" in process.stderr or "DEBUG" in process.stderr
    assert all(f"{fault} Ending" in process.stdout for fault in FAULTS)
    assert "[key]" in process.stdout
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) >= 2 * len(FAULTS)
    texts = [
        process.stdout,
        process.stderr,
        *(path.read_bytes().decode("latin-1") for path in kept),
    ]
    for text in texts:
        assert "Very_Secret" not in text


def test_an_answer_that_holds_the_key_is_kept_without_it(server, open_journal):
    with open_journal() as journal:
        extract_with_llm([chunk(1, "echo")], journal)
        assert journal.candidates(chunk(1, "echo")) == ["my header is Bearer [key]"]


def test_a_server_elsewhere_needs_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    config = LlmConfig(model="m", base_url="https://api.example.com/v1")
    with Journal(tmp_path / "journal", config) as journal:
        with pytest.raises(UserError, match="environment variable OPENAI_API_KEY"):
            extract_with_llm([chunk(1)], journal)
        # Batch files are only written: no key is needed.
        assert write_batch_files([chunk(1)], journal, tmp_path / "batch")


def test_a_server_on_this_machine_needs_none(server, open_journal, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with open_journal() as journal:
        assert extract_with_llm([chunk(1)], journal).answered == 1


def test_the_variable_that_holds_the_key_can_be_named(server, open_journal, monkeypatch):
    monkeypatch.setenv("OTHER_KEY", f" {SECRET}\n")
    with open_journal(api_key_variable="OTHER_KEY") as journal:
        extract_with_llm([chunk(1)], journal)
    assert server.authorizations == {f"Bearer {SECRET}": 1}


@pytest.mark.parametrize("key", ["Very_Secret\nline", "Very_Secretü", "Very_Secret\x01"])
def test_what_cannot_be_a_key_is_refused_unsaid(open_journal, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with open_journal() as journal, pytest.raises(UserError) as caught:
        extract_with_llm([chunk(1)], journal)
    assert "OPENAI_API_KEY" in str(caught.value)
    assert "Very_Secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", [f"https://user:{SECRET}@host/v1", f"https://host/v1?key={SECRET}", f"{SECRET}"]
)
def test_an_address_with_a_key_is_refused_unsaid(url):
    arguments = [
        "quickstart",
        "nuggets.extractor=llm",
        f"nuggets.llm={json.dumps({'model': 'm', 'base_url': url})}",
    ]
    with pytest.raises(UserError) as caught:
        resolve(arguments)
    assert "base_url" in str(caught.value)
    assert SECRET not in str(caught.value)
