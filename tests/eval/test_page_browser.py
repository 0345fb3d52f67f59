"""The page in a headless Chromium: a second page opens it in a frame of a phone's width, uses it,
and tells what it saw."""

import json
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pages import CELLS, CHUNKS, HOSTILE, answers, result

from eval.page import write_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

QUESTIONS = 40
TUNED = 2
# Without these it needs a screen, or asks its maker's hosts for news.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=20000",
]

VISITOR = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<iframe width="360" height="800"></iframe><pre></pre>
<script>
const frame = document.querySelector("iframe"), seen = {};
let page, visits = 0;
const visit = (hash) => new Promise((ready) => {
  frame.onload = () => { page = frame.contentDocument; ready(); };
  frame.src = `page.html?${visits++}${hash}`;
});
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const follow = async (hash) => {
  page.location.hash = hash;
  await wait(20);
};
const all = (selector) => [...page.querySelectorAll(selector)];
const texts = (selector) => all(selector).map((node) => node.textContent);
const listed = () => texts("#list span[dir]");
const hash = () => Object.fromEntries(new URLSearchParams(page.location.hash.slice(1)));
const use = (name, value) => {
  const field = page.querySelector(`#filters [name=${name}]`);
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
};
const click = (selector, text) =>
  all(selector).find((node) => node.textContent.startsWith(text)).click();
const column = (section, place) => texts(`${section} tbody tr > :nth-child(${place})`);

(async () => {
  await visit("");
  const { scrollWidth, clientWidth } = page.documentElement;
  seen.widths = [scrollWidth, clientWidth, frame.clientWidth];
  const nav = page.querySelector("nav");
  seen.nav = [nav.scrollWidth, nav.clientWidth, nav.offsetHeight, texts("nav a")];
  seen.small = all("button, select, input, nav a").filter((node) => {
    const { width, height } = node.getBoundingClientRect();
    return width < 40 || height < 40;
  }).map((node) => node.outerHTML);
  seen.head = texts("h1, #head dd, #notes li");
  seen.hit = [frame.contentWindow.hit ?? null, all("img").length];
  seen.opened = listed().length;
  const list = page.querySelector("#list");
  list.scrollTop = list.scrollHeight;
  const scrolled = list.scrollTop;
  click("#list button", "Show more");
  seen.more = [listed().length, list.scrollTop === scrolled && scrolled > 0];

  seen.results = texts("#results tbody tr:first-child > *");
  click("#results th button", "F1");
  seen.falling = [column("#results", 5), page.querySelector("#results th[aria-sort]").ariaSort];
  click("#results th button", "F1");
  seen.rising = column("#results", 5);
  click("#results th button", "Gold recall");
  seen.unknown = column("#results", 5);
  seen.budget = texts("#budget tbody tr:first-child > *");
  const cellsOf = (row) => [...row.children].map((each) => each.textContent);
  seen.injection = all("#injection tbody").map((body) => [...body.rows].map(cellsOf));
  seen.differences = texts("#differences h3, #differences tbody tr:first-child > *");

  seen.marks = all("figure").map((figure) => figure.querySelectorAll("g .mark").length);
  const [first, second] = page.querySelectorAll("figure:nth-child(2) g");
  first.focus();
  first.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  seen.focused = [page.activeElement === second, ...texts("figure:nth-child(2) .tip")];
  second.blur();
  const { left, top, width, height } = first.getBoundingClientRect();
  first.dispatchEvent(new PointerEvent("pointerdown", {
    bubbles: true, clientX: left + width / 2 + 5, clientY: top + height / 2 + 5 }));
  seen.pointed = texts("figure:nth-child(2) .tip:not([hidden])");
  seen.labels = first.getAttribute("aria-label");
  click("#legend button", "Standard RAG");
  click("#legend button", "Arms");
  seen.fewer = all("figure").map((figure) => figure.querySelectorAll("g .mark").length);
  seen.hide = [hash(), page.activeElement.tagName];

  const filters = [["data", "musique"], ["show", "right"], ["show", "wrong"], ["kind", "none"],
    ["kind", "extraction_loss"], ["text", "NUMBER 7"], ["text", "نهر"]];
  seen.filtered = [];
  for (const [name, value] of filters) {
    await follow("#q=");
    use(name, value);
    const byHand = [listed(), hash()];
    await follow("#q=");
    const reset = listed().length;
    await follow(`#${new URLSearchParams({ [name]: value })}`);
    seen.filtered.push([name, value, ...byHand, reset, listed()]);
  }
  await visit("#kind=distractor_bias&cell=coinrag.base.3.4&data=hotpotqa");
  seen.together = listed();

  await visit("#q=q+33");
  seen.linked = [...texts(".turn span"), texts("#question h3")[0], listed().length];
  click(".turn button", "Next");
  seen.next = [hash(), ...texts(".turn span")];
  click(".turn button", "← Previous");
  click(".turn button", "← Previous");
  seen.previous = hash();
  seen.evidence = [texts("#question .chunk mark"), all("#question .chunk mark").map((m) => m.title),
    texts("#question .chunk sup")];
  seen.gold = texts("#question .chunk b.gold");
  seen.chunks = texts("#question .chunk p");
  seen.stray = texts("#question .stray li");
  seen.answers = [column("#question", 1), column("#question", 2)];
  seen.whole = [all("#question .whole").length];
  click("#question tbody button", "Standard RAG");
  seen.whole.push(all("#question .whole").length, all("#question .chunk mark").length, hash().cell);
  use("text", "number 7");
  seen.moved = texts("#question h3");
  await follow("#q=q+5");
  seen.followed = texts("#question h3");

  page.body.append(Object.assign(page.createElement("img"), { src: "/blocked" }));
  await wait(50);
})().catch((error) => { seen.error = `${error.stack}`; }).finally(() => {
  document.querySelector("pre").textContent = JSON.stringify(seen);
});
</script>
"""


@dataclass(frozen=True)
class Visit:
    """What the visitor saw, what was asked of the server, what the browser complained of."""

    seen: dict[str, Any]
    requested: set[str]
    console: list[str]


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> Visit:
    folder = tmp_path_factory.mktemp("site")
    write_page(result(), answers(QUESTIONS), CHUNKS, folder / "page.html")
    (folder / "visitor.html").write_text(VISITOR, encoding="utf-8")
    requested: set[str] = set()

    class Server(SimpleHTTPRequestHandler):
        def log_message(self, form: str, *values: Any) -> None:
            requested.add(self.path.partition("?")[0])

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
        run = subprocess.run(
            [*command, f"http://127.0.0.1:{server.server_port}/visitor.html"],
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=True,
        )
        server.shutdown()
    told = re.search("<pre>(.*)</pre>", run.stdout, re.DOTALL)
    assert told, run.stderr
    seen = json.loads(unescape(told[1]))
    assert "error" not in seen, seen["error"]
    return Visit(seen, requested, [line for line in run.stderr.split("\n") if "CONSOLE" in line])


def expected(cell: int = TUNED, **wanted: Any) -> list[str]:
    """The questions that a cell's answers fit, as the list shows the first of them."""
    rows = [row for n, row in enumerate(answers(QUESTIONS)) if n % len(CELLS) == cell]
    return [
        row.question
        for row in rows
        if all(getattr(row, name) in (value, [value]) for name, value in wanted.items())
    ]


