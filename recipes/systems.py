"""The systems' names, and the section of what belongs to one of them alone."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from recipes.section import Fraction, Natural, Positive, Section, mistake

SystemName = Literal[
    "standard_rag",
    "turborag",
    "block_attention",
    "cacheblend",
    "epic",
    "ape",
    "kvlink",
    "online_nuggets",
    "coinrag",
]
TrainedSystem = Literal["coinrag", "standard_rag", "turborag", "block_attention", "kvlink"]


class TurboragConfig(Section):
    # composite: every chunk starts right after the prompt.
    positions: Literal["reordered", "composite"] = "reordered"


class CacheblendConfig(Section):
    # Share of the prefix's tokens that are recomputed.
    ratio: Fraction = 0.15
    # Whose deviation from the cached one chooses them.
    metric: Literal["v", "k"] = "v"
    # The layer that chooses; it and those before it recompute every token. In layer 0 nothing could
    # deviate: its keys and values depend on their own token alone.
    check_layer: Positive = 1
    # Later layers narrow the choice further.
    gradual: bool = False


class EpicConfig(Section):
    # First tokens of every chunk but the first that are recomputed (LegoLink-16).
    recomputed_tokens: Positive = 16


class ApeConfig(Section):
    # Below 1 attention to the chunks is sharper.
    temperature: Annotated[float, Field(ge=0.01, le=100.0)] = 0.9
    # Factor on the log-sum-exp of the attention to the chunks.
    scale: Annotated[float, Field(ge=0.01, le=100.0)] = 0.9


class KvlinkConfig(Section):
    link_tokens: Natural = 5


class OnlineNuggetsConfig(Section):
    # rules: sentences and clauses; else a language model described under `nuggets`.
    extractor: Literal["rules", "llm", "local_model"] = "local_model"
    # ginger: marks spans of each passage; crucible: asks for questions and their answers.
    style: Literal["ginger", "crucible"] = "ginger"

    @field_validator("style")
    @classmethod
    def _rules_mark_spans(cls, style: str, info: ValidationInfo) -> str:
        if info.data.get("extractor") == "rules" and style != "ginger":
            raise mistake(
                f"rules mark spans and ask nothing: expected ginger, got {style}",
                involves="systems.online_nuggets.extractor",
            )
        return style


class SystemsConfig(Section):
    """What belongs to one system alone."""

    turborag: TurboragConfig = TurboragConfig()
    cacheblend: CacheblendConfig = CacheblendConfig()
    epic: EpicConfig = EpicConfig()
    ape: ApeConfig = ApeConfig()
    kvlink: KvlinkConfig = KvlinkConfig()
    online_nuggets: OnlineNuggetsConfig = OnlineNuggetsConfig()
