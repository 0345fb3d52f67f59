"""The section that says what a prefix is made of; see `recipes.schema` for the whole."""

from typing import Any, Literal

from pydantic import ValidationInfo, field_validator

from recipes.section import Fraction, Natural, Positive, Section, mistake

# The systems whose whole prefix is slices, so that it can be corrected before the query.
CONTEXTUALIZED = ("coinrag", "turborag")


class ContextualizerConfig(Section):
    """A small transformer that corrects a prefix's keys and values with all slices in view."""

    width: Positive = 256
    # Its blocks, which all layers of the model share.
    layers: Positive = 1
    heads: Positive = 4

    @field_validator("heads")
    @classmethod
    def _divides_width(cls, heads: int, info: ValidationInfo) -> int:
        width = info.data.get("width", heads)
        if width % heads:
            raise mistake(
                f"expected a divisor of context.contextualizer.width ({width}), got {heads}",
                involves="context.contextualizer.width",
            )
        return heads


class AnchorsConfig(Section):
    """What stays in view of every chunk that a nugget is selected from."""

    prefix_tokens: Natural = 0
    suffix_tokens: Natural = 0
    # mean: of the keys and values of all its tokens, as one more behind them.
    summary: Literal["none", "mean"] = "none"


class PacketsConfig(Section):
    """Trained soft tokens around every slice, computed online."""

    before_tokens: Natural = 2
    after_tokens: Natural = 2

    @field_validator("after_tokens")
    @classmethod
    def _has_some(cls, after: int, info: ValidationInfo) -> int:
        if not after and not info.data.get("before_tokens", 1):
            raise mistake(
                "expected some tokens before or after a slice; context.packets=null has none",
                involves="context.packets.before_tokens",
            )
        return after


class RepairConfig(Section):
    """Serving alone: the prefix tokens that deviate most are computed anew with all in view.

    The layers up to the check layer are so for every token, also at a ratio of 0.
    """

    # As of systems.cacheblend.
    ratio: Fraction = 0.15
    metric: Literal["v", "k"] = "v"
    check_layer: Positive = 1


class ContextConfig(Section):
    # Whether answers train the encoding of their chunks: full; detach, not; frozen, chunks are the
    # base model's keys and values, so that its store serves the fine-tuned model too.
    gradient: Literal["full", "detach", "frozen"] = "full"
    # isolated: a nugget is encoded alone and not sliced from its chunk (the paper's ablation).
    encoding: Literal["contextual", "isolated"] = "contextual"
    # original: keys keep their chunk positions and are not rotated (the paper's ablation).
    positions: Literal["contiguous", "original"] = "contiguous"
    # First and last tokens of every used chunk.
    anchors: AnchorsConfig = AnchorsConfig()
    # null: nothing stands between slices.
    packets: PacketsConfig | None = None
    # null: the prefix is served as cached.
    repair: RepairConfig | None = None
    # Trained along, and applied before the query sees the prefix; null: there is none.
    contextualizer: ContextualizerConfig | None = None

    @field_validator("anchors")
    @classmethod
    def _chunks_are_encoded(cls, section: AnchorsConfig, info: ValidationInfo) -> AnchorsConfig:
        if section != AnchorsConfig() and info.data.get("encoding") == "isolated":
            raise mistake(
                "isolated nuggets have no chunk around them that could be anchored: expected "
                "contextual",
                at="context.encoding",
                involves="context.anchors",
            )
        return section

    @field_validator("packets")
    @classmethod
    def _slices_are_apart(
        cls, section: PacketsConfig | None, info: ValidationInfo
    ) -> PacketsConfig | None:
        if section is not None and info.data.get("positions") == "original":
            raise mistake(
                "original positions leave no place between slices for context.packets: expected "
                "contiguous",
                at="context.positions",
                involves="context.packets",
            )
        return section

    @field_validator("repair")
    @classmethod
    def _tokens_can_be_recomputed(
        cls, section: RepairConfig | None, info: ValidationInfo
    ) -> RepairConfig | None:
        anchors = info.data.get("anchors")
        if section is not None and anchors is not None and anchors.summary == "mean":
            raise mistake(
                "a mean is no token that context.repair could compute anew: expected none",
                at="context.anchors.summary",
                involves="context.repair",
            )
        return section

    def asked(self) -> dict[str, Any]:
        """Of anchors, packets and repair those that a recipe asks for."""
        options = {"anchors", "packets", "repair"}
        asked = {name for name in options if getattr(self, name) not in (None, AnchorsConfig())}
        return self.model_dump(mode="json", include=asked)
