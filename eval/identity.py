"""What an answer depends on, as a digest: an answer under another digest is not comparable."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_builders.nuggets.online import online_identity
from data_builders.prompt import PromptTemplate
from eval.environment import machine
from eval.systems import SYSTEMS
from recipes.schema import Recipe

# Raised when the same settings come to give other answers or timings.
VERSION = 2


def setting(
    config: Recipe, dev: Path, template: PromptTemplate, systems: Sequence[str]
) -> dict[str, Any]:
    """What decides answers and timings of some systems, beside the weights.

    `dev` is the content-keyed folder of the questions.
    """
    decided: dict[str, Any] = {
        "version": VERSION,
        "dev_data": dev.name,
        "template": template.digest,
        "dtype": config.model.dtype,
        "max_new_tokens": config.eval.max_new_tokens,
        "ttft_repeats": config.eval.ttft_repeats,
        "machine": machine(),
    }
    if any(name != "standard_rag" for name in systems):
        decided["slices"] = _slices(config)
    for name in systems:
        decided |= _own(config, name)
    return decided


def _slices(config: Recipe) -> dict[str, Any]:
    store = config.store
    slices: dict[str, Any] = {
        "from": "page cache" if store.folder else "memory",
        "dtype": store.dtype or config.model.dtype,
    }
    if store.folder:
        slices |= {"check_reads": store.check_reads, "read_threads": store.read_threads}
    return slices


def _own(config: Recipe, system: str) -> dict[str, Any]:
    """What concerns one system, or those of its kind, alone."""
    own: dict[str, Any] = {}
    options = config.systems.model_dump(mode="json")
    if system in options:
        own[system] = options[system]
    if SYSTEMS[system].selects_nuggets:
        own["order"] = config.retrieval.order
    match system:
        case "coinrag":
            own["overlap"] = config.retrieval.overlap
            # A contextualizer is among the weights.
            options = config.context.model_dump(mode="json", include={"encoding", "positions"})
            own["context"] = options | config.context.asked()
            if config.context.packets is not None:
                # Untrained ones follow from it.
                own["seed"] = config.seed
        case "standard_rag":
            own["max_prompt_tokens"] = config.eval.max_prompt_tokens
        case "online_nuggets":
            own["extractor"] = online_identity(config)
        case "kvlink":
            # Untrained link tokens follow from both.
            own["kvlink"] |= {"documents": config.retrieval.k_c, "seed": config.seed}
    return own


def weights_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of a model's config and safetensors files."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def answer_key(setting: Mapping[str, Any], weights: Sequence[str]) -> str:
    """The key of answers given under a setting by weights with those digests."""
    text = json.dumps([setting, *weights], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
