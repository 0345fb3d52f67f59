"""YAML reading and writing are inverse, whatever the text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.yaml_source import YamlSourceError, dump, read_mapping, read_value

_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc"), include_characters="\n\t"))
_TRICKY = st.sampled_from(
    ["1e5", "no", "010", "1_0", "null", "~", "", ".5", "2024-01-01", "<<", "1:30"]
)
_SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), _TEXT, _TRICKY
)
_VALUE = st.recursive(_SCALAR, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.one_of(_TRICKY, _TEXT), _VALUE, max_size=4))
def test_what_is_dumped_reads_back_equal_and_of_equal_type(value: dict[str, Any]) -> None:
    read, lines = read_mapping(dump(value))
    assert read == value
    assert repr(read) == repr(value)
    assert set(lines) == set(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        ("1_000", 1000),
        ("0", 0),
        ("-1", -1),
        ("-.inf", float("-inf")),
        ("~", None),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


def test_deep_nesting_is_a_clear_error() -> None:
    with pytest.raises(YamlSourceError, match="nested too deeply"):
        read_value("[" * 1000 + "]" * 1000)
