"""Evaluation of a model in training: the answers of a comparison, and nothing left behind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from built_tables import patch_built
from transformers import PreTrainedModel

import eval.compare
from cache_ops.attention import PACKED, enable_packed
from cache_ops.encode import encode_chunk, encode_chunks
from cache_ops.hf import load_model, load_tokenizer
from cache_ops.soft_tokens import add_soft_tokens, save_soft_tokens, take_soft_tokens
from cache_ops.supply import MissingSlicesError, Supply
from data_builders.kv import supply_over
from data_builders.tables import Chunk
from eval.answers import read_answers
from eval.compare import compare
from eval.in_training import open_evaluator
from eval.lockstep import Lockstep
from recipes.errors import UserError
from recipes.resolve import with_changes
from recipes.schema import Recipe
from recipes.training import EvaluateConfig

MakeRecipe = Callable[..., Recipe]
SYSTEMS = ("coinrag", "standard_rag", "turborag", "block_attention")


@pytest.fixture(autouse=True)
def tables(chunks: list[Chunk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_built(chunks, tmp_path, monkeypatch)
    for drawing in ("draw_overview", "draw_all", "write_page"):
        monkeypatch.setattr(eval.compare, drawing, lambda *_: None)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def trained_as(config: Recipe, system: str, gradient: str = "full", **train: Any) -> Recipe:
    options = EvaluateConfig(every_steps=1, sample_answers=5)
    training = config.train.model_copy(update={"system": system, "evaluate": options, **train})
    context = config.context.model_copy(update={"gradient": gradient})
    return config.model_copy(update={"train": training, "context": context})


def live_model(config: Recipe) -> PreTrainedModel:
    """The checkpoint of the recipe's run as it stands in a training."""
    model = load_model(f"{config.train.run_folder}/checkpoint", "float32")
    enable_packed(model)
    return model.train()


def tokenizer_of(config: Recipe) -> Any:
    """As saved and loaded, which may take words apart in another way than the one that was made."""
    return load_tokenizer(config.model.path)


def compared(config: Recipe) -> dict[tuple[str, str], tuple[str, float, float, bool]]:
    compare(config)
    answers = read_answers(Path(config.train.run_folder) / "compare" / "answers.jsonl")
    return {(a.system, a.question_id): (a.answer, a.f1, a.em, a.stopped) for a in answers}


def evaluated(
    config: Recipe, accelerator: Accelerator, model: Any, **given: Any
) -> dict[tuple[str, str], tuple[str, float, float, bool]]:
    given = {"soft_tokens": {}, "frozen": None, **given}
    found = open_evaluator(config, accelerator, model, tokenizer_of(config), **given)()
    assert found["questions"] == len(found["answers"]) == 5
    for name, scale in (("f1", 100), ("em", 100)):
        mean = scale * sum(one[name] for one in found["answers"]) / 5
        assert found[name] == pytest.approx(mean)
    system = config.train.system
    return {
        (system, one["question_id"]): (one["answer"], one["f1"], one["em"], one["stopped"])
        for one in found["answers"]
    }


def test_answers_are_those_of_a_comparison_of_the_checkpoint(
    recipe: MakeRecipe, accelerator: Accelerator
) -> None:
    config = recipe(systems=list(SYSTEMS), checkpoints=["fine_tuned"], concurrent_requests=2)
    expected = compared(config)
    model = live_model(config)
    for split in (False, True):
        found: dict[Any, Any] = {}
        for system in SYSTEMS:
            found |= evaluated(trained_as(config, system), accelerator, model, split=split)
        assert found == expected
    assert len({answer for answer, *_ in found.values()}) > 3, "answers differ"


def test_live_link_tokens_answer(recipe: MakeRecipe, accelerator: Accelerator) -> None:
    config = recipe(systems=["kvlink"], checkpoints=["fine_tuned"])
    kvlink = config.systems.kvlink.model_copy(update={"link_tokens": 2})
    systems = config.systems.model_copy(update={"kvlink": kvlink})
    config = config.model_copy(update={"systems": systems})
    model = live_model(config)
    added = add_soft_tokens(model, {"links": (3, 2)}, seed=3)
    found = evaluated(trained_as(config, "kvlink"), accelerator, model, soft_tokens=added)
    save_soft_tokens(Path(config.train.run_folder) / "checkpoint", take_soft_tokens(model))
    assert found == compared(config)


