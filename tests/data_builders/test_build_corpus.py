"""Builds that search a corpus, select in one stage, reuse what was made, or ask a model."""

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
from scripted_server import serve
from small import data_row, encode_words, save_stand_ins, words_encoder, write_rows

from data_builders import bm25, candidates, pipeline, workers
from data_builders.build import build, load_built, read_batches, write_batches
from data_builders.retrieval import cosine_scores, fuse, select_nuggets, top
from data_builders.statistics import draw_statistics, render_statistics
from recipes.errors import UserError
from recipes.schema import Recipe

TABLES = ("chunks.arrow", "samples.arrow")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Questions with contexts, the same without, and the corpus of their contexts."""
    save_stand_ins(tmp_path)
    monkeypatch.setattr(workers, "load_encoder", lambda config, threads: encode_words)
    monkeypatch.setitem(pipeline.PASSAGES_A_BATCH, "rules", 7)
    monkeypatch.setattr(pipeline, "QUESTIONS_A_BLOCK", 4)
    monkeypatch.setattr(candidates, "_ROWS_A_BLOCK", 8)
    for split, numbers in {"train": range(12), "dev": range(20, 26)}.items():
        write_corpus_files(tmp_path, split, [data_row(number) for number in numbers])
    return tmp_path


def write_corpus_files(folder, split, rows):
    write_rows(folder / f"{split}.jsonl", rows)
    questions = [
        {
            "id": row["question_id"],
            "question": row["question_text"],
            "answers": row["answers_objects"][0]["spans"],
            "supporting_ids": [c["title"] for c in row["contexts"] if c["is_supporting"]],
            "dataset": "d",
        }
        for row in rows
    ]
    write_rows(folder / f"{split}-questions.jsonl", questions)
    passages = [
        {"id": c["title"], "title": c["title"], "text": c["paragraph_text"]}
        for row in rows
        for c in row["contexts"]
    ]
    write_rows(folder / f"{split}-corpus.jsonl", passages)


def recipe(folder, corpus=False, **sections):
    suffix = "-questions" if corpus else ""
    files = {split: [str(folder / f"{split}{suffix}.jsonl")] for split in ("train", "dev")}
    if corpus:
        files["corpus"] = [str(folder / f"{split}-corpus.jsonl") for split in ("train", "dev")]
        files["format"] = "jsonl"
    values = {
        "name": "test",
        "model": {"path": str(folder / "model")},
        "data": {**files, "built_root": str(folder / "built"), "chunk_tokens": 64},
        "retrieval": {
            "encoder": str(folder / "encoder"),
            "k_c": 3,
            "k": 4,
            "candidates": "corpus" if corpus else "contexts",
        },
        "train": {"run_folder": str(folder / "run")},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Recipe.model_validate(values)


def spans(row):
    return list(zip(row["span_chunks"], row["span_starts"], row["span_ends"], strict=True))


def all_chunks(tables):
    return [tables.chunk(name) for name in tables.chunks["chunk_id"][:]]


def query_of(row):
    return words_encoder([row["question"]])[0]


@pytest.mark.parametrize("selection", ["two_stage", "one_stage"])
def test_a_corpus_is_searched_as_if_all_of_it_were_compared(world, selection):
    config = recipe(
        world, corpus=True, retrieval={"selection": selection}, raft={"noise_probability": 0.0}
    )
    build(config, "train")
    tables = load_built(config, "train")
    chunks = all_chunks(tables)
    assert len(tables.samples) == 12
    for row in tables.samples:
        query = query_of(row)
        if selection == "two_stage":
            scores = cosine_scores(query, words_encoder([chunk.text for chunk in chunks]))
            best = [chunks[at] for at in top(scores, 3)]
        else:
            owners = [chunk for chunk in chunks for _ in chunk.nuggets]
            texts = [text for chunk in chunks for text in chunk.nugget_texts]
            hits = top(cosine_scores(query, words_encoder(texts)), 4)
            best = list({owners[at].chunk_id: owners[at] for at in hits}.values())
        assert row["chunk_ids"] == [chunk.chunk_id for chunk in best]
        scores = [cosine_scores(query, words_encoder(chunk.nugget_texts)) for chunk in best]
        assert row["nugget_scores"] == scores
        chosen = select_nuggets(scores, [chunk.nuggets for chunk in best], 4)
        assert spans(row) == [(chunk, *best[chunk].nuggets[at]) for chunk, at in chosen]
        assert len(row["gold_chunk_ids"]) == 1
        assert row["answer_in_contexts"]


def test_one_stage_takes_the_best_nuggets_of_all_contexts(world):
    config = recipe(world, retrieval={"selection": "one_stage"}, raft={"noise_probability": 0.0})
    build(config, "train")
    tables = load_built(config, "train")
    by_title = {row["title"]: tables.chunk(row["chunk_id"]) for row in tables.chunks}
    for number, row in enumerate(tables.samples):
        own = [by_title[context["title"]] for context in data_row(number)["contexts"]]
        query = query_of(row)
        flat = [
            (score, chunk.chunk_id, nugget)
            for chunk in own
            for score, nugget in zip(
                cosine_scores(query, words_encoder(chunk.nugget_texts)), chunk.nuggets, strict=True
            )
        ]
        best = sorted(flat, key=lambda entry: -entry[0])[:4]
        assert [(row["chunk_ids"][c], (s, e)) for c, s, e in spans(row)] == [b[1:] for b in best]
        assert row["chunk_scores"] == sorted(row["chunk_scores"], reverse=True)


def test_noise_takes_the_supporting_passages_out_of_the_search(world):
    config = recipe(world, corpus=True, raft={"noise_probability": 1.0})
    clean = recipe(world, corpus=True, raft={"noise_probability": 0.0})
    build(config, "train")
    build(clean, "train")
    noised, kept = load_built(config, "train").samples, load_built(clean, "train").samples
    assert all(noised["noised"][:])
    gold_found = 0
    for after, before in zip(noised, kept, strict=True):
        assert after["gold_chunk_ids"] == []
        assert not set(before["gold_chunk_ids"]) & set(after["chunk_ids"])
        assert len(after["chunk_ids"]) == 3
        gold_found += len(set(before["gold_chunk_ids"]) & set(before["chunk_ids"]))
    assert gold_found > 0


@pytest.mark.parametrize("corpus", [False, True])
def test_bm25_joins_the_ranking_of_contexts_and_corpus(world, corpus):
    pytest.importorskip("bm25s")
    config = recipe(world, corpus=corpus, retrieval={"bm25": True})
    build(config, "dev")
    tables = load_built(config, "dev")
    chunks = all_chunks(tables)
    changed = 0
    for number, row in enumerate(tables.samples, start=20):
        titles = [context["title"] for context in data_row(number)["contexts"]]
        found = [chunk for chunk in chunks if corpus or chunk.title in titles]
        texts = [chunk.text for chunk in found]
        dense = top(cosine_scores(query_of(row), words_encoder(texts)), len(texts))
        lexical = bm25.rank(bm25.index_texts(texts), row["question"], len(texts))
        best = fuse([dense, lexical], 3)
        assert row["chunk_ids"] == [found[at].chunk_id for at, _ in best]
        assert row["chunk_scores"] == pytest.approx([score for _, score in best])
        changed += dense[:3] != [at for at, _ in best]
    assert changed


def test_questions_without_contexts_need_a_corpus_to_search(world):
    with pytest.raises(UserError, match=r"train-questions\.jsonl:1: .*candidates=corpus"):
        build(
            recipe(world, corpus=True, retrieval={"candidates": "contexts"}, data={"corpus": []}),
            "train",
        )
    row = json.loads((world / "dev-questions.jsonl").read_text().splitlines()[0])
    write_rows(world / "dev-questions.jsonl", [row | {"supporting_ids": ["Nobody"]}])
    with pytest.raises(UserError, match=r"dev-questions\.jsonl:1: supporting_ids: .*'Nobody'"):
        build(recipe(world, corpus=True), "dev")
    assert not (world / "built").exists()


def test_a_changed_corpus_redoes_only_what_changed(world):
    config = recipe(world, corpus=True)
    first = build(config, "train").made
    assert first["passages"].missing == first["passages"].distinct == 72
    lines = (world / "train-corpus.jsonl").read_text().splitlines()
    changed = json.loads(lines[3]) | {"text": "Something else stands here. It is short."}
    added = {"title": "Added", "text": "A passage that was not there before."}
    # One changed, one gone, one new.
    write_rows(
        world / "train-corpus.jsonl",
        [changed, added, *(json.loads(line) for line in lines[:3] + lines[5:])],
    )
    second = build(config, "train").made
    assert asdict(second["passages"]) == {"distinct": 72, "missing": 2}
    assert second["chunks"].missing == 2
    assert second["questions"].missing == 0
    # What was kept from before is what a build from nothing makes.
    fresh = recipe(world, corpus=True, data={"built_root": str(world / "fresh")})
    [reused, anew] = [build(c, "train").folder for c in (config, fresh)]
    assert reused.parent != anew.parent
    for name in TABLES:
        assert (reused / name).read_bytes() == (anew / name).read_bytes()


def test_statistics_are_those_of_the_tables(world):
    config = recipe(world, raft={"noise_probability": 0.0})
    built = build(config, "train")
    tables = load_built(config, "train")
    corpus = built.report["corpus"]
    nuggets = [nugget for chunk in all_chunks(tables) for nugget in chunk.nuggets]
    words = [len(text.split()) for chunk in all_chunks(tables) for text in chunk.nugget_texts]
    tokens = sum(len(chunk.token_ids) for chunk in all_chunks(tables))
    assert corpus["passages"] == 48
    assert corpus["nuggets"] == len(nuggets)
    assert corpus["nugget_words"]["mean"] == round(float(np.mean(words)), 2)
    assert corpus["nugget_words"]["p90"] == np.quantile(words, 0.9, method="nearest")
    assert corpus["tokens_covered"] == round(sum(e - s for s, e in nuggets) / tokens, 4)
    assert corpus["neighbour_overlap"] == 0.0
    assert sum(times for _, times in built.report["histograms"]["nuggets_a_question"]) == 12
    shown = render_statistics({"train": built.report})
    assert f"{len(nuggets):,}" in shown
    draw_statistics(built.report, "test", world / "statistics.png")
    assert (world / "statistics.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-test")
    with serve() as running:
        yield running


def model_recipe(world, server, **llm):
    llm = {"model": "scripted", "base_url": server.url, "attempts": 1, **llm}
    return recipe(world, nuggets={"extractor": "llm", "llm": llm})


def test_nuggets_of_a_model_are_paid_for_once(world, server):
    config = model_recipe(world, server)
    folder = build(config, "train").folder
    calls = server.calls.total()
    assert calls == len(server.calls) == 48
    # The scripted model gives the rule-based candidates.
    plain = build(recipe(world), "train").folder
    for name in TABLES:
        assert (folder / name).read_bytes() == (plain / name).read_bytes()
    build(model_recipe(world, server, concurrent_requests=2), "dev")
    build(config.model_copy(update={"seed": 1}), "train")
    # Only the passages of the dev questions were new.
    assert server.calls.total() == len(server.calls) == 48 + 24
    report = json.loads((folder / "report.json").read_text())
    assert report["extraction"] == {"model": "scripted", "chunks": 48, "failed": {}}


def test_failures_are_counted_and_asked_again_on_demand(world, server):
    rows = [data_row(number) for number in range(4)]
    rows[1]["contexts"][2]["paragraph_text"] += " [[refusal:1]]"
    write_rows(world / "train.jsonl", rows)
    config = model_recipe(world, server)
    first = build(config, "train")
    assert first.report["extraction"]["failed"] == {"refused": 1}
    assert first.report["chunks_without_nuggets"] == 1
    calls = server.calls.total()
    assert build(config, "train").folder == first.folder
    assert server.calls.total() == calls
    again = build(config, "train", retry_failed=True)
    assert again.folder == first.folder
    assert again.report["extraction"]["failed"] == {}
    assert again.report["chunks_without_nuggets"] == 0
    assert server.calls.total() == calls + 1
    assert build(config, "train", retry_failed=True).made == {}


def test_batch_files_take_the_place_of_calls(world, server):
    config = model_recipe(world, server)
    files = write_batches(config, world / "batch")
    assert [file.parent.name for file in files] == ["train", "dev"]
    requests = [line for file in files for line in file.read_text().splitlines()]
    assert len(requests) == 48 + 24
    assert write_batches(config, world / "again") == []
    assert not (world / "again").exists()
    results = []
    for line in map(json.loads, requests):
        text = line["body"]["messages"][-1]["content"].removeprefix("Text:\n")
        content = json.dumps({"nuggets": workers.load_extractor(recipe(world).nuggets)([text])[0]})
        choice = {"index": 0, "message": {"role": "assistant", "content": content}}
        body = {
            "model": "scripted",
            "choices": [choice | {"finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
        }
        results.append(
            {"custom_id": line["custom_id"], "response": {"status_code": 200, "body": body}}
        )
    write_rows(world / "results.jsonl", results)
    assert read_batches(config, [world / "results.jsonl"]).answered == 48 + 24
    folder = build(config, "train").folder
    assert server.calls.total() == 0
    plain = build(recipe(world), "train").folder
    for name in TABLES:
        assert (folder / name).read_bytes() == (plain / name).read_bytes()


def test_batch_files_need_a_model(world):
    with pytest.raises(UserError, match=r"nuggets\.extractor: expected llm .* got 'rules'"):
        write_batches(recipe(world), world / "batch")
    with pytest.raises(UserError, match=r"nuggets\.extractor: expected llm .* got 'rules'"):
        build(recipe(world), "train", retry_failed=True)
    assert not (world / "batch").exists()
    assert not (world / "built").exists()


def test_batch_files_are_written_for_both_splits_or_none(world, server):
    config = model_recipe(world, server)
    with pytest.raises(UserError, match=r"train\.jsonl/train: cannot write batch requests"):
        write_batches(config, world / "train.jsonl")
    (world / "dev.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"dev\.jsonl:1"):
        write_batches(config, world / "batch")
    assert not (world / "batch").exists()


def test_a_device_that_is_not_there_is_told_before_anything_is_made(world):
    with pytest.raises(UserError, match=r"retrieval\.device: no cuda:7 on this machine"):
        build(recipe(world, retrieval={"device": "cuda:7"}), "train")
    assert not (world / "built").exists()


def test_what_a_kill_leaves_beside_finished_tables_is_removed(world):
    config = recipe(world)
    folder = build(config, "dev").folder
    left = folder.with_name(f"{folder.name}.partial")
    left.mkdir()
    (left / "intake.sqlite").write_bytes(b"a lot")
    assert build(config, "dev").folder == folder
    assert not left.exists()


def test_a_damaged_store_is_named_and_can_be_deleted(world):
    config = recipe(world)
    folder = build(config, "dev").folder
    before = {name: (folder / name).read_bytes() for name in TABLES}
    shutil.rmtree(folder)
    [store] = (world / "built" / "assets").glob("chunks-*.sqlite")
    store.write_bytes(b"no database at all" * 100)
    with pytest.raises(UserError, match=rf"{store.name}: .*; delete it"):
        build(config, "dev")
    store.unlink()
    build(config, "dev")
    assert {name: (folder / name).read_bytes() for name in TABLES} == before
