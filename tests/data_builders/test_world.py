"""The sample world: its rows are valid, its answers unique, its two halves apart."""

import errno
import json
import re
from calendar import month_name
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from data_builders.readers import read_corpus, read_questions
from data_builders.world import iter_passages, write_corpus, write_world
from data_builders.world.entities import SCHEMA, Entity, build_world
from data_builders.world.names import ADJECTIVES, CULTURES, NOUNS, NameSource, native_spelling
from data_builders.world.prose import load, write_passages
from data_builders.world.questions import make_questions
from recipes.errors import UserError

TRAIN, DEV, SEED = 200, 100, 7
SPLITS = ("train", "dev")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_world(folder, train_questions=TRAIN, dev_questions=DEV, seed=SEED)
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    return {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").open(encoding="utf-8")]
        for split in SPLITS
    }


@pytest.fixture(scope="module")
def world():
    """A world with its passages and questions, and the graph beside them."""
    rng = Random(11)
    world = build_world(rng, NameSource(Random(12)), 80)
    passages = write_passages(world, rng)
    return world, passages, make_questions(world, passages, 160, rng)


def _answers(row):
    return [span for answer in row["answers_objects"] for span in answer["spans"]]


def test_rows_have_ircot_fields(rows):
    for split, count in zip(SPLITS, (TRAIN, DEV), strict=True):
        assert len(rows[split]) == count
        for row in rows[split]:
            assert set(row) == {
                "dataset", "question_id", "question_text", "answers_objects", "contexts", "type",
            }  # fmt: skip
            assert row["question_text"].endswith("?")
            assert "{" not in row["question_text"]
            for answer in row["answers_objects"]:
                assert answer["number"] == ""
                assert answer["date"] == {"day": "", "month": "", "year": ""}
                assert len(answer["spans"]) == 1
            assert [c["idx"] for c in row["contexts"]] == list(range(10))
            assert len({c["title"] for c in row["contexts"]}) == 10
            assert 2 <= sum(c["is_supporting"] for c in row["contexts"]) <= 4
    ids = [row["question_id"] for split in SPLITS for row in rows[split]]
    texts = [row["question_text"] for split in SPLITS for row in rows[split]]
    assert len(set(ids)) == len(ids)
    assert len(set(texts)) >= 0.98 * len(texts)


def test_gold_passages_do_not_stand_in_a_fixed_place(rows):
    places = Counter(
        c["idx"] for row in rows["train"] for c in row["contexts"] if c["is_supporting"]
    )
    assert len(places) == 10
    assert max(places.values()) < 2 * min(places.values())


def test_answer_is_stated_in_exactly_one_passage(rows):
    for row in rows["train"] + rows["dev"]:
        answers = _answers(row)
        if answers[0] in ("yes", "no"):
            continue
        stating = [
            c
            for c in row["contexts"]
            if any(
                a.casefold() in f"{c['title']}\n{c['paragraph_text']}".casefold() for a in answers
            )
        ]
        assert len(stating) == 1
        assert stating[0]["is_supporting"]
        assert answers[0] in stating[0]["paragraph_text"]


