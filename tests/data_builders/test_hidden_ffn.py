"""Nuggets scored by a trained network: its arithmetic, its vectors, builds and retrieval online."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small import data_row, encode_words, tiny_tokenizer, words_encoder, write_rows
from tiny import tiny_model

from cache_ops.attention import enable_packed
from cache_ops.encode import span_means
from data_builders import workers
from data_builders.build import build, load_built
from data_builders.hidden_states import HiddenWork
from data_builders.key import build_key
from data_builders.scorers.hidden_ffn import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Described,
    NuggetFfn,
    NuggetVectors,
    load_ffn,
    score_by_ffn,
    vectors_identity,
    write_ffn,
)
from data_builders.tables import Chunk
from eval import retriever
from eval.retriever import INDEX_FOLDER, Retriever
from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.schema import Recipe


def random_ffn(dimensions: int, width: int, seed: int = 0, *, add_cosine: bool = True) -> NuggetFfn:
    """Weights and norms far from those that a network begins with."""
    torch.manual_seed(seed)
    ffn = NuggetFfn(dimensions, width, add_cosine=add_cosine)
    with torch.no_grad():
        for weight in ffn.parameters():
            weight.normal_(std=0.4)
    return ffn


def by_hand(weights: dict[str, np.ndarray], nugget: np.ndarray, question: np.ndarray) -> float:
    """One nugget's score, number by number."""

    def norm(name: str, row: np.ndarray) -> np.ndarray:
        scaled = (row - row.mean()) / np.sqrt(row.var() + 1e-5)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    n, q = norm("nugget_norm", nugget), norm("question_norm", question)
    hidden = weights["hidden.weight"] @ np.concatenate([n, q]) + weights["hidden.bias"]
    active = [0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in hidden]
    score = float(weights["score.weight"][0] @ active + weights["score.bias"][0])
    if "cosine_weight" in weights:
        lengths = np.linalg.norm(nugget) * np.linalg.norm(question)
        score += float(weights["cosine_weight"] * (nugget @ question) / lengths)
    return score


def chunk_of(number: int, nuggets: int) -> Chunk:
    spans = [(at, at + 1) for at in range(nuggets)]
    return Chunk(str(number), "", "", list(range(nuggets + 1)), spans, ["text"] * nuggets)


