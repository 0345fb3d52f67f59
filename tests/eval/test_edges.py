"""Comparisons at the edge: few questions, no nuggets, no prompt, odd answers and names."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from built_tables import BuiltTables, patch_built
from small import data_row, write_rows
from transformers import PreTrainedTokenizerBase

import eval.compare
from data_builders.readers import read_questions
from data_builders.tables import Chunk
from eval.answers import Answer, read_answers
from eval.compare import compare
from eval.report import render_table
from recipes.ablations import ABLATIONS
from recipes.errors import UserError
from recipes.resolve import with_changes
from recipes.schema import Recipe
from recipes.systems import SystemName

MakeRecipe = Callable[..., Recipe]
Json = dict[str, Any]
ALL = list(get_args(SystemName))
RULES = "systems.online_nuggets.extractor=rules"
NO_PROMPT = ["prompt.before_passages=", "prompt.after_passages={question}"]
# A line break, markup, a formula, a spreadsheet's command, another script, the looks of a hidden
# label: what a name might break.
ODD = ["=größe\n漢字 <b>$x$", "_hidden, 100%"]


@pytest.fixture
def tables(chunks: list[Chunk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltTables:
    return patch_built(chunks, tmp_path, monkeypatch)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for drawing in ("draw_all", "draw_overview"):
        monkeypatch.setattr(eval.compare, drawing, lambda *arguments: None)


def folder_of(config: Recipe) -> Path:
    return Path(config.train.run_folder) / "compare"


def compared(config: Recipe) -> tuple[Json, list[Answer], str]:
    """A comparison's result, answers and text, once what holds of any of them was checked."""
    result = compare(config)
    told = (folder_of(config) / "compare.json").read_text(encoding="utf-8")
    assert "NaN" not in told
    assert "Infinity" not in told
    assert json.loads(told) == result
    for row in result["results"]:
        assert row["f1_low"] <= row["f1"] + 1e-9
        assert row["f1"] <= row["f1_high"] + 1e-9
    assert "</html>" in (folder_of(config) / "compare.html").read_text(encoding="utf-8")
    text = render_table(result)
    table = text.split("\n\n")[0].split("\n")
    assert len(table) == 2 + len(result["results"])
    assert len({len(line) for line in table[1:]}) == 1, "the last column is to the right"
    return result, read_answers(folder_of(config) / "answers.jsonl"), text


@pytest.mark.filterwarnings("ignore:Glyph")
def test_one_question_oddly_named_arms_and_more_nuggets_than_there_are(
    recipe: MakeRecipe, tables: BuiltTables
) -> None:
    tables.samples = tables.samples[:1]
    arms = [{"name": name, "set": ["retrieval.order=score"]} for name in ODD]
    config = recipe(systems=["turborag", "coinrag"], arms=arms, widths=[{"k_c": 3, "k": 10_000}])
    result, answers, text = compared(config)
    assert {row["questions"] for row in result["results"]} == {1}
    assert {row["f1_low"] == row["f1"] == row["f1_high"] for row in result["results"]} == {True}
    count = sum(len(chunk.nuggets) for chunk in tables.chunks)
    assert {len(answer.evidence) for answer in answers if answer.system == "coinrag"} == {count}
    assert {answer.arm for answer in answers} == {"", *ODD}
    # A line break inside a name does not break a row.
    assert "=größe 漢字 <b>$x$" in text
    figures = folder_of(config) / "figures"
    drawn = (figures / "ablations.svg").read_text(encoding="utf-8")
    assert drawn.endswith("</svg>\n")
    csv = (figures / "ablations.csv").read_text(encoding="utf-8")
    assert csv.count('"=größe\n漢字 <b>$x$"') == 2


