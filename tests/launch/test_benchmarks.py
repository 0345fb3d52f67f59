"""Benchmarks are not run by the tests; what they import must be there all the same."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_finds_what_it_imports(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (FOLDER, FOLDER.parent / "data_builders" / "llm"):
        monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
