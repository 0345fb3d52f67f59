"""The readers and extractors on real rows, where they lie beside the checkout."""

import os
import random
from pathlib import Path

import pytest
from small import tiny_tokenizer

from data_builders.answers import answer_key, holds_answer
from data_builders.ircot import read_ircot
from data_builders.nuggets.align import align
from data_builders.nuggets.extract import MAX_TITLE_WORDS, MAX_WORDS, rules
from data_builders.stages import chunk_rows

REAL = Path(os.environ.get("COINRAG_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))
SETS = ("hotpotqa", "2wikimultihopqa", "musique")
pytestmark = pytest.mark.skipif(not (REAL / "ircot").is_dir(), reason="the real data are absent")


def read(split, limit=None):
    return read_ircot(*(REAL / "ircot" / name / f"{split}.jsonl" for name in SETS), limit=limit)


def test_every_row_is_read_under_an_id_of_its_own():
    questions = read("train") + read("dev")
    assert len(questions) == 1600 + 1241 + 1118 + 300
    assert len({question.id for question in questions}) == len(questions)
    held = sum(
        holds_answer(answer_key(" ".join(p.full_text for p in question.passages)), question.answers)
        for question in questions
    )
    assert held > 0.85 * len(questions)


def test_nuggets_are_short_verbatim_and_cover_the_prose():
    passages = [passage for row in read("dev", 40) for passage in row.passages]
    passages = random.Random(0).sample(passages, 400)
    words = []
    for passage in passages:
        candidates = rules(passage.full_text)
        alignment = align(passage.full_text, candidates, None)
        assert alignment.counts == {"exact": len(candidates)}
        covered = sum(found.end - found.start for found in alignment.located)
        assert 0.7 <= covered / len(passage.full_text.strip()) <= 1.0
        words += [len(candidate.split()) for candidate in candidates]
    assert max(words) <= 2 * MAX_WORDS + MAX_TITLE_WORDS
    assert sum(count <= MAX_WORDS for count in words) > 0.9 * len(words)


def test_token_spans_hold_their_texts():
    tokenizer = tiny_tokenizer()
    passages = [passage for row in read("dev", 3) for passage in row.passages]
    for index, passage in enumerate(passages):
        for row in chunk_rows(passage, index, tokenizer, 256, rules, None):
            spans = zip(row["nugget_starts"], row["nugget_ends"], row["nugget_texts"], strict=True)
            for start, end, text in spans:
                assert text in tokenizer.decode(row["token_ids"][start:end])
