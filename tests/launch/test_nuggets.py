"""`coinrag nuggets`: its figures against plain counts, its thresholds, its output and mistakes."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_ops.hf import load_tokenizer
from cache_ops.plan import PROMPT
from data_builders.build import build as build_split
from data_builders.build import load_built
from data_builders.prompt import PromptTemplate
from eval.nugget_outcomes import Point, at_tokens
from eval.nugget_report import render_nuggets
from eval.questions import dev_questions
from eval.systems import Serving, Width
from eval.systems.coinrag import request
from launch import cli
from launch.commands import build
from launch.nuggets import nuggets
from recipes.errors import UserError
from recipes.resolve import resolve

Recipe = Callable[..., list[str]]

ARMS = (
    "eval.arms=["
    '{name: wide, set: ["nuggets.neighbour_sentences=1"]}, '
    '{name: short, set: ["retrieval.budget={tokens: 60}"]}, '
    '{name: same, set: ["train.max_steps=3"]}, '
    '{name: whole, systems: [turborag], set: ["retrieval.k=2"]}]'
)


def by_hand(arguments: list[str]) -> tuple[float, float, float]:
    """From the table: percent of questions with their town in a selected span, mean tokens, and
    the share of gold chunks with a span."""
    tables = load_built(resolve(arguments).config, "dev")
    held, tokens, gold = [], [], []
    for row in tables.samples:
        chunks = [tables.chunk(name) for name in row["chunk_ids"]]
        spans = list(zip(row["span_chunks"], row["span_starts"], row["span_ends"], strict=True))
        texts = [
            chunks[c].slice_texts[n]
            for c, start, end in spans
            for n, span in enumerate(chunks[c].nuggets)
            if span == (start, end)
        ]
        held.append(any(row["answers"][0] in text for text in texts))
        tokens.append(len({(c, t) for c, start, end in spans for t in range(start, end)}))
        [wanted] = row["gold_chunk_ids"]
        gold.append(any(chunks[c].chunk_id == wanted for c, _, _ in spans))
    return 100 * sum(held) / len(held), sum(tokens) / len(tokens), sum(gold) / len(gold)


def test_figures_of_a_recipe_and_its_arms(recipe: Recipe, tmp_path: Path) -> None:
    arguments = recipe("retrieval.k=3", ARMS)
    build(arguments)
    result = nuggets(arguments, str(tmp_path / "drawn"))
    assert (result["questions"], result["in_words"]) == (3, 3)
    # What changes no table has nothing to show, nor has what selects no nuggets.
    rows = {row["arm"]: row for row in result["rows"]}
    assert [*rows] == ["", "wide", "short"]
    changes: dict[str, tuple[str, ...]] = {
        "": (),
        "wide": ("nuggets.neighbour_sentences=1",),
        "short": ("retrieval.budget={tokens: 60}",),
    }
    for name, own in changes.items():
        coverage, tokens, gold = by_hand([*recipe("retrieval.k=3"), *own])
        assert rows[name]["coverage"]["mean"] == coverage
        assert (rows[name]["tokens"], rows[name]["gold_selected"]) == (tokens, gold)
    assert rows["wide"]["tokens"] > rows[""]["tokens"] > 60 >= rows["short"]["tokens"]
    # Nuggets are scored by their own text, whatever their slices take along.
    assert rows["wide"]["recall_at_1"] == rows[""]["recall_at_1"]
    assert rows["wide"]["difference"]["recall_at_1"]["mean"] == 0
    assert rows[""]["difference"] == dict.fromkeys(rows[""]["difference"])
    gap = rows["short"]["coverage"]["mean"] - rows[""]["coverage"]["mean"]
    assert rows["short"]["difference"]["coverage"]["mean"] == pytest.approx(gap)
    kinds = [(curve["arm"], curve["kind"]) for curve in result["curves"]]
    assert kinds == [("", "top_k"), ("wide", "top_k"), ("short", "top_k"), ("short", "selection")]
    for curve in result["curves"]:
        for one, other in zip(curve["points"], curve["points"][1:], strict=False):
            assert one["tokens"] <= other["tokens"]
    assert [Path(path).name for path in result["pictures"]] == ["drawn.png", "drawn.svg"]
    shown = render_nuggets(result)
    assert all(text in shown for text in ("minus recipe", "wide", "scorer: bi_encoder, "))


def test_a_threshold_keeps_what_it_says_and_belongs_to_its_scorer(
    recipe: Recipe, tmp_path: Path
) -> None:
    arguments = recipe("retrieval.k=3")
    build(arguments)
    result = nuggets(arguments)
    assert result["scorer"] == f"bi_encoder, {tmp_path / 'encoder'} (dense 1)"
    answering, others = [], []
    tables = load_built(resolve(arguments).config, "train")
    for row in tables.samples:
        for c, name in enumerate(row["chunk_ids"]):
            for n, text in enumerate(tables.chunk(name).nugget_texts):
                held = row["answers"][0] in text
                (answering if held else others).append(row["nugget_scores"][c][n])
    assert answering
    for threshold in result["thresholds"]:
        least = threshold["min_score"] - 1e-6
        kept = sum(score >= least for score in answering) / len(answering)
        assert kept >= threshold["kept"]
        assert threshold["train"]["answering_kept"] == pytest.approx(kept)
        # The next higher score would keep too few.
        higher = [score for score in answering if score > threshold["min_score"] + 1e-6]
        assert len(higher) / len(answering) < threshold["kept"]
        left_out = sum(score < least for score in others) / len(others)
        assert threshold["train"]["others_left_out"] == pytest.approx(left_out)
    # As an option it does on dev what was said.
    strictest = result["thresholds"][-1]
    with_it = recipe("retrieval.k=3", f"retrieval.min_score={strictest['min_score']}")
    build(with_it)
    [row] = nuggets(with_it)["rows"]
    assert row["coverage"]["mean"] == pytest.approx(100 * strictest["selection"]["coverage"])
    assert row["tokens"] == pytest.approx(strictest["selection"]["tokens"])


@pytest.mark.parametrize(
    "overrides",
    [
        ("retrieval.budget={tokens: 90, a_chunk: 1}", "retrieval.k=9"),
        ("retrieval.min_score=0.2", "nuggets.neighbour_sentences=1"),
        (
            "retrieval.budget={tokens: 90, max_similarity: 0.3}",
            "retrieval.overlap=keep",
            "retrieval.selection=one_stage",
            "nuggets.neighbour_sentences=1",
        ),
    ],
)
def test_what_is_served_is_what_a_table_trains(recipe: Recipe, overrides: tuple[str, ...]) -> None:
    config = resolve(recipe(*overrides)).config
    build_split(config, "dev")
    tokenizer = load_tokenizer(config.model.path)
    serving = Serving(config, PromptTemplate(tokenizer, config.prompt), tokenizer)
    width = Width(config.retrieval.k_c, config.retrieval.k)
    rows = load_built(config, "dev").samples
    for question, row in zip(dev_questions(config), rows, strict=True):
        served = request(question, width, serving)
        trained = list(zip(row["span_chunks"], row["span_starts"], row["span_ends"], strict=True))
        assert trained
        names = [row["chunk_ids"][c] for c, _, _ in trained]
        assert [piece.chunk_id for piece in served.evidence] == names
        slices = [one for one in served.layout.plan.slices if one.chunk != PROMPT]
        tokens = Counter((one.chunk, t) for one in slices for t in range(one.start, one.end))
        expected = Counter(
            (name, t)
            for name, (_, start, end) in zip(names, trained, strict=True)
            for t in range(start, end)
        )
        assert tokens == (expected if config.retrieval.overlap == "keep" else Counter({*expected}))
        for piece, (c, start, end) in zip(served.evidence, trained, strict=True):
            seen = tokenizer.decode(question.chunks[c].token_ids[start:end])
            assert piece.text is not None
            assert piece.text == seen.strip()


def test_coverage_at_a_number_of_tokens_lies_on_the_line_between_two_points() -> None:
    curve = [
        Point(0, {"a": 0, "b": 0}, {}, {"a": 0, "b": 0}, {}),
        Point(1, {"a": 10, "b": 30}, {}, {"a": 0, "b": 1}, {}),
        Point(2, {"a": 40, "b": 40}, {}, {"a": 1, "b": 1}, {}),
    ]
    assert at_tokens(curve, "ab", 5) == {"a": 0, "b": 0.25}
    assert at_tokens(curve, "ab", 20) == {"a": 0, "b": 1}
    assert at_tokens(curve, "ab", 30) == {"a": 0.5, "b": 1}
    assert at_tokens(curve, "a", 40) == {"a": 1}
    assert at_tokens(curve, "ab", 41) is None


def test_output_and_mistakes(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["nuggets", *recipe()]) == 2
    assert "no built dev data" in capsys.readouterr().err
    build(recipe())
    assert cli.main(["nuggets", *recipe()]) == 0
    shown = capsys.readouterr().out
    assert "3 dev questions, 3 with an answer in words" in shown
    assert "minus recipe  " not in shown
    # A threshold alone needs the train split, of which other RAFT noise makes another.
    other = recipe("raft.noise_probability=0.5")
    assert cli.main(["nuggets", "--json", *other]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["command"] == "nuggets"
    assert "no built train data" in report["no_thresholds"]
    assert "no thresholds: no built train data" in render_nuggets(report)
    with pytest.raises(UserError, match=r"no picture: .* is a folder"):
        nuggets(recipe(), str(tmp_path))
