"""What all readers share: files, places, mistakes, and values that come back as written."""

import gzip
import json
import random
import re
import tracemalloc
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_builders.readers import files, read_corpus, read_questions
from data_builders.records import Passage, Question
from recipes.errors import UserError

# Any character but half surrogates, with those that are apt to break readers made common.
TEXT = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from('"\\/\n\r\t \u2028\ufeff{}[],😀')),
    max_size=20,
)
SOME_TEXT = TEXT.filter(str.strip)
NAME = st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=8)


def rows(count=4):
    """Rows of the own format."""
    return [
        {
            "id": f"q{number}",
            "question": f"Who is {number}? 🙂é",
            "answers": ["Ann", "Anne"],
            "contexts": [{"title": "T", "text": "A [text], {so}.", "is_supporting": True}],
        }
        for number in range(count)
    ]


def layouts(rows):
    """The same rows in every layout that is read."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    return {
        "lines": "\n".join(lines) + "\n",
        "crlf": "\r\n".join(lines),
        "blank lines": "\n \n" + "\n\n\t\n".join(lines) + "\n\n",
        "list": json.dumps(rows, ensure_ascii=True),
        "indented list": json.dumps(rows, ensure_ascii=False, indent=2) + "\n",
        "list of lines": "\n[\n" + ",\n".join(lines) + "\n]\n",
    }


def read(path, data_format="jsonl", limit=None):
    return list(read_questions([path], data_format, limit))


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize("layout", layouts([{}]))
@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "gzip"])
@pytest.mark.parametrize("window", [1, 7, 1 << 20])
def test_every_layout_gives_the_same_rows(tmp_path, monkeypatch, layout, coding, window):
    monkeypatch.setattr(files, "READ_BYTES", window)
    text = layouts(rows())[layout]
    if coding == "gzip":
        path = tmp_path / "a.json.gz"
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path = tmp_path / "a.json"
        path.write_text(text, encoding=coding, newline="")
    found = read(path)
    assert found == read(write(tmp_path / "plain.jsonl", rows()))
    assert [question.text for question in found] == [row["question"] for row in rows()]
    for number, (question, row) in enumerate(zip(found, rows(), strict=True), start=1):
        line, of_list = re.fullmatch(
            rf"{re.escape(str(path))}:(\d+)(?: \(row (\d+)\))?", question.place
        ).groups()
        assert of_list == (str(number) if "list" in layout else None)
        # The line that a place names is where the row begins.
        rest = "\n".join(re.split(r"\r?\n", text)[int(line) - 1 :])
        if layout != "list":
            assert json.JSONDecoder().raw_decode(rest.strip())[0] == row
    assert [q.text for q in read(path, limit=2)] == [row["question"] for row in rows(2)]


def test_reading_streams(tmp_path):
    good = [json.dumps(row) for row in rows(3)]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join([*good, "{"]))
    array = tmp_path / "a.json"
    array.write_text("[" + ",".join(good) + ",{")
    for path in (lines, array):
        assert len(list(islice(read_questions([path], "jsonl"), 3))) == 3
        assert len(read(path, limit=3)) == 3
        with pytest.raises(UserError, match="malformed"):
            read(path)


def test_nothing_comes_after_the_first_mistake(tmp_path):
    path = write(tmp_path / "a.jsonl", [*rows(2), {"question": 1}, *rows(4)[2:], {"id": 1}])
    with pytest.raises(UserError) as error:
        read(path)
    assert f"{path}:3: " in str(error.value)
    assert f"{path}:6: " in str(error.value)
    stream = read_questions([path], "jsonl")
    assert [next(stream).id, next(stream).id] == ["q0", "q1"]
    with pytest.raises(UserError):
        next(stream)


@pytest.mark.parametrize("layout", ["lines", "list", "indented list"])
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, layout):
    monkeypatch.setattr(files, "READ_BYTES", 1 << 14)
    peaks = []
    for count in (50, 1000):
        made = [row | {"metadata": "é" * 5000} for row in rows(count)]
        path = tmp_path / "a.json"
        path.write_text(layouts(made)[layout], encoding="utf-8")
        del made
        tracemalloc.start()
        assert sum(1 for _ in read_questions([path], "jsonl")) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # A thousand rows are ten megabytes; what is kept of each is its name, a digest and its place.
    assert peaks[1] - peaks[0] < 1000 * 500


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("[", ":1 (row 1)", "found the end of the file inside the list"),
        ("[]", "", "no rows"),
        ("[{}", ":1 (row 1)", "expected a comma or ] after the row, found the end of the file"),
        ("[\n{} {}]", ":2 (row 1)", "expected a comma or ] after the row, found a string ('{')"),
        ("[\n1,\n2]", ":2 (row 1)", "expected a JSON object, found a number (1)"),
        ("[[], 2]", ":1 (row 1)", "expected a JSON object, found a list"),
        ("[\n\n{'a'}]", ":3 (row 1)", "malformed JSON at character 2 of the row"),
        ("[{},]", ":1 (row 2)", "malformed JSON at character 1 of the row"),
        ('["a', ":1 (row 1)", "malformed JSON"),
        ("[1]\n\n{}", ":3", "expected the end of the file after the list, found a string ('{')"),
        ("[" * 100_000, ":1 (row 1)", "malformed JSON"),
        ("[" + "9" * 5000 + "]", ":1 (row 1)", "malformed JSON"),
        ("{}\n[]", ":2", "expected a JSON object, found a list"),
        ("", "", "no rows; expected one JSON object a line or a list of them"),
        (" \n\t\n", "", "no rows"),
    ],
)
@pytest.mark.parametrize("window", [1, 1 << 20])
def test_what_is_no_list_of_objects_is_told_with_its_place(
    tmp_path, monkeypatch, text, place, message, window
):
    monkeypatch.setattr(files, "READ_BYTES", window)
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read(path)
    assert f"{path}{place}: " in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("window", [1, 5, 1 << 20])
def test_bytes_that_are_not_utf8_are_located_in_a_list(tmp_path, monkeypatch, window):
    monkeypatch.setattr(files, "READ_BYTES", window)
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf[\n{"id":\n "\xc3\xa9\xff"}]')
    with pytest.raises(UserError, match=r"a\.json:3: expected UTF-8, found byte 0xff at byte 16 "):
        read(path)


def test_files_of_other_kinds_are_refused_in_words(tmp_path):
    for name in ("a.parquet", "a.jsonl.zst", "A.ZIP"):
        (tmp_path / name).write_bytes(b"PAR1")
        with pytest.raises(UserError, match=r"files are not read; expected JSON Lines or a JSON"):
            read(tmp_path / name)
    whole = gzip.compress(json.dumps(rows()).encode())
    for name, content in (("cut.gz", whole[:-20]), ("plain.gz", b"{}"), ("bad.gz", b"\x1f\x8b0")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}: cannot read data file: \w+"):
            read(tmp_path / name)
    with pytest.raises(UserError, match="cannot read data file: Is a directory"):
        read(tmp_path)


IRCOT = {
    "dataset": "d", "question_id": "1", "question_text": "Q?",
    "answers_objects": [{"number": "", "date": {}, "spans": ["a"]}],
    "contexts": [{"idx": 0, "title": "T", "paragraph_text": "P", "is_supporting": True}],
}  # fmt: skip
HOTPOTQA = {
    "_id": "1", "question": "Q?", "answer": "a", "level": "hard", "type": "bridge",
    "supporting_facts": [["T", 0]], "context": [["T", ["P."]]],
}  # fmt: skip
WIKI2 = {
    "_id": "1", "question": "Q?", "answer": "a", "type": "inference",
    "evidences": [["a", "b", "c"]], "supporting_facts": [["T", 0]], "context": [["T", ["P."]]],
}  # fmt: skip
MUSIQUE = {
    "id": "1", "question": "Q?", "answer": "a", "answer_aliases": [], "answerable": True,
    "question_decomposition": [],
    "paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "P", "is_supporting": True}],
}  # fmt: skip
LONGBENCH = {
    "input": "Q?", "context": "Passage 1:\nT\nP", "answers": ["a"], "length": 1, "dataset": "d",
    "language": "en", "all_classes": None, "_id": "1",
}  # fmt: skip
OWN = {"id": "1", "question": "Q?", "answers": ["a"], "contexts": [{"title": "T", "text": "P"}]}
FORMATS = {
    "ircot": IRCOT, "jsonl": OWN, "hotpotqa": HOTPOTQA, "2wikimultihopqa": WIKI2,
    "musique": MUSIQUE, "longbench": LONGBENCH,
}  # fmt: skip


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("written", FORMATS)
def test_the_wrong_format_is_told_with_the_right_one(tmp_path, data_format, written):
    path = write(tmp_path / "a.jsonl", [FORMATS[written]] * 3)
    if data_format == written:
        assert len(read(path, data_format, limit=1)) == 1
        return
    with pytest.raises(UserError) as error:
        read(path, data_format)
    assert f"looks like a file for data.format: {written}" in str(error.value)
    assert f"{path}:1: " in str(error.value)
    assert f"{path}:2: " not in str(error.value)


def test_questions_and_corpora_are_told_apart(tmp_path):
    passages = write(tmp_path / "passages.jsonl", [{"title": "T", "text": "P"}])
    for data_format in FORMATS:
        with pytest.raises(UserError, match=r"looks like a file for data\.corpus"):
            read(passages, data_format)
        questions = write(tmp_path / "questions.jsonl", [FORMATS[data_format]])
        with pytest.raises(UserError, match=f"looks like a file for data.format: {data_format}"):
            list(read_corpus([questions]))


contexts = st.builds(Passage, TEXT, SOME_TEXT, st.booleans())
questions = st.builds(
    Question,
    id=NAME,
    dataset=NAME,
    text=SOME_TEXT,
    answers=st.lists(SOME_TEXT, min_size=1, max_size=3, unique=True).map(tuple),
    passages=st.lists(contexts, min_size=1, max_size=4).map(tuple),
)


def as_ircot(question):
    return IRCOT | {
        "dataset": question.dataset,
        "question_id": question.id,
        "question_text": question.text,
        "answers_objects": [
            {"number": "", "date": {"day": "", "month": "", "year": ""}, "spans": [answer]}
            for answer in question.answers
        ],
        "contexts": [
            {"title": p.title, "paragraph_text": p.text, "is_supporting": p.is_supporting}
            for p in question.passages
        ],
    }


def as_musique(question):
    return MUSIQUE | {
        "id": question.id,
        "question": question.text,
        "answer": question.answers[0],
        "answer_aliases": list(question.answers[1:]),
        "paragraphs": as_ircot(question)["contexts"],
    }


def as_own(question):
    return {
        "id": question.id,
        "dataset": question.dataset,
        "question": question.text,
        "answers": list(question.answers),
        "contexts": [
            {"title": p.title, "text": p.text, "is_supporting": p.is_supporting}
            for p in question.passages
        ],
    }


@pytest.mark.parametrize(
    ("data_format", "as_row"), [("ircot", as_ircot), ("musique", as_musique), ("jsonl", as_own)]
)
@settings(max_examples=60, deadline=None)
@given(
    written=st.lists(questions, min_size=1, max_size=4, unique_by=lambda question: question.id),
    ascii_only=st.booleans(),
    layout=st.sampled_from(["lines", "list"]),
)
def test_values_come_back_as_written(
    tmp_path_factory, data_format, as_row, written, ascii_only, layout
):
    path = tmp_path_factory.mktemp("written") / "a.json"
    lines = [json.dumps(as_row(question), ensure_ascii=ascii_only) for question in written]
    text = "\n".join(lines) if layout == "lines" else "[" + ", ".join(lines) + "]"
    path.write_text(text, encoding="utf-8", newline="")
    found = read(path, data_format)
    for question, expected in zip(found, written, strict=True):
        assert (question.id, question.text) == (expected.id, expected.text)
        assert (question.answers, question.passages) == (expected.answers, expected.passages)
        assert question.dataset == ("musique" if data_format == "musique" else expected.dataset)


JUNK = (None, True, 7, 1.5, "", " ", "\ud800", [], {}, [[]], [None], [{}], "x" * 50, float("nan"))


def corrupted(value, rng):
    """The value with one part of it, anywhere inside, replaced, removed or renamed."""
    if isinstance(value, list | dict) and value and rng.random() < 0.8:
        copy = value.copy()
        at = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
        if rng.random() < 0.15:
            del copy[at]
        elif isinstance(copy, dict) and rng.random() < 0.1:
            copy[f"{at}s"] = copy.pop(at)
        else:
            copy[at] = corrupted(copy[at], rng)
        return copy
    return rng.choice(JUNK)


@pytest.mark.parametrize("data_format", FORMATS)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_corrupt_value_is_a_mistake_with_its_place_or_none_at_all(
    tmp_path_factory, data_format, seed
):
    good = FORMATS[data_format]
    path = tmp_path_factory.getbasetemp() / f"{data_format}.jsonl"
    write(path, [good, corrupted(good, random.Random(seed))])
    expect_place(lambda: read(path, data_format), path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_corrupt_bytes_are_a_mistake_with_their_place_or_none_at_all(tmp_path_factory, data):
    data_format = data.draw(st.sampled_from(list(FORMATS)))
    layout = data.draw(st.sampled_from(list(layouts([{}]))))
    content = bytearray(layouts([FORMATS[data_format]])[layout].encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
        content = content or bytearray(b" ")
    path = tmp_path_factory.getbasetemp() / "corrupt.json"
    path.write_bytes(content)
    expect_place(lambda: read(path, data_format), path)


def expect_place(read, path):
    try:
        questions = read()
    except UserError as error:
        message = str(error)
        assert re.search(rf"{re.escape(str(path))}(:\d+( \(row \d+\))?)?: ", message)
        assert re.search(r":\d+", message) or "no rows" in message
        # What is shown can be written anywhere.
        message.encode()
    else:
        for question in questions:
            assert question.text.strip()
            assert all(answer.strip() for answer in question.answers)
            assert question.answers
            assert all(passage.text.strip() for passage in question.passages)
