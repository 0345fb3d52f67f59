"""The engine end to end, over a small real build and a store on disk."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from small import data_row, encode_words, save_stand_ins, tiny_tokenizer, write_rows
from tiny import tiny_model

from cache_ops.store import Store
from cache_ops.store.errors import ForeignStoreError
from data_builders import workers
from data_builders.build import build, load_built
from eval import online, retriever
from eval.engine import Engine, Reply
from eval.systems import SYSTEMS
from recipes.errors import UserError
from recipes.resolve import with_changes
from recipes.schema import Recipe

QUESTIONS = [f"Where was Persond{number}x1 born?" for number in range(20, 26)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints' weights, and data."""
    folder = tmp_path_factory.mktemp("engine")
    save_stand_ins(folder)
    tokenizer = tiny_tokenizer()
    for path, seed in ((folder / "model", 1), (folder / "run" / "checkpoint", 2)):
        tiny_model("llama", seed=seed, vocabulary=len(tokenizer)).save_pretrained(path)
        tokenizer.save_pretrained(path)
    for split, numbers in {"train": range(2), "dev": range(20, 26)}.items():
        write_rows(folder / f"{split}.jsonl", [data_row(number) for number in numbers])
    return folder


@pytest.fixture(scope="module")
def _words_encoder() -> object:
    with pytest.MonkeyPatch.context() as patch:
        for module in (workers, retriever):
            patch.setattr(module, "load_encoder", lambda config, threads: encode_words)
        yield


def recipe(folder: Path, **sections: dict) -> Recipe:
    values = {
        "name": "engine",
        "model": {"path": str(folder / "model")},
        "data": {
            "train": [str(folder / "train.jsonl")],
            "dev": [str(folder / "dev.jsonl")],
            "built_root": str(folder / "built"),
            "chunk_tokens": 64,
        },
        "retrieval": {"encoder": str(folder / "encoder"), "k_c": 3, "k": 4},
        "train": {"run_folder": str(folder / "run")},
        "eval": {"max_new_tokens": 8, "concurrent_requests": 3},
    }
    return Recipe.model_validate(values | sections)


@pytest.fixture(scope="module")
def config(folder: Path, _words_encoder: object) -> Recipe:
    made = recipe(folder)
    build(made, "dev")
    assert len(load_built(made, "dev").samples) == len(QUESTIONS)
    return made


@pytest.fixture(scope="module")
def alone(config: Recipe) -> list[Reply]:
    """What one client is told, from slices in memory."""
    with Engine.open(config) as engine:
        return [engine.answer(question) for question in QUESTIONS]


def test_replies_say_what_they_were_made_of(alone: list[Reply]) -> None:
    first = alone[0].report
    assert (first.k_c, first.k, first.system, first.checkpoint) == (3, 4, "coinrag", "base")
    assert first.tokens_computed == first.active_tokens > 0
    assert first.new_tokens == len(alone[0].token_ids) > 0
    assert sum(first.stage_ms.values()) == pytest.approx(first.ttft_ms, rel=0.02)
    assert first.ttft_ms <= first.total_ms
    assert len({reply.answer for reply in alone}) > 1, "equal answers would prove little"
    # The prompt is in memory after the first question.
    assert all(reply.report.tokens_memory > 0 for reply in alone[1:])


@pytest.mark.parametrize("keep", ["nuggets", "chunks"])
def test_a_store_answers_alike_and_again_after_a_restart(
    config: Recipe, folder: Path, alone: list[Reply], keep: str, tmp_path: Path
) -> None:
    store = {"folder": str(tmp_path), "memory_gib": 0.0, "keep": keep}
    with_store = recipe(folder, store=store)
    for opened in range(2):
        with Engine.open(with_store) as engine:
            replies = [engine.answer(question) for question in QUESTIONS]
        assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in alone]
        for reply in replies if opened else []:
            report = reply.report
            assert (report.tokens_disk, report.tokens_computed) == (report.active_tokens, 0)
            # fp32 keys and values of 2 layers, 2 heads and 16 dimensions.
            assert report.bytes_read == report.active_tokens * 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("system", sorted({*SYSTEMS} - {"coinrag"}))
def test_every_system_is_served_alone_and_beside_others(config: Recipe, system: str) -> None:
    rules = with_changes(config, ["systems.online_nuggets.extractor=rules"])
    with Engine.open(rules, "base", system) as engine:
        alone = [engine.answer(question) for question in QUESTIONS[:3]]
        together = engine.answer_all(QUESTIONS[:3])
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    report = alone[0].report
    assert report.system == system
    assert (report.k is None) == (not SYSTEMS[system].selects_nuggets)
    assert report.active_tokens > 0
    assert (report.recomputed_tokens > 0) == (system in ("cacheblend", "epic"))


