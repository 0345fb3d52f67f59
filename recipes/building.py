"""The sections that decide how data are built: see `recipes.schema` for the whole."""

import os
import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from recipes.section import (
    Device,
    Fraction,
    Natural,
    Positive,
    Section,
    Text,
    mistake,
    refuse_repeats,
)

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
        refuse_repeats([os.path.normpath(path) for path in files])
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
    # Budgets hold over all builds with the same model, server, prompt and output settings, and for
    # online nuggets in one run.
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
    # Sentences on each side that a nugget's slice takes along. Scored is the nugget's own text; by
    # the generator's hidden states (retrieval.hidden_ffn.vectors) it is the slice.
    neighbour_sentences: Natural = 0
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
