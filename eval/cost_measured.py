"""Cells measured by `coinrag compare`: reads `compare.json` for `coinrag cost`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from eval.cost_cells import WITHOUT_CACHE, Figure, Served, Source, reading_ms, slice_bytes
from recipes.errors import UserError
from recipes.scenario import Amount, Count, Percent, Rate, Scenario
from recipes.section import Natural, Section
from recipes.systems import SystemName


class _Row(Section, extra="ignore"):
    arm: str
    checkpoint: Literal["base", "fine_tuned"]
    system: SystemName
    k_c: Count
    k: Count | None
    questions: Natural
    f1: Percent
    ttft_mean_ms: Rate
    ttft_p50_ms: Rate
    ttft_p99_ms: Rate
    extract_p50_ms: Amount
    bytes_read: Amount
    active_tokens: Amount


class _Encoding(Section, extra="ignore"):
    chunk_tokens: Natural
    seconds: Amount


class _Model(Section, extra="ignore"):
    path: str


class _Store(Section, extra="ignore"):
    folder: str | None


class _OnlineNuggets(Section, extra="ignore"):
    extractor: str


class _Systems(Section, extra="ignore"):
    online_nuggets: _OnlineNuggets


class _Config(Section, extra="ignore"):
    model: _Model
    store: _Store
    systems: _Systems


class _Environment(Section, extra="ignore"):
    hardware: str


class Comparison(Section, extra="ignore"):
    """What is used of a `compare.json`."""

    results: list[_Row]
    questions_by_dataset: dict[str, int]
    offline: dict[str, _Encoding]
    config: _Config
    environment: _Environment


def read_comparisons(paths: Sequence[str], scenario: Scenario) -> list[Comparison]:
    """The content of `compare.json` files that were measured alike, with the scenario's model.

    Raises:
        UserError: a file is something else; or models, data sets or machines differ.
    """
    read = [_read(path) for path in paths]
    for path, one in zip(paths, read, strict=True):
        name = Path(one.config.model.path).name
        if name.lower() != scenario.model.name.lower():
            raise UserError(
                f"{path}: measured with {name}, but the scenario's model is {scenario.model.name}: "
                "describe the measured one under model"
            )
        if set(one.questions_by_dataset) != set(read[0].questions_by_dataset):
            raise UserError(
                f"{path}: F1 is of other data than in {paths[0]} "
                f"({_datasets(one)} against {_datasets(read[0])}), so it cannot be made equal"
            )
        if one.environment != read[0].environment:
            raise UserError(
                f"{path}: measured on {one.environment.hardware}, but {paths[0]} on "
                f"{read[0].environment.hardware}: times of two machines do not compare"
            )
    return read


def measured_cells(comparison: Comparison, scenario: Scenario) -> list[Served]:
    """The cells of the recipe itself; those of arms are left out."""
    return [_measured(row, comparison, scenario) for row in comparison.results if not row.arm]


def _measured(row: _Row, comparison: Comparison, scenario: Scenario) -> Served:
    if row.system not in WITHOUT_CACHE and comparison.config.store.folder is None:
        read = Figure(slice_bytes(row.active_tokens, scenario), "derived")
    else:
        read = Figure(row.bytes_read, "measured")
    # Measured times hold no disk: slices come from memory, or a store's from the page cache.
    added_ms = reading_ms(read.value, scenario)
    source: Source = "measured + derived" if added_ms else "measured"
    mean_ms = machine_ms = row.ttft_mean_ms + added_ms
    priced = row.system == "online_nuggets" and (
        comparison.config.systems.online_nuggets.extractor == "llm"
    )
    if priced:
        # A mean time without extraction is not recorded; the medians' difference is near it.
        machine_ms = max(0.0, row.ttft_p50_ms - row.extract_p50_ms) + added_ms
    encoding = comparison.offline.get(row.checkpoint)
    rate = None
    if encoding is not None and encoding.chunk_tokens and encoding.seconds:
        rate = encoding.chunk_tokens / encoding.seconds
    return Served(
        system=row.system,
        checkpoint=row.checkpoint,
        k_c=row.k_c,
        k=row.k,
        f1=Figure(row.f1, "measured"),
        questions=row.questions,
        mean_ms=Figure(mean_ms, source),
        p99_ms=Figure(row.ttft_p99_ms + added_ms, source),
        machine_ms=machine_ms,
        bytes_read=read,
        priced_chunks=row.k_c if priced else 0,
        encoding_tokens_a_second=rate,
    )


def _read(path: str) -> Comparison:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not the JSON of a comparison: {error}") from error
    try:
        read = Comparison.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the top"
        raise UserError(
            f"{path}: not a compare.json that this version of coinrag compare writes: "
            f"{place}: {first['msg']}"
        ) from error
    if all(row.arm for row in read.results):
        raise UserError(f"{path}: holds no cell of the recipe itself, only arms")
    return read


def _datasets(comparison: Comparison) -> str:
    return ", ".join(sorted(comparison.questions_by_dataset))
