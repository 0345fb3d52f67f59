"""The public configuration: one frozen model a section, every option typed, checked and read.

Counts are in the unit their name ends with (tokens, samples, steps); `k_c` counts chunks and `k`
nuggets. Unknown keys are refused. `recipes.resolve` builds a `Recipe` from YAML and the command
line; nothing else should.
"""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from recipes.building import BuildConfig, DataConfig, NuggetsConfig, RaftConfig
from recipes.context import CONTEXTUALIZED, ContextConfig
from recipes.evaluation import EvalConfig
from recipes.retrieval import RetrievalConfig
from recipes.scorer import ScorerConfig
from recipes.section import (
    Positive,
    Prose,
    Section,
    Text,
    mistake,
)
from recipes.systems import SystemsConfig
from recipes.training import TrainConfig

# LongBench's multi-hop prompt, split where the passages go.
_INSTRUCTION = (
    "Answer the question based on the given passages. "
    "Only give me the answer and do not output any other words."
)
BEFORE_PASSAGES = f"{_INSTRUCTION}\n\nThe following are given passages.\n"
AFTER_PASSAGES = f"\n\n{_INSTRUCTION}\n\nQuestion: {{question}}\nAnswer:"


class ModelConfig(Section):
    path: Text
    dtype: Literal["float32", "bfloat16"] = "float32"


class PromptConfig(Section):
    system: Prose | None = None
    before_passages: Prose = BEFORE_PASSAGES
    after_passages: Prose = AFTER_PASSAGES

    @field_validator("after_passages")
    @classmethod
    def _one_question(cls, text: str) -> str:
        count = text.count("{question}")
        if count != 1:
            raise mistake(f"expected {{question}} exactly once, found it {count} times")
        return text

    @field_validator("system", "before_passages")
    @classmethod
    def _static(cls, text: str | None) -> str | None:
        if text is not None and "{question}" in text:
            raise mistake("{question} belongs in prompt.after_passages: this part is cached")
        return text


class StoreConfig(Section):
    """Where chunk keys and values are kept between runs, and how they are read."""

    # One store for each set of weights lies inside: base, fine_tuned. null: nothing is kept.
    folder: Text | None = None
    # nuggets: only the tokens that some nugget covers; TurboRAG serves whole chunks.
    keep: Literal["nuggets", "chunks"] = "nuggets"
    # null: the model's own.
    dtype: Literal["float32", "bfloat16", "float16", "int8", "float8"] | None = None
    max_gib: Annotated[float, Field(gt=0.0)] | None = None
    # evict: the least recently used chunks give way.
    when_full: Literal["refuse", "evict"] = "refuse"
    shard_mib: Positive = 256
    # Checksums are compared on every read, and not only by `coinrag cache verify`.
    check_reads: bool = False
    read_threads: Positive = 4
    # The tier of slices in memory in front of the disk; 0 leaves it out.
    memory_gib: Annotated[float, Field(ge=0.0)] = 1.0


class Recipe(Section):
    """Everything one run needs; the sections are described in the shipped YAML recipes."""

    name: Text
    # NumPy's generators take no more than 32 bits.
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    model: ModelConfig
    data: DataConfig
    nuggets: NuggetsConfig = NuggetsConfig()
    retrieval: RetrievalConfig
    build: BuildConfig = BuildConfig()
    raft: RaftConfig = RaftConfig()
    prompt: PromptConfig = PromptConfig()
    context: ContextConfig = ContextConfig()
    systems: SystemsConfig = SystemsConfig()
    store: StoreConfig = StoreConfig()
    train: TrainConfig
    scorer: ScorerConfig = ScorerConfig()
    eval: EvalConfig = EvalConfig()

    @field_validator("retrieval")
    @classmethod
    def _corpus_is_searched(cls, section: RetrievalConfig, info: ValidationInfo) -> RetrievalConfig:
        data = info.data.get("data")
        if data is not None and data.corpus and section.candidates != "corpus":
            raise mistake(
                "data.corpus is searched with candidates corpus alone, got contexts",
                at="retrieval.candidates",
                involves="data.corpus",
            )
        return section

    @field_validator("train")
    @classmethod
    def _context_is_cached(cls, section: TrainConfig, info: ValidationInfo) -> TrainConfig:
        context = info.data.get("context")
        if context is not None and section.system == "standard_rag" and context.gradient != "full":
            raise mistake(
                f"standard_rag caches nothing that gradient {context.gradient} could concern: "
                "expected full",
                at="context.gradient",
                involves="train.system",
            )
        return section

    @field_validator("train")
    @classmethod
    def _prefix_can_be_corrected(cls, section: TrainConfig, info: ValidationInfo) -> TrainConfig:
        context = info.data.get("context")
        if context is None or context.contextualizer is None:
            return section
        if section.system not in CONTEXTUALIZED:
            raise mistake(
                "a contextualizer corrects prefixes that are all slices: expected null, or "
                f"train.system coinrag or turborag, got it with {section.system}",
                at="context.contextualizer",
                involves="train.system",
            )
        return section

    @field_validator("train")
    @classmethod
    def _base_encodes_context(cls, section: TrainConfig, info: ValidationInfo) -> TrainConfig:
        context = info.data.get("context")
        if context is None or section.tuning != "lora" or not section.lora.activated:
            return section
        if context.gradient != "frozen":
            raise mistake(
                "an activated adapter leaves the context to the base model: expected frozen, got "
                f"{context.gradient}",
                at="context.gradient",
                involves="train.lora.activated",
            )
        if section.system not in ("coinrag", "turborag"):
            raise mistake(
                f"an activated adapter acts from the query on, and {section.system} computes more "
                "with the trained weights: expected coinrag or turborag",
                at="train.system",
                involves="train.lora.activated",
            )
        if section.system == "coinrag" and context.packets is not None:
            raise mistake(
                "an activated adapter acts from the query on, and packet tokens come before it: "
                "expected null",
                at="context.packets",
                involves="train.lora.activated",
            )
        return section

    @field_validator("eval")
    @classmethod
    def _online_extractor_is_described(
        cls, section: EvalConfig, info: ValidationInfo
    ) -> EvalConfig:
        systems, nuggets = info.data.get("systems"), info.data.get("nuggets")
        if systems is None or nuggets is None or "online_nuggets" not in section.systems:
            return section
        extractor = systems.online_nuggets.extractor
        if extractor != "rules" and getattr(nuggets, extractor) is None:
            raise mistake(
                f"online_nuggets needs it for systems.online_nuggets.extractor {extractor}; "
                "extractor rules needs no model",
                at=f"nuggets.{extractor}",
                involves="eval.systems",
            )
        return section

    @field_validator("eval")
    @classmethod
    def _widths_within_retrieval(cls, section: EvalConfig, info: ValidationInfo) -> EvalConfig:
        # Built tables hold the top retrieval.k_c chunks of a question and no more.
        retrieval = info.data.get("retrieval")
        widest = max((width.k_c for width in section.widths), default=0)
        if retrieval is not None and widest > retrieval.k_c:
            raise mistake(
                f"expected k_c of at most retrieval.k_c ({retrieval.k_c}), got {widest}",
                at="eval.widths",
                involves="retrieval.k_c",
            )
        # One-stage tables hold the chunks of the top retrieval.k nuggets.
        most = max((width.k for width in section.widths), default=0)
        if retrieval is not None and retrieval.selection == "one_stage" and most > retrieval.k:
            raise mistake(
                f"expected k of at most retrieval.k ({retrieval.k}) with one-stage selection, "
                f"got {most}",
                at="eval.widths",
            )
        return section
