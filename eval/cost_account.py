"""The money behind one cell: once, each month and a query, from a scenario's amounts and prices."""

import math
from dataclasses import dataclass

from eval.cost_cells import Figure, Served, kv_token_bytes, prefill_flop
from recipes.errors import UserError
from recipes.scenario import Scenario

# A training token takes a forward pass and a backward pass of twice its operations.
_TRAINING_PASSES = 3


@dataclass(frozen=True)
class Line:
    """A month's cost of one cell over the number of queries in it."""

    fixed_usd_a_month: float
    usd_a_query: float

    def usd_a_month(self, queries: float) -> float:
        """The cost of a month with so many queries."""
        return self.fixed_usd_a_month + self.usd_a_query * queries


@dataclass(frozen=True)
class Account:
    """What one cell costs, and the amounts behind it."""

    cell: Served
    encoding_hours: Figure
    fine_tuning_hours: Figure
    disk_gb: Figure
    extraction_once_usd: float
    encoding_once_usd: float
    fine_tuning_once_usd: float
    changes_usd_a_month: float
    """Nuggets and encoding of replaced passages."""
    models_usd_a_month: float
    """Encoding and fine-tuning again for new models, spread over all months."""
    disk_usd_a_month: float
    line: Line


def account(cell: Served, scenario: Scenario) -> Account:
    """What a cell costs in a scenario.

    CoinRAG pays for nuggets; every system with a cache for encoding the corpus and for the disk;
    a fine-tuned cell for one fine-tuning, and CoinRAG's for the training passages' nuggets too.

    Raises:
        UserError: the cell is fine-tuned, and the scenario does not say what that takes.
    """
    machine, corpus, months = scenario.machine, scenario.corpus, scenario.months
    nuggets = cell.system == "coinrag"
    tuned = cell.checkpoint == "fine_tuned"
    extraction = corpus.passages * _extraction_usd_a_passage(scenario) if nuggets else 0.0
    encoding_hours = _encoding_hours(cell, scenario)
    encoding = encoding_hours.value * machine.usd_an_hour
    fine_tuning_hours, fine_tuning, training_nuggets = Figure(0.0, "given"), 0.0, 0.0
    if tuned:
        fine_tuning_hours, fine_tuning = _fine_tuning(scenario)
        assert scenario.fine_tuning is not None, "its cost is known"
        training_nuggets = scenario.fine_tuning.extraction_usd if nuggets else 0.0
    disk_gb = _disk_gb(cell, scenario)
    disk = disk_gb * machine.disk_usd_a_gb_month
    changes = corpus.changed_share_a_month * (extraction + encoding)
    # The first model is there from the start.
    later_models = math.ceil(months / (scenario.months_between_models or months)) - 1
    models = later_models * (encoding + fine_tuning) / months
    once = extraction + training_nuggets + encoding + fine_tuning
    online_nuggets = cell.priced_chunks * _extraction_usd_a_passage(scenario) / _chunks(scenario)
    return Account(
        cell=cell,
        encoding_hours=encoding_hours,
        fine_tuning_hours=fine_tuning_hours,
        disk_gb=Figure(disk_gb, "derived"),
        extraction_once_usd=extraction + training_nuggets,
        encoding_once_usd=encoding,
        fine_tuning_once_usd=fine_tuning,
        changes_usd_a_month=changes,
        models_usd_a_month=models,
        disk_usd_a_month=disk,
        line=Line(
            fixed_usd_a_month=once / months + changes + models + disk,
            usd_a_query=cell.machine_ms / 3.6e6 * machine.usd_an_hour + online_nuggets,
        ),
    )


def _chunks(scenario: Scenario) -> int:
    """Of one passage."""
    return math.ceil(scenario.corpus.tokens_a_passage / scenario.corpus.chunk_tokens)


def _extraction_usd_a_passage(scenario: Scenario) -> float:
    prices = scenario.extraction
    if prices.usd_a_passage is not None:
        return prices.usd_a_passage
    assert prices.usd_a_million_input_tokens is not None, "checked by the scenario"
    assert prices.usd_a_million_output_tokens is not None, "checked by the scenario"
    tokens = scenario.corpus.tokens_a_passage
    input_tokens = _chunks(scenario) * prices.instruction_tokens + tokens
    output_tokens = prices.output_tokens_a_token * tokens
    return (
        input_tokens * prices.usd_a_million_input_tokens
        + output_tokens * prices.usd_a_million_output_tokens
    ) / 1e6


def _encoding_hours(cell: Served, scenario: Scenario) -> Figure:
    """Machine hours of encoding every chunk of the corpus once."""
    corpus, chunks = scenario.corpus, _chunks(scenario)
    if not cell.cached:
        return Figure(0.0, "derived")
    if cell.encoding_tokens_a_second is not None:
        tokens = corpus.passages * corpus.tokens_a_passage
        return Figure(tokens / cell.encoding_tokens_a_second / 3600, "measured + derived")
    length = corpus.tokens_a_passage / chunks
    flop = corpus.passages * chunks * prefill_flop(scenario.model, length, length)
    return Figure(flop / (scenario.machine.effective_tflops * 1e12) / 3600, "derived")


def _fine_tuning(scenario: Scenario) -> tuple[Figure, float]:
    """Machine hours and USD of one fine-tuning."""
    config = scenario.fine_tuning
    if config is None:
        raise UserError(
            "fine-tuned cells need a price: set fine_tuning.machine_hours or "
            "fine_tuning.training_tokens"
        )
    usd_an_hour = config.usd_an_hour
    if usd_an_hour is None:
        usd_an_hour = scenario.machine.usd_an_hour
    if config.machine_hours is not None:
        hours = Figure(config.machine_hours, "given")
    else:
        assert config.training_tokens is not None, "checked by the scenario"
        flop = _TRAINING_PASSES * 2 * scenario.model.parameters * config.training_tokens
        hours = Figure(flop / (scenario.machine.effective_tflops * 1e12) / 3600, "derived")
    return hours, hours.value * usd_an_hour


def _disk_gb(cell: Served, scenario: Scenario) -> float:
    if not cell.cached:
        return 0.0
    covered = cell.system == "coinrag" and scenario.extraction.keep == "nuggets"
    share = scenario.extraction.covered_share if covered else 1.0
    tokens = scenario.corpus.passages * scenario.corpus.tokens_a_passage * share
    return tokens * kv_token_bytes(scenario.model) / 1e9