@pytest.mark.parametrize("add_cosine", [True, False])
def test_scores_are_those_computed_by_hand(add_cosine: bool) -> None:
    ffn = random_ffn(6, 5, add_cosine=add_cosine)
    weights = {name: part.double().numpy() for name, part in ffn.state_dict().items()}
    rows = np.random.default_rng(1)
    question = rows.normal(size=6).astype(np.float32)
    chunks = [chunk_of(0, 3), chunk_of(1, 0), chunk_of(2, 2)]
    vectors = {c.chunk_id: rows.normal(size=(len(c.nuggets), 6)) for c in chunks}
    score = score_by_ffn(
        ffn,
        NuggetVectors(lambda text: question, lambda c: vectors[c.chunk_id].astype(np.float32)),
    )
    expected = [
        [by_hand(weights, row.astype(np.float32), question) for row in vectors[c.chunk_id]]
        for c in chunks
    ]
    found = score("Who?", chunks)
    assert [len(row) for row in found] == [3, 0, 2]
    for got, wanted in zip(found, expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_span_is_the_mean_of_plain_last_hidden_states(architecture: str) -> None:
    model = tiny_model(architecture)
    ids, spans = list(range(3, 40)), [(0, 5), (4, 11), (36, 37), (0, 37)]
    with torch.no_grad():
        last = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    expected = torch.stack([sum(last[start:end]) / (end - start) for start, end in spans])
    torch.testing.assert_close(span_means(model, ids, spans), expected)
    enable_packed(model, "sdpa")
    torch.testing.assert_close(span_means(model, ids, spans), expected)


# Builds and retrieval online


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny generator, an encoder that only has a name, and rows."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    tiny_model("llama", vocabulary=len(tokenizer)).save_pretrained(folder / "model")
    (folder / "encoder").mkdir()
    (folder / "encoder" / "config.json").write_text("{}")
    for split, numbers in {"train": range(2), "dev": range(20, 26)}.items():
        write_rows(folder / f"{split}.jsonl", [data_row(number) for number in numbers])
    return folder


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (workers, retriever):
        monkeypatch.setattr(module, "load_encoder", lambda config, threads: encode_words)


def recipe(models: Path, folder: Path, *overrides: str) -> Recipe:
    """A recipe over `models` whose builds and scorer are in `folder`."""
    (folder / "recipe.yaml").write_text(
        f"""
name: test
model: {{path: {models}/model}}
data:
  train: [{models}/train.jsonl]
  dev: [{models}/dev.jsonl]
  built_root: {folder}/built
  chunk_tokens: 64
retrieval:
  encoder: {models}/encoder
  candidates: corpus
  k_c: 3
  k: 4
  nugget_scorer: hidden_ffn
  hidden_ffn: {{path: {folder}/scorer, width: 16}}
train: {{run_folder: {folder}/run}}
"""
    )
    return resolve([str(folder / "recipe.yaml"), *overrides]).config


def test_an_untrained_network_with_the_cosine_ranks_as_the_cosine_does() -> None:
    torch.manual_seed(0)
    nuggets, questions = torch.randn(2, 50, 12)
    scores = NuggetFfn(12, 8, add_cosine=True)(nuggets, questions)
    cosines = torch.cosine_similarity(nuggets, questions)
    assert torch.equal(scores.argsort(), cosines.argsort())


def with_scorer(config: Recipe, seed: int = 0) -> NuggetFfn:
    """Leaves a random network where the recipe expects one."""
    section = config.retrieval.hidden_ffn
    ffn = random_ffn(64, section.width, seed)
    folder = Path(section.path)
    folder.mkdir(exist_ok=True)
    made_for = vectors_identity(config)
    write_ffn(folder, ffn, Described(section.vectors, 64, section.width, True, made_for))
    return ffn


@pytest.mark.parametrize("vectors", ["encoder", "generator"])
@pytest.mark.parametrize("selection", ["two_stage", "one_stage"])
def test_a_new_question_is_scored_as_the_build_scores_it(
    models: Path, tmp_path: Path, encoded: None, vectors: str, selection: str
) -> None:
    config = recipe(
        models,
        tmp_path,
        f"retrieval.hidden_ffn.vectors={vectors}",
        f"retrieval.selection={selection}",
    )
    ffn = with_scorer(config)
    weights = {name: part.double().numpy() for name, part in ffn.state_dict().items()}
    folder = build(config, "dev").folder
    tables = load_built(config, "dev")
    opened = Retriever.open(config)
    assert ((folder / INDEX_FOLDER / "hidden.sqlite").is_file()) == (vectors == "generator")
    shutil.rmtree(tmp_path / "built" / "assets")
    if vectors == "generator":
        with pytest.raises(UserError, match="a question without text"):
            opened.retrieve("")
    states = HiddenWork.of(config).load()
    tokenizer = tiny_tokenizer()
    for row in tables.samples:
        found = opened.retrieve(row["question"]).question
        assert [chunk.chunk_id for chunk in found.chunks] == row["chunk_ids"]
        assert found.nugget_scores == row["nugget_scores"]
        chunk = found.chunks[0]
        ids = tokenizer(row["question"], add_special_tokens=False)["input_ids"]
        if vectors == "generator":
            question = states(ids, [(0, len(ids))])[0]
            nuggets = states(chunk.token_ids, chunk.nuggets)
        else:
            [question] = words_encoder([row["question"]])
            nuggets = words_encoder(chunk.nugget_texts)
        expected = [by_hand(weights, nugget, question) for nugget in nuggets]
        assert found.nugget_scores[0] == pytest.approx(expected, abs=1e-4)


def test_states_are_made_once_for_all_scorers(models: Path, tmp_path: Path, encoded: None) -> None:
    config = recipe(models, tmp_path, "retrieval.hidden_ffn.vectors=generator")
    with_scorer(config)
    first = build(config, "dev")
    assert first.made["hidden states of chunks"].missing > 0
    assert first.made["hidden states of questions"].missing == 6
    # Nothing asks the encoder for nuggets that the network does not compare by it.
    assert "nuggets" not in first.made
    with_scorer(config, seed=1)
    second = build(config, "dev")
    assert second.folder != first.folder
    assert second.made["hidden states of chunks"].missing == 0


def test_the_key_names_the_network_where_it_scores_and_only_there(
    models: Path, tmp_path: Path
) -> None:
    config = recipe(models, tmp_path)
    plain = recipe(
        models, tmp_path, "retrieval.nugget_scorer=bi_encoder", "retrieval.hidden_ffn=null"
    )
    described = recipe(models, tmp_path, "retrieval.nugget_scorer=bi_encoder")
    assert build_key(described, "dev") == build_key(plain, "dev")
    assert "nugget_scorer" not in build_key(plain, "dev")
    with_scorer(config)
    before = build_key(config, "dev")
    # Its content counts and not its place.
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "scorer", moved)
    assert (
        build_key(recipe(models, tmp_path, f"retrieval.hidden_ffn.path={moved}"), "dev") == before
    )
    with_scorer(config, seed=1)
    assert build_key(config, "dev") != before


