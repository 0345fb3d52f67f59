"""Imports between the packages point one way."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = {"cache_ops", "recipes"}
MAY_IMPORT = {
    "cache_ops": set(),
    "recipes": set(),
    "data_builders": CORE,
    "train": CORE | {"data_builders"},
    "eval": CORE | {"data_builders"},
    "launch": CORE | {"data_builders", "train", "eval"},
}
# The entry script gives a training what evaluates it.
BESIDES = {"train/nugget_ft.py": {"eval"}}


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_those_below_it(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {}
    for path in files:
        name = str(path.relative_to(ROOT))
        allowed = MAY_IMPORT[package] | BESIDES.get(name, set()) | {package}
        if others := (imported(path) & MAY_IMPORT.keys()) - allowed:
            wrong[name] = others
    assert not wrong


def test_only_the_entry_script_brings_evaluation_into_training() -> None:
    using = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "train").rglob("*.py")
        if "eval" in imported(path)
    }
    assert using == set(BESIDES)
