"""Conversations of the sample world: one answer a turn, in passages that all turns share."""

import hashlib
import json
import re

import pytest

from data_builders.readers import read_conversations, read_questions
from data_builders.world import write_world
from recipes.errors import UserError

SIZES = {"train_questions": 30, "dev_questions": 60, "seed": 5}
COUNT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    assert write_world(folder, **SIZES, conversations=COUNT)["conversations"] == COUNT
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    return [json.loads(line) for line in (folder / "conversations.jsonl").open(encoding="utf-8")]


def test_turns_come_back_to_the_same_few_passages(rows):
    assert len({row["conversation_id"] for row in rows}) == COUNT
    assert {len(row["turns"]) for row in rows} == {4, 6}
    for row in rows:
        assert set(row) == {"conversation_id", "turns", "contexts"}
        assert [context["idx"] for context in row["contexts"]] == list(range(10))
        gold = [turn["gold_titles"] for turn in row["turns"]]
        chain = gold[-2]
        assert len(chain) == len(set(chain)) == len(row["turns"]) // 2
        singles = [
            title for hop in range(1, len(chain)) for title in ([chain[hop]], chain[: hop + 1])
        ]
        assert gold[:-1] == [[chain[0]], *singles]
        assert gold[-1][0] in chain
        assert {c["title"] for c in row["contexts"] if c["is_supporting"]} == set(chain)
        assert len({turn["question_text"] for turn in row["turns"]}) == len(row["turns"])
        assert all(turn["question_text"].endswith("?") for turn in row["turns"])


def test_each_answer_stands_word_for_word_in_one_passage_of_its_turn(rows):
    for row in rows:
        for turn in row["turns"]:
            stating = [
                context
                for context in row["contexts"]
                for answer in turn["answers"]
                if answer.casefold()
                in f"{context['title']}\n{context['paragraph_text']}".casefold()
            ]
            assert len({context["title"] for context in stating}) == 1
            assert stating[0]["title"] == turn["gold_titles"][-1]
            assert turn["answers"][0] in stating[0]["paragraph_text"]


def test_they_are_about_the_passages_of_dev_and_not_of_train(folder, rows):
    def texts(split):
        questions = read_questions([folder / f"{split}.jsonl"], "ircot")
        return {(p.title, p.text) for question in questions for p in question.passages}

    told = {(c["title"], c["paragraph_text"]) for row in rows for c in row["contexts"]}
    assert told <= texts("dev")
    train = " ".join(text for _, text in texts("train"))
    names = {re.sub(r" \(\w+\)$", "", title) for title, _ in told}
    assert not {name for name in names if name in train}


def test_the_other_files_keep_their_bytes_and_the_same_seed_gives_the_same(folder, tmp_path):
    known = {
        "train.jsonl": "799166064cf8440986004762ea09fe05cb504c73b2fac7df913879b3c7817552",
        "dev.jsonl": "789db75809deb7348d7a919f03f278796fd11995e693358d1ca085b43dc1be8f",
        "world.json": "6f846aa98363b3c057c6292afff2917cc5f267abd6c5ba257c111caa3d3a77fd",
    }
    small = SIZES | {"dev_questions": 20}
    write_world(tmp_path / "with", **small, conversations=3)
    write_world(tmp_path / "without", **small)
    for name, digest in known.items():
        for kind in ("with", "without"):
            data = (tmp_path / kind / name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == digest
    assert not (tmp_path / "without" / "conversations.jsonl").exists()
    write_world(tmp_path / "again", **SIZES | {"train_questions": 2}, conversations=COUNT)
    told = [(path / "conversations.jsonl").read_bytes() for path in (folder, tmp_path / "again")]
    assert told[0] == told[1]


def test_more_than_the_passages_are_enough_for_is_told(tmp_path):
    with pytest.raises(UserError, match="too few for 5000 conversations; ask for fewer"):
        write_world(tmp_path, **SIZES | {"dev_questions": 4}, conversations=5000)
    assert not list(tmp_path.iterdir())


def test_what_is_read_is_what_was_written(folder, rows):
    read = list(read_conversations(folder / "conversations.jsonl"))
    for number, (row, conversation) in enumerate(zip(rows, read, strict=True), start=1):
        assert conversation.id == row["conversation_id"]
        for turn, question in zip(row["turns"], conversation.turns, strict=True):
            assert question.text == turn["question_text"]
            assert list(question.answers) == turn["answers"]
            gold = {passage.title for passage in question.passages if passage.is_supporting}
            assert gold == set(turn["gold_titles"])
            assert [p.text for p in question.passages] == [
                context["paragraph_text"] for context in row["contexts"]
            ]
            assert question.place == f"{folder / 'conversations.jsonl'}:{number}"
        assert [q.id for q in conversation.turns] == [
            f"{conversation.id}/{n}" for n in range(1, len(row["turns"]) + 1)
        ]


def _drop(row, *path):
    *owners, last = path
    for key in owners:
        row = row[key]
    del row[last]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: _drop(row, "turns"), r"turns: missing; expected a list"),
        (lambda row: row.update(turns=[]), r"turns: expected at least one"),
        (lambda row: row.update(contexts=[]), r"gold_titles\[0\]: expected the title of one"),
        (lambda row: row.update(contexts=[], turns=[]), r"contexts: expected at least one"),
        (lambda row: _drop(row, "turns", 1, "answers"), r"turns\[1\]\.answers: missing"),
        (lambda row: row["turns"][0].update(answers=[]), r"turns\[0\]\.answers: expected at least"),
        (lambda row: row["turns"][2].update(question_text=" "), r"turns\[2\]\.question_text: "),
        (
            lambda row: row["turns"][0].update(gold_titles=["Nobody"]),
            r"turns\[0\]\.gold_titles\[0\]: .* found a string \(\"?'Nobody'",
        ),
        (lambda row: _drop(row, "contexts", 3, "title"), r"contexts\[3\]\.title: missing"),
        (lambda row: row.update(conversation_id=7), r"conversation_id: expected a string"),
        (lambda row: row["turns"].append("Where?"), r"turns\[\d\]: expected an object"),
    ],
)
def test_a_malformed_row_is_told_with_file_and_line(rows, tmp_path, change, message):
    changed = json.loads(json.dumps(rows[1]))
    change(changed)
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], changed)))
    with pytest.raises(UserError, match=rf"conversations\.jsonl:2: .*{message}"):
        list(read_conversations(path))


def test_what_is_no_file_of_conversations_is_told(folder, rows, tmp_path):
    path = tmp_path / "conversations.jsonl"
    path.write_text(json.dumps(rows[0]) + "\n{\n")
    with pytest.raises(UserError, match=r"conversations\.jsonl:2: "):
        list(read_conversations(path))
    path.write_text((json.dumps(rows[0]) + "\n") * 2)
    with pytest.raises(UserError, match=r":2: conversation_id: .* is already at .*:1"):
        list(read_conversations(path))
    path.write_text("")
    with pytest.raises(UserError, match="no rows"):
        list(read_conversations(path))
    with pytest.raises(UserError, match=r"looks like a file for data\.format: ircot"):
        list(read_conversations(folder / "dev.jsonl"))
    with pytest.raises(UserError, match="looks like a file for conversations"):
        list(read_questions([folder / "conversations.jsonl"], "ircot"))
