"""How benchmarks show their figures: a Markdown table, and JSON with where they were measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eval.environment import environment


def percentiles(values: list[float]) -> dict[str, float]:
    """The median, the 90th and the 99th percentile."""
    return {f"p{q}": round(float(np.percentile(values, q)), 3) for q in (50, 90, 99)}


def render(rows: Mapping[str, Mapping[str, Any]], head: str) -> str:
    """Named rows with the same columns as a table."""
    columns = list(next(iter(rows.values())))
    lines = [[head, *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(_cell(row[column]) for column in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return " / ".join(map(_cell, value.values()))
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def write(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes figures with the environment, where a path is given."""
    if path is not None:
        path.write_text(json.dumps({**figures, "environment": environment()}, indent=1))
