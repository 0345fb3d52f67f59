import time

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from data_builders.nuggets.clauses import MAX_WORDS, MIN_WORDS, Words, _boundaries, clauses
from data_builders.nuggets.rules import rules
from data_builders.nuggets.sentences import sentences


def parts_of(text):
    """The text without its bars, and the parts that they mark."""
    return text.replace("|", ""), [part.strip() for part in text.split("|")]


@pytest.mark.parametrize(
    "marked",
    [
        "Ann was a film director.|He won a big prize.|It was the last one ever.",
        "He lived in St. Louis until 1950. |He died there much later.",
        "J. R. R. Tolkien met Dr. Smith at 3.5 km. |They talked a lot.",
        "It was written and directed by P. A. Arun Prasad.",
        "She left the U.S. |The town was small and old.",
        "A U.S. Army base was built there by Gen. Ann Lee in 1990.",
        "He has a Ph.D. in Political Science( 1998).|His wife is from Paris.",
        'He said "I am here." |Then he left the old town.',
        "He worked for Acme Inc. in 1990. |It was sold to Foo Co. |The rest is known.",
        "Élodie came home late. |Özgür was born in İzmir.|Ömer was not there.",
        "Version 2.0 came in No. 10 of vol. 3 at example.com that year.",
        "She ran away! |Did she come back? |Nobody knows that today.",
        # Abbreviations that are words too, and months before numbers and before sentences.
        "She said no. |Then she left the room. |It was No. 5 of all.",
        "He came on Dec. 5 of that year. |She came in Oct. |They left at once.",
        "Many birds live there, e.g. The Great Auk, i.e. An auk.",
        "The river Po (approx. Five miles long) is old. |See Fig. 3 and pp. 5.",
        # Numbers.
        "The firm lost 1,234.56 dollars in all. |About 3.5 of 10 were saved.",
        "Revenue grew by 63.6%.|On Monday it fell to $5.|He sold all shares.",
        "1. First, open the small box.",
        # A missing space, and names that look like one.
        "It was in the city.|She died there. |But the Node.Js file README.Md stayed.",
        "Write to ann.Lee@x.org or see https://x.com/a.Html?q=b.C for more.",
        # Ellipses, quotations and brackets.
        "He waited for hours... |Then the man [...] Went home at last. |She saw it… and left.",
        '"Is it really you there?" he asked her. |"Yes, of course it is!" |Ann said it loudly.',
        'The single "What About Us?" (UK #122) was produced by Bo.',
        "He (the son of A. Lee, b. 1950) came home. |(She did not come home.)",
        # No capitals at all.
        "he was born in a small town. |he left it at last.",
        # Pictures.
        "Great game this fine evening 🎉🎉 |We won by two goals 😀 |They all love 🇫🇷 France.",
    ],
)
def test_sentences_end_where_a_reader_ends_them(marked):
    text, parts = parts_of(marked)
    found = sentences(text, 0, len(text))
    assert [text[start:end].strip() for start, end in found] == parts


