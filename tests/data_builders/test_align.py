import math
import random
import time
import unicodedata

import hypothesis.strategies as st
import pytest
import regex
from hypothesis import example, given, settings
from rapidfuzz.distance import Indel

from data_builders.nuggets.align import align
from data_builders.nuggets.folding import MAX_CLUSTER
from data_builders.nuggets.windows import Windows, widths

WORDS = st.lists(st.text("abcé", min_size=1, max_size=6), min_size=1, max_size=70)


def spans(text, candidates, threshold=0.7):
    return [(found.start, found.end) for found in align(text, candidates, threshold).located]


def exhaustive(words, query, threshold):
    """The best similarity, and by word count the windows that have it, found one by one."""
    count = len(query.split())
    least, most = widths(count)
    scored = {}
    for width in range(least, most + 1):
        for first in range(len(words) - width + 1):
            window = " ".join(words[first : first + width])
            scored[first, width] = Indel.normalized_similarity(query, window)
    best = max(scored.values(), default=-1.0)
    if best < threshold:
        return threshold, []
    tiers = []
    for width in sorted(range(least, most + 1), key=lambda width: abs(width - count)):
        tier = []
        for first in range(len(words)):
            start = len(" ".join([*words[:first], ""]))
            end = start + len(" ".join(words[first : first + width]))
            if scored.get((first, width)) == best and (not tier or start >= tier[-1][1]):
                tier.append((start, end))
        tiers += [tier] if tier else []
    return best, tiers


@given(WORDS, st.data())
@settings(deadline=None, max_examples=150)
def test_the_best_windows_are_those_of_an_exhaustive_search(words, data):
    start = data.draw(st.integers(0, len(words) - 1))
    near = words[start : start + data.draw(st.integers(1, 20))]
    edits = st.one_of(st.sampled_from(words), st.text("abcé", min_size=1, max_size=6))
    for _ in range(data.draw(st.integers(0, 4))):
        near[data.draw(st.integers(0, len(near) - 1))] = data.draw(edits)
    query = " ".join(near)
    threshold = data.draw(st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]))
    expected = exhaustive(words, query, threshold)
    assert Windows(" ".join(words)).best(query, threshold) == expected


def test_a_text_without_words_has_no_window():
    assert Windows("").best("a", 0.0) == (0.0, [])


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
    best, tiers = exhaustive([word.casefold() for word in words], candidate, threshold)
    if candidate in text:
        assert alignment.counts == {"exact": 1}
    elif tiers:
        [found] = alignment.located
        assert (found.kind, found.similarity) == ("fuzzy", best)
        assert (found.start, found.end) == tiers[0][0]
    else:
        assert alignment.counts == {"abandoned": 1}


@given(st.text("ab ", min_size=1, max_size=40), st.text("ab ", min_size=1, max_size=40))
@settings(deadline=None)
def test_a_similarity_equal_to_the_threshold_is_accepted_and_none_below(text, candidate):
    for found in align(text, [candidate], 0.0).located:
        assert align(text, [candidate], found.similarity).located == [found]
        if found.kind == "fuzzy" and found.similarity < 1:
            above = math.nextafter(found.similarity, 1)
            assert align(text, [candidate], above).counts == {"abandoned": 1}


def test_fuzzy_can_be_switched_off():
    text, candidate = "He was born in Paris.", "He was barn in Paris."
    assert align(text, [candidate], 0.7).counts == {"fuzzy": 1}
    assert align(text, [candidate], None).counts == {"abandoned": 1}
    assert align(text, ["he was"], None).counts == {"abandoned": 1}


def test_words_left_out_of_a_candidate_are_inside_its_place():
    text = "In 1990 the old town hall of Ghent was sold to a local brewer for a single franc."
    [(start, end)] = spans(
        text, ["the town hall of Ghent was sold to local brewer for single franc."]
    )
    assert text[start:end] == text[8:]


def test_repeated_mentions_are_taken_in_order_and_then_run_out():
    text = "He won. She lost. He won."
    alignment = align(text, ["He won.", "He won.", "He won."], 0.7)
    assert [(found.start, found.end) for found in alignment.located] == [(0, 7), (18, 25)]
    assert alignment.counts == {"exact": 2, "abandoned": 1}