def test_a_first_pass_that_fails_leaves_the_others_as_they_are(
    config: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(config, "base", "epic") as engine:
        alone = [engine.answer(question).token_ids for question in QUESTIONS[:3]]
        compute, failed = online.forward_recomputing, []

        def once(*args: object) -> object:
            if not failed:
                failed.append(args)
                raise MemoryError("no room on the device")
            return compute(*args)

        monkeypatch.setattr(online, "forward_recomputing", once)
        asked = [engine.ask(question) for question in QUESTIONS[:3]]
        with pytest.raises(MemoryError):
            asked[0].reply()
        assert [one.reply().token_ids for one in asked[1:]] == alone[1:]


def test_many_clients_get_the_answers_of_one(config: Recipe, alone: list[Reply]) -> None:
    with Engine.open(config) as engine, ThreadPoolExecutor(8) as clients:
        found = list(clients.map(engine.answer, QUESTIONS * 3))
        together = engine.answer_all(QUESTIONS)
    assert [reply.token_ids for reply in found] == [reply.token_ids for reply in alone] * 3
    assert [reply.token_ids for reply in together] == [reply.token_ids for reply in alone]
    assert max(reply.report.batch_requests for reply in [*found, *together]) > 1


def test_streamed_text_is_the_answer(config: Recipe, alone: list[Reply]) -> None:
    with Engine.open(config) as engine:
        for question, expected in zip(QUESTIONS, alone, strict=True):
            asked = engine.ask(question)
            assert "".join(asked).strip() == expected.answer
            assert asked.reply().token_ids == expected.token_ids


def test_what_goes_wrong_with_one_question_does_not_touch_others(
    config: Recipe, alone: list[Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(config) as engine:
        retrieve = engine._retriever.retrieve

        def failing(question: str):
            if question == "?":
                raise RuntimeError("no such question")
            return retrieve(question)

        monkeypatch.setattr(engine._retriever, "retrieve", failing)
        asked = [engine.ask(question) for question in (QUESTIONS[0], "?", QUESTIONS[1])]
        assert [one.reply().token_ids for one in asked[::2]] == [
            reply.token_ids for reply in alone[:2]
        ]
        with pytest.raises(RuntimeError, match="no such question"):
            asked[1].reply()
        with pytest.raises(RuntimeError, match="no such question"):
            list(asked[1])
        samples = metrics(engine)
    labels = (("checkpoint", "base"), ("system", "coinrag"))
    assert samples["coinrag_failed_requests_total", labels] == 1
    assert samples["coinrag_requests_total", labels] == 2


def metrics(engine: Engine) -> dict:
    families = text_string_to_metric_families(engine.prometheus_text())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_requests_are_logged_and_summed(config: Recipe, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    with Engine.open(config, log=log) as engine:
        replies = engine.answer_all(QUESTIONS[:3])
        samples = metrics(engine)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    by_question = {line["question"]: line for line in lines}
    assert by_question.keys() == set(QUESTIONS[:3])
    for reply in replies:
        assert by_question[reply.report.question]["answer"] == reply.answer
    for source in ("memory", "disk", "computed"):
        labels = (("checkpoint", "base"), ("source", source), ("system", "coinrag"))
        assert samples["coinrag_prefix_tokens_total", labels] == sum(
            line[f"tokens_{source}"] for line in lines
        )
    # The prompt, from the second question on.
    assert samples["coinrag_memory_tier", (("count", "hits"),)] >= 2
    stages = {
        dict(labels)["stage"] for name, labels in samples if name.endswith("stage_seconds_sum")
    }
    assert stages == set(lines[0]["stage_ms"])


def test_the_first_token_does_not_wait_for_the_store(
    config: Recipe, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, adding = Store.add, threading.Event()

    def slow(self: Store, chunks: object) -> int:
        assert adding.wait(10), "the first token has not come"
        return add(self, chunks)

    monkeypatch.setattr(Store, "add", slow)
    with Engine.open(recipe(folder, store={"folder": str(tmp_path)})) as engine:
        pieces = iter(engine.ask(QUESTIONS[0]))
        first = next(pieces)
        adding.set()
        assert first
        assert list(pieces)


def test_stages_add_up_in_a_batch(config: Recipe, folder: Path, tmp_path: Path) -> None:
    with Engine.open(recipe(folder, store={"folder": str(tmp_path)})) as engine:
        replies = engine.answer_all(QUESTIONS)
    for report in (reply.report for reply in replies):
        assert sum(report.stage_ms.values()) == pytest.approx(report.ttft_ms, rel=0.02, abs=0.1)


@pytest.mark.parametrize("damage", ["gone", "a file"])
def test_a_store_that_takes_nothing_fails_no_answer(
    config: Recipe, folder: Path, alone: list[Reply], tmp_path: Path, damage: str
) -> None:
    with Engine.open(recipe(folder, store={"folder": str(tmp_path)})) as engine:
        engine.answer(QUESTIONS[0])
        shutil.rmtree(tmp_path / "base" / "shards")
        if damage == "a file":
            (tmp_path / "base" / "shards").write_text("")
        replies = engine.answer_all(QUESTIONS)
        samples = metrics(engine)
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in alone]
    refused = [value for (name, _), value in samples.items() if name == "coinrag_chunks_not_stored"]
    assert sum(refused) > 0


def test_a_question_beyond_the_models_positions_is_refused(
    config: Recipe, alone: list[Reply]
) -> None:
    with Engine.open(config) as engine:
        asked = [engine.ask(question) for question in ("why " * 3000, QUESTIONS[0])]
        with pytest.raises(UserError, match="2048"):
            asked[0].reply()
        assert asked[1].reply().token_ids == alone[0].token_ids
        for _ in range(2):
            assert "".join(asked[1]).strip() == alone[0].answer


def test_a_pass_that_fails_is_tried_again_request_by_request(
    config: Recipe, alone: list[Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(config) as engine:
        advance = engine._path.advance

        def failing(requests: list) -> None:
            texts = [request.question.question for request in requests]
            if QUESTIONS[1] in texts:
                raise RuntimeError("out of memory")
            advance(requests)

        monkeypatch.setattr(engine._path, "advance", failing)
        asked = [engine.ask(question) for question in QUESTIONS[:3]]
        with pytest.raises(RuntimeError, match="out of memory"):
            asked[1].reply()
        for at in (0, 2):
            assert asked[at].reply().token_ids == alone[at].token_ids


def test_a_log_that_cannot_be_written_is_told_or_given_up(
    config: Recipe, alone: list[Reply], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match=r"none/log\.jsonl"):
        Engine.open(config, log=tmp_path / "none" / "log.jsonl")
    with Engine.open(config, log=Path("/dev/full")) as engine:
        replies = [engine.answer(question) for question in QUESTIONS[:2]]
    assert [reply.answer for reply in replies] == [reply.answer for reply in alone[:2]]
    assert caplog.text.count("no longer logged") == 1


def test_a_run_trained_over_frozen_context_is_known_by_its_own_recipe(
    config: Recipe, folder: Path, tmp_path: Path
) -> None:
    trained = recipe(folder, context={"gradient": "frozen"})
    file = folder / "run" / "recipe.yaml"
    file.write_text(yaml.safe_dump(trained.model_dump(mode="json")))
    try:
        with Engine.open(recipe(folder, store={"folder": str(tmp_path)}), "fine_tuned") as engine:
            engine.answer(QUESTIONS[0])
    finally:
        file.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_closed_engine_has_answered_what_was_asked_and_takes_nothing_more(
    config: Recipe, alone: list[Reply]
) -> None:
    engine = Engine.open(config)
    asked = [engine.ask(question) for question in QUESTIONS]
    engine.close()
    engine.close()
    assert [one.reply().token_ids for one in asked] == [reply.token_ids for reply in alone]
    with pytest.raises(RuntimeError, match="closed"):
        engine.ask("?")
    assert "engine" not in {thread.name for thread in threading.enumerate()}


def test_a_store_of_other_weights_is_refused(config: Recipe, folder: Path, tmp_path: Path) -> None:
    with_store = recipe(folder, store={"folder": str(tmp_path)})
    with Engine.open(with_store) as engine:
        engine.answer(QUESTIONS[0])
    (tmp_path / "base").rename(tmp_path / "fine_tuned")
    with pytest.raises(ForeignStoreError, match="weights"):
        Engine.open(with_store, "fine_tuned")


def test_a_model_trained_over_frozen_context_serves_from_the_base_store(
    config: Recipe, folder: Path, tmp_path: Path
) -> None:
    store = {"folder": str(tmp_path), "memory_gib": 0.0}
    with Engine.open(recipe(folder, store=store)) as engine:
        engine.answer_all(QUESTIONS)
    frozen = recipe(folder, store=store, context={"gradient": "frozen"})
    with Engine.open(frozen, "fine_tuned") as engine:
        replies = engine.answer_all(QUESTIONS)
    assert all(reply.report.tokens_computed == 0 for reply in replies)
    assert not (tmp_path / "fine_tuned").exists()
    with Engine.open(recipe(folder), "fine_tuned") as engine:
        own = engine.answer_all(QUESTIONS)
    assert [reply.token_ids for reply in replies] != [reply.token_ids for reply in own]
