"""What one query takes at each cell of a comparison: as given, or counted from operations.

Time is that of the first token on a machine that does nothing else. Counting takes the larger of
two times for the forward pass, operations at the machine's effective rate or the weights' bytes at
that of its memory, then adds the slices' bytes at that of its disk and a fixed overhead.
"""

from dataclasses import dataclass
from typing import Literal

from recipes.scenario import CellConfig, GeometryConfig, Scenario
from recipes.systems import SystemName

# measured + derived: measured without a disk, with the time that reading slices from one takes.
Source = Literal["measured", "given", "derived", "measured + derived"]

# Everything is computed online; the others keep keys and values of chunks.
WITHOUT_CACHE = frozenset({"standard_rag", "online_nuggets"})


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from."""

    value: float
    source: Source


@dataclass(frozen=True)
class Served:
    """One cell, and what a query takes there."""

    system: SystemName
    checkpoint: Literal["base", "fine_tuned"]
    k_c: int
    k: int | None
    f1: Figure | None
    """Times 100; None where it is not known."""
    mean_ms: Figure
    p99_ms: Figure
    machine_ms: float
    """Of `mean_ms`, what the machine is held for: not the waiting for a priced model's nuggets."""
    bytes_read: Figure
    priced_chunks: int
    """Chunks whose nuggets a priced model extracts during the query."""
    questions: int | None = None
    """Those that F1 is the mean of, where it was measured."""
    encoding_tokens_a_second: float | None = None
    """How fast chunks were encoded where this was measured."""

    @property
    def cached(self) -> bool:
        """Whether the system keeps keys and values of the corpus."""
        return self.system not in WITHOUT_CACHE


def kv_token_bytes(model: GeometryConfig) -> float:
    """Bytes of one token's keys and values over all layers."""
    return model.layers * 2 * model.kv_heads * model.head_dim * model.bytes_a_kv_number


def prefill_flop(model: GeometryConfig, computed: float, context: float) -> float:
    """Operations of computing the last `computed` of `context` tokens: linear layers, attention.

    A token takes two for each parameter, and for each key that it sees four times the width of all
    heads in every layer.
    """
    keys_seen = computed * (context - computed) + computed * (computed + 1) / 2
    width = model.attention_heads * model.head_dim
    return 2 * model.parameters * computed + 4 * model.layers * width * keys_seen


def given_cell(cell: CellConfig, scenario: Scenario) -> Served:
    """A cell of the scenario, with times counted where it has none."""
    online = cell.system in WITHOUT_CACHE
    read = 0.0 if online else slice_bytes(cell.active_tokens, scenario)
    mean = cell.ttft_mean_ms
    counted = _counted_ms(cell, scenario) + reading_ms(read, scenario)
    p99 = cell.ttft_p99_ms or mean
    return Served(
        system=cell.system,
        checkpoint=cell.checkpoint,
        k_c=cell.k_c,
        k=cell.k,
        f1=None if cell.f1 is None else Figure(cell.f1, "given"),
        mean_ms=Figure(counted, "derived") if mean is None else Figure(mean, "given"),
        p99_ms=Figure(p99 or counted, "given" if cell.ttft_p99_ms else "derived"),
        machine_ms=(mean or counted) - cell.extract_ms,
        bytes_read=Figure(read, "derived"),
        priced_chunks=cell.k_c if cell.system == "online_nuggets" else 0,
    )


def _counted_ms(cell: CellConfig, scenario: Scenario) -> float:
    model, machine, queries = scenario.model, scenario.machine, scenario.queries
    context = cell.active_tokens + queries.question_tokens
    whole = cell.system in WITHOUT_CACHE
    computed = cell.computed_tokens or (context if whole else queries.question_tokens)
    by_operations = prefill_flop(model, computed, context) / (machine.effective_tflops * 1e12)
    weights = model.parameters * model.bytes_a_parameter
    by_memory = weights / (machine.memory_gb_a_second * 1e9)
    return 1e3 * max(by_operations, by_memory) + queries.overhead_ms


def slice_bytes(active_tokens: float, scenario: Scenario) -> float:
    """Bytes of a prefix on disk; its prompt stays in memory."""
    tokens = max(0.0, active_tokens - scenario.queries.prompt_tokens)
    return tokens * kv_token_bytes(scenario.model)


def reading_ms(bytes_read: float, scenario: Scenario) -> float:
    """Milliseconds of reading so many bytes from the scenario's disk."""
    return bytes_read / (scenario.machine.disk_gb_a_second * 1e6)
