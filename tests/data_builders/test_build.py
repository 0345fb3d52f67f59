import json
import logging
from contextlib import suppress
from pathlib import Path

import pytest
from small import (
    data_row,
    hashed_pairs,
    save_stand_ins,
    tiny_tokenizer,
    words_encoder,
    write_rows,
)
from transformers import GPT2Config

from cache_ops.hf import UnsupportedModelError
from data_builders import build_assets, pipeline, workers
from data_builders.build import build, built_folder, load_built
from data_builders.encoded import Encoded
from data_builders.encoder import encoder_identity
from data_builders.key import build_key, tokenizer_identity
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
    monkeypatch.setattr(build_assets, "TEXTS_A_BATCH", 16)
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


def test_the_key_of_default_settings_is_what_it_was(world):
    """Tables that were built before the later options came are still found."""
    key = build_key(recipe(world), "train")
    (sha256,) = key.pop("files_sha256")
    assert len(sha256) == 64
    assert key == {
        "split": "train",
        "data_format": "ircot",
        "corpus_sha256": [],
        "rows_per_file": None,
        "chunks": {
            "format": 5,
            "tokenizer_sha256": tokenizer_identity(tiny_tokenizer()),
            "chunk_tokens": 64,
            "extractor": key["chunks"]["extractor"],
            "fuzzy_threshold": 0.7,
        },
        "encoder": {
            "format": 5,
            "sha256": encoder_identity(str(world / "encoder")),
            "kind": "bge_m3",
            "sparse": False,
            "colbert": False,
            "batch_size": 1,
        },
        "weights": {"dense": 1.0, "sparse": 0.0, "colbert": 0.0},
        "bm25": False,
        "candidates": "contexts",
        "selection": "two_stage",
        "k": 4,
        "k_c": 3,
        "seed": 0,
        "noise_probability": 0.15,
    }


def read_together(folder: Path, **retrieval) -> Recipe:
    """With a cross-encoder, which is there by its name alone."""
    return recipe(
        folder, retrieval={"cross_encoder": {"path": str(folder / "encoder")}} | retrieval
    )


def use_cross_encoder(monkeypatch, score):
    monkeypatch.setattr(workers, "load_cross_encoder", lambda config, threads: score)
    monkeypatch.setattr("data_builders.build.check_cross_encoder", lambda config: None)


@pytest.mark.parametrize("candidates", ["contexts", "corpus"])
@pytest.mark.parametrize(
    "options",
    [
        {"nugget_scorer": "cross_encoder"},
        {"rerank_chunks": 8},
        {"rerank_chunks": 8, "nugget_scorer": "cross_encoder"},
    ],
)
def test_a_cross_encoder_chooses_chunks_and_scores_nuggets(world, monkeypatch, candidates, options):
    use_cross_encoder(monkeypatch, hashed_pairs)
    wide = recipe(world, retrieval={"k_c": 8, "candidates": candidates})
    build(wide, "dev")
    config = read_together(world, candidates=candidates, **options)
    build(config, "dev")
    tables = load_built(config, "dev")
    reranked = 0
    for row, found in zip(tables.samples, load_built(wide, "dev").samples, strict=True):
        question, chunks = row["question"], [tables.chunk(name) for name in found["chunk_ids"]]
        order = list(range(len(chunks)))
        chunk_scores = found["chunk_scores"]
        if "rerank_chunks" in options:
            [chunk_scores] = hashed_pairs([(question, [chunk.text for chunk in chunks])])
            order.sort(key=lambda at: -chunk_scores[at])
            reranked += order[:3] != sorted(order)[:3]
        assert row["chunk_ids"] == [chunks[at].chunk_id for at in order[:3]]
        assert row["chunk_scores"] == [chunk_scores[at] for at in order[:3]]
        expected = [found["nugget_scores"][at] for at in order[:3]]
        if "nugget_scorer" in options:
            expected = hashed_pairs([(question, chunks[at].nugget_texts) for at in order[:3]])
        assert row["nugget_scores"] == expected
        nuggets = [chunks[at].nuggets for at in order[:3]]
        chosen = select_nuggets(expected, nuggets, 4)
        assert row["span_starts"] == [nuggets[chunk][at][0] for chunk, at in chosen]
    assert bool(reranked) is ("rerank_chunks" in options)


