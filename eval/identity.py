"""What an answer depends on, as a digest: an answer under another digest is not comparable."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_builders.nuggets.online import online_identity
from data_builders.prompt import PromptTemplate
from eval.environment import machine
from recipes.schema import Recipe


def setting(
    config: Recipe, dev: Path, template: PromptTemplate, system: str | None = None
) -> dict[str, Any]:
    """What decides answers and timings beside the weights, of one system or of all.

    `dev` is the content-keyed folder of the questions.
    """
    store = config.store
    own = config.systems.model_dump(mode="json")
    if system is not None:
        own = own.get(system, {})
        if system == "online_nuggets":
            own["extractor"] = online_identity(config)
        if system == "kvlink":
            # Untrained link tokens follow from both.
            own |= {"documents": config.retrieval.k_c, "seed": config.seed}
    return {
        "systems": own,
        "context": config.context.model_dump(mode="json", exclude={"gradient"}),
        "dev_data": dev.name,
        "template": template.digest,
        "dtype": config.model.dtype,
        "slices": {
            "from": "disk" if store.folder else "memory",
            "dtype": store.dtype or config.model.dtype,
            "check_reads": store.check_reads,
            "read_threads": store.read_threads,
        },
        "order": config.retrieval.order,
        "overlap": config.retrieval.overlap,
        "max_new_tokens": config.eval.max_new_tokens,
        "max_prompt_tokens": config.eval.max_prompt_tokens,
        "ttft_repeats": config.eval.ttft_repeats,
        "machine": machine(),
    }


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
