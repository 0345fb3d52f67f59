"""The public configuration: one frozen model a section, every option typed, checked and read.

Counts are in the unit their name ends with (tokens, samples, steps); `k_c` counts chunks and `k`
nuggets. Unknown keys are refused. `recipes.resolve` builds a `Recipe` from YAML and the command
line; nothing else should.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]

# LongBench's multi-hop prompt, split where the passages go.
_INSTRUCTION = (
    "Answer the question based on the given passages. "
    "Only give me the answer and do not output any other words."
)
BEFORE_PASSAGES = f"{_INSTRUCTION}\n\nThe following are given passages.\n"
AFTER_PASSAGES = f"\n\n{_INSTRUCTION}\n\nQuestion: {{question}}\nAnswer:"


def mistake(message: str, *, at: str = "", involves: str = "") -> PydanticCustomError:
    """A cross-check's error.

    `at` is the dotted path of the option at fault when it is not the validated field itself, and
    `involves` that of another option which may be at fault in its place.
    """
    # The message travels as a value, so braces in it are not taken for placeholders.
    context = {"text": message, "at": at, "involves": involves}
    return PydanticCustomError("cross_check", "{text}", context)


def _written(text: str) -> str:
    # No file name, tokenizer or UTF-8 file takes these.
    if wrong := re.search("[\0\ud800-\udfff]", text):
        raise mistake(f"expected Unicode text without NUL, found {wrong[0]!a}")
    return text


# Free text, possibly empty; and text that names something.
Prose = Annotated[str, AfterValidator(_written)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_written)]


def _refuse_repeats(values: Sequence[str]) -> None:
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise mistake(f"expected each entry once, got {repeated[0]!r} again")


class Section(BaseModel):
    """What all sections share: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


def _known_device(device: str) -> str:
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise mistake(f"expected cpu, mps, cuda or cuda:N, got {device!r}")
    return device


Device = Annotated[str, AfterValidator(_known_device)]


class ModelConfig(Section):
    path: Text
    dtype: Literal["float32", "bfloat16"] = "float32"


DataFormat = Literal["ircot", "jsonl", "hotpotqa", "2wikimultihopqa", "musique", "longbench"]


class DataConfig(Section):
    format: DataFormat = "ircot"
    # null: as `format`.
    dev_format: DataFormat | None = None
    train: Annotated[list[Text], Field(min_length=1)]
    dev: Annotated[list[Text], Field(min_length=1)]
    # Files of passages, searched together with all contexts when retrieval.candidates is corpus.
    corpus: list[Text] = []
    train_rows_per_file: Positive | None = None
    dev_rows_per_file: Positive | None = None
    chunk_tokens: Positive = 512
    built_root: Text = "built"

    @field_validator("train", "dev", "corpus")
    @classmethod
    def _each_file_once(cls, files: list[str]) -> list[str]:
        _refuse_repeats([os.path.normpath(path) for path in files])
        return files

    @field_validator("dev")
    @classmethod
    def _no_shared_file(cls, dev: list[str], info: ValidationInfo) -> list[str]:
        train = {os.path.normpath(path) for path in info.data.get("train", [])}
        shared = [path for path in dev if os.path.normpath(path) in train]
        if shared:
            raise mistake(f"{shared[0]!r} is a training file too", involves="data.train")
        return dev


def _server_address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise mistake("expected an http or https address, as in http://localhost:8000/v1")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise mistake(
            "expected an address without user, password or query: "
            "the key comes from the environment (api_key_variable)"
        )
    return url.rstrip("/")