def test_a_repeated_mention_never_takes_a_worse_place():
    text = "It was built in 1990 and sold in 1996."
    assert spans(text, ["built in 1990", "Built in 1990", "built in 1990"]) == [(7, 20)]


def test_spellings_of_a_phrase_share_its_places():
    text = "The city fell. Then the city rose."
    assert spans(text, ["the city", "the city"]) == [(20, 28), (0, 8)]
    assert spans(text, ["The City", "the city"]) == [(0, 8), (20, 28)]
    assert spans(text, ["tha city", "tha city"]) == [(0, 8), (20, 28)]


def test_the_candidate_before_says_which_of_several_places_is_meant():
    text = "Ann saw the city. Bo left the city. Cy drew the city."
    assert spans(text, ["Bo left", "the city"]) == [(18, 25), (26, 34)]
    assert spans(text, ["Bo left the city.", "the city"]) == [(18, 35), (26, 34)]
    assert spans(text, ["Cy drew the city.", "tha city"]) == [(36, 53), (44, 53)]


@given(st.integers(0, 5), st.integers(0, 7), st.randoms(use_true_random=False), st.booleans())
@settings(deadline=None)
def test_no_place_is_lost_in_any_order_of_the_candidates(places, mentions, rng, misspelt):
    words = [f"w{number}x{number * 7919}" for number in range(6)]
    text = words[0]
    for number in range(places):
        text += f" red house {words[number + 1]}"
    candidates = ["rad house" if misspelt else "red house"] * mentions + words[: places + 1]
    rng.shuffle(candidates)
    located = align(text, candidates, 0.8).located
    taken = [(x.start, x.end) for x in located if candidates[x.candidate].endswith("house")]
    assert len(taken) == len(set(taken)) == min(places, mentions)
    assert {text[start:end] for start, end in taken} <= {"red house"}


def test_whole_words_come_before_parts_of_words():
    assert spans("A party for art", ["art"], None) == [(12, 15)]
    assert spans("A party for Art", ["art"]) == [(12, 15)]
    assert spans("A party", ["art"], None) == [(3, 6)]


EXACT = {
    "typographic quotes": ('"It\'s"', "“It’s”"),
    "dashes": ("1914-1918", "1914–1918"),
    "minus": ("-5", "−5"),
    "ellipsis": ("and so on...", "and so on…"),
    "white space": ("New York City", "New\u00a0York\n\t City"),
    "ideographic space": ("東京 大学", "東京\u3000大学"),
    "soft hyphens": ("information", "infor\u00admation"),
    "soft hyphen before a mark": ("née", "ne\u00ad\u0301e"),
    "zero-width space": ("information", "infor\u200bmation"),
    "byte order mark": ("Ann Lee", "\ufeffAnn\ufeff Lee"),
    "direction marks": ("שלום Ann", "שלום\u200f \u202aAnn\u202c"),
    "full width": ("ABC 123!", "ＡＢＣ １２３！"),
    "half-width kana": ("ガラス", "ｶﾞﾗｽ"),
    "ligatures": ("official fluff", "oﬃcial ﬂuﬀ"),
    "Arabic presentation forms": ("سلام", "ﺳﻼﻡ"),
    "Hangul jamo": ("한국", unicodedata.normalize("NFD", "한국")),
    "variation selector": ("I ❤ it", "I ❤\ufe0f it"),
    "stacked marks": ("ệ", "e\u0302\u0323"),
    "Kelvin sign": ("300 K", "300 \u212a"),
}
FOLDED = {
    "case": ("MCDONALD", "McDonald"),
    "accents": ("Grainne Ni Mhaille", "Gráinne Ní Mháille"),
    "strokes": ("Lodz", "Łódź"),
    "sharp s": ("STRASSE", "Straße"),
    "capital sharp s": ("straße", "STRAẞE"),
    "Turkish i": ("Istanbul Diyarbakir", "İstanbul Dıyarbakır"),
    "vowel points": ("محمد", "مُحَمَّد"),
    "Hebrew points": ("שלום", "שָׁלוֹם"),
    "Greek": ("οδος", "ὉΔΌΣ"),
    "compatibility": ("m2 TM", "m² ™"),
    "lone mark": ("a b", "a\u0301 \u0301b"),
    "lone mark after a no-break space": ("a b", "a\u0301\u00a0\u0301b"),
    "spacing accent": ("a b", "a¨ ¨b"),
}
APART = {
    "superscripts": ("102", "10²"),
    "accents": ("Mhaille", "Mháille"),
    "kana voicing": ("ハハ", "ババ"),
}


