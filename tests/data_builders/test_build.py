import json
import logging
from pathlib import Path

import pytest
from small import data_row, save_stand_ins, tiny_tokenizer, words_encoder, write_rows
from transformers import GPT2Config

from cache_ops.hf import UnsupportedModelError
from data_builders import pipeline, workers
from data_builders.build import build, built_folder, load_built
from data_builders.encoded import Encoded
from data_builders.retrieval import select_nuggets
from recipes.errors import UserError
from recipes.schema import Recipe

TABLES = ("chunks", "samples")


class InterruptionError(Exception):
    pass


def use_encoder(monkeypatch, encode):
    def load(config, threads):
        return lambda texts: [Encoded(row) for row in encode(texts)]

    monkeypatch.setattr(workers, "load_encoder", load)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A tokenizer, an encoder folder and data; the encoder itself is the hashed-words one."""
    save_stand_ins(tmp_path)
    write_rows(tmp_path / "train.jsonl", [data_row(number) for number in range(30)])
    write_rows(tmp_path / "dev.jsonl", [data_row(number) for number in range(100, 108)])
    use_encoder(monkeypatch, words_encoder)
    # Several batches of everything.
    monkeypatch.setitem(pipeline.PASSAGES_A_BATCH, "rules", 16)
    monkeypatch.setattr(pipeline, "QUESTIONS_A_BLOCK", 4)
    monkeypatch.setattr(pipeline, "TEXTS_A_BATCH", 16)
    return tmp_path


def recipe(folder: Path, **sections) -> Recipe:
    values = {
        "name": "test",
        "model": {"path": str(folder / "model")},
        "data": {
            "train": [str(folder / "train.jsonl")],
            "dev": [str(folder / "dev.jsonl")],
            "built_root": str(folder / "built"),
            "chunk_tokens": 64,
        },
        "retrieval": {"encoder": str(folder / "encoder"), "k_c": 3, "k": 4},
        "train": {"run_folder": str(folder / "run")},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return Recipe.model_validate(values)


def rows(tables):
    return {name: getattr(tables, name).to_list() for name in TABLES}


def test_tables_hold_what_the_contract_says(world):
    config = recipe(world, raft={"noise_probability": 0.3})
    folder = build(config, "train").folder
    tables = load_built(config, "train")
    tokenizer = tiny_tokenizer()
    ids = tables.chunks["chunk_id"]
    assert len(set(ids)) == len(ids)
    for row in tables.chunks:
        assert len(row["token_ids"]) <= 64
        chunk = tables.chunk(row["chunk_id"])
        for (start, end), text in zip(chunk.nuggets, chunk.nugget_texts, strict=True):
            assert 0 <= start < end <= len(chunk.token_ids)
            assert text in chunk.text
            assert text in tokenizer.decode(chunk.token_ids[start:end])
        assert chunk.nuggets == sorted(set(chunk.nuggets))
    assert [row["question_id"] for row in tables.samples] == [f"d-{n}" for n in range(30)]
    for row in tables.samples:
        chunks = [tables.chunk(name) for name in row["chunk_ids"]]
        assert len(chunks) <= 3
        assert row["chunk_scores"] == sorted(row["chunk_scores"], reverse=True)
        nuggets = [chunk.nuggets for chunk in chunks]
        assert [len(scores) for scores in row["nugget_scores"]] == [len(n) for n in nuggets]
        chosen = select_nuggets(row["nugget_scores"], nuggets, 4)
        spans = zip(row["span_chunks"], row["span_starts"], row["span_ends"], strict=True)
        assert list(spans) == [(chunk, *nuggets[chunk][at]) for chunk, at in chosen]
        assert bool(row["gold_chunk_ids"]) is not row["noised"]
        assert row["answer_in_contexts"] is not row["noised"]
    report = json.loads((folder / "report.json").read_text())
    noised = sum(tables.samples["noised"])
    assert report["questions"] == 30
    assert 0 < report["raft"]["noised"] == noised < 30
    assert report["answers"]["in_words"] == report["answers"]["in_contexts"] == 30 - noised
    dropped = sum(report["drops"].values())
    assert report["alignment"]["exact"] == report["corpus"]["nuggets"] + dropped


def test_dev_is_never_noised(world):
    config = recipe(world, raft={"noise_probability": 1.0})
    build(config, "dev")
    assert not any(load_built(config, "dev").samples["noised"])


def test_an_interrupted_build_goes_on_and_gives_the_same_tables(world, monkeypatch):
    whole = recipe(world, data={"built_root": str(world / "whole")})
    build(whole, "train")
    config = recipe(world)
    work = []

    def breaking_encoder(texts):
        work.extend(texts)
        if len(work) > limit:
            raise InterruptionError
        return words_encoder(texts)

    original = pipeline.sample_row

    def breaking_row(*arguments):
        work.append("sample")
        if len(work) > limit:
            raise InterruptionError
        return original(*arguments)

    use_encoder(monkeypatch, breaking_encoder)
    monkeypatch.setattr(pipeline, "sample_row", breaking_row)
    interruptions = 0
    finished = False
    while not finished:
        work.clear()
        limit = 40
        try:
            build(config, "train")
            finished = True
        except InterruptionError:
            interruptions += 1
            assert not built_folder(config, "train").exists()
            with pytest.raises(UserError, match="run `coinrag build`"):
                load_built(config, "train")
    assert interruptions > 3
    assert rows(load_built(config, "train")) == rows(load_built(whole, "train"))
    built = built_folder(config, "train")
    twin = built_folder(whole, "train")
    assert (built / "report.json").read_text() == (twin / "report.json").read_text()
    for name in ("chunks.arrow", "samples.arrow"):
        assert (built / name).read_bytes() == (twin / name).read_bytes()
    assert {path.name for path in built.parent.iterdir()} == {built.name, "assets"}


def test_each_distinct_text_is_embedded_once(world, monkeypatch):
    seen = []

    def counting(texts):
        seen.extend(texts)
        return words_encoder(texts)

    use_encoder(monkeypatch, counting)
    build(recipe(world), "train")
    assert len(seen) == len(set(seen))
    assert set(seen) >= {data_row(number)["question_text"] for number in range(30)}


def test_the_same_content_is_a_hit_wherever_it_lies(world, caplog):
    config = recipe(world)
    with caplog.at_level(logging.INFO):
        first = build(config, "train").folder
        assert "miss" in caplog.text
        caplog.clear()
        moved = world / "moved.jsonl"
        moved.write_bytes((world / "train.jsonl").read_bytes())
        other = recipe(
            world,
            name="other",
            data={"train": [str(moved)]},
            retrieval={"batch_size": 1, "order": "score"},
            prompt={"system": "Be brief."},
        )
        assert build(other, "train").folder == first
        assert "hit" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"data": {"chunk_tokens": 32}},
        {"data": {"train_rows_per_file": 5}},
        {"nuggets": {"fuzzy_threshold": None}},
        {"retrieval": {"k": 5}},
        {"retrieval": {"k_c": 4}},
        {"retrieval": {"encoder_kind": "flag_mean"}},
        {"raft": {"noise_probability": 0.5}},
    ],
)
def test_what_decides_the_tables_is_in_the_key(world, change):
    assert built_folder(recipe(world, **change), "train") != built_folder(recipe(world), "train")


@pytest.mark.parametrize("part", ["train.jsonl", "encoder/config.json", "model/tokenizer.json"])
def test_changed_inputs_are_another_build(world, part):
    before = built_folder(recipe(world), "train")
    content = (world / part).read_text()
    if part == "model/tokenizer.json":
        tokenizer = json.loads(content)
        tokenizer["model"]["merges"].pop()
        content = json.dumps(tokenizer)
    (world / part).write_text(content + " ")
    assert built_folder(recipe(world), "train") != before


def test_a_mistake_in_the_data_leaves_nothing_behind(world):
    (world / "train.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"train\.jsonl:1: "):
        build(recipe(world), "train")
    assert not (world / "built").exists()


@pytest.mark.parametrize("root", ["file", "file/below", "x" * 300, "/proc/none"])
def test_a_root_that_cannot_be_written_is_named(world, root):
    (world / "file").write_text("")
    config = recipe(world, data={"built_root": str(world / root)})
    with pytest.raises(UserError, match=r"data\.built_root: cannot use .*: "):
        build(config, "dev")


def test_an_encoder_in_the_home_of_nobody_is_not_found(world):
    config = recipe(world, retrieval={"encoder": "~no-such-user/encoder"})
    with pytest.raises(UserError, match="no model at '~no-such-user/encoder'"):
        build(config, "dev")


def test_an_answer_absent_from_every_passage_is_kept_and_counted(world):
    row = data_row(1)
    row["answers_objects"][0]["spans"] = ["Atlantis"]
    write_rows(world / "dev.jsonl", [row, data_row(2)])
    config = recipe(world)
    folder = build(config, "dev").folder
    report = json.loads((folder / "report.json").read_text())
    assert report["answers"]["absent_from_every_passage"] == 1
    assert load_built(config, "dev").samples["answer_in_contexts"][:] == [False, True]


def test_a_passage_of_two_questions_is_stored_once(world):
    shared = data_row(1)
    again = {**data_row(2), "contexts": shared["contexts"]}
    write_rows(world / "dev.jsonl", [shared, again])
    config = recipe(world)
    build(config, "dev")
    tables = load_built(config, "dev")
    texts = {row["title"] for row in tables.chunks}
    assert texts == {context["title"] for context in shared["contexts"]}
    assert len(tables.chunks) == len(set(tables.chunks["text"]))


def test_two_builds_of_one_content_do_not_mix(world, monkeypatch):
    config = recipe(world)

    refused = []

    def second_build(texts):
        if not refused:
            with pytest.raises(UserError, match="another process is building"):
                build(config, "dev")
            refused.append(True)
        return words_encoder(texts)

    use_encoder(monkeypatch, second_build)
    assert build(config, "dev").folder.is_dir()
    assert refused


def test_a_model_that_cannot_be_trained_is_refused_before_building(world):
    GPT2Config().save_pretrained(world / "model")
    with pytest.raises(UnsupportedModelError, match="model type 'gpt2'"):
        build(recipe(world), "train")
    assert not (world / "built").exists()