def test_same_arguments_same_bytes_and_dev_is_independent_of_train(folder, tmp_path):
    write_world(tmp_path / "again", train_questions=TRAIN, dev_questions=DEV, seed=SEED)
    write_world(tmp_path / "more", train_questions=TRAIN + 20, dev_questions=DEV, seed=SEED)
    write_world(tmp_path / "other", train_questions=TRAIN, dev_questions=DEV, seed=SEED + 1)
    for name in ("train.jsonl", "dev.jsonl", "world.json"):
        first = (folder / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == first
        assert (tmp_path / "other" / name).read_bytes() != first
        assert ((tmp_path / "more" / name).read_bytes() == first) == (name == "dev.jsonl")
    assert sorted(p.name for p in folder.iterdir()) == ["dev.jsonl", "train.jsonl", "world.json"]


def test_train_and_dev_share_no_name():
    names = NameSource(Random(3))
    worlds = [build_world(Random(seed), names, 100) for seed in (1, 2)]
    texts = ["\n".join(write_passages(w, Random(4)).values()) for w in worlds]
    for world, other in zip(worlds, reversed(texts), strict=True):
        for entity in world.entities():
            pattern = rf"(?<!\w){re.escape(entity.name)}(?!\w)"
            assert entity.name not in other or not re.search(pattern, other), entity.name


def test_written_splits_share_no_title_and_no_coined_word(rows):
    titles, words = {}, {}
    for split in SPLITS:
        contexts = [c for row in rows[split] for c in row["contexts"]]
        titles[split] = {c["title"] for c in contexts}
        text = " ".join(c["paragraph_text"] for c in contexts)
        # Coined words: capitalised, and no wording or title inventory has them.
        words[split] = set(re.findall(r"[^\W\d_a-z][\w']{3,}", text)) - _plain_words()
    assert not titles["train"] & titles["dev"]
    assert len(words["train"]) > 200
    assert not words["train"] & words["dev"]


def _plain_words():
    wordings = json.dumps(load("wordings.yaml"), ensure_ascii=False)
    source = Path(build_world.__code__.co_filename).read_text(encoding="utf-8")
    found = set(re.findall(r"[\w']+", wordings + source)) | {*month_name, *ADJECTIVES, *NOUNS}
    found |= {f"{word}'s" for word in found}
    scripts = {culture.script for culture in CULTURES if culture.script}
    return found | {word.capitalize() for word in found} | scripts


def test_every_answer_follows_from_the_graph_alone(world):
    graph, _, questions = world
    by_name = Counter(entity.name for entity in graph.entities())
    assert max(by_name.values()) == 1
    for question in questions:
        assert all(start.name in question.text for start in question.starts)
        assert _resolve(question) in question.answers, question.text


def _resolve(question):
    """Answer a question from the entities it names and the relations it follows."""

    def follow(start, path):
        for relation in path:
            start = start.facts[relation]
        return start

    if question.type in ("bridge", "compositional"):
        *path, last = question.path
        subject = follow(question.starts[0], path)
        return subject.text(last)
    *path, verb = question.path
    a, b = (follow(start, path) for start in question.starts)
    if verb == "same":
        return "yes" if a is b else "no"
    assert a != b
    if verb == "order":
        return "yes" if a < b else "no"
    return question.starts[(a < b) ^ (verb == "least")].name


def test_every_fact_is_stated_in_its_passage_and_every_paragraph_has_its_length(world):
    graph, passages, _ = world
    for entity in graph.entities():
        text = passages[entity]
        assert 60 <= len(text.split()) <= 160
        assert "{" not in text
        assert not re.search(r"\s\s|\s[.,]|\.\.|\ban? [A-Z]?\s", text)
        for relation in SCHEMA:
            if relation in entity.facts:
                assert entity.text(relation) in text


def test_relations_lead_to_the_types_they_promise(world):
    for entity in world[0].entities():
        for relation, value in entity.facts.items():
            if relation in SCHEMA:
                subject, target = SCHEMA[relation]
                assert entity.type == subject
                assert not isinstance(value, Entity) or value.type == target
                assert value is not entity


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_guesser_that_sees_only_questions_does_badly(tmp_path, seed):
    write_world(tmp_path, train_questions=TRAIN, dev_questions=DEV, seed=seed)
    train, dev = (
        Counter(
            json.loads(line)["answers_objects"][0]["spans"][0]
            for line in (tmp_path / f"{split}.jsonl").open(encoding="utf-8")
        )
        for split in SPLITS
    )
    assert dev[train.most_common(1)[0][0]] < 0.12 * DEV
    assert max(dev.values()) < 0.12 * DEV
    assert len(dev) > 0.6 * DEV


def test_question_and_answer_kinds_are_mixed(world):
    questions = world[2]
    kinds = Counter(q.type for q in questions)
    assert set(kinds) == {"bridge", "comparison", "compositional", "bridge_comparison"}
    hops = Counter(len(q.path) for q in questions if q.type == "compositional")
    assert set(hops) == {3, 4}
    answers = Counter(
        "yes/no"
        if q.source is None
        else q.source.type
        if "compar" in q.type
        else SCHEMA[q.path[-1]][1]
        for q in questions
    )
    for kind in ("person", "town", "date", "work", "count", "km", "yes/no"):
        assert answers[kind] >= 2, kind
    assert sum(bool(re.fullmatch(r"1\d{3}|20\d\d", q.answers[0])) for q in questions) >= 2
    assert max(answers.values()) < 0.35 * len(questions)
    assert any(len(q.answers) == 2 for q in questions)


def test_yes_and_no_cannot_be_told_by_the_wording(world):
    told = {"same": Counter(), "order": Counter()}
    for question in world[2]:
        if question.source is None:
            told[question.path[-1]][question.answers[0]] += 1
    for counts in told.values():
        assert min(counts["yes"], counts["no"]) >= 2


def test_prose_varies(world):
    graph, passages, _ = world
    names = sorted((re.escape(word) for e in graph.entities() for word in e.name.split()), key=len)
    pattern = re.compile(rf"(?<!\w)({'|'.join(reversed(names))})(?!\w)")
    skeletons = Counter(
        re.sub(r"\d[\d,.]*", "0", pattern.sub("N", sentence))
        for text in passages.values()
        for sentence in re.split(r"(?<=\.) (?=[A-Z])", text)
    )
    assert len(skeletons) > 800
    assert skeletons.most_common(1)[0][1] < 0.02 * sum(skeletons.values())


@pytest.mark.parametrize("relation", SCHEMA)
def test_every_relation_has_five_wordings(relation):
    table = load("wordings.yaml")[SCHEMA[relation][0]]
    facts = table["facts"]
    for wordings in facts.values() if isinstance(facts, dict) else [facts]:
        assert sum(f"{{{relation}}}" in wording for wording in wordings) >= 5


SCRIPTS = {
    "Cyrillic": "[\u0400-\u04ff]", "Greek": "[\u0370-\u03ff]", "Arabic": "[\u0600-\u06ff]",
    "Han": "[\u4e00-\u9fff]",
}  # fmt: skip


def test_every_world_has_accents_and_two_foreign_scripts():
    found = set()
    for seed in range(12):
        world = build_world(Random(seed), NameSource(Random(seed)), 40)
        text = " ".join(write_passages(world, Random(seed)).values())
        here = {script for script, letters in SCRIPTS.items() if re.search(letters, text)}
        assert len(here) == 2
        assert re.search("[éñåøçşāōüö]|\\w'\\w", text)
        found |= here
    assert found == set(SCRIPTS)


@pytest.mark.parametrize("culture", [c for c in CULTURES if c.script])
def test_a_native_spelling_is_wholly_in_its_script(culture):
    names = NameSource(Random(1))
    for _ in range(50):
        name = f"{names.word(culture, culture.male)} {names.word(culture)}"
        spelled = native_spelling(name, culture.script, Random(2))
        assert re.fullmatch(f"(?:{SCRIPTS[culture.script]}+ ?)+", spelled), spelled


def test_passages_stream_with_distinct_titles_and_repeat_with_the_seed():
    passages = list(iter_passages(1, 6000))
    assert len({title for title, _ in passages}) == len(passages) == 6000
    assert all(60 <= len(text.split()) <= 160 for _, text in passages)
    assert list(iter_passages(1, 300)) == passages[:300]
    assert next(iter_passages(2, 1)) != passages[0]
    assert list(iter_passages(1, 0)) == []


CORPUS = {"passages": 1250, "train_questions": 90, "dev_questions": 30, "seed": 3}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus of two whole blocks and a part of one, with its summary."""
    folder = tmp_path_factory.mktemp("corpus")
    return folder, write_corpus(folder, **CORPUS)


def test_a_corpus_has_distinct_passages_and_tells_what_it_holds(corpus):
    folder, summary = corpus
    passages = list(read_corpus([folder / "corpus.jsonl"]))
    for names in (
        {p.id for p in passages},
        {p.title for p in passages},
        {p.text for p in passages},
    ):
        assert len(names) == len(passages) == 1250
    assert json.loads((folder / "world.json").read_text()) == summary
    assert summary["corpus"] == 1250
    assert sum(summary["dev"]["types"].values()) == summary["dev"]["questions"] == 30


def test_questions_about_a_corpus_have_their_answers_in_it(corpus):
    folder, _ = corpus
    by_id = {passage.id: passage for passage in read_corpus([folder / "corpus.jsonl"])}
    gold = {}
    for split, count in (("train", 90), ("dev", 30)):
        questions = list(read_questions([folder / f"{split}.jsonl"], "jsonl"))
        assert len({question.text for question in questions}) == len(questions) == count
        gold[split] = {name for question in questions for name in question.supporting_ids}
        for question in questions:
            assert not question.passages
            passages = [by_id[name] for name in question.supporting_ids]
            assert 2 <= len(set(passages)) == len(passages) <= 4
            stating = [
                passage
                for passage in passages
                if any(a.casefold() in passage.full_text.casefold() for a in question.answers)
            ]
            if question.answers[0] not in ("yes", "no"):
                assert len(stating) == 1
                assert question.answers[0] in stating[0].text
    assert not gold["train"] & gold["dev"]


def test_same_arguments_same_corpus_and_questions_leave_passages_alone(corpus, tmp_path):
    folder, _ = corpus
    write_corpus(tmp_path / "again", **CORPUS)
    write_corpus(tmp_path / "more", **CORPUS | {"train_questions": 91})
    for path in folder.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    for name, same in (("corpus.jsonl", True), ("train.jsonl", False)):
        assert ((tmp_path / "more" / name).read_bytes() == (folder / name).read_bytes()) == same


@pytest.mark.parametrize(
    ("passages", "train", "dev"),
    [(400, 39, 1), (400, 1, 39), (400, 20, 20), (999, 90, 9), (5003, 20, 480)],
)
def test_corpora_of_any_size_hold_as_many_questions_as_promised(tmp_path, passages, train, dev):
    write_corpus(tmp_path, passages=passages, train_questions=train, dev_questions=dev, seed=1)
    written = list(read_corpus([tmp_path / "corpus.jsonl"]))
    assert len(written) == passages
    if passages >= 5000:
        assert [(p.title, p.text) for p in written] == list(iter_passages(1, passages))
    for split, count in (("train", train), ("dev", dev)):
        assert len(list(read_questions([tmp_path / f"{split}.jsonl"], "jsonl"))) == count


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"passages": 399}, "a corpus needs at least 400 passages, not 399"),
        ({"dev_questions": 0}, "dev_questions must be at least 1, not 0"),
        ({"train_questions": 96}, "1250 passages are enough for 125 questions, not 126"),
    ],
)
def test_counts_that_make_no_corpus_are_refused_and_nothing_is_written(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        write_corpus(tmp_path / "new", **CORPUS | changes)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("split", SPLITS)
def test_a_count_below_one_is_refused_and_nothing_is_written(tmp_path, split):
    counts = {"train_questions": 3, "dev_questions": 3, f"{split}_questions": 0}
    with pytest.raises(UserError, match=rf"{split}_questions must be at least 1, not 0"):
        write_world(tmp_path / "new", seed=0, **counts)
    assert not (tmp_path / "new").exists()


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    write_world(tmp_path, train_questions=3, dev_questions=3, seed=0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(self, target):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(UserError, match=r"cannot write a world .* no space left"):
        write_world(tmp_path, train_questions=3, dev_questions=3, seed=1)
    with pytest.raises(UserError, match=r"cannot write a corpus .* no space left"):
        write_corpus(tmp_path, passages=400, train_questions=3, dev_questions=3, seed=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
