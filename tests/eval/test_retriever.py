"""Retrieval for a new question finds what a build finds for the same one."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small import (
    data_row,
    encode_words,
    hashed_pairs,
    save_stand_ins,
    words_encoder,
    write_rows,
)

from data_builders import workers
from data_builders.build import build, built_folder, load_built
from data_builders.encoded import Encoded
from data_builders.tables import Tables
from eval import retriever
from eval.retriever import Retriever
from eval.systems import Question
from recipes.errors import UserError
from recipes.schema import Recipe


def encode_in_three_ways(texts: list[str]) -> list[Encoded]:
    """Words as a dense row, as lexical weights and as one vector each, as of BGE-M3."""
    found = []
    for text, dense in zip(texts, words_encoder(texts), strict=True):
        words = text.lower().split() or [""]
        ids = np.flatnonzero(dense).astype(np.int32)
        vectors = words_encoder(words).astype(np.float16)
        found.append(Encoded(dense, (ids, dense[ids] / 2), vectors))
    return found


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were encoded, as long as the test goes on."""
    texts: list[str] = []

    def load(config, threads):
        weights = config.weights

        def encode(asked):
            texts.extend(asked)
            if weights.sparse or weights.colbert:
                return encode_in_three_ways(asked)
            return encode_words(asked)

        return encode

    for module in (workers, retriever):
        monkeypatch.setattr(module, "load_encoder", load)
        monkeypatch.setattr(module, "load_cross_encoder", lambda config, threads: hashed_pairs)
    monkeypatch.setattr("data_builders.build.check_cross_encoder", lambda config: None)
    return texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_stand_ins(tmp_path)
    for split, numbers in {"train": range(2), "dev": range(20, 32)}.items():
        write_rows(tmp_path / f"{split}.jsonl", [data_row(number) for number in numbers])
    return tmp_path


def recipe(folder: Path, candidates: str = "corpus", **retrieval: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "model": {"path": str(folder / "model")},
            "data": {
                "train": [str(folder / "train.jsonl")],
                "dev": [str(folder / "dev.jsonl")],
                "built_root": str(folder / "built"),
                "chunk_tokens": 64,
            },
            "retrieval": {
                "encoder": str(folder / "encoder"),
                "k_c": 3,
                "k": 4,
                "candidates": candidates,
                "cross_encoder": {"path": str(folder / "encoder")},
                **retrieval,
            },
            "train": {"run_folder": str(folder / "run")},
        }
    )


def built_questions(tables: Tables) -> list[Question]:
    """The samples of built tables as a comparison reads them."""
    return [
        Question(
            row["question_id"],
            row["dataset"],
            row["question"],
            row["answers"],
            [tables.chunk(name) for name in row["chunk_ids"]],
            row["nugget_scores"],
            [],
        )
        for row in tables.samples
    ]


SETTINGS = {
    "two_stage": {},
    "one_stage": {"selection": "one_stage"},
    "bm25": {"bm25": True},
    "cross-encoder": {"nugget_scorer": "cross_encoder"},
    "reranked": {"rerank_chunks": 9},
    "reranked, cross-encoder": {"rerank_chunks": 9, "nugget_scorer": "cross_encoder"},
    "one_stage, cross-encoder": {"selection": "one_stage", "nugget_scorer": "cross_encoder"},
    "three scores": {"weights": {"dense": 1.0, "sparse": 0.3, "colbert": 0.7}},
    "three scores, one stage": {
        "selection": "one_stage",
        "weights": {"dense": 0.5, "sparse": 1.0, "colbert": 0.2},
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_corpus_is_searched_as_the_build_searches_it(folder, encoded, settings):
    if settings.get("bm25"):
        pytest.importorskip("bm25s")
    config = recipe(folder, **settings)
    build(config, "dev")
    tables = load_built(config, "dev")
    opened = Retriever.open(config)
    for row, question in zip(tables.samples, built_questions(tables), strict=True):
        found = opened.retrieve(question.question)
        assert found.question == replace(question, question_id="", dataset="", answers=[])
        assert np.float32(found.chunk_scores).tolist() == row["chunk_scores"]
        assert min(found.embed_ms, found.search_ms, found.score_ms) > 0


def test_only_what_no_build_has_encoded_is_encoded_and_the_assets_may_go(folder, encoded):
    config = recipe(folder)
    build(config, "dev")
    built = list(encoded)
    encoded.clear()
    Retriever.open(config)
    tables = load_built(config, "dev")
    texts = [text for row in tables.chunks for text in [row["text"], *row["nugget_texts"]]]
    assert sorted(encoded) == sorted(set(texts) - set(built))
    assert encoded
    encoded.clear()
    shutil.rmtree(folder / "built" / "assets")
    question = tables.samples[0]["question"]
    assert Retriever.open(config).retrieve(question).question.chunks
    assert encoded == [question]


def test_threads_share_a_retriever(folder, encoded):
    config = recipe(folder)
    build(config, "dev")
    opened = Retriever.open(config)
    questions = load_built(config, "dev").samples["question"][:] * 10
    alone = [opened.retrieve(question).question for question in questions]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda question: opened.retrieve(question).question, questions))
    assert found == alone


def test_a_folder_that_cannot_be_written_is_told_unless_nothing_is_to_be_written(
    folder, encoded, monkeypatch
):
    config = recipe(folder)
    build(config, "dev")
    index = built_folder(config, "dev") / "retrieval"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(UserError, match=r"retrieval: not there, and cannot be made: .*Read-on"):
            Retriever.open(config)
    assert not index.exists()
    # What a kill left is no obstacle.
    (index.with_name("retrieval.partial")).mkdir()
    (index.with_name("retrieval.partial") / "vectors.npy").write_bytes(b"half")
    first = Retriever.open(config).retrieve("Where?")
    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(retriever, "_make_index", refuse)
    assert Retriever.open(config).retrieve("Where?").question == first.question


def test_damaged_vectors_are_told(folder, encoded):
    config = recipe(folder)
    build(config, "dev")
    Retriever.open(config)
    vectors = built_folder(config, "dev") / "retrieval" / "vectors.npy"
    vectors.write_bytes(vectors.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"retrieval: .*; delete it, it is made again"):
        Retriever.open(config)


def test_what_is_not_built_or_cannot_be_searched_is_told(folder, encoded):
    with pytest.raises(UserError, match="run `coinrag build`"):
        Retriever.open(recipe(folder))
    lexical = recipe(folder, "contexts", weights={"dense": 0.0, "sparse": 1.0})
    with pytest.raises(UserError, match=r"retrieval\.weights\.dense: .* above 0"):
        Retriever.open(lexical)


def test_what_the_cross_encoder_scores_is_not_encoded(folder, encoded):
    config = recipe(folder, nugget_scorer="cross_encoder")
    build(config, "dev")
    tables = load_built(config, "dev")
    Retriever.open(config).retrieve(tables.samples[0]["question"])
    assert set(encoded) == {row["text"] for row in tables.chunks} | set(tables.samples["question"])


def test_a_question_is_embedded_once(folder, encoded):
    config = recipe(folder)
    build(config, "dev")
    opened = Retriever.open(config)
    encoded.clear()
    opened.retrieve("Where?")
    opened.retrieve("When?")
    assert encoded == ["Where?", "When?"]
