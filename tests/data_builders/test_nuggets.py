import time
import unicodedata

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from rapidfuzz.distance import Indel

from data_builders.nuggets.align import align
from data_builders.nuggets.extract import MAX_WORDS, rules


@pytest.mark.parametrize(
    "text",
    [
        "Ann was a film director.|He won a big prize.|It was the last one ever.",
        "He lived in St. Louis until 1950. |He died there much later.",
        "J. R. R. Tolkien met Dr. Smith at 3.5 km. |They talked a lot.",
        "She left the U.S. |The town was small and old.",
        "A U.S. Army base was built there by Gen. Ann Lee in 1990.",
        "He has a Ph.D. in Political Science( 1998).|His wife is from Paris.",
        'He said "I am here." |Then he left the old town.',
        "He worked for Acme Inc. in 1990. |It was sold to Foo Co. |The rest is known.",
        "Élodie came home late. |Özgür was born in İzmir.|Ömer was not there.",
        "Version 2.0 came in No. 10 of vol. 3 at example.com that year.",
        "She ran away! |Did she come back? |Nobody knows that today.",
    ],
)
def test_sentences_end_where_a_reader_ends_them(text):
    parts = [part.strip() for part in text.split("|")]
    assert rules(text.replace("|", "")) == parts


def test_long_sentences_are_divided_at_clauses_outside_brackets():
    text = (
        "The band was founded in 1990 by two friends from school (Ann, who sang, and Bo, who "
        "played the drums), and it was known for long concerts, which were held in the old town."
    )
    parts = rules(text)
    assert parts[0].endswith("drums)")
    assert all(len(part.split()) <= MAX_WORDS for part in parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Ann Lee\nAnn Lee was a singer. She lived right here.\n",
            ["Ann Lee\nAnn Lee was a singer."],
        ),
        ("St. Paul\n It is a town.\n", ["St. Paul\n It is a town."]),
        ("Ann Lee\n", ["Ann Lee"]),
        ("It was cut before this end.\nShe lived here.\n", ["It was cut before this end."]),
    ],
)
def test_a_title_line_goes_with_the_candidate_after_it(text, expected):
    assert rules(text)[:1] == expected


def test_spaced_hyphens_and_ranges_of_years_are_no_boundaries():
    words = "word " * 12
    text = f"{words}for two - year terms {words}from 1701 – 1767 {words}— {words}end"
    assert [len(part.split()) for part in rules(text)] == [45, 13]


def test_a_run_without_boundaries_is_cut_between_words():
    words = [f"w{number}" for number in range(130)]
    parts = rules(" ".join(words))
    assert [word for part in parts for word in part.split()] == words
    assert max(len(part.split()) for part in parts) == MAX_WORDS


@given(st.text(st.sampled_from('abÉ日 .,;()"“”—\n1Z!'), max_size=200))
@settings(deadline=None)
def test_candidates_are_verbatim_in_order_and_do_not_overlap(text):
    at = 0
    for candidate in rules(text):
        at = text.index(candidate, at) + len(candidate)


@given(st.text(st.sampled_from("abc \n."), max_size=120), st.data())
@settings(deadline=None)
def test_a_substring_is_found_at_a_place_that_reads_the_same(text, data):
    start = data.draw(st.integers(0, len(text)))
    candidate = text[start : data.draw(st.integers(start, len(text)))]
    alignment = align(text, [candidate], None)
    if not candidate.strip():
        assert alignment.counts == {"abandoned": 1}
        return
    [found] = alignment.located
    assert found.kind == "exact"
    assert text[found.start : found.end].split() == candidate.split()


@given(
    st.lists(st.sampled_from(["born", "barn", "Paris", "in", "1990."]), min_size=1, max_size=12),
    st.lists(st.sampled_from(["born", "born,", "paris", "at"]), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5, 0.7, 0.9, 1.0]),
)
@settings(deadline=None)
def test_the_threshold_is_honoured_and_the_best_window_wins(words, wanted, threshold):
    text, candidate = " ".join(words), " ".join(wanted)
    alignment = align(text, [candidate], threshold)
    scores = [
        Indel.normalized_similarity(" ".join(words[at : at + width]).casefold(), candidate)
        for width in range(max(1, len(wanted) - 1), len(wanted) + 2)
        for at in range(len(words) - width + 1)
    ]
    best = max(scores, default=-1.0)
    if candidate in text:
        assert alignment.counts == {"exact": 1}
    elif best >= threshold:
        [found] = alignment.located
        assert found.kind == "fuzzy"
        assert found.similarity == pytest.approx(best)
    else:
        assert alignment.counts == {"abandoned": 1}


def test_fuzzy_can_be_switched_off():
    text, candidate = "He was born in Paris.", "He was barn in Paris."
    assert align(text, [candidate], 0.7).counts == {"fuzzy": 1}
    assert align(text, [candidate], None).counts == {"abandoned": 1}


def test_repeated_mentions_are_taken_in_order_and_then_run_out():
    text = "He won. She lost. He won."
    alignment = align(text, ["He won.", "He won.", "He won."], 0.7)
    assert [(found.start, found.end) for found in alignment.located] == [(0, 7), (18, 25)]
    assert alignment.counts == {"exact": 2, "abandoned": 1}


def test_whole_words_come_before_parts_of_words():
    [found] = align("A party for art", ["art"], None).located
    assert found.start == 12
    [inside] = align("A party", ["art"], None).located
    assert inside.start == 3


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKD"])
@pytest.mark.parametrize("candidate_form", ["NFC", "NFD"])
def test_canonical_forms_are_equal_and_offsets_are_the_originals(form, candidate_form):
    text = unicodedata.normalize(form, "Ça: Françoise née\n Ağaç 한국 was here.")
    candidate = unicodedata.normalize(candidate_form, "Françoise née Ağaç 한국")
    [found] = align(text, [candidate], None).located
    part = unicodedata.normalize("NFC", text[found.start : found.end])
    assert part.split() == ["Françoise", "née", "Ağaç", "한국"]
    assert found.end == len(text) or not unicodedata.combining(text[found.end])


def test_case_and_accents_are_a_matter_of_similarity():
    [found] = align("Then FRANÇOISE Née came.", ["francoise nee came."], 1.0).located
    assert (found.kind, found.similarity, found.start) == ("fuzzy", 1.0, 5)


def test_a_long_run_without_spaces_or_stops_takes_no_quadratic_time():
    started = time.process_time()
    rules("=" * 60_000)
    assert time.process_time() - started < 5
