import logging
import math
import sys
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from data_builders.bm25 import index_texts, rank, read_index, words, write_index
from recipes.errors import UserError

pytest.importorskip("bm25s", reason="the extra bm25 is not installed")

WORDS = st.lists(st.sampled_from("a b c d e f".split()), max_size=6).map(" ".join)


def scores_by_hand(query, texts):
    """Lucene's BM25, straight from its formula."""
    documents = [Counter(text.split()) for text in texts]
    mean = sum(sum(document.values()) for document in documents) / len(texts)
    scores = []
    for document in documents:
        score = 0.0
        for word in query.split():
            holding = sum(word in other for other in documents)
            if document[word]:
                idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
                length = 1 - 0.75 + 0.75 * sum(document.values()) / mean
                score += idf * document[word] / (document[word] + 1.5 * length)
        scores.append(score)
    return scores


@given(st.lists(WORDS, min_size=1, max_size=12), WORDS, st.integers(1, 15))
@settings(deadline=None)
def test_ranks_are_those_of_the_formula(texts, query, count):
    found = rank(index_texts(iter(texts)), query, count)
    by_hand = scores_by_hand(query, texts)
    assert len(found) == min(count, sum(score > 0 for score in by_hand))
    assert len(set(found)) == len(found)
    # Single precision there, double here: what is ranked higher may be lower by the rounding alone.
    for place, text in enumerate(found):
        better = [score for at, score in enumerate(by_hand) if at not in found[: place + 1]]
        assert by_hand[text] > 0
        assert all(by_hand[text] >= score - 1e-5 for score in better)


@given(st.lists(WORDS, min_size=1, max_size=6), WORDS)
@settings(deadline=None)
def test_the_earlier_of_equal_texts_comes_first(texts, query):
    doubled = texts + texts
    found = rank(index_texts(doubled), query, len(doubled))
    places = {text: place for place, text in enumerate(found)}
    for first in range(len(texts)):
        if first in places:
            assert places[first] < places[first + len(texts)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Gráinne Ní Mháille's 2 ships", ["gráinne", "ní", "mháille", "s", "2", "ships"]),
        ("gra\u0301inne", ["gráinne"]),
        ("ＦＵＬＬ ﬁsh", ["full", "fish"]),
        ("東京タワー in 1958", ["東京", "京タ", "タワ", "ワー", "in", "1958"]),
        ("山 100km山口", ["山", "100km", "山口"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("ไทย", ["ไท", "ทย"]),
        ("서울은 한국", ["서울은", "한국"]),
        ("… — !", []),
        ("", []),
    ],
)
def test_words_of_many_scripts(text, expected):
    assert words(text) == expected


def test_a_part_of_a_chinese_sentence_is_found():
    texts = ["巴黎是法国的首都。", "柏林是德国的首都。", "埃菲尔铁塔在巴黎。"]
    assert rank(index_texts(texts), "德国", 3) == [1]
    assert sorted(rank(index_texts(texts), "巴黎", 3)) == [0, 2]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("texts", [[], ["", "…"], ["a"]])
def test_texts_without_the_words_of_the_query_find_nothing(texts):
    index = index_texts(texts)
    assert rank(index, "nothing like it", 3) == rank(index, "", 3) == []


def test_an_index_on_disk_ranks_like_one_in_memory(tmp_path, caplog):
    texts = [f"{word} {other}" for word in "abcdef" for other in "aébc"]
    with caplog.at_level(logging.DEBUG):
        write_index(tmp_path / "bm25", iter(texts))
        index = read_index(tmp_path / "bm25")
    assert not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == ["bm25"]
    for query in ("a", "é b", "c d", "z"):
        assert rank(index, query, 9) == rank(index_texts(texts), query, 9)


def test_an_interrupted_write_leaves_no_index(tmp_path):
    def texts():
        yield "a"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_index(tmp_path / "bm25", texts())
    assert not (tmp_path / "bm25").exists()
    (tmp_path / "bm25.partial").mkdir()
    (tmp_path / "bm25.partial" / "left").touch()
    write_index(tmp_path / "bm25", ["a"])
    assert not (tmp_path / "bm25" / "left").exists()


def test_without_bm25s_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UserError, match=r"retrieval\.bm25 needs .* 'coinrag\[bm25\]'"):
        index_texts(["a"])
