"""HotpotQA's, 2WikiMultihopQA's and MuSiQue's original rows, and LongBench's."""

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_builders.readers import read_questions
from data_builders.readers.longbench import split_context
from data_builders.records import Passage
from recipes.errors import UserError

REAL = Path(os.environ.get("COINRAG_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))

HOTPOTQA = {
    "_id": "5a7a",
    "question": "Were both of one nation? ",
    "answer": "yes",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": [["Ed Wood", 0], ["Scott", 0], ["Ed Wood", 1]],
    "context": [
        ["Ed Wood", ["Edward was American.", " He wrote.", " "]],
        ["Other (film)", ["A film.", "No space here."]],
        ["Scott", ["Scott is\u00a0American."]],
    ],
}
WIKI2 = {
    "_id": "8813",
    "question": "Who is the mother of the director?",
    "answer": "Małgorzata Braunek",
    "answer_id": "Q274277",
    "type": "compositional",
    "entity_ids": "Q1_Q2",
    "evidences": [["Film", "director", "Xawery"]],
    "supporting_facts": [["Film", 0], ["Xawery", 1]],
    "context": [
        ["Film", ["Film( 2009) is Polish."]],
        ["Xawery", ["He was born.", "He is the son of Małgorzata Braunek."]],
        ["Nobody", ["Nothing."]],
    ],
}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Who is the spouse of the performer?",
    "answer": "Miquette Giraudy",
    "answer_aliases": ["Giraudy", "Miquette Giraudy", " "],
    "answerable": True,
    "question_decomposition": [
        {"id": 1, "question": "Green >> performer", "answer": "Steve", "paragraph_support_idx": 0}
    ],
    "paragraphs": [
        {"idx": 0, "title": "Green", "paragraph_text": "Green is his.", "is_supporting": True},
        {"idx": 1, "title": "Blue", "paragraph_text": "Blue is not. ", "is_supporting": False},
    ],
}
LONGBENCH = {
    "input": "Who?",
    "context": "Passage 1:\nGreen\nGreen is his.\n\nSince then.\n\nPassage 2:\nBlue\nBlue is not. ",
    "answers": ["Ann", "Anne"],
    "length": 9,
    "dataset": "musique",
    "language": "en",
    "all_classes": None,
    "_id": "87f9",
}


def read(tmp_path, data_format, *rows):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return list(read_questions([path], data_format))


def columns(row):
    """A row as Hugging Face's datasets export it."""
    titles, sentences = zip(*row["context"], strict=True)
    supporting, numbers = zip(*row["supporting_facts"], strict=True)
    kept = {key: value for key, value in row.items() if key != "_id"}
    return kept | {
        "id": row["_id"],
        "context": {"title": titles, "sentences": sentences},
        "supporting_facts": {"title": supporting, "sent_id": numbers},
    }


@pytest.mark.parametrize("shape", [dict, columns])
def test_hotpotqa(tmp_path, shape):
    [question] = read(tmp_path, "hotpotqa", shape(HOTPOTQA))
    assert (question.id, question.dataset) == ("5a7a", "hotpotqa")
    assert question.text == "Were both of one nation? "
    assert question.answers == ("yes",)
    # Sentences bring their spaces, so what stands without one stood so in the article.
    assert question.passages == (
        Passage("Ed Wood", "Edward was American. He wrote. ", True),
        Passage("Other (film)", "A film.No space here.", False),
        Passage("Scott", "Scott is\u00a0American.", True),
    )


@pytest.mark.parametrize("shape", [dict, columns])
def test_2wikimultihopqa(tmp_path, shape):
    [question] = read(tmp_path, "2wikimultihopqa", shape(WIKI2))
    assert (question.id, question.dataset) == ("8813", "2wikimultihopqa")
    assert question.answers == ("Małgorzata Braunek",)
    assert question.passages == (
        Passage("Film", "Film( 2009) is Polish.", True),
        Passage("Xawery", "He was born. He is the son of Małgorzata Braunek.", True),
        Passage("Nobody", "Nothing.", False),
    )


def test_the_two_sets_of_one_shape_are_told_apart(tmp_path):
    for data_format, row, other in (
        ("hotpotqa", WIKI2, "2wikimultihopqa"),
        ("2wikimultihopqa", HOTPOTQA, "hotpotqa"),
    ):
        with pytest.raises(UserError, match=f"looks like a file for data.format: {other}"):
            read(tmp_path, data_format, row)


def test_passages_without_text_are_left_out_and_counted(tmp_path, caplog):
    empty = HOTPOTQA | {"context": [["Nothing", []], *HOTPOTQA["context"], ["Blank", [" "]]]}
    [question] = read(tmp_path, "hotpotqa", empty)
    assert question.passages == read(tmp_path, "hotpotqa", HOTPOTQA)[0].passages
    assert "a.jsonl: left out 2 passages without text" in caplog.text


def test_musique(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    [question] = read(tmp_path, "musique", MUSIQUE)
    assert (question.id, question.dataset) == ("2hop__1_2", "musique")
    assert question.answers == ("Miquette Giraudy", "Giraudy")
    assert question.passages == (
        Passage("Green", "Green is his.", True),
        Passage("Blue", "Blue is not. ", False),
    )
    assert not caplog.records


def test_unanswerable_questions_are_left_out_and_counted(tmp_path, caplog):
    twin = MUSIQUE | {"answerable": False}
    [question] = read(tmp_path, "musique", twin, MUSIQUE, twin)
    assert question == read(tmp_path, "musique", MUSIQUE)[0]
    assert "left out 2 unanswerable questions" in caplog.text
    with pytest.raises(UserError, match=r"no rows.*\(left out: 1 unanswerable questions\)"):
        read(tmp_path, "musique", twin)


def test_longbench(tmp_path):
    [question] = read(tmp_path, "longbench", LONGBENCH)
    assert (question.id, question.dataset) == ("87f9", "musique")
    assert question.answers == ("Ann", "Anne")
    assert question.passages == (
        Passage("Green", "Green is his.\n\nSince then."),
        Passage("Blue", "Blue is not. "),
    )


@pytest.mark.parametrize(
    ("data_format", "row", "name"),
    [
        ("hotpotqa", HOTPOTQA, "answer"),
        ("2wikimultihopqa", WIKI2, "answer"),
        ("musique", MUSIQUE, "answer"),
    ],
)
def test_test_sets_without_answers_are_refused_in_words(tmp_path, data_format, row, name):
    unknown = {key: value for key, value in row.items() if key != name}
    for without in (unknown, unknown | {name: None}, unknown | {name: ""}):
        with pytest.raises(UserError, match=r"answer: expected the answer, found none; a test set"):
            read(tmp_path, data_format, without)


@pytest.mark.parametrize(
    ("data_format", "row", "message"),
    [
        ("hotpotqa", HOTPOTQA | {"context": {"title": ["T"]}}, "context.sentences: missing"),
        (
            "hotpotqa",
            HOTPOTQA | {"context": {"title": ["T"], "sentences": []}},
            "as many titles as lists of sentences, found 1 and 0",
        ),
        ("hotpotqa", HOTPOTQA | {"context": [["T"]]}, "context[0]: expected [title, sentences]"),
        ("hotpotqa", HOTPOTQA | {"context": [["T", "S"]]}, "expected [title, sentences]"),
        ("hotpotqa", HOTPOTQA | {"context": [[1, ["S"]]]}, "context[0][0]: expected a string"),
        ("hotpotqa", HOTPOTQA | {"context": [["T", ["S", 2]]]}, "context[0][1][1]: expected a"),
        ("hotpotqa", HOTPOTQA | {"context": []}, "context: expected at least one passage"),
        ("hotpotqa", HOTPOTQA | {"supporting_facts": ["T"]}, "supporting_facts[0]: expected [tit"),
        ("2wikimultihopqa", WIKI2 | {"supporting_facts": None}, "supporting_facts: expected a li"),
        ("musique", MUSIQUE | {"answer_aliases": [1]}, "answer_aliases[0]: expected a string"),
        ("musique", MUSIQUE | {"answerable": "no"}, "answerable: expected true or false"),
        ("musique", MUSIQUE | {"paragraphs": []}, "paragraphs: expected at least one passage"),
        ("musique", MUSIQUE | {"paragraphs": [{"title": "T"}]}, "paragraphs[0].paragraph_text: mi"),
        ("longbench", LONGBENCH | {"answers": []}, "answers: expected at least one answer"),
        ("longbench", LONGBENCH | {"input": ""}, "input: expected some text"),
        ("longbench", LONGBENCH | {"context": "Passage 1:\n\n \n"}, "context: expected at least"),
    ],
)
def test_a_mistake_names_file_line_and_field(tmp_path, data_format, row, message):
    with pytest.raises(UserError) as error:
        read(tmp_path, data_format, row)
    assert f"{tmp_path / 'a.jsonl'}:1: " in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ("A story.\nPassage 1:\nof it", [("", "A story.\nPassage 1:\nof it")]),
        ("Passage 2:\nT\ntext", [("", "Passage 2:\nT\ntext")]),
        ("Passage 1:\nT\ntext", [("T", "text")]),
        ("Passage 1:\nno title", [("", "no title")]),
        ("Passage 1:\nA\na\nPassage 2:\nB\nb\n", [("A", "a"), ("B", "b\n")]),
        # A number that is not the next one begins no passage.
        (
            "Passage 1:\nA\na\nPassage 3:\nx\nPassage 2:\nB\nb",
            [("A", "a\nPassage 3:\nx"), ("B", "b")],
        ),
        # Nor does one without the blank line that the others have.
        (
            "Passage 1:\nA\na\n\nPassage 2:\nB\nb\nPassage 3:\nx\n\nPassage 3:\nC\nc",
            [("A", "a"), ("B", "b\nPassage 3:\nx"), ("C", "c")],
        ),
    ],
)
def test_contexts_are_split_where_the_next_passage_begins(context, expected):
    assert [(p.title, p.text) for p in split_context(context)] == expected


