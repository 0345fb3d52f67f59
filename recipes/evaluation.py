"""The section that says what a comparison measures; see `recipes.schema` for the whole."""

from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from recipes.ablations import ABLATIONS
from recipes.section import Natural, Positive, Section, Text, mistake, refuse_repeats
from recipes.systems import SystemName


class WidthConfig(Section):
    k_c: Positive
    k: Positive


class RunsConfig(Section):
    """Run folders whose weights are a system's fine-tuned ones; null: those of train.run_folder."""

    standard_rag: Text | None = None
    turborag: Text | None = None
    block_attention: Text | None = None
    cacheblend: Text | None = None
    epic: Text | None = None
    ape: Text | None = None
    kvlink: Text | None = None
    online_nuggets: Text | None = None
    coinrag: Text | None = None


class ArmConfig(Section):
    """The recipe with changes, measured beside it: an ablation or a setting of one's own."""

    name: Text
    systems: Annotated[list[SystemName], Field(min_length=1)] = ["coinrag"]
    # As on the command line: section.key=value.
    set: Annotated[list[Text], Field(min_length=1)]

    @field_validator("systems")
    @classmethod
    def _each_once(cls, names: list[str]) -> list[str]:
        refuse_repeats(names)
        return names


class EvalConfig(Section):
    systems: Annotated[list[SystemName], Field(min_length=1)] = [
        "standard_rag",
        "turborag",
        "coinrag",
    ]
    checkpoints: Annotated[list[Literal["base", "fine_tuned"]], Field(min_length=1)] = [
        "base",
        "fine_tuned",
    ]
    runs: RunsConfig = RunsConfig()
    # Of CoinRAG: isolated, one_stage, no_rotation, score_order, overlaps_kept; a+b is both at once.
    ablations: list[Text] = []
    arms: list[ArmConfig] = []
    # null: all dev questions; else the first so many of each data set.
    questions_per_dataset: Positive | None = None
    # Timed prefills of each answer, for steadier percentiles.
    ttft_repeats: Positive = 1
    # Of the table of what each system gives in time; empty: chosen from the measured P99 TTFTs.
    budgets_ms: list[Annotated[float, Field(gt=0.0)]] = []
    # Empty: the one width of the retrieval section.
    widths: list[WidthConfig] = []
    max_new_tokens: Positive = 32
    # Of Standard RAG, whose longer prompts lose the middle of their context, as in LongBench.
    # null: as many as the model has trained positions, less those of the answer.
    max_prompt_tokens: Positive | None = None
    bootstrap_resamples: Positive = 10000
    warmup_questions: Natural = 3
    # Requests that the online engine answers at a time; the comparison answers one by one.
    concurrent_requests: Positive = 8
    # null: the folder `compare` inside train.run_folder.
    output: Text | None = None
    # Of `coinrag inject`: what it planted in the questions that data.dev then names; null: none.
    injections: Text | None = None
    # answers.jsonl of the same comparison without planted texts, for the F1 that they cost.
    injection_clean: Text | None = None

    @field_validator("widths")
    @classmethod
    def _each_width_once(cls, widths: list[WidthConfig]) -> list[WidthConfig]:
        refuse_repeats([f"{{k_c: {width.k_c}, k: {width.k}}}" for width in widths])
        return widths

    @field_validator("injection_clean")
    @classmethod
    def _clean_beside_injections(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and info.data.get("injections") is None:
            raise mistake("needs eval.injections beside it, which is not set")
        return path

    @field_validator("systems", "checkpoints", "ablations")
    @classmethod
    def _each_once(cls, names: list[str]) -> list[str]:
        refuse_repeats(names)
        return names

    @field_validator("ablations")
    @classmethod
    def _known_ablations(cls, names: list[str]) -> list[str]:
        for part in (part for name in names for part in name.split("+")):
            if not part:
                raise mistake("expected the name of an ablation on both sides of +")
            if part not in ABLATIONS:
                close = get_close_matches(part, ABLATIONS, n=1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(ABLATIONS)}"
                raise mistake(f"no ablation {part!r}; {hint}")
        # Both orders of a pair, and one twice over, are the same changes.
        refuse_repeats(["+".join(sorted({*name.split("+")})) for name in names])
        return names

    @field_validator("arms")
    @classmethod
    def _each_arm_once(cls, arms: list[ArmConfig], info: ValidationInfo) -> list[ArmConfig]:
        refuse_repeats([*info.data.get("ablations", []), *(arm.name for arm in arms)])
        return arms
