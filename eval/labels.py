"""How systems, checkpoints and cells are called and coloured, the same in tables and pictures."""

from collections.abc import Mapping
from typing import Any

SYSTEM_NAMES = {
    "standard_rag": "Standard RAG",
    "turborag": "TurboRAG",
    "block_attention": "Block-Attention",
    "cacheblend": "CacheBlend",
    "epic": "EPIC",
    "ape": "APE",
    "kvlink": "KVLink",
    "online_nuggets": "online nuggets",
    "coinrag": "CoinRAG",
}
# Okabe and Ito's palette, which readers with any colour vision can tell apart; its yellow is
# darkened to be seen on white, and a grey makes it nine.
SYSTEM_COLOURS = {
    "standard_rag": "#000000",
    "turborag": "#D55E00",
    "block_attention": "#E69F00",
    "cacheblend": "#009E73",
    "epic": "#888888",
    "ape": "#8F7D00",
    "kvlink": "#CC79A7",
    "online_nuggets": "#56B4E9",
    "coinrag": "#0072B2",
}
# Matplotlib's, for readers without any.
SYSTEM_MARKERS = dict(zip(SYSTEM_NAMES, "Ds^vPX<>o", strict=True))
CHECKPOINT_NAMES = {"base": "base", "fine_tuned": "fine-tuned"}
# The error kinds of an answer, in the order of the pipeline.
ERROR_NAMES = {
    "bridge_gap": "bridge gap",
    "extraction_loss": "extraction loss",
    "distractor_bias": "distractor bias",
}


def arm_name(arm: str) -> str:
    """An arm by its name, the recipe without changes by this word."""
    return arm or "recipe"


def width_label(row: Mapping[str, Any]) -> str:
    """`k_c/k` of a row; a whole-chunk system has all nuggets."""
    return f"{row['k_c']}/{'all' if row['k'] is None else row['k']}"


def cell_label(row: Mapping[str, Any]) -> str:
    """A cell's system, width, checkpoint and arm in one line."""
    checkpoint = CHECKPOINT_NAMES[row["checkpoint"]]
    arm = f", {row['arm']}" if row["arm"] else ""
    return f"{SYSTEM_NAMES[row['system']]} {width_label(row)}, {checkpoint}{arm}"
