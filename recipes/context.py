"""The section that says what a prefix is made of; see `recipes.schema` for the whole."""

from typing import Literal

from recipes.section import Section


class ContextConfig(Section):
    # Whether answers train the encoding of their chunks: full; detach, not; frozen, chunks are the
    # base model's keys and values, so that its store serves the fine-tuned model too.
    gradient: Literal["full", "detach", "frozen"] = "full"
    # isolated: a nugget is encoded alone and not sliced from its chunk (the paper's ablation).
    encoding: Literal["contextual", "isolated"] = "contextual"
    # original: keys keep their chunk positions and are not rotated (the paper's ablation).
    positions: Literal["contiguous", "original"] = "contiguous"
