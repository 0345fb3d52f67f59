"""The file of answers between two runs of a comparison."""

from pathlib import Path

from answering import answers_of

from eval.answers import Variant, append_answers, read_answers, resume_answers

CELL = Variant("", "base", "coinrag", 5, 10)


def test_answers_that_no_longer_hold_are_put_aside_after_earlier_ones(tmp_path: Path) -> None:
    path, previous = tmp_path / "answers.jsonl", tmp_path / "answers.previous.jsonl"
    # A line separator in a text is no end of a line.
    given = [answers_of([0.0, 1.0], key=key, answer="Ines\u2028Varga") for key in "abc"]
    other = answers_of([0.5], key="a", arm="isolated")
    append_answers(path, other)
    for place, answers in enumerate(given):
        assert resume_answers(path, {CELL: answers[0].key}) == other
        assert read_answers(previous) == [one for group in given[:place] for one in group]
        append_answers(path, answers)
    assert resume_answers(path, {CELL: "c"}) == [*other, *given[2]]
    assert read_answers(previous) == [*given[0], *given[1]]