def test_it_runs_without_complaint_and_asks_for_nothing(visit: Visit) -> None:
    assert visit.requested == {"/visitor.html", "/page.html"}
    # The visitor's own picture is refused by the page's policy, and nothing else is said.
    assert len(visit.console) == 1
    assert "/blocked" in visit.console[0]
    assert visit.seen["hit"] == [None, 0]


def test_texts_stay_texts(visit: Visit) -> None:
    title, questions, measured, hardware, versions, note = visit.seen["head"]
    assert (title, note) == (f"tiny {HOSTILE}", f"a note {HOSTILE}")
    assert questions == "hotpotqa 3, musique 3"
    assert measured == "2026-11-30 14:20:00+00:00"
    assert hardware == "a machine, 2 CPUs, 1 threads"
    assert versions == "torch 2.13.0"
    assert visit.seen["chunks"] == [
        "🎉 Lower Tarn 1is a town on the 2river Oss. Its mayor is Bela Kun.\n",
        f"3The Oss rises in the Grey Hills. {HOSTILE}\n",
        "العسل مادة حلوة. Made by bees.\n",
    ]


def test_a_phone_shows_it_without_scrolling_sideways(visit: Visit) -> None:
    scrolled, shown, frame = visit.seen["widths"]
    assert scrolled == shown <= frame == 360
    assert visit.seen["small"] == []
    inside, shown, height, links = visit.seen["nav"]
    assert inside == shown, "every link is in view"
    assert height <= 2 * 41 + 1
    assert links == ["results", "budget", "plots", "differences", "injection", "questions"]


def test_tables_say_the_figures_and_sort(visit: Visit) -> None:
    assert visit.seen["results"] == [
        *("Standard RAG", "base", "3/all", "recipe", "20.0", "[15.0, 25.0]", "10.0"),
        *("21.0", "19.0", "40.0", "50.0", "60.0", "700", "–", "50 %", "25 %"),
        *("6", "5", "2", "1", "1"),
    ]
    falling, order = visit.seen["falling"]
    assert (falling, order) == (["50.0", "40.0", "30.0", "20.0"], "descending")
    assert visit.seen["rising"] == falling[::-1]
    assert visit.seen["unknown"] == ["20.0", "30.0", "40.0", "50.0"], "equal rows keep their order"
    assert visit.seen["budget"] == [
        *("100", "Standard RAG", "base", "3/all", "20.0", "60.0", "700"),
        *("+10.0 [+1.0, +19.0]", "+33.3 %"),
    ]
    assert visit.seen["differences"] == [
        "Fine-tuned minus base weights",
        *("CoinRAG", "fine-tuned", "3/4", "recipe", "+10.0 [+1.0, +19.0]", "+33.3 %"),
        *("CoinRAG 3/4, base", "+10.0 [+1.0, +19.0]", "–", "6"),
        "Each arm minus the recipe",
        *("CoinRAG", "fine-tuned", "3/4", "isolated", "−10.0 [−19.0, −1.0]", "+33.3 %"),
        *("CoinRAG 3/4, fine-tuned", "–", "–", "6"),
    ]


