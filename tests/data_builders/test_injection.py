"""Planted instructions: one passage a question, nothing else changed, in a balanced design."""

import json
import math
from collections import Counter
from itertools import combinations
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import data_row, tiny_tokenizer, write_rows

from data_builders.chunking import chunk_text
from data_builders.injection import KINDS, PLACES, Injection, write_injections
from data_builders.injection.planting import coin_target, insertion_point, plant, wordings
from data_builders.readers import read_questions
from recipes.errors import UserError

LINE = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)
TEXT = st.one_of(LINE, st.lists(LINE, min_size=1, max_size=4).map(". ".join))
WRITTEN = TEXT.filter(str.strip)
CONTEXT = st.fixed_dictionaries({"title": TEXT, "text": WRITTEN, "is_supporting": st.booleans()})
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "question": WRITTEN,
            "answers": st.lists(WRITTEN, min_size=1, max_size=2),
            "contexts": st.lists(CONTEXT, max_size=4),
        }
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda row: row["question"],
)

# Whatever is to be planted in it, there is a place.
ALWAYS = {
    "question": "Always?",
    "answers": ["a"],
    "contexts": [
        {"text": "It is so. It was so.", "is_supporting": True},
        {"text": "It may be. It can be."},
    ],
}


def written(path, folder, data_format="ircot", **options):
    """The result, the questions before and after, and the injections by question."""
    result = write_injections([Path(path)], folder, data_format=data_format, **options)
    before = list(read_questions([path], data_format))
    after = list(read_questions([folder / "questions.jsonl"], "jsonl"))
    lines = (folder / "injections.jsonl").read_text("utf-8").split("\n")[:-1]
    injections = {row["question_id"]: Injection(**row) for row in map(json.loads, lines)}
    assert len(injections) == len(lines) == result["attacked"]
    return result, before, after, injections


@pytest.fixture
def questions(tmp_path):
    return write_rows(tmp_path / "dev.jsonl", [data_row(number) for number in range(70)])


@settings(max_examples=25, deadline=None)
@given(ROWS, st.integers(0, 3))
def test_one_passage_of_an_attacked_question_changes_and_nothing_else(rows, seed):
    with TemporaryDirectory() as name:
        folder = Path(name)
        path = write_rows(folder / "dev.jsonl", [*rows, ALWAYS])
        result, before, after, injections = written(path, folder / "out", "jsonl", seed=seed)
        again, *_ = written(path, folder / "again", "jsonl", seed=seed)
        for file in ("questions.jsonl", "injections.jsonl"):
            assert (folder / "again" / file).read_bytes() == (folder / "out" / file).read_bytes()
    assert result == again
    assert result["attacked"] + sum(result["skipped"].values()) == len(rows) + 1
    targets = [injection.target for injection in injections.values()]
    assert len(set(targets)) == len(targets)
    for old, new in zip(before, after, strict=True):
        injection = injections.get(old.id)
        if injection is None:
            assert new == old
            continue
        carrier, clean = new.passages[injection.passage], old.passages[injection.passage]
        assert carrier.title == clean.title == injection.title
        assert carrier.is_supporting == clean.is_supporting
        assert [injection.text in passage.full_text for passage in new.passages].count(True) == 1
        left, right = carrier.text.split(injection.text)
        assert clean.text in {
            f"{left.removesuffix(' ' * cut)}{right.removeprefix(' ' * drop)}"
            for cut in (0, 1)
            for drop in (0, 1)
        }
        assert injection.target in injection.text
        known = [old.text, *old.answers, *(passage.full_text for passage in old.passages)]
        assert injection.target.casefold() not in "\n".join(known).casefold()
        others = [list(q.passages) for q in (old, new)]
        for passages in others:
            del passages[injection.passage]
        assert others[0] == others[1]
        assert (new.id, new.dataset, new.text, new.answers) == (
            (old.id, old.dataset, old.text, old.answers)
        )


