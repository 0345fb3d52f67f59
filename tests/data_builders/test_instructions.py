import contextlib
import json
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from data_builders.nuggets.instructions import NUGGETS_SCHEMA, messages, parse_candidates


def test_the_worked_example_follows_its_own_rules():
    task, answer, question = messages("A text.")
    assert [turn["role"] for turn in (task, answer, question)] == ["user", "assistant", "user"]
    assert list(json.loads(answer["content"])) == NUGGETS_SCHEMA["required"]
    example, at = task["content"].partition("Text:\n")[2], 0
    for nugget in parse_candidates(answer["content"]):
        at = example.index(nugget, at) + len(nugget)
    assert question["content"].endswith("A text.")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"nuggets": ["a b", "c"]}', ["a b", "c"]),
        ('{"nuggets": []}', []),
        ("[]", []),
        ('["a", "a"]', ["a", "a"]),
        ('{"facts": ["a"]}', ["a"]),
        ('{"nuggets": [1, " a ", null, " ", {"x": 2}]}', ["a"]),
        ('{"nuggets": ["caf\\u00e9 \\"x\\"", "two\nlines"]}', ['café "x"', "two\nlines"]),
        ('```json\n{"nuggets": ["a", "b"]}\n```', ["a", "b"]),
        ('Sure, [3] nuggets: {"nuggets": ["a"]}. Is it good?', ["a"]),
        ('<think>["x"] or 1. y?</think>\n["a"]', ["a"]),
        # Cut off: the complete entries.
        ('{"nuggets": ["a", "b', ["a"]),
        ('{"nuggets": ["a", "b",', ["a", "b"]),
        ('```json\n["a",\n "b', ["a"]),
        # Quotation marks that are not escaped.
        ('{"nuggets": [\n  "He said "no" to her.",\n  "b"\n]}', ['He said "no" to her.', "b"]),
        ('Nuggets:\n1. a\n2) "b"\n(3) c, d\n', ["a", "b", "c, d"]),
        ("- a\n* b.\n• c\n", ["a", "b.", "c"]),
    ],
)
def test_answers_of_many_forms_are_read(answer, expected):
    assert parse_candidates(answer) == expected


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "empty answer"),
        (" \n", "empty answer"),
        ('<think>Is it ["a"', "empty answer"),
        ("The text states nothing.", "no list found"),
        ('{"nuggets": [', "no list found"),
        ('{"nuggets": "a"}', "no list found"),
        ('{"nuggets": [1, 2]}', "no text in the list"),
        ("[" * 5000, "no list found"),
        ('{"a":' * 5000, "no list found"),
    ],
)
def test_what_cannot_be_read_says_why(answer, reason):
    with pytest.raises(ValueError, match=f"^{reason}$"):
        parse_candidates(answer)


entries = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(st.lists(entries, min_size=1), st.booleans(), st.data())
@settings(deadline=None)
def test_json_cut_anywhere_gives_its_first_entries(texts, ascii_only, data):
    answer = json.dumps({"nuggets": texts}, ensure_ascii=ascii_only)
    cut = data.draw(st.integers(0, len(answer)))
    stripped = [text.strip() for text in texts]
    try:
        found = parse_candidates(answer[:cut])
    except ValueError:
        assert cut <= len(json.dumps({"nuggets": texts[:1]}, ensure_ascii=ascii_only))
        return
    assert found == stripped[: len(found)]
    assert cut < len(answer) or found == stripped


@pytest.mark.parametrize("piece", ["[", '["', '{"a":', "- ", "1. ", "a ", '"a', "<think>"])
def test_reading_takes_no_long_time(piece):
    started = time.process_time()
    with contextlib.suppress(ValueError):
        parse_candidates(piece * (50_000 // len(piece)))
    assert time.process_time() - started < 3