def test_without_prompt_and_nuggets_a_prefix_may_be_empty(
    recipe: MakeRecipe,
    tables: BuiltTables,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    changes = [*NO_PROMPT, RULES, f"eval.systems=[{','.join(ALL)}]"]
    config = with_changes(recipe(checkpoints=["base"]), changes)
    # A base model's: nothing but what the recipe says stands before the passages.
    plain = deepcopy(tokenizer)
    plain.chat_template = None
    (tmp_path / "base" / "chat_template.jinja").unlink()
    plain.save_pretrained(tmp_path / "base")
    tables.chunks = [replace(chunk, nuggets=[], nugget_texts=[]) for chunk in tables.chunks]
    tables.samples = [
        {**sample, "nugget_scores": [[] for _ in tables.chunks]} for sample in tables.samples[:2]
    ]
    result, answers, _ = compared(config)
    tokens = sum(len(chunk.token_ids) for chunk in tables.chunks)
    active = {answer.system: answer.active_tokens for answer in answers}
    links = 5 * len(tables.chunks)
    assert active == dict.fromkeys(ALL, tokens) | {
        "coinrag": 0,
        "kvlink": tokens + links,
        "online_nuggets": active["online_nuggets"],
    }
    for answer in answers:
        assert answer.new_tokens > 0
        assert answer.context_tokens == answer.active_tokens
        assert bool(answer.evidence) == (answer.system != "coinrag")
    [row] = [row for row in result["results"] if row["system"] == "coinrag"]
    assert (row["gold_share"], row["answer_coverage"]) == (None, 0)
    names = {path.name for path in (folder_of(config) / "figures").iterdir()}
    assert {"f1_against_tokens.png", "f1_against_tokens.svg", "errors.png"} <= names


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("gold", "is_scorable", "in_chunks"),
    [
        (["the"], False, True),
        (["The The", "—"], True, False),
        (["A", "..."], False, True),
        (["yes"], True, False),
        (["she", "a"], True, True),
    ],
)
def test_answers_that_scoring_deletes_are_told(
    recipe: MakeRecipe, tables: BuiltTables, gold: list[str], is_scorable: bool, in_chunks: bool
) -> None:
    for sample in tables.samples:
        sample["answers"] = gold
    result, answers, text = compared(recipe(systems=["coinrag"], checkpoints=["base"]))
    note = "of the gold answers of 5 questions scoring leaves nothing"
    assert (note in text) == any(note in told for told in result["notes"]) == (not is_scorable)
    assert {answer.answer_in_chunks for answer in answers} == {in_chunks}
    assert result["results"][0]["wrong"] == sum(answer.f1 < 1 for answer in answers)


@pytest.mark.usefixtures("undrawn")
def test_arms_over_a_store_answer_as_over_memory(
    recipe: MakeRecipe, tables: BuiltTables, tmp_path: Path
) -> None:
    config = recipe(systems=["turborag", "coinrag"], checkpoints=["base"], ablations=[*ABLATIONS])
    _, in_memory, _ = compared(config)
    _, from_disk, _ = compared(with_changes(config, [f"store.folder={tmp_path / 'kv'}"]))
    given = [
        {(a.variant, a.question_id): a.answer for a in found} for found in (in_memory, from_disk)
    ]
    assert given[0] == given[1]
    assert {(a.bytes_read > 0, a.key in {b.key for b in in_memory}) for a in from_disk} == {
        (True, False)
    }


def test_a_name_in_two_data_sets_is_two_questions_and_an_empty_set_is_told(tmp_path: Path) -> None:
    rows = {name: {**data_row(1, dataset=name), "question_id": "1"} for name in ("one", "two")}
    paths = [write_rows(tmp_path / f"{name}.jsonl", [row]) for name, row in rows.items()]
    questions = list(read_questions(paths, "ircot"))
    assert {question.dataset for question in questions} == {"one", "two"}
    assert len({question.id for question in questions}) == 2
    empty = write_rows(tmp_path / "empty.jsonl", [])
    with pytest.raises(UserError, match=r"empty\.jsonl"):
        list(read_questions([*paths, empty], "ircot"))


def test_an_arm_is_not_called_as_the_recipe_is(recipe: MakeRecipe, tables: BuiltTables) -> None:
    config = recipe(arms=[{"name": "recipe", "set": ["retrieval.order=score"]}])
    with pytest.raises(UserError, match="arm 'recipe': recipe, the names of ablations, and"):
        compare(config)
