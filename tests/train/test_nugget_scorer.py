"""Training a nugget scorer: the loss, what is learned and what is held out, the folder left."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_ops.hf import load_tokenizer
from data_builders.build import load_built
from data_builders.key import build_key
from data_builders.prompt import PromptTemplate
from data_builders.scorers.hidden_ffn import NuggetFfn, load_ffn
from data_builders.tables import Chunk
from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.retrieval import HiddenFfnConfig
from recipes.scorer import ScorerConfig
from train import nugget_scorer
from train.contract import contract
from train.run_folder import replace_folder
from train.scorer_fit import VectorList, fit, listwise_loss
from train.scorer_lists import NuggetList, is_held_out, nugget_lists
from train.scorer_measure import recall
from train.scorer_run import train_scorer

DIMENSIONS = 12


def a_list(number: int, nuggets: int = 12, good: tuple[int, ...] = (3,)) -> VectorList:
    """A question whose good nuggets have a vector near its own, in two chunks."""
    draw = torch.Generator().manual_seed(number)
    question = torch.randn(DIMENSIONS, generator=draw)
    rows = torch.randn((nuggets, DIMENSIONS), generator=draw)
    for at in good:
        rows[at] = question + 0.1 * rows[at]
    half = nuggets // 2
    chunks = [
        Chunk(str(c), "", "", [0] * nuggets, [(n, n + 1) for n in range(half)], ["x"] * half)
        for c in range(2)
    ]
    one = NuggetList(
        f"q{number}",
        "who?",
        torch.tensor([at in good for at in range(nuggets)]),
        {(at // half, at % half) for at in good},
        chunks,
        [[0.0] * half, [0.0] * half],
    )
    return VectorList(one, question, rows)


def test_the_loss_is_the_mean_of_what_a_softmax_leaves_to_the_others() -> None:
    torch.manual_seed(0)
    ffn = NuggetFfn(DIMENSIONS, 8, add_cosine=False)
    lists = [a_list(0), a_list(1, nuggets=4, good=(0, 2))]
    expected = 0.0
    for one in lists:
        scores = ffn(one.nuggets_NE, one.question_E.expand_as(one.nuggets_NE)).double()
        expected -= torch.softmax(scores, 0)[one.of.good_N].sum().log().item() / len(lists)
    assert listwise_loss(ffn, lists).item() == pytest.approx(expected, abs=1e-5)


def test_what_can_be_told_apart_is_learned_and_by_equal_seeds_equally() -> None:
    lists = [a_list(number) for number in range(120)]
    learned, held_out = lists[:90], lists[90:]
    section = HiddenFfnConfig(path="unused", width=32, add_cosine=False)
    config = ScorerConfig(epochs=8, learning_rate=1e-2)
    fitted = fit(learned, held_out, section, config)
    before, after = fitted.epochs[0], fitted.epochs[fitted.best]
    assert before["recall_at_5"] < 0.7
    assert after["recall_at_5"] == after["recall_at_10"] == 1.0
    # The best epoch's weights are kept, and training goes on for `patience` more at most.
    assert len(fitted.epochs) - 1 - fitted.best <= config.patience
    assert listwise_loss(fitted.ffn, held_out).item() == pytest.approx(after["held_out_loss"])
    again = fit(learned, held_out, section, config)
    assert all(
        torch.equal(part, again.ffn.state_dict()[name])
        for name, part in fitted.ffn.state_dict().items()
    )
    other = fit(learned, held_out, section, config.model_copy(update={"seed": 1, "epochs": 1}))
    assert not torch.equal(other.ffn.hidden.weight, fitted.ffn.hidden.weight)


def test_recall_counts_questions_with_an_answering_nugget_alone() -> None:
    lists = [a_list(0).of, a_list(1, good=(11,)).of, replace(a_list(2).of, answering=set())]
    first = recall(lists, [[[6.0, 5, 4, 3, 2, 1], [0.0, -1, -2, -3, -4, -5]]] * 3)
    assert first == {5: 0.5, 10: 0.5}
    last = recall(lists, [[[0.0] * 6, [1.0] * 6]] * 3)
    assert last == {5: 0.0, 10: 1.0}


@given(st.text(), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_who_is_held_out_depends_on_the_id_and_grows_with_the_share(
    name: str, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    assert is_held_out(name, less) <= is_held_out(name, more)


def test_about_the_share_is_held_out() -> None:
    held = sum(is_held_out(f"q{number}", 0.2) for number in range(2000))
    assert 300 < held < 500


# From built tables


def settings(place, folder: Path, *overrides: str) -> list[str]:
    return [
        str(place.folder / "recipe.yaml"),
        "retrieval.nugget_scorer=hidden_ffn",
        f"retrieval.hidden_ffn={{path: {folder}, width: 8}}",
        "scorer.held_out=0.3",
        "scorer.epochs=3",
        *overrides,
    ]


def test_good_nuggets_hold_the_answer_or_else_are_the_bi_encoders_best(
    workplace,
) -> None:
    tables = load_built(resolve([str(workplace.folder / "recipe.yaml")]).config, "train")
    held, weak = 0, 0
    for one in nugget_lists(tables, weak=True):
        texts = one.texts
        good = [text for text, is_good in zip(texts, one.good_N.tolist(), strict=True) if is_good]
        town = f"Town{one.question_id.replace('-', '')}x1"
        if any(town in text for text in texts):
            held += 1
            assert good == [text for text in texts if town in text]
        else:
            # RAFT has taken the gold passages away.
            weak += 1
            assert good == []
    assert held > 10

    # As if the answer were a verdict.
    row = next(row for row in tables.samples if row["gold_chunk_ids"][0] in row["chunk_ids"])
    tables.samples = [{**row, "answers": ["yes"]}]
    [one] = nugget_lists(tables, weak=True)
    gold = row["chunk_ids"].index(row["gold_chunk_ids"][0])
    first = sum(len(chunk.nuggets) for chunk in one.chunks[:gold])
    best = max(row["nugget_scores"][gold])
    assert one.answering == set()
    assert one.good_N.nonzero().flatten().tolist() == [
        first + row["nugget_scores"][gold].index(best)
    ]
    [none] = nugget_lists(tables, weak=False)
    assert not none.teaches


@pytest.mark.parametrize("vectors", ["encoder", "generator"])
def test_a_recipe_trains_the_network_that_it_scores_with(
    workplace,
    tmp_path: Path,
    vectors: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "scorer"
    arguments = settings(workplace, folder, f"retrieval.hidden_ffn.vectors={vectors}")
    monkeypatch.setattr(sys, "argv", ["nugget_scorer.py", *arguments])
    nugget_scorer.main()
    assert capsys.readouterr().out == f"{folder}\n"
    config = resolve(arguments).config
    assert load_ffn(config).hidden.out_features == 8
    report = json.loads((folder / "report.json").read_text())
    questions = report["questions"]
    assert questions["in_tables"] == 22
    assert questions["held_out"] >= questions["held_out_with_answer"] > 0
    assert questions["learned"] > questions["learned_by_weak_labels"] == 0
    assert set(report["held_out_recall"]) == {"bi_encoder", "untrained", "trained"}
    epochs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in epochs] == list(range(len(epochs)))
    assert report["best_epoch"] < len(epochs)
    assert resolve([str(folder / "recipe.yaml")]).config == config

    with pytest.raises(UserError, match=r"retrieval\.hidden_ffn\.path: .* is in use"):
        train_scorer(resolve(arguments))


def test_the_contract_of_an_export_names_the_network(workplace, tmp_path: Path) -> None:
    config = resolve(settings(workplace, tmp_path / "scorer")).config
    train_scorer(resolve(settings(workplace, tmp_path / "scorer")))
    tokenizer = load_tokenizer(config.model.path)
    described = contract(
        config,
        PromptTemplate(tokenizer, config.prompt),
        tokenizer,
        weights=Path(config.model.path),
        dtype="float32",
        run=tmp_path,
        adapter=None,
        exported_with={},
    )
    network = described["retrieval"]["hidden_ffn"]
    assert (network["path"], network["sha256"]) == (
        str(tmp_path / "scorer"),
        build_key(config, "dev")["nugget_scorer"]["sha256"],
    )


def refusal(arguments: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        train_scorer(resolve(arguments))
    return str(caught.value)


def test_what_cannot_be_trained_is_told_in_words(
    workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "scorer"
    plain = str(workplace.folder / "recipe.yaml")
    assert "set retrieval.hidden_ffn.path=FOLDER" in refusal([plain])
    unbuilt = refusal(settings(workplace, folder, "data.chunk_tokens=32"))
    assert "no built train data" in unbuilt
    assert "retrieval.nugget_scorer=bi_encoder" in unbuilt
    assert "scorer.held_out: none of" in refusal(
        settings(workplace, folder, "scorer.held_out=1e-9")
    )
    assert "no question has good nuggets" in refusal(
        settings(workplace, folder, "scorer.held_out=0.999999")
    )
    diverged = refusal(settings(workplace, folder, "scorer.learning_rate=1e30"))
    assert "scorer.learning_rate 1e+30: the loss of epoch" in diverged
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "accelerate launch --num_processes 1" in refusal(settings(workplace, folder))
    assert not folder.exists()


def test_damaged_assets_are_named(workplace, tmp_path: Path) -> None:
    built = tmp_path / "built"
    shutil.copytree(resolve(settings(workplace, tmp_path)).config.data.built_root, built)
    for file in (built / "assets").glob("encoded-*.sqlite"):
        file.write_bytes(b"damaged" * 1000)
    told = refusal(settings(workplace, tmp_path / "scorer", f"data.built_root={built}"))
    assert f"{built / 'assets'}/encoded-" in told
    assert "delete it, what it held is made again" in told


def test_a_folder_that_fills_meanwhile_is_left_as_it_is(
    workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "scorer"
    load = load_built

    def another_process(*arguments: object) -> object:
        replace_folder(folder, lambda fresh: (fresh / "theirs").touch())
        return load(*arguments)

    monkeypatch.setattr("train.scorer_run.load_built", another_process)
    assert "is in use" in refusal(settings(workplace, folder))
    assert [path.name for path in folder.iterdir()] == ["theirs"]
