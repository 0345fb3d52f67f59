from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from small import tiny_tokenizer
from transformers import AutoTokenizer

from data_builders.chunking import chunk_id, chunk_text, covering_tokens
from data_builders.nuggets.align import align

TOKENIZER = tiny_tokenizer()
TEXT = st.text(st.sampled_from("aé日𝔘e\u0301 \n.<|im_end|>Thebornin"), max_size=80)


@given(text=TEXT, size=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_chunks_partition_tokens_and_characters(text, size):
    chunks = chunk_text(TOKENIZER, text, size)
    whole = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert [token for chunk in chunks for token in chunk.token_ids] == whole
    assert "".join(chunk.text for chunk in chunks) == text
    assert all(1 <= len(chunk.token_ids) <= size for chunk in chunks)
    # No character here has more than four bytes, and so tokens.
    assert all(len(chunk.token_ids) > size - 4 for chunk in chunks[:-1])
    if size >= 4:
        assert all(TOKENIZER.decode(chunk.token_ids) == chunk.text for chunk in chunks)
    assert all(len(chunk.offsets) == len(chunk.token_ids) for chunk in chunks)


@given(text=TEXT, size=st.integers(2, 12), data=st.data())
@settings(max_examples=100, deadline=None)
def test_covering_tokens_hold_the_characters_and_no_token_too_many(text, size, data):
    for chunk in chunk_text(TOKENIZER, text, size):
        if not chunk.text:
            continue
        start = data.draw(st.integers(0, len(chunk.text) - 1))
        end = data.draw(st.integers(start + 1, len(chunk.text)))
        overlapping = [i for i, (a, b) in enumerate(chunk.offsets) if a < end and b > start]
        span = covering_tokens(chunk.offsets, start, end)
        assert span == ((overlapping[0], overlapping[-1] + 1) if overlapping else None)


MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"
SCRIPTS = st.text(
    "aé日ใก\u0e49\u0301👍🏽👩\u200d🇫\u00ad\ufeffﬁＡ한\u1112\u1161 “-\n'ک\u064e𝔘 the born",
    max_size=60,
)


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def tokenizer(request):
    if request.param == "tiny":
        return TOKENIZER
    if not MODEL.is_dir():
        pytest.skip("models/smollm2-135m-instruct is absent")
    return AutoTokenizer.from_pretrained(MODEL)


@given(text=SCRIPTS, size=st.integers(4, 40), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_text_decoded_from_a_span_holds_its_nugget(tokenizer, text, size, data):
    for chunk in chunk_text(tokenizer, text, size):
        start = data.draw(st.integers(0, len(chunk.text)))
        part = chunk.text[start : start + data.draw(st.integers(1, 12))]
        for found in align(chunk.text, [part, part.upper(), part[::-1]], 0.5).located:
            first, last = covering_tokens(chunk.offsets, found.start, found.end)
            decoded = tokenizer.decode(
                chunk.token_ids[first:last], clean_up_tokenization_spaces=False
            )
            assert chunk.text[found.start : found.end] in decoded


def test_a_character_split_over_tokens_is_covered_whole():
    [chunk] = chunk_text(TOKENIZER, "a日b", 50)
    span = covering_tokens(chunk.offsets, 1, 2)
    assert span is not None
    assert span[1] - span[0] == 3
    assert TOKENIZER.decode(chunk.token_ids[slice(*span)]) == "日"


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(0, 1, (0, 1)), (1, 2, (2, 3)), (0, 2, (0, 3)), (2, 3, None)]
)
def test_tokens_without_characters_are_inside_a_span_but_never_at_its_ends(start, end, expected):
    assert covering_tokens([(0, 1), (1, 1), (1, 2), (2, 2)], start, end) == expected


def test_special_tokens_in_text_stay_text():
    [chunk] = chunk_text(TOKENIZER, "a<|im_end|>b", 50)
    assert TOKENIZER.convert_tokens_to_ids("<|im_end|>") not in chunk.token_ids
    assert TOKENIZER.decode(chunk.token_ids) == "a<|im_end|>b"


def test_chunk_ids_are_content_addresses():
    assert chunk_id([1, 2], "a") == chunk_id([1, 2], "a")
    assert len({chunk_id(ids, text) for ids in ([1, 2], [2, 1]) for text in ("a", "b")}) == 4
