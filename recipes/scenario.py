"""A scenario of `coinrag cost`: a corpus, its questions, a model and a machine, with their prices.

A YAML file of its own kind, read like a recipe. Every name ends with its unit: `usd` are US
dollars, `gb` 1e9 bytes, `tflops` 1e12 operations a second, and a month is a twelfth of a year.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from recipes.section import Fraction, Natural, Section, Text, mistake
from recipes.systems import SystemName

# What is larger is a mistake, and would not be counted exactly.
_MOST = 10**15
Amount = Annotated[float, Field(ge=0.0, le=_MOST)]
Rate = Annotated[float, Field(gt=0.0, le=_MOST)]
Count = Annotated[int, Field(ge=1, le=_MOST)]
Percent = Annotated[float, Field(ge=0.0, le=100.0)]


class CorpusConfig(Section):
    passages: Count
    tokens_a_passage: Rate
    chunk_tokens: Count = 512
    # Of its passages, those replaced each month; above 1 they are so more than once.
    changed_share_a_month: Amount = 0.0


class ExtractionConfig(Section):
    """What nuggets cost: a passage as measured, or a request for each chunk at an LLM's prices."""

    # Takes the place of prices and tokens. null: counted from them.
    usd_a_passage: Amount | None = None
    usd_a_million_input_tokens: Amount | None = None
    usd_a_million_output_tokens: Amount | None = None
    # Of a request, beside the chunk.
    instruction_tokens: Natural = 0
    # Nuggets repeat most of a chunk, between quotation marks.
    output_tokens_a_token: Amount = 1.2
    # Of the corpus's tokens, those that some nugget covers.
    covered_share: Fraction
    # nuggets: CoinRAG's store holds the covered tokens alone; chunks: all.
    keep: Literal["nuggets", "chunks"] = "nuggets"

    @model_validator(mode="after")
    def _priced(self) -> Self:
        prices = [self.usd_a_million_input_tokens, self.usd_a_million_output_tokens]
        if self.usd_a_passage is None and None in prices:
            raise mistake(
                "expected usd_a_passage, or both usd_a_million_input_tokens and "
                "usd_a_million_output_tokens"
            )
        return self


class GeometryConfig(Section):
    # The last part of the path or name that the model has in a recipe.
    name: Text
    # Those that every token passes through: without embeddings and output head.
    parameters: Count
    layers: Count
    attention_heads: Count
    kv_heads: Count
    head_dim: Count
    bytes_a_parameter: Rate = 2.0
    # Of the store's keys and values, which may be kept in fewer bits.
    bytes_a_kv_number: Rate = 2.0


class MachineConfig(Section):
    """What serves and encodes: a GPU, or the CPU of which times were measured."""

    usd_an_hour: Rate
    # What a prefill reaches, not the data sheet's peak.
    effective_tflops: Rate
    memory_gb_a_second: Rate
    # Used where reading slices was not inside the measured time.
    disk_gb_a_second: Rate
    disk_usd_a_gb_month: Amount


class QueriesConfig(Section):
    a_month: Rate
    # The question with the part of the prompt that follows the passages; and the part before.
    question_tokens: Count
    prompt_tokens: Natural = 0
    # Beside the forward pass and reading, where a time is counted and not measured.
    overhead_ms: Amount = 0.0


class FineTuningConfig(Section):
    """One fine-tuning of one system; its tokens are those of all steps together."""

    # null: counted from training_tokens.
    machine_hours: Amount | None = None
    training_tokens: Count | None = None
    # null: as the machine that serves.
    usd_an_hour: Amount | None = None
    # Nuggets of training passages outside the corpus.
    extraction_usd: Amount = 0.0

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.machine_hours is None and self.training_tokens is None:
            raise mistake("expected machine_hours or training_tokens")
        return self


class GoalConfig(Section):
    # null: what every system reaches within the latency budget, times 100 like all F1.
    f1: Percent | None = None
    # null: no latency budget.
    p99_ttft_ms: Rate | None = None


class CellConfig(Section):
    """A system at one width, with figures that somebody else has measured."""

    system: SystemName
    checkpoint: Literal["base", "fine_tuned"] = "base"
    k_c: Count
    k: Count | None = None
    # null: not known, and taken to reach the goal.
    f1: Percent | None = None
    # The prefix with its prompt, whether cached or computed online.
    active_tokens: Rate
    # Computed online. null: the question and, without a cache, the prefix.
    computed_tokens: Rate | None = None
    # null: counted from operations and bytes; a counted P99 is the mean.
    ttft_mean_ms: Rate | None = None
    ttft_p99_ms: Rate | None = None
    # Of the mean, waiting for the model that extracts nuggets online.
    extract_ms: Amount = 0.0


class Scenario(Section):
    """Everything `coinrag cost` is told beside the comparisons that it reads."""

    name: Text
    # What is paid once is spread over so many.
    months: Count = 12
    # A new model encodes the corpus again and is fine-tuned again. null: none within the months.
    months_between_models: Count | None = None
    corpus: CorpusConfig
    extraction: ExtractionConfig
    model: GeometryConfig
    machine: MachineConfig
    queries: QueriesConfig
    # null: not known, so fine-tuned cells are refused.
    fine_tuning: FineTuningConfig | None = None
    goal: GoalConfig = GoalConfig()
    # Left out where comparisons are given.
    cells: list[CellConfig] = []

    @field_validator("cells")
    @classmethod
    def _countable(cls, cells: list[CellConfig]) -> list[CellConfig]:
        for place, cell in enumerate(cells):
            partly = cell.system in ("cacheblend", "epic", "kvlink")
            timed = cell.ttft_mean_ms is not None
            if partly and not timed and cell.computed_tokens is None:
                raise mistake(
                    f"{cell.system} computes a part of its prefix: expected ttft_mean_ms or "
                    "computed_tokens",
                    at=f"cells.{place}",
                )
            if cell.extract_ms > (cell.ttft_mean_ms or 0.0):
                raise mistake(
                    "expected extract_ms within ttft_mean_ms, which includes it",
                    at=f"cells.{place}.extract_ms",
                )
        return cells
