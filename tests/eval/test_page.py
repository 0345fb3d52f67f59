import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import CHUNKS, HOSTILE, NUGGETS, answers, result

from eval.page import write_page

# What a JSON file can bring: any text, halves of surrogate pairs and control characters included.
TEXTS = st.one_of(
    st.text(st.characters(), max_size=30),
    st.lists(
        st.sampled_from(["<", "</", "script", "title", "style", ">", "<!--", "-->", "{{ style }}"])
    ).map("".join),
)


class Page(HTMLParser):
    """The elements of a page, and the text inside its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self.inside[-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.inside[1])


def written(folder: Path, **given: Any) -> Page:
    inputs = {"result": result(), "answers": answers(), "chunks": CHUNKS} | given
    write_page(inputs["result"], inputs["answers"], inputs["chunks"], folder / "page.html")
    return Page((folder / "page.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return written(tmp_path_factory.mktemp("page"))


def test_the_policy_admits_the_pages_own_script_and_style_and_nothing_else(page: Page) -> None:
    style, _, script = page.inside
    (policy,) = [
        attributes["content"] or ""
        for tag, attributes in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    digests = {
        name: "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
        for name, text in (("script-src", script), ("style-src", style))
    }
    assert rules == {
        "default-src": "'none'",
        **digests,
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_nothing_in_the_page_points_outside_it(page: Page) -> None:
    links = [
        attributes[name]
        for _, attributes in page.elements
        for name in ("src", "href", "action", "srcset")
        if name in attributes
    ]
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import|\b(fetch|XMLHttpRequest|innerHTML)\b", str(page.inside))


def test_the_data_arrive_whole_and_are_held_once(page: Page) -> None:
    data = page.data
    assert data["result"]["recipe"] == f"tiny {HOSTILE}"
    assert data["chunks"] == [[chunk["title"], chunk["text"]] for chunk in CHUNKS.values()]
    assert [question["id"] for question in data["questions"]] == [f"q {n}" for n in range(6)]
    first = data["questions"][0]
    assert [given[0] for given in first["answers"]] == ["the Oss", "", "", ""]
    # The median of the repeats, of the cell in the same place of the results.
    assert [given[2] for given in first["answers"]] == [10.0, 11.0, 12.0, 13.0]
    assert first["answers"][3][3] == ["bridge_gap", "distractor_bias"]
    # The cells of CoinRAG share chunks and evidence.
    assert [given[4] for given in first["answers"]] == [0, 1, 1, 1]
    assert "secret" not in str(page.inside), "the recipe's servers and paths stay out"
    # The fastest cell of the recipe's CoinRAG per weights, and Standard RAG; no arm.
    assert data["curves"] == [[0], [1], [2]]


def test_evidence_is_placed_in_its_chunk_by_utf16_units(page: Page) -> None:
    whole, nuggets = page.data["questions"][0]["contexts"]
    assert whole == [[0, 1, 2], [[0], [1], [2]]]
    retrieved, placed = nuggets
    assert retrieved == [0, 1, 2]
    assert placed[3] == [1, NUGGETS[3][1]], "what is not there verbatim keeps its text"
    for (chunk, start, end), (name, text) in zip(placed[:3], NUGGETS[:3], strict=True):
        units = CHUNKS[name]["text"].encode("utf-16-le")
        assert list(CHUNKS)[chunk] == name
        assert units[2 * start : 2 * end].decode("utf-16-le") == text


def test_a_text_seen_twice_takes_its_two_places_and_spaces_do_not_matter(tmp_path: Path) -> None:
    chunks = {"c": {"title": "", "text": "a bee. a bee. a bee"}}
    evidence = [{"chunk_id": "c", "text": text} for text in (" a bee", "a bee ", "a bee", "a bee")]
    row = replace(answers(1)[1], chunk_ids=["c"], evidence=evidence)
    (question,) = written(tmp_path, answers=[row], chunks=chunks).data["questions"]
    ((_, placed),) = question["contexts"]
    assert placed == [[0, 0, 5], [0, 7, 12], [0, 14, 19], [0, "a bee"]]


@settings(max_examples=40)
@given(text=TEXTS)
def test_no_text_leaves_its_place(
    page: Page, tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    row = replace(
        answers(1)[0],
        **dict.fromkeys(("question_id", "dataset", "question", "answer"), text),
        gold=[text],
        chunk_ids=["c"],
        evidence=[{"chunk_id": "c", "text": text}],
    )
    other = written(
        tmp_path_factory.getbasetemp(),
        result=result() | {"recipe": text.encode("utf-8", "replace").decode(), "notes": [text]},
        answers=[row],
        chunks={"c": {"title": text, "text": f"0 {text}"}},
    )
    assert [tag for tag, _ in other.elements] == [tag for tag, _ in page.elements]
    assert other.inside[::2] == page.inside[::2], "script and style are untouched"
    (question,) = other.data["questions"]
    assert [question["id"], question["question"], *question["gold"]] == [text] * 3
    assert other.data["chunks"] == [[text, f"0 {text}"]]


def test_an_answer_needs_its_cell_and_its_chunks(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="oss"):
        written(tmp_path, chunks={"tarn": CHUNKS["tarn"]})
    with pytest.raises(KeyError):
        written(tmp_path, answers=[replace(answers()[0], k_c=9)])
    assert not list(tmp_path.iterdir()), "no half page is left"