LINE = st.text(st.sampled_from("ab é.:"), min_size=1, max_size=6).filter(str.strip)
BODY = st.lists(LINE | st.just("Passage 3:") | st.just("Passage 12:"), min_size=1, max_size=4)


@given(st.lists(st.tuples(LINE, BODY.map("\n".join)), min_size=2, max_size=15))
def test_passages_come_back_from_a_context(passages):
    context = "\n\n".join(
        f"Passage {number}:\n{title}\n{text}"
        for number, (title, text) in enumerate(passages, start=1)
    )
    assert [(p.title, p.text) for p in split_context(context)] == passages


@pytest.mark.skipif(not (REAL / "longbench").is_dir(), reason="the real data are absent")
@pytest.mark.parametrize(
    ("name", "ircot"),
    [("hotpotqa", "hotpotqa"), ("2wikimqa", "2wikimultihopqa"), ("musique", "musique")],
)
def test_every_passage_of_a_real_question_is_in_its_long_context(name, ircot):
    dev = {
        question.text: question
        for question in read_questions([REAL / "ircot" / ircot / "dev.jsonl"], "ircot")
    }
    rows = list(read_questions([REAL / "longbench" / f"{name}.jsonl"], "longbench"))
    assert len(rows) == 50
    for row in rows:
        own = {(passage.title, passage.text) for passage in dev[row.text].passages}
        assert own < {(passage.title, passage.text) for passage in row.passages}
        assert row.answers == dev[row.text].answers
