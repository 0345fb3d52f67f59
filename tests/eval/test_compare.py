import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from built_tables import BuiltTables, patch_built
from tiny import tiny_model

import data_builders.build
import eval.questions
from cache_ops.hf import ModelNotFoundError
from data_builders import kv
from data_builders.tables import Chunk
from eval.answers import Answer, read_answers
from eval.compare import compare
from eval.runner import Runner
from recipes.errors import UserError
from recipes.schema import Recipe

MakeRecipe = Callable[..., Recipe]


@pytest.fixture(autouse=True)
def tables(chunks: list[Chunk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltTables:
    return patch_built(chunks, tmp_path, monkeypatch)


def output(config: Recipe) -> Path:
    return Path(config.train.run_folder) / "compare"


def asked(answers: Sequence[Answer]) -> Counter[tuple[Any, str]]:
    return Counter((answer.variant, answer.question_id) for answer in answers)


def without_times(answers: Sequence[Answer]) -> list[tuple[Any, ...]]:
    return sorted((a.variant, a.question_id, a.answer, a.f1, a.active_tokens) for a in answers)


def test_every_system_and_checkpoint_answers_every_question(recipe: MakeRecipe) -> None:
    config = recipe(widths=[{"k_c": 3, "k": 2}, {"k_c": 3, "k": 4}])
    result = compare(config)
    assert [(r["system"], r["k_c"], r["k"], r["checkpoint"]) for r in result["results"]] == [
        (system, 3, k, checkpoint)
        for system, k in [
            ("standard_rag", None),
            ("turborag", None),
            ("coinrag", 2),
            ("coinrag", 4),
        ]
        for checkpoint in ("base", "fine_tuned")
    ]
    assert {row["questions"] for row in result["results"]} == {5}
    tuned = [d for d in result["differences"] if d["kind"] == "fine_tuning"]
    assert [(d["system"], d["k"]) for d in tuned] == [
        ("standard_rag", None), ("turborag", None), ("coinrag", 2), ("coinrag", 4),
    ]  # fmt: skip
    assert set(result["differences"][0]["by_dataset"]) == {"hotpotqa", "musique"}
    assert json.loads((output(config) / "compare.json").read_text()) == result
    assert (output(config) / "compare.png").read_bytes().startswith(b"\x89PNG")
    answers = read_answers(output(config) / "answers.jsonl")
    assert set(asked(answers).values()) == {1}
    assert len(answers) == 5 * 4 * 2
    assert not list(output(config).glob(".*")), "no temporary file is left"


def test_a_killed_comparison_goes_on_where_it_stopped(
    recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recipe(output=str(Path(recipe().train.run_folder) / "whole"), warmup_questions=0)
    compare(whole)
    config = recipe(warmup_questions=0)
    answer, served = Runner.answer, []

    def killed(self: Runner, asked: Any) -> list[Answer]:
        if len(served) == 7:
            raise KeyboardInterrupt
        served.append(asked)
        return answer(self, asked)

    monkeypatch.setattr(Runner, "answer", killed)
    with pytest.raises(KeyboardInterrupt):
        compare(config)
    path = output(config) / "answers.jsonl"
    assert len(read_answers(path)) == 7 * 3
    # The machine went down in the middle of a line.
    with path.open("a", encoding="utf-8") as file:
        file.write('{"key": "half')

    calls = []
    monkeypatch.setattr(Runner, "answer", lambda *args: calls.append(args) or answer(*args))
    compare(config)
    assert len(calls) == 3, "two checkpoints of five questions, seven of them done"
    assert set(asked(read_answers(path)).values()) == {1}
    assert without_times(read_answers(path)) == without_times(
        read_answers(Path(whole.eval.output or "") / "answers.jsonl")
    )
    calls.clear()
    compare(config)
    assert not calls


def test_another_setting_starts_anew_and_says_so(
    recipe: MakeRecipe, caplog: pytest.LogCaptureFixture
) -> None:
    compare(recipe())
    with caplog.at_level(logging.WARNING):
        compare(recipe(max_new_tokens=3))
    assert "30 answers (base coinrag, base standard_rag, " in caplog.text
    answers = read_answers(output(recipe()) / "answers.jsonl")
    assert max(answer.new_tokens for answer in answers) <= 3
    assert set(asked(answers).values()) == {1}
    assert len(read_answers(output(recipe()) / "answers.previous.jsonl")) == 30


def test_new_weights_are_asked_again_and_the_base_is_not(
    recipe: MakeRecipe, caplog: pytest.LogCaptureFixture
) -> None:
    config = recipe()
    compare(config)
    before = read_answers(output(config) / "answers.jsonl")
    tiny_model("qwen2", seed=9).save_pretrained(Path(config.train.run_folder) / "checkpoint")
    with caplog.at_level(logging.WARNING):
        compare(config)
    assert "15 answers (fine_tuned coinrag, fine_tuned standard_rag, " in caplog.text
    after = read_answers(output(config) / "answers.jsonl")
    assert [a for a in after if a.checkpoint == "base"] == [
        a for a in before if a.checkpoint == "base"
    ]
    assert len(after) == 30


def test_an_added_system_is_asked_alone(
    recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(recipe(systems=["coinrag"], checkpoints=["base"]))
    seen = []
    answer = Runner.answer

    def watched(self: Runner, asked: Any) -> list[Answer]:
        seen.extend((cell.checkpoint, cell.system) for cell, _ in asked)
        return answer(self, asked)

    monkeypatch.setattr(Runner, "answer", watched)
    config = recipe(systems=["coinrag", "turborag"], checkpoints=["base"], warmup_questions=0)
    result = compare(config)
    assert set(seen) == {("base", "turborag")}
    assert [row["system"] for row in result["results"]] == ["turborag", "coinrag"]
    assert {row["kind"] for row in result["differences"]} == {"system"}


def test_systems_take_turns_and_share_the_encoded_chunks(
    recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = kv.encode_chunk

    def counted(model: Any, token_ids: Any) -> Any:
        encoded.append(len(token_ids))
        return encode(model, token_ids)

    monkeypatch.setattr(kv, "encode_chunk", counted)
    config = recipe(checkpoints=["base"], warmup_questions=2)
    result = compare(config)
    # The prompt and the three chunks that all questions have.
    assert len(encoded) == 4
    assert encoded[1:] != encoded[:3]
    # The warm-up has encoded all of them.
    assert result["offline"]["base"]["chunk_tokens"] == 0
    answers = read_answers(output(config) / "answers.jsonl")
    first = [answers[3 * number].system for number in range(5)]
    assert first == ["standard_rag", "turborag", "coinrag", "standard_rag", "turborag"]


def test_a_missing_checkpoint_names_the_command(recipe: MakeRecipe, tmp_path: Path) -> None:
    config = recipe()
    (Path(config.train.run_folder) / "checkpoint" / "config.json").unlink()
    with pytest.raises(UserError, match="coinrag train"):
        compare(config)
    assert not output(config).exists()
    kinds = {row["kind"] for row in compare(recipe(checkpoints=["base"]))["differences"]}
    assert kinds == {"system"}


def test_missing_dev_data_names_the_command(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval.questions, "load_built", data_builders.build.load_built)
    monkeypatch.chdir(tmp_path)
    for path in ("dev.jsonl", "none/config.json"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("{}\n")
    with pytest.raises(UserError, match="coinrag build"):
        compare(recipe())
    assert not output(recipe()).exists()


def test_a_missing_base_model_is_named(recipe: MakeRecipe, tmp_path: Path) -> None:
    config = recipe()
    absent = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(tmp_path / "absent")})}
    )
    with pytest.raises(ModelNotFoundError, match="absent"):
        compare(absent)
    assert not output(config).exists()


def test_no_questions_is_an_error(recipe: MakeRecipe, tables: BuiltTables) -> None:
    tables.samples = []
    with pytest.raises(UserError, match="no questions"):
        compare(recipe())


def test_a_foreign_file_in_place_of_the_answers_is_refused(recipe: MakeRecipe) -> None:
    config = recipe()
    output(config).mkdir(parents=True)
    (output(config) / "answers.jsonl").write_text('{"something": "else"}\n')
    with pytest.raises(UserError, match=r"answers\.jsonl:1"):
        compare(config)
    assert (output(config) / "answers.jsonl").read_text() == '{"something": "else"}\n'


def test_slices_from_a_store_give_the_answers_of_memory_and_are_loaded_inside_the_clock(
    recipe: MakeRecipe, tmp_path: Path
) -> None:
    config = recipe()
    compare(config)
    in_memory = read_answers(output(config) / "answers.jsonl")
    store = config.store.model_copy(update={"folder": str(tmp_path / "kv")})
    stored = config.model_copy(update={"store": store})
    compare(stored)
    from_disk = read_answers(output(config) / "answers.jsonl")
    assert without_times(from_disk) == without_times(in_memory)
    # What caches nothing does not depend on where slices come from.
    shared = {answer.key for answer in from_disk} & {answer.key for answer in in_memory}
    assert shared == {a.key for a in in_memory if a.system == "standard_rag"}
    for answer in from_disk:
        # fp32 keys and values of 2 layers, 2 heads and 16 dimensions.
        cached = answer.active_tokens if answer.system != "standard_rag" else 0
        assert answer.bytes_read == cached * 2 * 2 * 2 * 16 * 4
        assert 0 < answer.load_ms < answer.ttft_ms[0]
    assert all(answer.bytes_read == 0 for answer in in_memory)
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["base", "fine_tuned"]


def test_a_memory_tier_that_cannot_hold_a_question_is_refused(recipe: MakeRecipe) -> None:
    config = recipe()
    store = config.store.model_copy(update={"memory_gib": 1e-6})
    with pytest.raises(UserError, match=r"store\.memory_gib"):
        compare(config.model_copy(update={"store": store}))


def test_slices_kept_in_another_dtype_are_asked_again(recipe: MakeRecipe) -> None:
    config = recipe(checkpoints=["base"], systems=["coinrag"])
    compare(config)
    before = read_answers(output(config) / "answers.jsonl")
    store = config.store.model_copy(update={"dtype": "int8"})
    compare(config.model_copy(update={"store": store}))
    after = read_answers(output(config) / "answers.jsonl")
    assert len(after) == len(before)
    assert {answer.key for answer in after}.isdisjoint(answer.key for answer in before)