@pytest.mark.parametrize("before", ["", "Then ", "Été 日本 “", "👨\u200d👩\u200d👧 "])
@pytest.mark.parametrize("case", EXACT)
def test_encodings_and_styles_of_the_same_characters_are_exact(before, case):
    for candidate, form in (EXACT[case], EXACT[case][::-1]):
        text = f"{before}{form} was."
        [found] = align(text, [candidate], None).located
        assert found.kind == "exact"
        assert text[found.start : found.end].strip("\ufeff\u202a\u202c") == form.strip(
            "\ufeff\u202a\u202c"
        )


@pytest.mark.parametrize("case", FOLDED)
def test_case_accents_and_compatibility_forms_are_fuzzy(case):
    for candidate, form in (FOLDED[case], FOLDED[case][::-1]):
        text = f"Été ({form}), was"
        assert align(text, [candidate], None).counts == {"abandoned": 1}
        [found] = align(text, [candidate], 1.0).located
        assert (found.kind, found.similarity) == ("fuzzy", 1.0)
        assert text[found.start : found.end] == form


@pytest.mark.parametrize("case", APART)
def test_what_changes_the_meaning_is_not_exact(case):
    candidate, form = APART[case]
    assert align(f"in {form} was", [candidate], None).counts == {"abandoned": 1}


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKD"])
@pytest.mark.parametrize("candidate_form", ["NFC", "NFD"])
def test_canonical_forms_are_equal_and_offsets_are_the_originals(form, candidate_form):
    text = unicodedata.normalize(form, "Ça: Françoise née\n Ağaç 한국 was here.")
    candidate = unicodedata.normalize(candidate_form, "Françoise née Ağaç 한국")
    [found] = align(text, [candidate], None).located
    part = unicodedata.normalize("NFC", text[found.start : found.end])
    assert part.split() == ["Françoise", "née", "Ağaç", "한국"]
    assert found.end == len(text) or not unicodedata.combining(text[found.end])


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_an_unaccented_name_finds_its_accented_place(form):
    text = unicodedata.normalize(
        form, "Queen\nGrace O’Malley (c. 1530 – c. 1603; Irish: Gráinne Ní Mháille) was a lord."
    )
    [found] = align(text, ["Grace O'Malley (Irish: Grainne Ni Mhaille)"], 0.7).located
    assert found.kind == "fuzzy"
    assert found.end == text.index(" was")
    [found] = align(text, ["Irish: Grainne Ni Mhaille"], 0.7).located
    assert (found.kind, found.similarity) == ("fuzzy", 1.0)
    assert text[found.start : found.end] == unicodedata.normalize(form, "Irish: Gráinne Ní Mháille")


@pytest.mark.parametrize(
    ("text", "candidate", "place"),
    [
        ("彼は1990年に東京で生まれた。その後、大阪に移った。", "東京に生まれた", "東京で生まれた"),
        ("他出生于北京市海淀区,后来搬到上海。", "出生于北京海淀区", "出生于北京市海淀区"),
        ("เขาเกิดที่กรุงเทพมหานครในปีพ.ศ.", "เกิดทิ่กรุงเทพมหานคร", "เกิดที่กรุงเทพมหานคร"),
        ("👍🏽👨‍👩‍👧🎉🇫🇷🇩🇪🎂🎈🎁", "🎉🇫🇷🇩🇪🎃🎈", "🎉🇫🇷🇩🇪🎂🎈"),
    ],
)
def test_windows_of_unspaced_scripts_are_characters(text, candidate, place):
    [found] = align(text, [candidate], 0.7).located
    assert (found.kind, text[found.start : found.end]) == ("fuzzy", place)


