"""Every system, ablations, arms and runs in one comparison, over built data in memory."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from built_tables import BuiltTables, patch_built
from tiny import tiny_model
from torch import Tensor

from cache_ops.contextualizer import ContextualizerSpec, new_contextualizer, save_contextualizer
from cache_ops.soft_tokens import add_soft_tokens, save_soft_tokens, take_soft_tokens
from cache_ops.supply import Supply
from data_builders.tables import Chunk
from eval.answers import Answer, read_answers
from eval.cells import cells_of
from eval.compare import compare
from eval.runner import Runner
from eval.systems import SYSTEMS
from recipes.ablations import ABLATIONS
from recipes.arms import arms_of
from recipes.errors import UserError
from recipes.resolve import with_changes
from recipes.schema import Recipe
from recipes.systems import SystemName

MakeRecipe = Callable[..., Recipe]
ALL = list(get_args(SystemName))


@pytest.fixture(autouse=True)
def tables(chunks: list[Chunk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltTables:
    return patch_built(chunks, tmp_path, monkeypatch)


def answers_of(config: Recipe) -> list[Answer]:
    return read_answers(Path(config.train.run_folder) / "compare" / "answers.jsonl")


def run_of(tmp_path: Path, name: str, seed: int, links: int = 0) -> Path:
    """A run folder whose checkpoint has weights of its own."""
    folder = tmp_path / name / "checkpoint"
    model = tiny_model("qwen2", seed=seed)
    if links:
        add_soft_tokens(model, {"links": (3, links)}, seed=seed)
        taken = take_soft_tokens(model)
        model.save_pretrained(folder)
        save_soft_tokens(folder, taken)
    else:
        model.save_pretrained(folder)
    return folder.parent


def test_the_schema_names_exactly_the_systems() -> None:
    assert set(ALL) == set(SYSTEMS)


def test_every_system_answers(recipe: MakeRecipe) -> None:
    # Online nuggets without a language model.
    changes = ["systems.online_nuggets.extractor=rules", f"eval.systems=[{','.join(ALL)}]"]
    config = with_changes(recipe(checkpoints=["base"], ttft_repeats=3), changes)
    result = compare(config)
    assert {row["system"] for row in result["results"]} == set(ALL)
    for answer in answers_of(config):
        assert len(answer.ttft_ms) == 3
        assert answer.active_tokens > 0
        assert (answer.k is None) == (not SYSTEMS[answer.system].selects_nuggets)
        assert all((piece["text"] is None) == (answer.k is None) for piece in answer.evidence)
        assert len(answer.chunk_ids) == 3
    by_system = {row["system"]: row for row in result["results"]}
    assert by_system["turborag"]["active_tokens"] == by_system["cacheblend"]["active_tokens"]
    links = 5 * 3
    assert by_system["kvlink"]["active_tokens"] == by_system["turborag"]["active_tokens"] + links
    assert by_system["coinrag"]["active_tokens"] < by_system["turborag"]["active_tokens"]
    page = (Path(config.train.run_folder) / "compare" / "compare.html").read_text("utf-8")
    assert "</html>" in page


def test_untrained_systems_over_the_same_text_agree(recipe: MakeRecipe) -> None:
    # Everything recomputed is a full prefill; block attention is TurboRAG until it is trained.
    config = with_changes(
        recipe(
            systems=["standard_rag", "turborag", "block_attention", "cacheblend"],
            checkpoints=["base"],
        ),
        ["systems.cacheblend.ratio=1.0"],
    )
    compare(config)
    given: dict[str, list[str]] = {}
    for answer in sorted(answers_of(config), key=lambda a: a.question_id):
        given.setdefault(answer.system, []).append(answer.answer)
    assert given["cacheblend"] == given["standard_rag"]
    assert given["block_attention"] == given["turborag"]
    assert given["turborag"] != given["standard_rag"]


def test_ablations_and_their_pairs_are_cells_of_coinrag(recipe: MakeRecipe) -> None:
    ablations = [*ABLATIONS, "isolated+no_rotation"]
    config = recipe(systems=["coinrag"], checkpoints=["base"], ablations=ablations)
    result = compare(config)
    assert [row["arm"] for row in result["results"]] == ["", *ablations]
    kinds = {(row["kind"], row["arm"]) for row in result["differences"]}
    assert {("ablation", name) for name in ablations} <= kinds
    assert ("interaction", "isolated+no_rotation") in kinds
    answers: dict[str, list[str]] = {}
    for answer in answers_of(config):
        answers.setdefault(answer.arm, []).append(answer.answer)
    for name in ("isolated", "no_rotation", "isolated+no_rotation"):
        assert answers[name] != answers[""], f"{name} changes nothing"
    assert result["setting"]["arms"]["isolated+no_rotation"] == {
        "context.encoding": "isolated", "context.positions": "original",
    }  # fmt: skip


def test_arms_of_ones_own(recipe: MakeRecipe) -> None:
    arm = {
        "name": "one link",
        "systems": ["kvlink"],
        "set": ["systems.kvlink.link_tokens=1"],
    }
    config = recipe(systems=["kvlink"], checkpoints=["base"], arms=[arm])
    rows = {row["arm"]: row["active_tokens"] for row in compare(config)["results"]}
    assert rows[""] == rows["one link"] + 3 * 4


def test_anchors_packets_and_repair_as_arms(recipe: MakeRecipe) -> None:
    changes = {
        "anchors": ["context.anchors={prefix_tokens: 3, suffix_tokens: 2}"],
        "packets": ["context.packets={before_tokens: 2, after_tokens: 1}"],
        "repair": ["context.repair={ratio: 0.5}"],
        "none": ["context.repair={ratio: 0.0}"],
    }
    changes["together"] = [change for name in list(changes)[:3] for change in changes[name]]
    arms = [{"name": name, "set": list(options)} for name, options in changes.items()]
    config = recipe(systems=["coinrag"], checkpoints=["base"], arms=arms, questions_per_dataset=1)
    compare(config)
    by_arm: dict[str, dict[str, Answer]] = {}
    for answer in answers_of(config):
        by_arm.setdefault(answer.arm, {})[answer.question_id] = answer
    for question_id, plain in by_arm[""].items():
        given = {name: answers[question_id] for name, answers in by_arm.items()}
        packets = given["packets"]
        slices, rest = divmod(packets.active_tokens - plain.active_tokens, 3)
        assert slices >= 1
        assert rest == 0
        assert packets.online_tokens == plain.online_tokens + 3 * slices
        assert packets.evidence == plain.evidence
        assert given["anchors"].online_tokens == plain.online_tokens
        more = given["anchors"].active_tokens - plain.active_tokens
        assert more == given["anchors"].context_tokens - plain.context_tokens > 0
        assert given["anchors"].evidence[: len(plain.evidence)] == plain.evidence
        assert len(given["anchors"].evidence) > len(plain.evidence)
        assert given["repair"].active_tokens == plain.active_tokens
        prefix = plain.active_tokens
        # Layers 0 and 1 of two compute every row.
        assert given["repair"].recomputed_tokens == given["none"].recomputed_tokens == prefix
        together = given["together"]
        assert together.recomputed_tokens == given["anchors"].active_tokens
        assert together.active_tokens > given["anchors"].active_tokens
    with pytest.raises(UserError, match=r"context.repair.check_layer: .* last one is 1"):
        compare(with_changes(config, ["context.repair={check_layer: 2}", "eval.arms=[]"]))


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ([{"name": "x", "set": ["model.dtype=bfloat16"]}], "arm 'x': model.dtype=bfloat16 cannot"),
        ([{"name": "x", "set": ["eval.systems=[turborag]"]}], "arm 'x': eval.systems"),
        ([{"name": "x", "set": ["retrieval.k_cc=1"]}], "did you mean retrieval.k_c"),
        ([{"name": "x", "set": ["retrieval.k=0"]}], "retrieval.k"),
        ([{"name": "x+y", "set": ["retrieval.k=2"]}], "'x.y': recipe, the names"),
        ([{"name": "isolated", "set": ["retrieval.k=2"]}], "'isolated': recipe, the names"),
    ],
)
def test_mistakes_in_arms_are_told(recipe: MakeRecipe, arms: Any, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        arms_of(recipe(arms=arms))


def test_an_arm_that_changes_nothing_is_refused(recipe: MakeRecipe) -> None:
    idle = {"name": "noise", "set": ["raft.noise_probability=0.5"]}
    config = recipe(systems=["coinrag"], checkpoints=["base"], arms=[idle])
    with pytest.raises(UserError, match=r"'noise' changes nothing .*eval\.runs\.coinrag"):
        compare(config)
    # Rotation is CoinRAG's alone.
    other = {"name": "x", "systems": ["turborag"], "set": ["context.positions=original"]}
    with pytest.raises(UserError, match="'x' changes nothing that decides an answer of turborag"):
        compare(recipe(checkpoints=["base"], arms=[other]))
    assert not (Path(config.train.run_folder) / "compare").exists()


def test_what_cannot_be_measured_is_told_before_anything_is_written(recipe: MakeRecipe) -> None:
    config = recipe(systems=["cacheblend"], checkpoints=["base"])
    with pytest.raises(
        UserError, match=r"systems\.cacheblend\.check_layer: .* 9, .* last one is 1"
    ):
        compare(with_changes(config, ["systems.cacheblend.check_layer=9"]))
    arm = {"name": "asked", "systems": ["online_nuggets"], "set": ["retrieval.order=score"]}
    with pytest.raises(UserError, match=r"'asked': (?s:.*)nuggets\.local_model"):
        compare(recipe(arms=[arm]))
    folder = Path(config.train.run_folder)
    assert not (folder / "compare").exists()
    (folder / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write into .*file \(eval\.output\)"):
        compare(with_changes(config, [f"eval.output={folder / 'file'}"]))


def test_two_comparisons_do_not_share_a_folder(
    recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe(systems=["coinrag"], checkpoints=["base"])
    answer, refused = Runner.answer, []

    def beside(self: Runner, asked: Any) -> list[Answer]:
        if not refused:
            with pytest.raises(UserError, match="another comparison is writing into") as error:
                compare(config)
            refused.append(error)
        return answer(self, asked)

    monkeypatch.setattr(Runner, "answer", beside)
    compare(config)
    assert refused
    compare(config)


def test_timed_requests_find_used_buffers(
    recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = []
    take = Supply._take_buffer

    def counted(self: Supply, needed: int) -> Tensor:
        before = len(self._free)
        buffer = take(self, needed)
        fresh.append(len(self._free) == before)
        return buffer

    monkeypatch.setattr(Supply, "_take_buffer", counted)
    systems = [name for name in ALL if name != "online_nuggets"]
    compare(recipe(systems=systems, checkpoints=["base"], warmup_questions=1, ttft_repeats=2))
    # The prompt and whole chunks of the warm-up's first question are the largest.
    assert len(fresh) > 100
    assert not any(fresh[20:])


@pytest.mark.parametrize(
    "names",
    [
        ["isolate"],
        ["isolated+rotation"],
        ["isolated", "isolated"],
        ["isolated+isolated", "isolated"],
    ],
)
def test_unknown_or_repeated_ablations_are_refused(recipe: MakeRecipe, names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"did you mean|expected each entry once"):
        recipe(ablations=names)


def test_each_system_takes_the_weights_of_its_run(
    recipe: MakeRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = {"turborag": str(run_of(tmp_path, "turbo", 7))}
    config = recipe(checkpoints=["fine_tuned"], runs=runs)
    with caplog.at_level(logging.INFO):
        result = compare(config)
    folders = {name: Path(path) for name, path in result["setting"]["weights"].items()}
    assert folders["fine_tuned turborag"] == tmp_path / "turbo" / "checkpoint"
    assert folders["fine_tuned coinrag"] == tmp_path / "run" / "checkpoint"
    before = {(a.system, a.question_id): (a.key, a.answer) for a in answers_of(config)}
    assert "10 answers to 5 questions" in caplog.text
    # New weights of one run ask again what they have answered, and nothing else.
    run_of(tmp_path, "turbo", 8)
    compare(config)
    after = {(a.system, a.question_id): (a.key, a.answer) for a in answers_of(config)}
    changed = {system for (system, _), given in after.items() if given not in before.values()}
    assert changed == {"turborag"}


def test_weights_trained_with_other_options_are_told_of_once(
    recipe: MakeRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path, "anchored", 7)
    anchored = "context.anchors={prefix_tokens: 3, suffix_tokens: 0}"
    arms = [
        {"name": "kept", "systems": ["coinrag"], "set": ["retrieval.overlap=keep"]},
        {"name": "own", "systems": ["coinrag"],
         "set": [anchored, f"eval.runs.coinrag={tmp_path / 'run'}"]},
    ]  # fmt: skip
    config = recipe(systems=["coinrag", "turborag"], arms=arms, runs={"coinrag": str(run)})

    def told_by(trained: Recipe) -> list[str]:
        (run / "recipe.yaml").write_text(yaml.safe_dump(trained.model_dump(mode="json")))
        caplog.clear()
        compare(config)
        return [r.getMessage() for r in caplog.records if "was trained with" in r.getMessage()]

    # Neither the arm that changes the recipe on purpose nor another width is worth a word.
    assert told_by(with_changes(config, ["retrieval.k=2", "train.epochs=3"])) == []
    (one,) = told_by(with_changes(config, [anchored, "retrieval.order=score"]))
    assert one.startswith(
        f'{run} was trained with retrieval.order="score", context.anchors.prefix_tokens=3; '
        'this recipe has "rank_then_document", 0'
    )
    # A system that borrows weights has no training of its own.
    assert told_by(with_changes(config, [anchored, "train.system=kvlink"])) == []
    # An arm with a run of its own is looked at.
    own = config.model_dump(mode="json")
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(own))
    (one,) = told_by(config)
    assert "anchors.prefix_tokens=0; this recipe has 3" in one


def test_trained_link_tokens_are_served_and_others_refused(
    recipe: MakeRecipe, tmp_path: Path
) -> None:
    runs = {"kvlink": str(run_of(tmp_path, "linked", 7, links=2))}
    config = recipe(systems=["kvlink"], runs=runs)
    two = with_changes(config, ["systems.kvlink.link_tokens=2"])
    compare(two)
    tuned = [a for a in answers_of(two) if a.checkpoint == "fine_tuned"]
    for other in (5, 0):
        asked = with_changes(config, [f"systems.kvlink.link_tokens={other}"])
        with pytest.raises(UserError, match=f"trained with 2 link tokens .* asks for {other}"):
            compare(asked)
    unlinked = with_changes(two, ["eval.runs.kvlink=null"])
    with pytest.raises(UserError, match=r"trained with 0 link tokens .* eval\.runs\.kvlink"):
        compare(unlinked)
    # Other link tokens on the same weights are other answers.
    model = tiny_model("qwen2", seed=7)
    add_soft_tokens(model, {"links": (3, 2)}, seed=1)
    taken = {name: 40 * table for name, table in take_soft_tokens(model).items()}
    save_soft_tokens(tmp_path / "linked" / "checkpoint", taken)
    compare(two)
    again = [a for a in answers_of(two) if a.checkpoint == "fine_tuned"]
    assert {a.key for a in again}.isdisjoint(a.key for a in tuned)
    assert [a.answer for a in again] != [a.answer for a in tuned]


def test_a_contextualizer_corrects_the_system_that_it_was_trained_with(
    recipe: MakeRecipe, tmp_path: Path
) -> None:
    # The base model's weights, so that nothing else tells the two checkpoints apart.
    run = run_of(tmp_path, "corrected", seed=1)
    spec = ContextualizerSpec.of(tiny_model("qwen2").config, "coinrag", width=16, layers=1, heads=2)
    contextualizer = new_contextualizer(spec, seed=0)
    for matrix in contextualizer.write:
        torch.nn.init.normal_(matrix.get_parameter("weight"))
    save_contextualizer(run / "checkpoint", contextualizer)
    systems = ["coinrag", "turborag"]
    config = recipe(systems=systems, runs=dict.fromkeys(systems, str(run)), questions_per_dataset=2)
    with pytest.raises(UserError, match=r"a context\.contextualizer of width=16 .* asks for none"):
        compare(config)
    compare(with_changes(config, ["context.contextualizer={width: 16, heads: 2}"]))
    said: dict[tuple[str, str], dict[str, str]] = {}
    for answer in answers_of(config):
        said.setdefault((answer.system, answer.checkpoint), {})[answer.question_id] = answer.answer
    assert said["turborag", "fine_tuned"] == said["turborag", "base"]
    assert said["coinrag", "fine_tuned"] != said["coinrag", "base"]


def test_fewer_questions_of_each_set_and_then_all(recipe: MakeRecipe) -> None:
    few = recipe(systems=["coinrag"], checkpoints=["base"], questions_per_dataset=1)
    assert compare(few)["questions_by_dataset"] == {"hotpotqa": 1, "musique": 1}
    before = answers_of(few)
    result = compare(recipe(systems=["coinrag"], checkpoints=["base"]))
    assert result["questions_by_dataset"] == {"hotpotqa": 3, "musique": 2}
    assert answers_of(few)[: len(before)] == before
    assert compare(few)["questions_by_dataset"] == {"hotpotqa": 1, "musique": 1}
    assert (
        json.loads((Path(few.train.run_folder) / "compare" / "compare.json").read_text("utf-8"))[
            "results"
        ][0]["questions"]
        == 2
    )


def test_a_store_for_each_run(recipe: MakeRecipe, tmp_path: Path) -> None:
    runs = {"turborag": str(run_of(tmp_path, "turbo", 7))}
    config = recipe(systems=["turborag", "coinrag"], runs=runs)
    stored = with_changes(config, [f"store.folder={tmp_path / 'kv'}"])
    compare(config)
    in_memory = {(a.variant, a.question_id): a.answer for a in answers_of(config)}
    compare(stored)
    assert {(a.variant, a.question_id): a.answer for a in answers_of(config)} == in_memory
    names = sorted(path.name for path in (tmp_path / "kv").iterdir())
    assert len(names) == 3
    assert names[:2] == ["base", "fine_tuned"]


def test_cells_of_whole_chunks_are_measured_once_a_k_c(recipe: MakeRecipe) -> None:
    widths = [{"k_c": 3, "k": 2}, {"k_c": 3, "k": 3}, {"k_c": 1, "k": 2}]
    config = recipe(systems=["epic", "coinrag"], checkpoints=["base"], widths=widths)
    cells = [(c.system, c.width.k_c, c.width.k) for c in cells_of(config)]
    assert cells == [
        ("epic", 3, None), ("coinrag", 3, 2), ("coinrag", 3, 3), ("epic", 1, None),
        ("coinrag", 1, 2),
    ]  # fmt: skip
