"""Builds of odd input, over damaged files, and of what changed while one was stopped."""

import json
import shutil

import numpy as np
import pytest
from scripted_server import serve
from small import data_row, encode_words, save_stand_ins, write_rows

from data_builders import candidates, pipeline, workers
from data_builders.build import build, load_built
from data_builders.encoded import Encoded
from recipes.errors import UserError
from recipes.schema import Recipe

TABLES = ("chunks.arrow", "samples.arrow")
ROWS = [data_row(number) for number in range(6)]
PASSAGES = [
    {"id": context["title"], "title": context["title"], "text": context["paragraph_text"]}
    for row in ROWS
    for context in row["contexts"]
]
QUESTIONS = [
    {
        "id": row["question_id"],
        "question": row["question_text"],
        "answers": row["answers_objects"][0]["spans"],
        "supporting_ids": [c["title"] for c in row["contexts"] if c["is_supporting"]],
    }
    for row in ROWS
]


class StoppedError(Exception):
    pass


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Where builds lie, with a tokenizer and the hashed-words encoder."""
    save_stand_ins(tmp_path)
    monkeypatch.setattr(workers, "load_encoder", lambda config, threads: encode_words)
    return tmp_path


def recipe(world, questions=QUESTIONS, passages=PASSAGES, **sections):
    values = {
        "name": "test",
        "model": {"path": str(world / "model")},
        "data": {
            "format": "jsonl",
            "train": [write_rows(world / "train.jsonl", questions)],
            "dev": [str(world / "dev.jsonl")],
            "corpus": [write_rows(world / "corpus.jsonl", passages)] if passages else [],
            "built_root": str(world / "built"),
            "chunk_tokens": 64,
        },
        "retrieval": {"encoder": str(world / "encoder"), "k_c": 3, "k": 4, "candidates": "corpus"},
        "raft": {"noise_probability": 0.0},
        "train": {"run_folder": str(world / "run")},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Recipe.model_validate(values)


def table_bytes(folder):
    return [(folder / name).read_bytes() for name in TABLES]


def stop_at_samples(config, monkeypatch):
    """A build that has retrieved everything and written no sample."""

    def stop(*_):
        raise StoppedError

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "sample_row", stop)
        with pytest.raises(StoppedError):
            build(config, "train")


def test_questions_need_a_passage_to_be_searched_in(world):
    questions = [{"question": "Where is it?", "answer": "there"}]
    with pytest.raises(UserError, match=r"data\.corpus: no passage to search"):
        build(recipe(world, questions, []), "train")
    assert not (world / "built").exists()


@pytest.mark.parametrize(
    "marks",
    [
        {"contexts": [{}], "supporting_ids": ["a"]},
        {"contexts": [{}, {"is_supporting": True}]},
        {"contexts": [{"is_supporting": True}, {}], "supporting_ids": ["a", "a again"]},
    ],
)
def test_a_passage_supports_if_it_is_marked_anywhere(world, marks):
    passage = {"title": "A", "text": "It is kept in Rome."}
    other = {"title": "B", "text": "Nothing is kept in Bonn."}
    contexts = [passage | mark for mark in marks["contexts"]]
    question = {"question": "Where is it kept?", "answer": "Rome", **marks, "contexts": contexts}
    corpus = [{"id": "a", **passage}, {"id": "a again", **passage}, other]
    kept, noised = (
        recipe(world, [question], corpus, raft={"noise_probability": probability})
        for probability in (0.0, 1.0)
    )
    for config in (kept, noised):
        build(config, "train")
    [row] = load_built(kept, "train").samples
    assert len(row["gold_chunk_ids"]) == 1
    assert row["gold_chunk_ids"][0] in row["chunk_ids"]
    [after] = load_built(noised, "train").samples
    assert after["noised"]
    assert not after["answer_in_contexts"]
    assert len(after["chunk_ids"]) == 1


def test_equal_nuggets_are_chosen_alike_in_contexts_and_corpus(world, monkeypatch):
    # The last chunk has the best nugget and one that ties with the only one of the first.
    rows = {"best": [1.0, 0.0], "equal": [0.6, 0.8]}

    def encode(texts):
        found = [next((row for key, row in rows.items() if key in text), [1, 0]) for text in texts]
        return [Encoded(np.array(row, dtype=np.float32)) for row in found]

    monkeypatch.setattr(workers, "load_encoder", lambda config, threads: encode)
    passages = [
        {"text": "This sentence here is equal."},
        {"text": "This sentence here is best. That sentence there is equal."},
    ]
    question = {"question": "Which one is it?", "answer": "this"}
    one_stage = {"selection": "one_stage", "k": 2}
    with_contexts = recipe(
        world,
        [{**question, "contexts": passages}],
        [],
        retrieval={**one_stage, "candidates": "contexts"},
    )
    build(with_contexts, "train")
    [own] = load_built(with_contexts, "train").samples.to_list()
    with_corpus = recipe(world, [question], passages, retrieval=one_stage)
    build(with_corpus, "train")
    [found] = load_built(with_corpus, "train").samples.to_list()
    assert len(own["chunk_ids"]) == 2
    names = ("chunk_ids", "chunk_scores", "nugget_scores", "span_chunks", "span_starts")
    assert {name: found[name] for name in names} == {name: own[name] for name in names}


def test_what_a_question_finds_does_not_depend_on_the_others(world, monkeypatch):
    pytest.importorskip("bm25s")
    monkeypatch.setattr(candidates, "FUSION_DEPTH", 4)
    asked = {"question": "Where was Persond1x1 born? In the city", "answer": "Townd1x1"}
    # Noise takes half of the corpus out of the other question's search.
    many = [passage["id"] for passage in PASSAGES[::2]]
    other = {"question": "Who died?", "answer": "She", "supporting_ids": many}
    options = {"retrieval": {"bm25": True, "k_c": 4}, "raft": {"noise_probability": 1.0}}
    found = []
    for questions in ([asked], [asked, other]):
        config = recipe(world, questions, **options)
        build(config, "train")
        [row, *_] = load_built(config, "train").samples.to_list()
        found.append((row["chunk_ids"], row["chunk_scores"]))
    assert found[0] == found[1]


def test_nuggets_that_came_while_a_build_was_stopped_are_searched(world, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-test")
    passages = [dict(passage) for passage in PASSAGES]
    # The passage that the first question is about.
    passages[1]["text"] += " [[refusal:1]]"
    with serve() as server:
        llm = {"model": "scripted", "base_url": server.url, "attempts": 1}
        sections = {"nuggets": {"extractor": "llm", "llm": llm}}
        config = recipe(world, passages=passages, retrieval={"selection": "one_stage"}, **sections)
        stop_at_samples(config, monkeypatch)
        # Another build asks again, and the journal is theirs together.
        build(recipe(world, passages=passages, **sections), "train", retry_failed=True)
        folder = build(config, "train").folder
        went_on = table_bytes(folder)
        shutil.rmtree(folder)
        assert table_bytes(build(config, "train").folder) == went_on


def test_a_damaged_working_file_is_named_and_can_be_deleted(world, monkeypatch):
    config = recipe(world)
    whole = table_bytes(build(config, "train").folder)
    for place in ("built/*.partial/intake.sqlite", "built/assets/chunks-*.sqlite"):
        shutil.rmtree(world / "built")
        stop_at_samples(config, monkeypatch)
        [file] = world.glob(place)
        content = bytearray(file.read_bytes())
        for page in range(4096, len(content), 4096):
            content[page : page + 100] = b"\xff" * 100
        file.write_bytes(content)
        with pytest.raises(UserError, match=rf"^\S*{file.name}: database .*; delete it"):
            build(config, "train")
        file.unlink()
        assert table_bytes(build(config, "train").folder) == whole


def test_a_folder_without_tables_is_built_again(world):
    config = recipe(world)
    folder = build(config, "train").folder
    whole = table_bytes(folder)
    for file in folder.iterdir():
        file.unlink()
    assert build(config, "train").folder == folder
    assert table_bytes(folder) == whole
    assert json.loads((folder / "report.json").read_text())["questions"] == len(QUESTIONS)


def test_one_stage_selection_is_the_same_build_for_any_k_c(world):
    folders = [
        build(recipe(world, retrieval={"selection": "one_stage", "k_c": k_c}), "train").folder
        for k_c in (1, 3)
    ]
    assert folders[0] == folders[1]
    # As it must be: another root, and the other k_c.
    apart = {"data": {"built_root": str(world / "apart")}}
    other = recipe(world, retrieval={"selection": "one_stage", "k_c": 3}, **apart)
    assert table_bytes(build(other, "train").folder) == table_bytes(folders[0])
