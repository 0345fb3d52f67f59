import random
from dataclasses import replace
from pathlib import Path

import pytest
from small import data_row, write_rows

from data_builders.answers import answer_key, holds_answer
from data_builders.intake import Intake
from data_builders.raft import add_noise, remove_supporting
from data_builders.readers import read_questions
from data_builders.records import Passage


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    rows = [data_row(number, dataset) for dataset in "de" for number in range(500)]
    path = write_rows(tmp_path_factory.mktemp("raft") / "rows.jsonl", rows)
    return list(read_questions([path], "ircot"))


def noise_all(questions, probability=0.15, seed=0):
    with Intake(Path(":memory:")) as intake:
        intake.fill([], questions)
        pools = intake.pools()
        return {row.id: add_noise(row, pools, probability, seed) for row in questions}


def test_the_rate_is_the_probability(questions):
    rate = sum(row.noised for row in noise_all(questions).values()) / len(questions)
    # Four standard deviations of a binomial draw of 1000.
    assert abs(rate - 0.15) < 0.046
    assert not any(row.noised for row in noise_all(questions, 0.0).values())
    assert all(row.noised for row in noise_all(questions, 1.0).values())


def test_only_seed_and_id_decide_and_not_the_order(questions):
    shuffled = random.Random(1).sample(questions, len(questions))
    assert noise_all(questions) == noise_all(shuffled)
    noised = {name for name, row in noise_all(questions).items() if row.noised}
    assert noised != {name for name, row in noise_all(questions, seed=1).items() if row.noised}


def test_supporting_passages_go_and_all_else_stays(questions):
    by_text = {p.full_text: q.dataset for q in questions for p in q.passages}
    for before in questions:
        after = noise_all([before, *questions[:40], *questions[-40:]], 1.0)[before.id].question
        assert after.answers == before.answers
        assert len({p.full_text for p in after.passages}) == len(before.passages)
        for old, new in zip(before.passages, after.passages, strict=True):
            assert not new.is_supporting
            if old.is_supporting:
                assert new.full_text not in {p.full_text for p in before.passages}
                assert not holds_answer(answer_key(new.full_text), before.answers)
                assert by_text[new.full_text] == before.dataset
            else:
                assert new == old
        if before.id.endswith("20"):
            break


def test_without_a_possible_distractor_the_question_stays_and_says_so(questions):
    [alone] = noise_all(questions[:1], 1.0).values()
    assert (alone.drawn, alone.noised, alone.question) == (True, False, questions[0])


def test_passages_that_hold_the_answer_are_no_distractors(questions):
    leaking = Passage("Leak", f"It is {questions[0].answers[0]}.", False)
    other = replace(questions[1], passages=(leaking,))
    [first, _] = noise_all([questions[0], other], 1.0).values()
    assert not first.noised


def test_a_corpus_loses_the_supporting_passages_of_the_same_questions(questions):
    drawn = {name for name, row in noise_all(questions).items() if row.drawn}
    removed = {row.id: remove_supporting(row, 0.15, 0) for row in questions}
    assert {name for name, row in removed.items() if row.noised} == drawn
    for before in questions:
        kept = [p for p in before.passages if not p.is_supporting or before.id not in drawn]
        assert removed[before.id].question == replace(before, passages=tuple(kept))