@pytest.mark.parametrize(
    "marked",
    [
        "李白字太白，是唐代诗人。|他说：“天生我材必有用！”，后来他走了。|你知道吗？|知道！",
        "「吾輩は猫である。」という一文で知られる。|価格は１．５ドルです。",
        "세종대왕은 국왕이다. |그는 훈민정음을 창제했다.|그는 과학도 발전시켰다.",
        "महात्मा गांधी का जन्म हुआ था। |वे एक वकील थे।|क्या यह सच है?",
        "كان طبيبًا وفيلسوفًا. |هل تعرفه؟ |نعم، أعرفه جيدًا. |كان د. أحمد هناك.",
        "علامہ اقبال ایک شاعر تھے۔ |وہ سیالکوٹ میں پیدا ہوئے۔",
        "ភ្នំពេញគឺជារាជធានី។ |ទីក្រុងនេះស្ថិតនៅលើច្រាំងទន្លេ។",
        "ရန်ကုန်မြို့သည် အကြီးဆုံးမြို့ ဖြစ်သည်။ |မြို့တော်ဖြစ်ခဲ့သည်။",
        "Երևանը Հայաստանի մայրաքաղաքն է։ |Քաղաքը մեծ է։",
        "አዲስ አበባ ዋና ከተማ ናት። |ብዙ ሰዎች ይኖሩባታል።",
        "Ο Σωκράτης ήταν φιλόσοφος. |Πού γεννήθηκε; |Στην Αθήνα; |Ναι· εκεί γεννήθηκε.",
        "А. С. Пушкин родился в 1799 г. в Москве. |Он был поэтом.|Его убили на дуэли.",
        "ירושלים היא בירת ישראל. |העיר הוקמה לפני שנים. |האם זה נכון?",
        "Am 5. Mai 1818 wurde er geboren, z. B. in Trier. |Er sagte: „Gut so.“ |Dann ging er.",
        "¿Cómo estás? |¡Muy bien! |Nació en Sevilla.",
    ],
)
def test_sentences_end_in_other_scripts_and_languages(marked):
    text, parts = parts_of(marked)
    found = sentences(text, 0, len(text))
    assert [text[start:end].strip() for start, end in found] == parts


@pytest.mark.parametrize(
    "marked",
    [
        "The band was founded in 1990 by two friends from school (Ann, who sang, and Bo, who "
        "played the drums),| and it was known for long concerts.",
        'It has been called "the best book, which nobody reads, and the worst film" by a critic '
        "of the paper,| who had seen neither of them at that time.",
        "The treaty had three aims: (1) to end the war between the two kingdoms of the north,| "
        "(2) to open the ports to trade, and (3) to return the prisoners.",
        "He was Private Secretary to the Prime Minister, his uncle, Robert Lee, Jr.,| during the "
        "second term of the government and on July 2, 1993, he left it again.",
        "The name of the award is a reference to the novel by Jules Verne| in which the traveller "
        "and his servant go round the whole world for a bet.",
        "长安、洛阳、成都、扬州、金陵、襄阳、江陵、岳阳、宣城、当涂等地都留下了他的足迹，|"
        "他的诗歌现存九百多首，题材十分广泛，其中包括送别等内容。",
    ],
)
def test_long_sentences_are_divided_at_clauses(marked):
    text, parts = parts_of(marked)
    assert rules(text) == [part.rstrip(",，") for part in parts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Ann Lee\nAnn Lee was a singer. She lived right here.\n",
            ["Ann Lee\nAnn Lee was a singer.", "She lived right here."],
        ),
        ("St. Paul\n It is a town.\n", ["St. Paul\n It is a town."]),
        ("Ann Lee\n", ["Ann Lee"]),
        (
            "It was cut before this end.\nShe lived here.\n",
            ["It was cut before this end.", "She lived here."],
        ),
        (
            "# Ann Lee\n\n## Life\n\nShe lived right here.\n\nCareer\n\nShe was a painter.\n",
            ["# Ann Lee\n\n## Life\n\nShe lived right here.", "Career\n\nShe was a painter."],
        ),
        (
            "He owned these:\n\n- a red car\n\n* two boats\n1. a house\n\nAnn: 5\nBo: 6\n",
            ["He owned these:\n\n- a red car", "two boats", "1. a house", "Ann: 5", "Bo: 6"],
        ),
        ("| Year | Film |\n|------|------|\n| 1990 | Foo |\n", ["Year | Film", "1990 | Foo"]),
        ("No. He never came back here. Why?", ["No. He never came back here. Why?"]),
        (" \n\t\u3000 ", []),
        ("!!! ... ???", []),
        ("", []),
    ],
)
def test_lines_titles_and_lists(text, expected):
    assert rules(text) == expected


def test_wrapped_prose_is_read_across_its_line_ends():
    text = (
        "The quick brown fox jumps over the lazy dog near the bank of\n"
        "the river, where a hunter had been waiting for it since Dr.\n"
        "Smith left. He went home to his small house in the town of\n"
        "Paris.\n"
        "A new line starts here.\n"
    )
    assert rules(text) == [
        "The quick brown fox jumps over the lazy dog near the bank of\nthe river",
        "where a hunter had been waiting for it since Dr.\nSmith left.",
        "He went home to his small house in the town of\nParis.",
        "A new line starts here.",
    ]