class LlmConfig(Section):
    """Nugget extraction through an OpenAI-compatible server; prices are in USD a million tokens."""

    model: Text
    # null: the client's own, OpenAI's or that of the environment's OPENAI_BASE_URL.
    base_url: Annotated[Text, AfterValidator(_server_address)] | None = None
    # The environment variable that holds the key; a key itself never stands in a recipe.
    api_key_variable: Text = "OPENAI_API_KEY"
    # auto: the strictest that the server takes, found by asking once.
    output: Literal["auto", "json_schema", "json_object", "text"] = "auto"
    # null: the server's own, for models that refuse to be told.
    temperature: Annotated[float, Field(ge=0.0)] | None = 0.0
    max_output_tokens: Positive = 1024
    concurrent_requests: Positive = 16
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    # Requests for one chunk before it counts as failed.
    attempts: Positive = 6
    input_price: Annotated[float, Field(ge=0.0)] | None = None
    output_price: Annotated[float, Field(ge=0.0)] | None = None
    # Budgets hold over all runs with the same model, server, prompt and output settings.
    max_requests: Positive | None = None
    max_total_tokens: Positive | None = None
    max_cost: Annotated[float, Field(gt=0.0)] | None = None

    @model_validator(mode="after")
    def _cost_has_prices(self) -> Self:
        prices = {"input_price": self.input_price, "output_price": self.output_price}
        given = self.max_cost is not None or any(price is not None for price in prices.values())
        missing = [name for name, price in prices.items() if price is None]
        if given and missing:
            raise mistake(
                f"cost needs both prices, in USD a million tokens: set {missing[0]} too",
                at=f"nuggets.llm.{missing[0]}",
            )
        return self


class LocalModelConfig(Section):
    """Nugget extraction by an instruct model in this process."""

    path: Text
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Device = "cpu"
    # Chunks at once. null: 8 on a GPU; 1 on a CPU, where answers then do not depend on company.
    batch_size: Positive | None = None
    max_new_tokens: Positive = 512


class NuggetsConfig(Section):
    extractor: Literal["rules", "llm", "local_model"] = "rules"
    # Similarity from which a fuzzy match is taken; null: exact matches only.
    fuzzy_threshold: Fraction | None = 0.7
    llm: LlmConfig | None = None
    local_model: LocalModelConfig | None = None

    @model_validator(mode="after")
    def _extractor_is_described(self) -> Self:
        if self.extractor != "rules" and getattr(self, self.extractor) is None:
            raise mistake(
                f"nuggets.extractor {self.extractor} needs the section nuggets.{self.extractor}",
                at=f"nuggets.{self.extractor}",
            )
        return self


Weight = Annotated[float, Field(ge=0.0)]


class RetrievalWeights(Section):
    """What each of BGE-M3's scores counts in the score of a text."""

    dense: Weight = 1.0
    sparse: Weight = 0.0
    colbert: Weight = 0.0

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        if not (self.dense or self.sparse or self.colbert):
            raise mistake("expected a weight above 0")
        return self


class RetrievalConfig(Section):
    encoder: Text
    encoder_kind: Literal["bge_m3", "flag_cls", "flag_mean"] = "bge_m3"
    weights: RetrievalWeights = RetrievalWeights()
    # Ranks chunks by reciprocal rank fusion of the encoder's ranking and BM25's.
    bm25: bool = False
    # contexts: a question is searched in its own passages; corpus: in all passages of the split.
    candidates: Literal["contexts", "corpus"] = "contexts"
    # one_stage: the best nuggets of all candidates, without choosing chunks first.
    selection: Literal["two_stage", "one_stage"] = "two_stage"
    k_c: Positive = 5
    k: Positive = 10
    order: Literal["rank_then_document", "score"] = "rank_then_document"
    overlap: Literal["merge", "keep"] = "merge"
    # Texts a forward pass. null: 32 on a GPU; 1 on a CPU, where padding costs more than batches
    # gain and a vector's bits then do not depend on which texts it was encoded with.
    batch_size: Positive | None = None
    device: Device = "cpu"

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.encoder_kind != "bge_m3":
            for name in ("sparse", "colbert"):
                if getattr(self.weights, name):
                    raise mistake(
                        f"{name} scores need encoder_kind bge_m3, got {self.encoder_kind}",
                        at=f"retrieval.weights.{name}",
                        involves="retrieval.encoder_kind",
                    )
        if self.candidates == "corpus" and not self.weights.dense:
            raise mistake(
                "a corpus is searched by dense vectors first: expected a weight above 0",
                at="retrieval.weights.dense",
                involves="retrieval.candidates",
            )
        if self.bm25 and self.selection == "one_stage":
            raise mistake(
                "BM25 helps to choose chunks, which one_stage does not do",
                at="retrieval.bm25",
                involves="retrieval.selection",
            )
        return self


