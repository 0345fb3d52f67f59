"""`coinrag compare` through the command line: killed and gone on with, under attack, on LongBench's
files."""

import fcntl
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from small import data_row, write_rows

import eval.compare
from cache_ops.hf import load_tokenizer
from data_builders.prompt import PromptTemplate
from eval.answers import Answer, read_answers
from eval.metrics import normalize_answer
from launch import cli
from recipes.resolve import resolve

Recipe = Callable[..., list[str]]
RULES = "systems.online_nuggets.extractor=rules"

# Children start with everything imported, so that what is killed is a comparison at work.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["launch.cli", "eval.compare", "matplotlib.figure"])


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for drawing in ("draw_all", "draw_overview"):
        monkeypatch.setattr(eval.compare, drawing, lambda *arguments: None)


def run(command: str, arguments: Sequence[str]) -> None:
    assert cli.main([command, *arguments]) == 0


def lines_of(folder: Path) -> list[bytes]:
    """The complete lines of a comparison's answers."""
    path = folder / "answers.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def is_locked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def killed(arguments: Sequence[str], folder: Path, is_time: Callable[[], bool]) -> int | None:
    """The exit code of a comparison that SIGKILL meets a little after its time has come."""
    process = PROCESSES.Process(target=cli.main, args=(["compare", *arguments],))
    process.start()
    deadline = time.monotonic() + 300
    # At work only once it holds the folder: what it waits for may be there before it starts.
    while process.is_alive() and not (is_time() and is_locked(folder)):
        assert time.monotonic() < deadline, "a comparison hangs, or does not hold its folder"
        time.sleep(0.01)
    time.sleep(Random().uniform(0, 0.03))
    process.kill()
    process.join()
    return process.exitcode


def without_times(result: dict[str, Any]) -> Any:
    rows = [
        {name: value for name, value in row.items() if not name.endswith("_ms")}
        for row in result["results"]
    ]
    return rows, [result[name] for name in ("differences", "examples", "questions_by_dataset")]


def test_a_killed_comparison_repeats_nothing_and_loses_nothing(
    recipe: Recipe, tmp_path: Path
) -> None:
    rows = [data_row(n, dataset=("dü", "e")[n % 2]) for n in range(20, 28)]
    systems = ["standard_rag", "turborag", "online_nuggets", "coinrag"]
    arguments = recipe(
        f"data.dev=[{write_rows(tmp_path / 'odd.jsonl', rows)}]",
        f"eval.systems=[{','.join(systems)}]",
        RULES,
        "store.folder=null",
        "eval.bootstrap_resamples=200",
    )
    run("build", arguments)
    run("compare", [*arguments, f"eval.output={tmp_path / 'whole'}"])
    whole, folder = tmp_path / "whole", tmp_path / "run" / "compare"
    total = len(rows) * len(systems) * 2
    assert len(lines_of(whole)) == total

    folder.mkdir()
    times: list[Callable[[], bool]] = [
        lambda: len(lines_of(folder)) >= 4,
        lambda: len(lines_of(folder)) > total // 2,
        # While the report is written, before its first file and after it.
        lambda: len(lines_of(folder)) == total,
        (folder / "compare.json").exists,
    ]
    before: list[bytes] = []
    codes = []
    for number, is_time in enumerate(times):
        codes.append(killed(arguments, folder, is_time))
        after = lines_of(folder)
        assert after[: len(before)] == before, "what was answered is not asked again"
        assert len(after) > len(before) or len(before) == total
        assert not is_locked(folder)
        before = after
        if number < 2:
            # A machine that went down leaves a piece of a line, that may end inside a character.
            cut = before[0].index("ü".encode()) + 1
            with (folder / "answers.jsonl").open("ab") as file:
                file.write(before[0][:cut])
    assert codes.count(-9) >= 2, codes

    run("compare", arguments)
    assert lines_of(folder)[: len(before)] == before
    answers = read_answers(folder / "answers.jsonl")
    asked = Counter((answer.variant, answer.question_id) for answer in answers)
    assert len(asked) == total
    assert set(asked.values()) == {1}
    results = [json.loads((one / "compare.json").read_text("utf-8")) for one in (folder, whole)]
    assert without_times(results[0]) == without_times(results[1])
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert names == {path.name for path in whole.iterdir()}