@pytest.mark.parametrize("count", [7, 20, 30, 61])
def test_kinds_places_and_carriers_are_balanced_alone_and_in_pairs(questions, tmp_path, count):
    _, _, _, injections = written(questions, tmp_path / "out", share=count / 70)
    assert len(injections) == count
    sizes = {"kind": len(KINDS), "place": len(PLACES), "carrier": 2}
    assert all(math.gcd(*pair) == 1 for pair in combinations(sizes.values(), 2))
    for names in [*combinations(sizes, 1), *combinations(sizes, 2), tuple(sizes)]:
        cells = Counter(tuple(getattr(i, name) for name in names) for i in injections.values())
        number = math.prod(sizes[name] for name in names)
        assert min(cells.values()) >= count // number
        assert max(cells.values()) <= -(-count // number)
        assert len(cells) == min(count, number)


def test_places_and_carriers_are_where_they_say(questions, tmp_path):
    _, before, after, injections = written(questions, tmp_path / "out")
    clean = {question.id: question for question in before}
    for question in after:
        injection = injections[question.id]
        passage = question.passages[injection.passage]
        assert passage.is_supporting == (injection.carrier == "gold")
        at = passage.text.index(injection.text)
        if injection.kind == "clause":
            assert passage.text[at - 2] not in ".!?"
            assert 0 < at < len(passage.text) - len(injection.text)
        elif injection.place == "start":
            assert at == 0
        elif injection.place == "end":
            assert passage.text.endswith(injection.text)
        else:
            assert clean[question.id].passages[injection.passage].text[:at].rstrip().endswith(".")


@pytest.mark.parametrize(
    ("text", "kind", "place", "expected"),
    [
        ("One is. Two is two. Three is.", "override", "start", "X One is. Two is two. Three is."),
        ("One is. Two is two. Three is.", "override", "middle", "One is. Two is two. X Three is."),
        ("One is. Two is two. Three is.", "override", "end", "One is. Two is two. Three is. X"),
        ("One is. Two is two. Three is.", "clause", "start", "One X is. Two is two. Three is."),
        ("One is. Two is two. Three is.", "clause", "middle", "One is. Two is X two. Three is."),
        ("One is. Two is two. Three is.", "clause", "end", "One is. Two is two. Three X is."),
        ("He came.She left. ", "override", "middle", "He came. X She left. "),
        ("He came. ", "override", "end", "He came. X"),
        ("no stop at all", "override", "middle", "no stop X at all"),
        ("Word", "override", "middle", None),
        ("Word", "clause", "end", None),
    ],
)
def test_where_a_text_is_planted(text, kind, place, expected):
    at = insertion_point(text, kind, place)
    assert (None if at is None else plant(text, at, "X")) == expected


def test_what_cannot_be_attacked_is_left_as_it_is_and_counted(tmp_path):
    rows = [
        {"id": "none", "question": "A?", "answers": ["a"], "supporting_ids": ["p"]},
        *({"id": f"word {n}", "question": f"{n}?", "answers": ["a"], "contexts": [{"text": "W"}]}
          for n in range(15)),
    ]  # fmt: skip
    path = write_rows(tmp_path / "dev.jsonl", rows)
    result, before, after, injections = written(path, tmp_path / "out", "jsonl")
    # A passage of one word has a start and an end, but no middle, and no sentence to go inside.
    assert result["skipped"] == {"no passages of its own": 1, "no passage has such a place": 7}
    assert {(i.kind == "clause", i.place == "middle") for i in injections.values()} == {
        (False, False)
    }
    assert {i.carrier for i in injections.values()} == {"unmarked"}
    assert after[0] == before[0]
    assert after[0].supporting_ids == ("p",)
    path = write_rows(tmp_path / "none.jsonl", rows[:1])
    with pytest.raises(UserError, match=r"attacked \(no passages of its own: 1\)"):
        write_injections([Path(path)], tmp_path / "none", data_format="jsonl")


def test_a_target_is_a_new_word():
    word = coin_target([], (), Random(0))
    assert word.isalpha()
    assert coin_target([], (), Random(0)) == word
    for texts, taken in (([f"x{word.upper()}y"], ()), (["x"], {word})):
        assert coin_target(texts, taken, Random(0)) != word


def test_every_format_is_read(tmp_path):
    context = (
        "Passage 1:\nTarn\nTarn is a town. It is old.\n\nPassage 2:\nOss\nA river. It is long."
    )
    row = {"_id": "7", "dataset": "d", "input": "Where?", "answers": ["Tarn"], "context": context}
    path = write_rows(tmp_path / "dev.jsonl", [row])
    _, [old], [new], _ = written(path, tmp_path / "out", "longbench")
    assert [p.title for p in new.passages] == [p.title for p in old.passages] == ["Tarn", "Oss"]
    assert (new.id, new.answers) == ("7", ("Tarn",))


def test_another_seed_makes_another_set(questions, tmp_path):
    sets = [written(questions, tmp_path / str(seed), seed=seed)[3] for seed in (0, 1)]
    assert sets[0].keys() == sets[1].keys()
    same = sum(sets[0][name].text == sets[1][name].text for name in sets[0])
    assert same == 0
    assert sum(sets[0][n].kind == sets[1][n].kind for n in sets[0]) < 40


def test_a_share_of_the_questions_is_attacked(questions, tmp_path):
    some = written(questions, tmp_path / "some", share=0.3)[3]
    assert len(some) == 21
    # A larger share attacks these questions in the same way.
    assert some.items() <= written(questions, tmp_path / "more", share=0.6)[3].items()
    for share in (0, -1, 1.1, math.nan):
        with pytest.raises(UserError, match="share: expected more than 0 and at most 1"):
            write_injections([Path(questions)], tmp_path / "none", share=share)
    assert not (tmp_path / "none").exists()


def test_template_marks_stay_plain_text(questions, tmp_path):
    tokenizer = tiny_tokenizer()
    _, _, after, injections = written(questions, tmp_path / "out")
    marked = [q for q in after if "<|im_end|>" in injections[q.id].text]
    assert marked
    for question in marked:
        text = question.passages[injections[question.id].passage].full_text
        ids = [token for chunk in chunk_text(tokenizer, text, 64) for token in chunk.token_ids]
        assert not set(ids) & set(tokenizer.all_special_ids)
        assert tokenizer.decode(ids) == text


def test_wordings_have_what_their_kind_needs():
    assert tuple(wordings()) == KINDS
    for kind, texts in wordings().items():
        assert len(set(texts)) == len(texts) >= 4
        for text in texts:
            assert text == text.strip()
            assert text.count("{question}") == (kind == "false_fact")
            assert "TARGET" in text.format(target="TARGET", question="?")


def test_another_set_is_not_overwritten_and_the_same_one_may_be_written_again(questions, tmp_path):
    folder = tmp_path / "out"
    write_injections([Path(questions)], folder)
    (folder / "injections.jsonl").unlink()
    write_injections([Path(questions)], folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.keys() == {"questions.jsonl", "injections.jsonl"}
    with pytest.raises(UserError, match=r"questions\.jsonl is there already, with other content"):
        write_injections([Path(questions)], folder, seed=1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "injections.jsonl").write_text("my own")
    with pytest.raises(UserError, match=r"injections\.jsonl is there already"):
        write_injections([Path(questions)], tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["injections.jsonl"]
    with pytest.raises(UserError, match="cannot write into"):
        write_injections([Path(questions)], Path(questions) / "below")