class BuildConfig(Section):
    """Where the work of a build is done. Tables do not depend on it."""

    executor: Literal["local", "ray"] = "local"
    # null: a Ray of this machine's own; auto: the cluster this machine belongs to; or host:port.
    ray_address: Text | None = None
    ray_workers: Positive = 2
    # Below 1: a share of one GPU.
    ray_gpus_a_worker: Annotated[float, Field(ge=0.0)] = 0.0

    @field_validator("ray_address")
    @classmethod
    def _address(cls, address: str | None) -> str | None:
        known = re.fullmatch(r"auto|(\[[0-9A-Fa-f:]+\]|[^\s/:\[\]]+):\d{1,5}", address or "auto")
        if known is None:
            raise mistake(f"expected null, auto or host:port, got {address!r}")
        return address

    @field_validator("ray_gpus_a_worker")
    @classmethod
    def _whole_gpus(cls, gpus: float) -> float:
        if gpus > 1 and not gpus.is_integer():
            raise mistake(f"expected at most 1 or a whole number, got {gpus:g}")
        return gpus


class RaftConfig(Section):
    noise_probability: Fraction = 0.15


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


class ContextConfig(Section):
    gradient: Literal["full", "detach"] = "full"


class LoraConfig(Section):
    rank: Positive = 16
    alpha: Positive = 32
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    target_modules: Annotated[list[Text], Field(min_length=1)] = [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip


class WandbConfig(Section):
    project: Text
    mode: Literal["online", "offline"] = "offline"


class TrainConfig(Section):
    tuning: Literal["full", "lora"] = "full"
    lora: LoraConfig = LoraConfig()
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-6
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    warmup_fraction: Fraction = 0.03
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    epochs: Positive = 1
    max_steps: Positive | None = None
    # Samples of one optimizer step: over micro-batches, accumulation and all ranks together.
    effective_batch_samples: Positive = 16
    micro_batch_samples: Positive = 4
    max_length_tokens: Positive = 1024
    gradient_checkpointing: bool = False
    mixed_precision: Literal["no", "bf16"] = "no"
    log_every_steps: Positive = 1
    save_every_steps: Positive | None = None
    resume: bool = False
    run_folder: Text
    wandb: WandbConfig | None = None

    @field_validator("micro_batch_samples")
    @classmethod
    def _divides_effective_batch(cls, micro: int, info: ValidationInfo) -> int:
        effective = info.data.get("effective_batch_samples", micro)
        if effective % micro:
            raise mistake(
                f"expected a divisor of train.effective_batch_samples ({effective}), got {micro}",
                involves="train.effective_batch_samples",
            )
        return micro


class WidthConfig(Section):
    k_c: Positive
    k: Positive


class EvalConfig(Section):
    systems: Annotated[
        list[Literal["standard_rag", "turborag", "coinrag"]], Field(min_length=1)
    ] = ["standard_rag", "turborag", "coinrag"]
    checkpoints: Annotated[list[Literal["base", "fine_tuned"]], Field(min_length=1)] = [
        "base",
        "fine_tuned",
    ]
    # Empty: the one width of the retrieval section.
    widths: list[WidthConfig] = []
    max_new_tokens: Positive = 32
    bootstrap_resamples: Positive = 10000
    warmup_questions: Natural = 3
    # null: the folder `compare` inside train.run_folder.
    output: Text | None = None

    @field_validator("widths")
    @classmethod
    def _each_width_once(cls, widths: list[WidthConfig]) -> list[WidthConfig]:
        _refuse_repeats([f"{{k_c: {width.k_c}, k: {width.k}}}" for width in widths])
        return widths

    @field_validator("systems", "checkpoints")
    @classmethod
    def _each_once(cls, names: list[str]) -> list[str]:
        _refuse_repeats(names)
        return names


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
    train: TrainConfig
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