@pytest.mark.usefixtures("undrawn")
def test_planted_instructions_are_followed_to_the_report(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dev = write_rows(tmp_path / "clean.jsonl", [data_row(number) for number in range(20, 26)])
    systems = ["standard_rag", "turborag", "online_nuggets", "coinrag"]
    settings = [f"eval.systems=[{','.join(systems)}]", "eval.checkpoints=[base]", RULES]
    settings += ["store.folder=null", "eval.bootstrap_resamples=200"]
    clean = recipe(f"data.dev=[{dev}]", *settings)
    run("build", clean)
    run("compare", clean)
    capsys.readouterr()

    out = tmp_path / "attacked"
    assert cli.main(["inject", dev, str(out), "--json"]) == 0
    overrides = json.loads(capsys.readouterr().out)["overrides"]
    answered = tmp_path / "run" / "compare" / "answers.jsonl"
    attacked = recipe(*settings, *overrides, f"eval.injection_clean={answered}")
    run("build", attacked)
    run("compare", attacked)
    shown = capsys.readouterr().out
    assert "instructions planted in passages" in shown
    assert "obeyed, by kind, place and carrier of the attack" in shown
    result = json.loads((out / "compare" / "compare.json").read_text("utf-8"))
    rows = {row["system"]: row for row in result["injection"]}
    assert [*rows] == systems
    for system, row in rows.items():
        assert row["attacked"] == row["clean"]["questions"] == 6
        assert row["success"] == row["success_low"] == 0 < row["success_high"] < 1
        # Rules leave nothing out, and whole chunks hold what was planted in them.
        assert row["in_nugget"] == (row["retrieved"] if system == "coinrag" else None)
        assert 0 < row["in_prefix"] <= row["retrieved"] <= 1
    assert rows["standard_rag"]["in_prefix"] == rows["standard_rag"]["retrieved"]
    page = (out / "compare" / "compare.html").read_text("utf-8")
    assert '"injection":[{"arm":"","checkpoint":"base"' in page

    # What an answer says is held against the file as it now is, and nothing is asked again.
    before = lines_of(out / "compare")
    answers = read_answers(out / "compare" / "answers.jsonl")
    given = next(answer for answer in answers if normalize_answer(answer.answer))
    injections = [json.loads(line) for line in (out / "injections.jsonl").open(encoding="utf-8")]
    for injection in injections:
        if injection["question_id"] == given.question_id:
            injection |= {"target": given.answer, "text": f"{injection['text']} {given.answer}"}
    write_rows(out / "injections.jsonl", injections)
    run("compare", attacked)
    assert lines_of(out / "compare") == before
    result = json.loads((out / "compare" / "compare.json").read_text("utf-8"))
    [row] = [row for row in result["injection"] if row["system"] == given.system]
    assert row["success"] >= 1 / 6

    injections = [one | {"question_id": f"other {n}"} for n, one in enumerate(injections)]
    write_rows(out / "others.jsonl", injections)
    capsys.readouterr()
    assert cli.main(["compare", *attacked, f"eval.injections={out / 'others.jsonl'}"]) == 2
    assert "attacks none of the questions that are asked" in capsys.readouterr().err


def longbench_row(
    dataset: str, question: str, passages: Sequence[str], name: str
) -> dict[str, Any]:
    """A row of LongBench's form; a single passage stands alone, as in its one-document sets."""
    numbered = [f"Passage {n}:\n{text}" for n, text in enumerate(passages, start=1)]
    return {
        "input": question,
        "context": "\n\n".join(numbered) if len(passages) > 1 else passages[0],
        "answers": ["Townx1", "the town of Townx1"],
        "length": sum(len(text.split()) for text in passages),
        "dataset": dataset,
        "language": "en",
        "all_classes": None,
        "_id": name,
    }


@pytest.mark.usefixtures("undrawn")
def test_longbenchs_files_are_compared_and_what_was_cut_is_said(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "Personx1 was born in Townx1 and won the prize of 1020 in the city."
    short = [f"Person {n}\n{sentence}" for n in range(3)]
    story = " ".join(f"{sentence} It was day {n}." for n in range(30))
    # Two sets may name their rows alike.
    files = {
        "hotpotqa": longbench_row("hotpotqa", "Where was Personx1 born?", short, "1"),
        "narrativeqa": longbench_row("narrativeqa", "Where was she born?", [story], "1"),
    }
    paths = [write_rows(tmp_path / f"{name}.jsonl", [row]) for name, row in files.items()]
    arguments = recipe(
        f"data.dev=[{','.join(paths)}]",
        "data.dev_format=longbench",
        "eval.checkpoints=[base]",
        "store.folder=null",
        "eval.bootstrap_resamples=200",
    )
    config = resolve(arguments).config
    template = PromptTemplate(load_tokenizer(config.model.path), config.prompt)
    asked = len(template.prompt_ids) + len(template.query_ids("Where was Personx1 born?"))
    limit = asked + 2 * 128
    arguments.append(f"eval.max_prompt_tokens={limit}")
    run("build", arguments)
    run("compare", arguments)
    shown = capsys.readouterr().out
    note = "note: 1 answers of Standard RAG left out the middle of a context too long for"
    assert note in shown
    answers: dict[tuple[str, str], Answer] = {
        (answer.system, answer.dataset): answer
        for answer in read_answers(tmp_path / "run" / "compare" / "answers.jsonl")
    }
    assert len(answers) == 3 * 2
    assert len({answer.question_id for answer in answers.values()}) == 2
    for (system, dataset), answer in answers.items():
        is_cut = (system, dataset) == ("standard_rag", "narrativeqa")
        assert bool(answer.cut_tokens) == is_cut
        # LongBench does not say what supports an answer.
        assert answer.gold_recall is None
        assert answer.answer_in_chunks
        if system == "standard_rag":
            assert answer.online_tokens <= limit - limit % 2
            assert is_cut == (answer.online_tokens >= limit - limit % 2)
    result = json.loads((tmp_path / "run" / "compare" / "compare.json").read_text("utf-8"))
    assert result["questions_by_dataset"] == {"hotpotqa": 1, "narrativeqa": 1}
    assert {row["gold_recall"] for row in result["results"]} == {None}
