import json

import pytest

from data_builders.readers import read_questions
from recipes.errors import UserError

EMPTY_DATE = {"day": "", "month": "", "year": ""}


def read(*paths, limit=None):
    return list(read_questions(paths, "ircot", limit))


def answer(*spans, number="", date=EMPTY_DATE):
    return {"number": number, "date": date, "spans": list(spans)}


def row(**changes):
    good = {
        "dataset": "d",
        "question_id": "q1",
        "question_text": "Who?  ",
        "answers_objects": [answer("Ann")],
        "contexts": [
            {"idx": 0, "title": "T", "paragraph_text": "P. director.He ", "is_supporting": True}
        ],
    }
    return {**good, **changes}


def write(path, *rows):
    lines = [line if isinstance(line, str) else json.dumps(line) for line in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_text_is_kept_verbatim(tmp_path):
    [question] = read(write(tmp_path / "a.jsonl", row()))
    assert question.text == "Who?  "
    assert question.passages[0].full_text == "T\nP. director.He \n"
    assert question.passages[0].is_supporting


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([answer("Frankfurt am Main"), answer("Frankfurt")], ("Frankfurt am Main", "Frankfurt")),
        ([answer("Ann", "Bo")], ("Ann, Bo",)),
        ([answer(number="12")], ("12",)),
        ([answer(number=12)], ("12",)),
        ([answer(date={"day": "3", "month": "May", "year": "1990"})], ("3 May 1990",)),
        ([answer(date={"day": "", "month": "", "year": "1990"})], ("1990",)),
        ([answer("x"), answer("x"), answer()], ("x",)),
    ],
)
def test_answers_of_every_kind(tmp_path, entries, expected):
    [question] = read(write(tmp_path / "a.jsonl", row(answers_objects=entries)))
    assert question.answers == expected


def without(name):
    return {key: value for key, value in row().items() if key != name}


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ("{not json", ["malformed JSON", "column 2"]),
        ("[1]", ["expected a JSON object, found a list"]),
        (without("question_text"), ["question_text: missing; expected a string"]),
        (row(question_id=7), ["question_id: expected a string, found a number (7)"]),
        (row(question_text=" "), ["question_text: expected some text, found an empty string"]),
        (row(contexts=[]), ["contexts: expected at least one passage"]),
        (row(contexts=None), ["contexts: expected a list, found null"]),
        (row(contexts=["x"]), ["contexts[0]: expected an object, found a string"]),
        (row(contexts=[{"title": "T"}]), ["contexts[0].paragraph_text: missing"]),
        (row(answers_objects=[]), ["answers_objects: expected at least one answer, found none"]),
        (row(answers_objects=[answer("")]), ["expected at least one answer"]),
        (row(answers_objects=[answer(3)]), ["answers_objects[0].spans[0]: expected a string"]),
        (row(answers_objects=[answer(date=[1])]), ["answers_objects[0].date: expected an object"]),
        (row(answers_objects=[answer(number=[])]), ["answers_objects[0].number"]),
        (row(question_text="\ud800?"), ["question_text: expected Unicode text"]),
        (row(answers_objects=[answer(number="\ud800")]), ["answers_objects[0].number: expected"]),
        (row(answers_objects=[answer(number=float("nan"))]), ["answers_objects[0].number"]),
        (row(answers_objects=[answer(date={"day": "\ud800"})]), ["[0].date.day: expected Unicode"]),
        (row(answers_objects=[answer(date={"day": [1]})]), ["[0].date.day: expected a string"]),
        (row(answers_objects=[answer(" ", "")]), ["expected at least one answer"]),
        ('{"idx": ' + "9" * 5000 + "}", ["malformed JSON", "digits"]),
        ("[" * 100_000, ["malformed JSON"]),
    ],
)
def test_a_mistake_names_file_line_and_field(tmp_path, bad, parts):
    path = write(tmp_path / "a.jsonl", row(), bad)
    with pytest.raises(UserError) as error:
        read(path)
    assert f"{path}:2: " in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_is_supporting_must_be_a_bool(tmp_path):
    context = {"title": "T", "paragraph_text": "P", "is_supporting": "no"}
    with pytest.raises(UserError, match=r"is_supporting: expected true or false, found a string"):
        read(write(tmp_path / "a.jsonl", row(contexts=[context])))


def test_all_mistakes_of_a_file_come_together_up_to_ten(tmp_path):
    path = write(tmp_path / "a.jsonl", *(["{"] * 12))
    with pytest.raises(UserError) as error:
        read(path)
    assert f"{path}:10:" in str(error.value)
    assert f"{path}:11:" not in str(error.value)
    assert "more may follow" in str(error.value)


def test_repeated_questions_are_refused_across_files(tmp_path):
    first, second = write(tmp_path / "a.jsonl", row()), write(tmp_path / "b.jsonl", row())
    with pytest.raises(UserError, match="with the same question is already at") as error:
        read(first, second)
    assert f"{second}:1: id" in str(error.value)
    assert f"{first}:1" in str(error.value)


def test_other_questions_under_one_id_stay_apart_with_a_warning(tmp_path, caplog):
    path = write(
        tmp_path / "a.jsonl", row(), row(question_text="What?"), row(question_text="When?")
    )
    ids = [question.id for question in read(path)]
    assert ids[0] == "q1"
    assert len(set(ids)) == 3
    assert ids == [question.id for question in read(path)]
    assert f"{path}:2: id 'q1' is taken" in caplog.text


def test_no_row_is_lost_when_a_made_id_is_taken(tmp_path):
    rows = [row(), row(question_text="What?")]
    made = read(write(tmp_path / "a.jsonl", *rows))[1].id
    taken = row(question_id=made, question_text="When?")
    questions = read(write(tmp_path / "b.jsonl", taken, *rows))
    assert [question.text for question in questions] == ["When?", "Who?  ", "What?"]
    assert len({question.id for question in questions}) == 3


def test_a_blank_id_is_made_of_the_question(tmp_path):
    rows = [row(question_id="", question_text=text) for text in ("Who?", "What?")]
    ids = [question.id for question in read(write(tmp_path / "a.jsonl", *rows))]
    assert len(set(ids)) == 2
    assert all(ids)
    [again] = read(write(tmp_path / "b.jsonl", rows[1]))
    assert again.id == ids[1]


def test_bytes_that_are_not_utf8_are_located(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(row()).encode() + b'\n{"x": "\xff"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: expected UTF-8, found byte 0xff at byte 7"):
        read(path)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="cannot read data file"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="no rows"):
        read(write(tmp_path / "a.jsonl", "", " "))


def test_the_limit_counts_rows_of_each_file(tmp_path):
    first = write(tmp_path / "a.jsonl", row(question_id="1"), "", row(question_id="2"), "{")
    second = write(tmp_path / "b.jsonl", row(question_id="3"))
    assert [q.id for q in read(first, second, limit=2)] == ["1", "2", "3"]
