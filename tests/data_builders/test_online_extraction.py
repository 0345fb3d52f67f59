"""Nuggets for one question: by rules, and from what a model says in either style."""

import gc
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import tiny_tokenizer
from tiny import tiny_model

from data_builders.answers import answer_key
from data_builders.nuggets import local_model
from data_builders.nuggets.align import align
from data_builders.nuggets.instructions import parse_candidates
from data_builders.nuggets.online import OnlineNugget, online_identity, open_online_extractor
from data_builders.nuggets.online_instructions import question_messages
from data_builders.nuggets.rules import rules
from data_builders.tables import Chunk
from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.schema import Recipe

QUESTION = "Where was the painter of the harbour born?"
LOCAL = {"path": "model"}


def chunk(text):
    return Chunk(text[:1], "", text, [], [], [])


CHUNKS = [
    chunk("Ines Varga was born in Lower Tarn; she painted the harbour and wrote plays."),
    chunk("Lower Tarn is a town on the Oss. Its mayor is Bela Kun."),
]


def recipe(extractor, style="ginger", nuggets=None):
    return Recipe.model_validate(
        {
            "name": "tiny",
            "model": {"path": "model"},
            "data": {"train": ["train.jsonl"], "dev": ["dev.jsonl"]},
            "nuggets": nuggets or {},
            "retrieval": {"encoder": "none", "k_c": 5},
            "systems": {"online_nuggets": {"extractor": extractor, "style": style}},
            "train": {"run_folder": "run"},
        }
    )


@pytest.fixture
def says(monkeypatch):
    """Has a local model give fixed candidates; returns its configuration and what it was asked."""

    def set_answers(*candidates):
        seen = {"asked": []}

        def load(config):
            seen["config"] = config

            def ask(chats):
                seen["asked"].append(chats)
                return [list(one) for one in candidates]

            return ask

        monkeypatch.setattr(local_model, "load_asked_model", load)
        return seen

    return set_answers


def extractor_of(style, **local):
    return open_online_extractor(
        recipe("local_model", style, {"local_model": LOCAL | local, "fuzzy_threshold": 0.7})
    )


def test_phrases_are_located_joined_and_taken_in_turn(says, caplog):
    says(
        ["Ines Varga was born in Lower Tarn", "wrote plays", "painted the harbor", "in Lower Tarn"],
        ["Its mayor is Bela Kun", "He was never there at all"],
    )
    extract = extractor_of("ginger")
    assert extract(QUESTION, CHUNKS) == [
        OnlineNugget(0, "Ines Varga was born in Lower Tarn", 0),
        OnlineNugget(1, "Its mayor is Bela Kun", 33),
        OnlineNugget(0, "wrote plays", 63),
        OnlineNugget(0, "painted the harbour", 39),
    ]
    with caplog.at_level(logging.WARNING):
        del extract
        gc.collect()
    assert (
        "1 of 6 nuggets that were extracted online are dropped: not in their chunk, or repeated"
        in caplog.text
    )


def test_answers_are_kept_in_the_models_words(says, caplog):
    says(
        ["Who painted? Ines Varga", "Where was she born?", "Who painted? Ines Varga"],
        ["Who is mayor? B. Kun", "Which river is it? The Oss", "Who painted? Ines Varga"],
    )
    extract = extractor_of("crucible")
    assert extract(QUESTION, CHUNKS) == [
        OnlineNugget(0, "Who painted? Ines Varga", 0),
        OnlineNugget(1, "Who is mayor? B. Kun", 0),
        OnlineNugget(1, "Which river is it? The Oss", 1),
        OnlineNugget(1, "Who painted? Ines Varga", 2),
    ]
    with caplog.at_level(logging.WARNING):
        del extract
        gc.collect()
    assert "2 of 6 nuggets" in caplog.text
    assert "repeated or without an answer" in caplog.text


@pytest.mark.parametrize("style", ["ginger", "crucible"])
def test_the_model_is_asked_about_every_chunk_at_once_and_every_time(says, style):
    seen = says([], [])
    extract = extractor_of(style)
    assert extract(QUESTION, CHUNKS) == extract(QUESTION, CHUNKS) == []
    first, second = seen["asked"]
    assert first == second == [question_messages(style, QUESTION, c.text) for c in CHUNKS]
    for chat, one in zip(first, CHUNKS, strict=True):
        assert QUESTION in chat[-1]["content"]
        assert one.text in chat[-1]["content"]
    assert seen["config"].batch_size == 5
    extractor_of(style, batch_size=2)
    assert seen["config"].batch_size == 2