def test_spaced_hyphens_and_ranges_of_years_are_no_boundaries():
    words = "word " * 12
    text = f"{words}for two - year terms {words}from 1701 – 1767 {words}— {words}end"
    assert [len(part.split()) for part in rules(text)] == [45, 13]


@pytest.mark.parametrize(
    ("unit", "joint", "units_a_word"),
    [("w", " ", 1), ("汉", "", 2), ("ก", "", 4), ("ကြ", "", 4)],
)
def test_a_run_without_boundaries_is_cut_between_words(unit, joint, units_a_word):
    text = joint.join([unit] * 130 * units_a_word)
    parts = rules(text)
    assert joint.join(parts) == text
    sizes = [part.count(unit) / units_a_word for part in parts]
    assert len(parts) == 6
    assert max(sizes) <= MAX_WORDS
    assert max(sizes) - min(sizes) <= 1


@given(st.text(st.sampled_from('abÉ日本ก็ 。，.,;()"“”—\n1Z!-|\t#🎉\u0301ー'), max_size=200))
@example("a.B" * 30)
@settings(deadline=None, max_examples=300)
def test_candidates_are_verbatim_in_order_and_cover_every_letter_once(text):
    at = 0
    candidates = rules(text)
    for candidate in candidates:
        at = text.index(candidate, at) + len(candidate)
    covered = "".join(filter(str.isalnum, "".join(candidates)))
    assert covered == "".join(filter(str.isalnum, text))


@given(st.lists(st.sampled_from(["ab", "c,", "—", "(d", "e)", "1.5"])), st.data())
def test_words_are_counted_as_by_splitting_at_spaces(words, data):
    text = " ".join(words)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    # Words that begin before the range are not in it.
    begun_before = start > 0 and not text[start - 1].isspace() and text[start:end].strip() != ""
    begun_before = begun_before and not text[start].isspace()
    expected = len(text[start:end].split()) - begun_before
    assert Words(text, [(0, len(text))]).between(start, end) == expected


def divided_slowly(words, kinds, start, end):
    """The rule for sentences that have boundaries, as it is written, counting for every place."""
    if words.between(start, end) > MAX_WORDS:
        for places in kinds:
            halves = [
                (words.between(start, place), words.between(place, end), place)
                for place in places
                if start < place < end
            ]
            scored = [
                (abs(left - right), place)
                for left, right, place in halves
                if min(left, right) >= MIN_WORDS
            ]
            if scored:
                place = min(scored)[1]
                halves = [(start, place), (place, end)]
                return [part for half in halves for part in divided_slowly(words, kinds, *half)]
    return [(start, end)]


@given(st.text(st.sampled_from("ab  ,;:—()"), max_size=600).filter(str.strip))
@settings(deadline=None)
def test_division_is_at_the_best_kind_of_boundary_nearest_the_middle(text):
    words = Words(text, [(0, len(text))])
    kinds = [places for _, places in _boundaries(text, words, 0, len(text))]
    slow = divided_slowly(words, kinds, 0, len(text))
    if all(words.between(*part) <= 2 * MAX_WORDS for part in slow):
        assert clauses(text, words, 0, len(text)) == slow


PIECES = [
    *[
        "=",
        " ",
        "a ",
        "a, ",
        ", ",
        "(",
        "(a ",
        "([{",
        '"a" ',
        '."',
        "a.",
        "A. ",
        "Ab.",
        "…",
        "汉，",
    ],
    *["ก", "😀", "a\n", "# a\n", "a;", " — ", "some word and ", "a | ", "\t", "- "],
]


@pytest.mark.parametrize("piece", PIECES)
def test_time_is_linear_in_the_text(piece):
    text = f"a{piece * (50_000 // len(piece))}b"
    started = time.process_time()
    rules(text)
    assert time.process_time() - started < 2