def test_a_network_comes_back_as_it_was(models: Path, tmp_path: Path) -> None:
    config = recipe(models, tmp_path)
    ffn = with_scorer(config)
    for name, part in load_ffn(config).state_dict().items():
        assert torch.equal(part, ffn.state_dict()[name]), name


def refusal(config: Recipe) -> str:
    """What `build` says of a scorer; before it has built anything."""
    with pytest.raises(UserError) as caught:
        build(config, "dev")
    return str(caught.value)


def test_what_is_wrong_with_a_network_is_told_in_words(models: Path, tmp_path: Path) -> None:
    config = recipe(models, tmp_path)
    assert "retrieval.hidden_ffn.path: no trained scorer" in refusal(config)
    assert "coinrag train-scorer" in refusal(config)
    with_scorer(config)
    asked = recipe(models, tmp_path, "retrieval.hidden_ffn.width=32")
    assert "has width 16, the recipe wants 32: set retrieval.hidden_ffn.width=16" in refusal(asked)
    asked = recipe(models, tmp_path, "retrieval.hidden_ffn.vectors=generator")
    assert 'has vectors "encoder", the recipe wants "generator"' in refusal(asked)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"another": 1}')
    asked = recipe(models, tmp_path, f"retrieval.encoder={other}")
    assert "trained on the vectors of another model than retrieval.encoder" in refusal(asked)

    asked = recipe(models, tmp_path, "retrieval.encoder_kind=flag_mean")
    assert "another model than retrieval.encoder with its kind" in refusal(asked)

    described = tmp_path / "scorer" / CONFIG_FILE
    whole = described.read_text()
    described.write_text(whole.replace('"dimensions": 64', '"dimensions": "64"'))
    assert f"{tmp_path / 'scorer'} is damaged" in refusal(config)
    described.write_text(whole)
    path = tmp_path / "scorer" / WEIGHTS_FILE
    weights = load_file(path)
    save_file({name: part for name, part in weights.items() if name != "score.bias"}, path)
    assert f"{tmp_path / 'scorer'} is damaged" in refusal(config)
    path.write_bytes(b"not safetensors")
    assert f"{tmp_path / 'scorer'} is damaged" in refusal(config)
    path.unlink()
    assert f"{tmp_path / 'scorer'} is damaged" in refusal(config)
    described.write_text(json.dumps({"of": "something else"}))
    assert "describes no scorer" in refusal(config)


def test_a_network_of_another_generator_is_refused(models: Path, tmp_path: Path) -> None:
    config = recipe(models, tmp_path, "retrieval.hidden_ffn.vectors=generator")
    with_scorer(config)
    other = tmp_path / "model"
    shutil.copytree(models / "model", other)
    tiny_model("llama", vocabulary=len(tiny_tokenizer()), seed=1).save_pretrained(other)
    asked = recipe(
        models, tmp_path, "retrieval.hidden_ffn.vectors=generator", f"model.path={other}"
    )
    assert "trained on the vectors of another model than model.path" in refusal(asked)


def test_a_device_that_is_not_there_is_named(models: Path) -> None:
    work = HiddenWork(str(models / "model"), "float32", "cuda:99", None)
    with pytest.raises(UserError, match=r"retrieval\.device: no cuda:99 on this machine"):
        work.load()


def test_a_recipe_describes_the_network_that_it_uses(models: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"hidden_ffn needs the section retrieval\.hidden_ffn"):
        recipe(models, tmp_path, "retrieval.hidden_ffn=null")