@pytest.mark.parametrize("style", ["ginger", "crucible"])
def test_the_worked_example_is_an_answer_as_it_should_be(style):
    asked, shown, _ = question_messages(style, QUESTION, "Text.")
    nuggets = parse_candidates(shown["content"])
    assert len(nuggets) == 2
    if style == "ginger":
        assert align(asked["content"], nuggets, None).counts == {"exact": 2}
    else:
        assert all("? " in nugget for nugget in nuggets)
    assert "write [] alone" in asked["content"]
    assert parse_candidates("[]") == []


WORDS = st.sampled_from("painter harbour tarn oss the was mayor born river".split())
SENTENCES = st.lists(st.lists(WORDS, min_size=4, max_size=7), min_size=1, max_size=4)


@given(st.lists(SENTENCES, min_size=1, max_size=3))
def test_rules_rank_all_candidates_by_rare_shared_words(texts):
    chunks = [chunk(" ".join(" ".join(w).capitalize() + "." for w in text)) for text in texts]
    found = open_online_extractor(recipe("rules"))(QUESTION, chunks)
    places = [(n, text) for n, one in enumerate(chunks) for text in rules(one.text)]
    assert sorted((nugget.chunk, nugget.text) for nugget in found) == sorted(places)

    def score(text):
        words = {word for word in answer_key(text).split() if word in answer_key(QUESTION).split()}
        holders = [sum(word in answer_key(other).split() for _, other in places) for word in words]
        return sum(math.log(1 + len(places) / count) for count in holders)

    ranked = [(-round(score(one.text), 9), one.chunk, one.place) for one in found]
    assert ranked == sorted(ranked)


def test_a_model_that_the_recipe_does_not_describe_is_named():
    for extractor in ("local_model", "llm"):
        for of in (open_online_extractor, online_identity):
            with pytest.raises(UserError, match=f"needs the section nuggets.{extractor}"):
                of(recipe(extractor))
        with pytest.raises(UserError, match=f"nuggets.{extractor} .*: online_nuggets needs it"):
            resolve(
                [
                    "quickstart",
                    "eval.systems=[online_nuggets]",
                    f"systems.online_nuggets.extractor={extractor}",
                ]
            )
    with pytest.raises(UserError, match="rules mark spans and ask nothing: expected ginger"):
        resolve(
            [
                "quickstart",
                "systems.online_nuggets.extractor=rules",
                "systems.online_nuggets.style=crucible",
            ]
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random instruct model."""
    folder = tmp_path_factory.mktemp("online") / "model"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_model("llama", vocabulary=len(tokenizer)).save_pretrained(folder)
    return folder


def test_a_local_model_is_asked_in_one_batch_and_its_lines_are_read(folder, monkeypatch):
    batches = []

    def answers(_model, tokenizer, prompts):
        batches.append(prompts)
        asked = [tokenizer.decode(ids).rpartition("Text:")[2] for ids in prompts]
        return ["- born in Lower Tarn\n- wrote plays" if "Ines" in a else "[]" for a in asked]

    monkeypatch.setattr(local_model, "_answers", answers)
    local = {"path": str(folder), "max_new_tokens": 8}
    extract = open_online_extractor(recipe("local_model", nuggets={"local_model": local}))
    assert [nugget.text for nugget in extract(QUESTION, CHUNKS)] == [
        "born in Lower Tarn",
        "wrote plays",
    ]
    assert [len(prompts) for prompts in batches] == [2]


def test_identity_follows_what_decides_the_nuggets(folder):
    local = {"local_model": {"path": str(folder)}}
    known = online_identity(recipe("local_model", nuggets=local))
    for other in (
        recipe("local_model", "crucible", local),
        recipe("local_model", nuggets=local | {"fuzzy_threshold": None}),
        recipe("local_model", nuggets={"local_model": {"path": str(folder), "dtype": "bfloat16"}}),
        recipe("rules", nuggets=local),
    ):
        assert online_identity(other) != known
    assert online_identity(recipe("local_model", nuggets=local)) == known
