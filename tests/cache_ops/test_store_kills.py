"""SIGKILL at random moments of writing; `benchmarks/store_kills.py` does it in numbers."""

import pytest
from benchmarks.store_kills import run_kills


@pytest.mark.slow
def test_a_killed_writer_leaves_every_committed_chunk_and_nothing_else(tmp_path):
    result = run_kills(tmp_path, kills=12, seed=1)
    assert result["kills"] == 12
    assert result["chunks_read_back"] > 100
