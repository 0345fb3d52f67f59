import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.metrics import exact_match, token_f1


@pytest.mark.parametrize(
    ("prediction", "answers", "f1", "em"),
    [
        ("The Eiffel Tower.", ["eiffel tower"], 1.0, 1.0),
        ("an  apple\na day", ["Apple day"], 1.0, 1.0),
        ("New York City", ["York", "New York"], 0.8, 0.0),
        ("no no no", ["no"], 0.5, 0.0),
        ("yes", ["no"], 0.0, 0.0),
        ("", ["anything"], 0.0, 0.0),
        ("the", ["a"], 0.0, 1.0),
        ("theatre an", ["Theatre"], 1.0, 1.0),
        ("U.S.-born", ["us born"], 0.0, 0.0),
        ("1,234", ["1234"], 1.0, 1.0),
        ("Émile Zola", ["emile zola"], 0.5, 0.0),
        ("“a” word", ["“ ” word"], 1.0, 1.0),
        ("東京", ["東京"], 1.0, 1.0),
        ("anything", [], 0.0, 0.0),
    ],
)
def test_known_pairs(prediction: str, answers: list[str], f1: float, em: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(f1)
    assert exact_match(prediction, answers) == em


words = st.lists(
    st.one_of(
        st.sampled_from(["a", "the", "An", "red", "Red,", "_the_", "fox", "“a”", "the…"]), st.text()
    ),
    max_size=8,
).map(" ".join)


@given(words, words)
def test_f1_of_one_answer_is_symmetric_and_bounded(first: str, second: str) -> None:
    assert token_f1(first, [second]) == pytest.approx(token_f1(second, [first]))
    assert 0.0 <= token_f1(first, [second]) <= 1.0
