"""What answers depend on: options that a recipe does not use leave their keys as they were."""

from pathlib import Path
from typing import Any, cast

import pytest

from cache_ops.fingerprint import Fingerprint
from cache_ops.store.stored import chunk_key
from data_builders.prompt import PromptTemplate
from eval import identity
from recipes.resolve import with_changes
from recipes.schema import Recipe

VALUES: dict[str, Any] = {
    "name": "pinned",
    "model": {"path": "model"},
    "data": {"train": ["train.jsonl"], "dev": ["dev.jsonl"]},
    "retrieval": {"encoder": "encoder", "k_c": 3, "k": 4},
    "train": {"run_folder": "run"},
}
KEYS = {
    "coinrag": "8c343a07f59b6d7c",
    "turborag": "efb31a3b2847d02f",
    "kvlink": "8b7d08179bdbf0bf",
    "standard_rag": "16d87a2ab894e1de",
}


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setattr(identity, "machine", lambda: {"cpu": "one"})
    return Recipe.model_validate(VALUES)


class Template:
    """All of a prompt that a key depends on."""

    digest = "prompt"


def key_of(config: Recipe, system: str) -> str:
    template = cast(PromptTemplate, Template())
    setting = identity.setting(config, Path("dev-data"), template, [system])
    return identity.answer_key(setting, ["weights"])


def test_the_keys_of_a_recipe_without_options_stay(config: Recipe) -> None:
    """With another key every answer is asked for again, and every stored chunk computed again."""
    assert {system: key_of(config, system) for system in KEYS} == KEYS
    parts = ("w", "r", "t", "512 tokens", "none", "float32 model, float32 records")
    assert Fingerprint(*parts).digest.startswith("f7edd46f6577befd")
    assert chunk_key([1, 2, 3]).hex().startswith("4636993d3e1da4e9")


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("context.anchors.prefix_tokens=2", True),
        ("context.anchors.summary=mean", True),
        ("context.packets={before_tokens: 1, after_tokens: 0}", True),
        ("context.repair={ratio: 0.0}", True),
        # It lies beside the weights, and its digest is among theirs.
        ("context.contextualizer={width: 16}", False),
        ("context.gradient=frozen", False),
    ],
)
def test_options_of_a_prefix_change_the_keys_of_coinrag_alone(
    config: Recipe, option: str, changes: bool
) -> None:
    changed = with_changes(config, [option])
    assert (key_of(changed, "coinrag") != key_of(config, "coinrag")) == changes
    assert key_of(changed, "turborag") == key_of(config, "turborag")