def test_one_stage_takes_the_nuggets_that_the_cross_encoder_puts_first(world, monkeypatch):
    use_cross_encoder(monkeypatch, hashed_pairs)
    config = read_together(world, selection="one_stage", nugget_scorer="cross_encoder")
    build(config, "dev")
    tables = load_built(config, "dev")
    of_title = {row["title"]: tables.chunk(row["chunk_id"]) for row in tables.chunks}
    for number, row in enumerate(tables.samples, 100):
        contexts = [of_title[context["title"]] for context in data_row(number)["contexts"]]
        texts = [text for chunk in contexts for text in chunk.nugget_texts]
        [everything] = hashed_pairs([(row["question"], texts)])
        chosen = sorted(score for scores in row["nugget_scores"] for score in scores)[-4:]
        assert chosen == sorted(everything)[-4:]


def test_scores_are_kept_and_a_stopped_build_goes_on(world, monkeypatch):
    options = {"rerank_chunks": 4, "nugget_scorer": "cross_encoder"}
    use_cross_encoder(monkeypatch, hashed_pairs)
    whole = recipe(
        world,
        data={"built_root": str(world / "whole")},
        retrieval={"cross_encoder": {"path": str(world / "encoder")}, **options},
    )
    build(whole, "train")
    scored = []

    def breaking(asked):
        if len(scored) + len(asked) > limit:
            raise InterruptionError
        scored.extend((question, *texts) for question, texts in asked)
        return hashed_pairs(asked)

    use_cross_encoder(monkeypatch, breaking)
    for name in ("CHUNKS_TO_RERANK_A_BATCH", "NUGGET_LISTS_A_BATCH"):
        monkeypatch.setattr(build_assets, name, 8)
    config = read_together(world, **options)
    built = None
    limit = 0
    while built is None:
        limit += 50
        with suppress(InterruptionError):
            built = build(config, "train")
    assert limit > 150
    for name in ("chunks.arrow", "samples.arrow", "report.json"):
        twin = built_folder(whole, "train") / name
        assert (built.folder / name).read_bytes() == twin.read_bytes()
    assert len(scored) == len(set(scored)) == 30 * (4 + 3)
    # Another number of nuggets needs no other score.
    made = build(read_together(world, k=5, **options), "train").made
    assert made["chunk scores"].missing == made["nugget scores"].missing == 0
    assert (made["chunk scores"].distinct, made["nugget scores"].distinct) == (120, 90)
    # Nuggets that another model scores are not encoded.
    assert set(made) == {"passages", "questions", "chunks", "chunk scores", "nugget scores"}


def test_the_cross_encoder_is_in_the_key_where_it_is_used(world):
    plain = built_folder(recipe(world), "dev")
    assert built_folder(read_together(world), "dev") == plain
    options = [
        {"nugget_scorer": "cross_encoder"},
        {"rerank_chunks": 3},
        {"rerank_chunks": 4},
        {"rerank_chunks": 4, "nugget_scorer": "cross_encoder"},
    ]
    folders = [built_folder(read_together(world, **one), "dev") for one in options]
    assert len({plain, *folders}) == 5
    (world / "encoder" / "config.json").write_text("{ }")
    assert not {plain, *folders} & {
        built_folder(read_together(world, **one), "dev") for one in options
    }


def test_without_the_cross_encoder_nothing_is_built(world):
    config = read_together(world, cross_encoder={"path": "no/such"}, rerank_chunks=3)
    with pytest.raises(UserError, match=r"retrieval\.cross_encoder\.path: no model at 'no/such'"):
        build(config, "dev")
    config = read_together(
        world, cross_encoder={"path": str(world / "encoder"), "device": "cuda:99"}, rerank_chunks=3
    )
    with pytest.raises(UserError, match=r"retrieval\.cross_encoder\.device: no cuda:99"):
        build(config, "dev")
    # The stand-in has a name alone.
    with pytest.raises(UserError, match=r"retrieval\.cross_encoder\.path: .* does not load as a"):
        build(read_together(world, rerank_chunks=3), "dev")
    assert not (world / "built").exists()
