"""The package's own format: corpora and questions."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_builders.readers import read_corpus, read_questions
from data_builders.records import Passage, Question
from recipes.errors import UserError


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def questions(tmp_path, *rows):
    return list(read_questions([write(tmp_path / "q.jsonl", *rows)], "jsonl"))


def corpus(tmp_path, *rows):
    return list(read_corpus([write(tmp_path / "c.jsonl", *rows)]))


def test_a_question_with_everything(tmp_path):
    row = {
        "id": 7,
        "question": "Who? ",
        "answers": ["Ann", "Anne", "Ann", " "],
        "contexts": [
            {"title": "T", "text": "P. ", "is_supporting": True, "metadata": [1]},
            {"text": "Q", "title": None},
        ],
        "supporting_ids": ["c1", 2, "c1"],
        "dataset": "mine",
        "metadata": {"anything": {"at": ["all"]}},
    }
    [question] = questions(tmp_path, row)
    assert question == Question(
        id="7",
        dataset="mine",
        text="Who? ",
        answers=("Ann", "Anne"),
        passages=(Passage("T", "P. ", True), Passage("", "Q")),
        supporting_ids=("c1", "2"),
    )
    assert question.place == f"{tmp_path / 'q.jsonl'}:1"


def test_a_question_needs_its_text_and_an_answer_only(tmp_path):
    first, second, again = questions(
        tmp_path,
        {"question": "Who?", "answer": "Ann"},
        {"question": "What?", "answer": "Ann", "contexts": None, "id": None, "metadata": None},
        {"question": "Who?", "answer": "Ann", "dataset": "other"},
    )
    assert (first.answers, first.passages, first.supporting_ids) == (("Ann",), (), ())
    assert first.dataset == second.dataset == "custom"
    assert len({first.id, second.id, again.id}) == 3
    assert questions(tmp_path, {"question": "Who?", "answer": "B"})[0].id == first.id


GOOD = {"question": "Q?", "answer": "a"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Q?", "anwser": "a"}, "anwser: unknown field; did you mean 'answer'?"),
        ({"question": "Q?", "Answers": ["a"]}, "Answers: unknown field; did you mean 'answers'?"),
        (GOOD | {"context": []}, "context: unknown field; did you mean 'contexts'?"),
        (GOOD | {"zzz": 1}, "zzz: unknown field; known are id, question, answers, answer, "),
        (GOOD | {"\ud800": 1}, "the row: expected Unicode text"),
        (GOOD | {"contexts": [{"txt": "P"}]}, "contexts[0].txt: unknown field; did you mean 'tex"),
        (GOOD | {"contexts": [{"id": "1", "text": "P"}]}, "contexts[0].id: unknown field"),
        (GOOD | {"contexts": ["P"]}, "contexts[0]: expected an object, found a string ('P')"),
        (GOOD | {"contexts": [{"title": "T"}]}, "contexts[0].text: missing; expected a string"),
        (GOOD | {"contexts": {}}, "contexts: expected a list, found an object"),
        (GOOD | {"answers": ["a"]}, "answer: expected either answer or answers, found both"),
        ({"question": "Q?", "answers": "a"}, "answers: expected a list, found a string ('a')"),
        ({"question": "Q?", "answers": []}, "answers: expected at least one answer, found none"),
        ({"question": "Q?"}, "answer: expected the answer, found none"),
        ({"answer": "a"}, "question: missing; expected a string"),
        (GOOD | {"id": True}, "id: expected a string or an integer, found true or false (true)"),
        (GOOD | {"id": " "}, "id: expected an id, found an empty string"),
        (GOOD | {"supporting_ids": [1.5]}, "supporting_ids[0]: expected a string or an integer"),
        (GOOD | {"supporting_ids": "c1"}, "supporting_ids: expected a list"),
    ],
)
def test_a_mistake_names_file_line_and_field(tmp_path, row, message):
    with pytest.raises(UserError) as error:
        questions(tmp_path, {"question": "Good?", "answer": "a"}, row)
    assert f"{tmp_path / 'q.jsonl'}:2: {message}" in str(error.value)
    assert "looks like" not in str(error.value)


def test_a_corpus(tmp_path):
    first, second, third, same_text = corpus(
        tmp_path,
        {"id": "a", "title": "T", "text": "P. ", "metadata": {"url": "u"}},
        {"id": 2, "text": "Q"},
        {"title": "T", "text": "R"},
        {"id": "z", "title": "T", "text": "P. "},
    )
    assert first == Passage("T", "P. ", id="a")
    assert second == Passage("", "Q", id="2")
    assert third.text == "R"
    assert third.id
    assert (same_text.id, same_text.full_text) == ("z", first.full_text)
    # An id is made of the content, wherever it stands.
    assert corpus(tmp_path, {"title": "T", "text": "R"}) == [third]
    assert corpus(tmp_path, {"title": "t", "text": "R"})[0].id != third.id


def test_one_id_for_two_passages_is_a_mistake_with_both_places(tmp_path):
    first = write(tmp_path / "a.jsonl", {"text": "x"}, {"id": "1", "text": "P"})
    second = write(tmp_path / "b.jsonl", {"id": "2", "text": "P"}, {"id": 1, "text": "Q"})
    with pytest.raises(UserError) as error:
        list(read_corpus([first, second]))
    assert f"{second}:2: id: '1' names another passage at {first}:2" in str(error.value)


def test_a_passage_given_again_is_left_out_and_counted(tmp_path, caplog):
    rows = [{"id": "1", "text": "P"}, {"id": "1", "text": "P"}, {"text": "Q"}, {"text": "Q"}]
    assert [passage.text for passage in corpus(tmp_path, *rows)] == ["P", "Q"]
    assert "c.jsonl: left out 2 passages given before" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": ""}, "text: expected some text, found an empty string"),
        ({"id": "1"}, "text: missing; expected a string"),
        ({"text": "P", "title": 1}, "title: expected a string, found a number (1)"),
        ({"text": "P", "titel": "T"}, "titel: unknown field; did you mean 'title'?"),
        ({"_id": "1", "text": "P"}, "_id: unknown field; did you mean 'id'?"),
        ({"text": "\udfff"}, "text: expected Unicode text, found a lone surrogate"),
    ],
)
def test_mistakes_of_a_corpus(tmp_path, row, message):
    with pytest.raises(UserError) as error:
        corpus(tmp_path, {"text": "good"}, row)
    assert f"{tmp_path / 'c.jsonl'}:2: {message}" in str(error.value)


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(Passage, TEXT, TEXT.filter(str.strip), id=TEXT.map(str.strip).filter(bool)),
        min_size=1,
        max_size=6,
        unique_by=lambda passage: passage.id,
    )
)
def test_a_corpus_comes_back_as_written(tmp_path_factory, passages):
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in passages]
    assert corpus(tmp_path_factory.getbasetemp(), *rows) == passages
