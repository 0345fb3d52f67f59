"""The readers and extractors on real rows, where they lie beside the checkout."""

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from small import tiny_tokenizer

from data_builders.answers import answer_key, holds_answer
from data_builders.chunking import chunk_text, covering_tokens
from data_builders.nuggets.align import align
from data_builders.nuggets.clauses import MAX_WORDS
from data_builders.nuggets.folding import canonical, form_text
from data_builders.nuggets.rules import MAX_TITLE_WORDS, rules
from data_builders.readers import read_questions

REAL = Path(os.environ.get("COINRAG_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))
SETS = ("hotpotqa", "2wikimultihopqa", "musique")
pytestmark = pytest.mark.skipif(not (REAL / "ircot").is_dir(), reason="the real data are absent")


def read(split, limit=None):
    files = [REAL / "ircot" / name / f"{split}.jsonl" for name in SETS]
    return list(read_questions(files, "ircot", limit))


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
    rng = random.Random(0)
    passages = rng.sample([passage for row in read("dev", 40) for passage in row.passages], 200)
    counts: Counter[str] = Counter()
    for passage in passages:
        for chunk in chunk_text(tokenizer, passage.full_text, 256):
            # As a model might return them: some verbatim, some with words left out.
            candidates = [_damaged(text, rng) for text in rules(chunk.text)]
            alignment = align(chunk.text, candidates, 0.7)
            counts += alignment.counts
            for found in alignment.located:
                located = chunk.text[found.start : found.end]
                start, end = covering_tokens(chunk.offsets, found.start, found.end)
                decoded = tokenizer.decode(chunk.token_ids[start:end])
                assert located in decoded
                assert found.similarity >= 0.7
                if found.kind == "exact":
                    wanted = form_text(candidates[found.candidate], canonical)
                    assert wanted in form_text(decoded, canonical)
    assert min(counts["exact"], counts["fuzzy"]) > 200


def _damaged(text, rng):
    words = text.split()
    if len(words) < 4 or rng.random() < 0.5:
        return text
    del words[rng.randrange(len(words))]
    return " ".join(words)