HIDDEN = "\u00ad\u200b\ufeff"
NASTY = HIDDEN + (
    "aé日ใก\u0e49\u0301\u0323e👍🏽👩\u200d🇫🇷ßİıﬁＡ．ｶﾞ한\u1112\u1161\u11ab"
    " \u00a0“-\n\r\t.,'ک\u064e\u0600\u0307क\u094dष\ufdfa"
)
# No cluster of it is longer than a form takes as one, not even decomposed.
NASTY_TEXT = st.text(NASTY, max_size=MAX_CLUSTER - 2)


@given(NASTY_TEXT, st.text(NASTY, max_size=12), st.integers(0, MAX_CLUSTER), st.integers(0, 12))
@example(" ﾞ", "", 0, 2)
@example("a\u00a0\u0301b", "A B", 2, 2)
@example("é  \u0301", "", 2, 2)
@example("\u0600 b", "", 0, 1)
@settings(deadline=None, max_examples=150)
def test_places_never_cut_a_grapheme_cluster(text, candidate, start, length):
    part = text[start : start + length]
    cuts = {0, *(match.end() for match in regex.finditer(r"\X", text))}
    for found in align(text, [candidate, part, part.upper(), part], 0.5).located:
        assert found.start < found.end
        assert {found.start, found.end} <= cuts
        assert 0.5 <= found.similarity <= 1


@given(NASTY_TEXT)
@example("\u0301\u00ad\u094d")
@example("e\u200b\u200d\u0301")
@example("\u1112\u00ad\u1161")
@example("\u1112\u200d\u00ad\u1161")
@settings(deadline=None)
def test_every_form_of_a_text_is_exact_in_it(text):
    shown = text.translate(dict.fromkeys(map(ord, HIDDEN)))
    for form in ("NFC", "NFD"):
        for candidate in (text, " ".join(text.split()), text.replace("\u00ad", ""), shown):
            counts = align(text, [unicodedata.normalize(form, candidate)], None).counts
            assert counts["exact"] == 1 or not shown.replace("\u200d", "").strip()


def seconds(text, candidates):
    times = []
    for _ in range(3):
        start = time.thread_time()
        align(text, candidates, 0.7)
        times.append(time.thread_time() - start)
    return min(times)


def test_the_time_grows_no_faster_than_n_log_n():
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 9))) for _ in range(2000)]
    words = rng.choices(vocabulary, k=50_000)
    candidates = [
        " ".join([*words[at : at + 8], "x", *words[at + 9 : at + 15]]) for at in (40, 300)
    ]
    small, large = (seconds(" ".join(words[:size]), candidates) for size in (500, 50_000))
    assert large / small < 2 * 100 * math.log(50_000) / math.log(500)


@pytest.mark.parametrize(
    ("unit", "candidate"),
    [
        ("word ", "word wurd word werd word"),
        ("abcde", "abcdd abcee abc"),
        ("aaaaa", "aa"),
        ("     ", "a word"),
        ("\u0301\u0316" * 3, "e\u0316e e"),
        ("日本語文字", "日本誤字日本語"),
        ("👨‍👩‍👧👍🏽", "👍👨‍👩‍👧👨"),
        ("a\u200b", "aba a"),
    ],
    ids=[
        "words",
        "no spaces",
        "one letter",
        "spaces",
        "marks",
        "ideographs",
        "emoji",
        "zero-width",
    ],
)
def test_hostile_texts_take_linear_time(unit, candidate):
    small, large = (seconds(unit * size, [candidate]) for size in (500, 10_000))
    assert large < 2 * 20 * max(small, 0.001)


def test_many_mentions_of_one_word_take_linear_time():
    text = "word " * 20_000
    start = time.thread_time()
    alignment = align(text, ["word"] * 25_000, 0.7)
    assert alignment.counts == {"exact": 20_000, "abandoned": 5_000}
    assert time.thread_time() - start < 5