def test_planted_instructions_have_their_tables(visit: Visit) -> None:
    cells = [["CoinRAG", "base", "3/4", "recipe"], ["CoinRAG", "fine-tuned", "3/4", "recipe"]]
    came = ["6", "100 %", "–", "–", "50 %", "25 %", "[5 %, 70 %]"]
    first, second = visit.seen["injection"]
    assert first == [
        [*cells[0], *came, "50 %", "12.5", "+10.0 [+1.0, +19.0]"],
        [*cells[1], *came, "–", "7.5", "–"],
    ]
    # By what any cell was attacked with: two kinds and one place.
    assert second == [[*cells[0], "25 %", "–", "25 %"], [*cells[1], "–", "25 %", "–"]]


def test_plots_tell_their_values_and_systems_can_be_hidden(visit: Visit) -> None:
    seen = visit.seen
    assert seen["marks"] == [4, 4, 3, 1], "arms are not in the budget's curves"
    # By TTFT the arm comes first, then the fine-tuned cell.
    moved, tip = seen["focused"]
    assert moved
    assert tip.startswith("CoinRAG 3/4, fine-tunedF1 40.0 [35.0, 45.0], 6 questions")
    assert seen["pointed"] == [seen["labels"].replace("; ", "")]
    assert seen["labels"].startswith("CoinRAG 3/4, fine-tuned, isolated; F1 50.0 [45.0, 55.0]")
    assert seen["fewer"] == [2, 2, 2, 0]
    assert seen["hide"] == [{"hide": "standard_rag arms"}, "BODY"]


def test_filters_find_what_they_say_by_hand_and_by_address(visit: Visit) -> None:
    assert visit.seen["opened"] == 30
    assert visit.seen["more"] == [QUESTIONS, True], "the list stays where it was scrolled to"
    rows = {
        ("data", "musique"): expected(dataset="musique"),
        ("show", "right"): expected(f1=1.0),
        ("show", "wrong"): expected(f1=0.0),
        ("kind", "none"): expected(error_kinds=[]),
        ("kind", "extraction_loss"): expected(error_kinds="extraction_loss"),
        ("text", "NUMBER 7"): expected(question_id="q 7"),
        ("text", "نهر"): expected(answer="نهر 🎉"),
    }
    for name, value, by_hand, address, reset, by_address in visit.seen["filtered"]:
        found = rows.pop((name, value))[:30]
        assert 0 < len(found) < QUESTIONS
        assert by_hand == by_address == found, (name, value)
        assert address == {name: value}
        assert reset == 30
    assert not rows
    both = {"dataset": "hotpotqa", "error_kinds": ["bridge_gap", "distractor_bias"]}
    assert visit.seen["together"] == expected(cell=1, **both)


def test_a_question_is_linked_to_and_turned_from(visit: Visit) -> None:
    seen = visit.seen
    assert seen["linked"] == ["34 of 40", "Which river is number 33? ", 34]
    assert seen["next"] == [{"q": "q 34"}, "35 of 40"]
    assert seen["previous"] == {"q": "q 32"}
    assert seen["moved"] == ["Which river is number 7? "], "the filter left out the one in view"
    assert seen["followed"] == ["Which river is number 5? "]


def test_evidence_is_marked_with_its_rank_and_overlaps_keep_both(visit: Visit) -> None:
    marks, ranks, numbers = visit.seen["evidence"]
    assert list(zip(ranks, marks, strict=True)) == [
        ("rank 1", "1is a town on the "),
        ("rank 1, 2", "2river "),
        ("rank 1, 2", "Oss"),
        ("rank 1, 2", "."),
        ("rank 2", " Its mayor is "),
        ("rank 2", "Bela Kun"),
        ("rank 2", "."),
        ("rank 3", "3The "),
        ("rank 3", "Oss"),
        ("rank 3", " rises in the Grey Hills."),
    ]
    assert numbers == ["1", "2", "3"]
    assert visit.seen["gold"] == ["Oss", "Bela Kun", "Oss", "Oss"]
    assert visit.seen["stray"] == ["a paraphrase that no chunk holds"]
    cells, given = visit.seen["answers"]
    assert cells[1:] == ["CoinRAG 3/4, base", "CoinRAG 3/4, fine-tuned", cells[2] + ", isolated"]
    assert given == [row.answer or "(empty)" for row in answers(33)[-4:]]
    # Nuggets are marked, whole chunks framed.
    assert visit.seen["whole"] == [0, 3, 0, "standard_rag.base.3.all"]
