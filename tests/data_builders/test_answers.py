import pytest

from data_builders.answers import answer_key, holds_answer


@pytest.mark.parametrize(
    ("text", "answer", "held"),
    [
        ("He lives in New York City.", "new york", True),
        ("He lives in New Yorkshire.", "new york", False),
        ("the director.He won", "he", True),
        ("Party", "art", False),
        ("A Café (Paris)", "café paris", True),
        ("born in 1990", "199", False),
        ("It cost 1,000 dollars.", "1,000", True),
        ("彼は東京に住んでいる。", "東京", True),
        ("彼は京都に住んでいる。", "東京", False),
        ("北京是中国的首都", "中国", True),
        ("กรุงเทพเป็นเมืองหลวงของประเทศไทย", "เมืองหลวง", True),
        ("Ｔｏｋｙｏ is large.", "tokyo", True),
        ("nothing", "?!", False),
    ],
)
def test_answers_are_found_by_whole_words_in_any_script(text, answer, held):
    assert holds_answer(answer_key(text), [answer]) is held