def test_a_rank_that_is_done_runs_passes_until_all_are(
    recipe: MakeRecipe, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = live_model(recipe(checkpoints=["fine_tuned"]))
    modes: list[tuple[bool, bool]] = []
    model.register_forward_hook(
        lambda *_: modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
    )
    # This rank has two passes to run, the slowest five.
    meetings = iter([1] * 5 + [0])
    told: list[int] = []

    def total(mine: torch.Tensor, how: str) -> torch.Tensor:
        told.append(int(mine))
        return mine + next(meetings)

    monkeypatch.setattr(accelerator, "reduce", total)
    lockstep = Lockstep(model, accelerator)
    encoded = encode_chunks(cast(PreTrainedModel, lockstep), [[1, 2, 3], [4]])
    assert all(map(torch.equal, encoded, encode_chunks(model, [[1, 2, 3], [4]])))
    with torch.inference_mode():
        encode_chunk(cast(PreTrainedModel, lockstep), [1, 2])
        lockstep.finish()
    assert told == [1, 1, 0, 0, 0, 0]
    assert modes == [(False, False)] * 5
    assert next(meetings, None) is None


def test_live_packets_answer_over_anchored_and_repaired_slices(
    recipe: MakeRecipe, accelerator: Accelerator
) -> None:
    options = (
        "context.packets={before_tokens: 1, after_tokens: 2}",
        "context.anchors={prefix_tokens: 2, suffix_tokens: 2}",
        "context.repair={ratio: 0.3}",
    )
    config = with_changes(recipe(systems=["coinrag"], checkpoints=["fine_tuned"]), options)
    model = live_model(config)
    shapes = {"packets_before": (1, 1), "packets_after": (1, 2)}
    added = add_soft_tokens(model, shapes, seed=3)
    found = evaluated(trained_as(config, "coinrag"), accelerator, model, soft_tokens=added)
    save_soft_tokens(Path(config.train.run_folder) / "checkpoint", take_soft_tokens(model))
    assert found == compared(config)


def frozen_supply(config: Recipe, model: Any, *, compute: bool = True) -> Supply:
    return supply_over(config, model, None, base_weights_only=True, compute=compute)


def test_frozen_context_is_the_base_models(recipe: MakeRecipe, accelerator: Accelerator) -> None:
    config = recipe(systems=["coinrag"], checkpoints=["fine_tuned"])
    config = trained_as(config, "coinrag", "frozen", tuning="lora")
    base = load_model(config.model.path, "float32")
    enable_packed(base)
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_dropout=0.5)).train()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    frozen = frozen_supply(config, model)
    found = evaluated(config, accelerator, model, frozen=frozen)
    own = trained_as(config, "coinrag", tuning="lora")
    assert evaluated(own, accelerator, model) != found, "whose slices matters"
    model.merge_and_unload().save_pretrained(f"{config.train.run_folder}/checkpoint")
    assert found == compared(config)


def test_slices_that_full_fine_tuning_could_not_compute_are_missed_before_it(
    recipe: MakeRecipe, accelerator: Accelerator
) -> None:
    config = trained_as(recipe(), "coinrag", "frozen")
    model = live_model(config)
    supply = frozen_supply(config, model, compute=False)
    with pytest.raises(MissingSlicesError, match="coinrag cache build"):
        open_evaluator(config, accelerator, model, tokenizer_of(config), None, supply)


def test_nothing_is_stale_and_nothing_is_left_behind(
    recipe: MakeRecipe, accelerator: Accelerator
) -> None:
    config = trained_as(recipe(), "coinrag")
    model = live_model(config)
    evaluate = open_evaluator(config, accelerator, model, tokenizer_of(config), None, None)
    generator, weights = torch.get_rng_state(), [w.clone() for w in model.parameters()]
    before = evaluate()["answers"]
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(map(torch.equal, weights, model.parameters()))
    assert model.config._attn_implementation == PACKED
    assert all(module.training for module in model.modules())
    assert all(w.grad is None and w.requires_grad for w in model.parameters())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    changed = [w.clone() for w in model.parameters()]
    after = evaluate()["answers"]
    fresh = live_model(config)
    with torch.no_grad():
        for weight, value in zip(fresh.parameters(), changed, strict=True):
            weight.copy_(value)
    assert after != before
    assert (
        after
        == open_evaluator(config, accelerator, fresh, tokenizer_of(config), None, None)()["answers"]
    )


def test_the_first_questions_of_each_data_set_are_asked(
    recipe: MakeRecipe, accelerator: Accelerator
) -> None:
    config = trained_as(recipe(), "coinrag")
    options = EvaluateConfig(every_steps=1, questions_per_dataset=1, sample_answers=1)
    training = config.train.model_copy(update={"evaluate": options})
    config = config.model_copy(update={"train": training})
    found = open_evaluator(
        config, accelerator, live_model(config), tokenizer_of(config), None, None
    )()
    assert found["questions"] == 2
    assert [one["question_id"] for one in found["answers"]] == ["q0"]
    assert found["f1_by_dataset"].keys() == {"hotpotqa", "musique"}


def test_unbuilt_dev_data_is_the_users_mistake(
    recipe: MakeRecipe, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    config = trained_as(recipe(), "coinrag")
    with pytest.raises(UserError, match="dev"):
        open_evaluator(config, accelerator, live_model(config), tokenizer_of(config), None, None)
