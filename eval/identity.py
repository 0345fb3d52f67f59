"""What an answer depends on, as a digest: an answer under another digest is not comparable."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_builders.prompt import PromptTemplate
from eval.environment import machine
from recipes.schema import Recipe


def setting(config: Recipe, dev: Path, template: PromptTemplate) -> dict[str, Any]:
    """What decides answers and timings beside the weights; `dev` is the content-keyed folder."""
    store = config.store
    return {
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
