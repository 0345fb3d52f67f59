"""`coinrag ask`: from a recipe to answers, through a real engine with a tiny model."""

import io
import json
from collections.abc import Callable

import pytest
from small import encode_words

from eval import retriever
from launch import cli

Recipe = Callable[..., list[str]]
QUESTIONS = ["Where was Persond20x1 born?", "Where was Persond21x1 born?"]


@pytest.fixture
def built(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys) -> Recipe:
    monkeypatch.setattr(retriever, "load_encoder", lambda config, threads: encode_words)
    assert cli.main(["build", *recipe()]) == 0
    capsys.readouterr()
    return recipe


def asked(*questions: str) -> list[str]:
    return [word for question in questions for word in ("--question", question)]


REPAIRED = ["context.anchors={prefix_tokens: 2, suffix_tokens: 1}", "context.repair={ratio: 0.5}"]
AVERAGED = [
    "context.anchors.summary=mean",
    "context.packets={}",
    "context.contextualizer={width: 16}",
]


@pytest.mark.parametrize(
    ("system", "options"),
    [("coinrag", []), ("coinrag", REPAIRED), ("coinrag", AVERAGED), ("kvlink", []),
     ("standard_rag", [])],
)  # fmt: skip
def test_each_system_answers(built, capsys, tmp_path, system, options):
    files = {name: tmp_path / "out" / name for name in ("log.jsonl", "metrics.prom")}
    (tmp_path / "out").mkdir()
    words = ["--system", system, "--log", str(files["log.jsonl"])]
    words += ["--metrics", str(files["metrics.prom"]), "--json"]
    assert cli.main(["ask", *built(*options), *asked(*QUESTIONS), *words]) == 0
    [line] = capsys.readouterr().out.splitlines()
    answers = json.loads(line)["answers"]
    assert [answer["question"] for answer in answers] == QUESTIONS
    assert {(answer["system"], answer["checkpoint"]) for answer in answers} == {(system, "base")}
    logged = [json.loads(line) for line in files["log.jsonl"].read_text().splitlines()]
    assert logged == answers
    assert "coinrag_requests_total" in files["metrics.prom"].read_text()


def test_answers_are_shown_as_they_come_and_are_those_of_the_report(
    built, capsys, monkeypatch, tmp_path
):
    assert cli.main(["ask", *built(), *asked(*QUESTIONS), "--json"]) == 0
    told = [answer["answer"] for answer in json.loads(capsys.readouterr().out)["answers"]]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTIONS[0]}\n\n  {QUESTIONS[1]} \n"))
    assert cli.main(["ask", *built()]) == 0
    # An answer may end in white space, which the report leaves out.
    shown = capsys.readouterr().out
    assert "".join(shown.split()) == "".join("".join(told).split())
    assert shown.endswith("\n")


def test_the_second_run_reads_what_the_first_has_stored(built, capsys, tmp_path):
    def tokens() -> dict[str, int]:
        words = [*asked(QUESTIONS[0]), "--checkpoint", "fine_tuned", "--json"]
        assert cli.main(["ask", *built(), *words]) == 0
        [answer] = json.loads(capsys.readouterr().out)["answers"]
        return {source: answer[f"tokens_{source}"] for source in ("disk", "computed")}

    first = tokens()
    assert first["computed"] > first["disk"] == 0
    assert tokens() == {"disk": first["computed"], "computed": 0}
    assert (tmp_path / "stores" / "fine_tuned" / "index.sqlite").is_file()


def test_no_question_and_nothing_built_are_told(built, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert cli.main(["ask", *built()]) == 2
    assert "no question: give --question TEXT" in capsys.readouterr().err
    assert cli.main(["ask", *built("data.chunk_tokens=99"), *asked("Where?")]) == 2
    assert "run `coinrag build`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("context.packets={}", "trained with 0 packet tokens before each slice"),
        ("context.contextualizer={}", "trained with a context.contextualizer of none"),
        ("context.repair={check_layer: 2}", "context.repair.check_layer: the check layer is 2"),
    ],
)
def test_weights_that_do_not_have_what_an_option_needs_are_named(built, capsys, option, message):
    words = [*asked(QUESTIONS[0]), "--checkpoint", "fine_tuned"]
    assert cli.main(["ask", *built(option), *words]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("option", ["--log", "--metrics"])
def test_a_file_that_cannot_be_written_is_the_users_mistake(built, tmp_path, capsys, option):
    (tmp_path / "file").write_text("")
    words = [*asked(QUESTIONS[0]), option, str(tmp_path / "file" / "out")]
    assert cli.main(["ask", *built(), *words]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "file" / "out") in error
    assert "Traceback" not in error


def test_a_question_that_is_no_text_is_named(built, monkeypatch, capsys):
    lines = io.TextIOWrapper(io.BytesIO(b"Where?\nb\xff\n"), "utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", lines)
    assert cli.main(["ask", *built()]) == 2
    assert "question 2 is not UTF-8" in capsys.readouterr().err
