"""The questions of a comparison, arm by arm, with what was retrieved for each."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from data_builders.build import load_built
from data_builders.injection import Injection
from data_builders.tables import Chunk
from eval.injection import load_injections, refuse_clean_data
from eval.systems import Question
from recipes.arms import Arm
from recipes.errors import UserError
from recipes.schema import Recipe


def dev_questions(config: Recipe) -> list[Question]:
    """The rows of the built dev data, with their chunks.

    Raises:
        UserError: nothing is built, or it holds no questions.
    """
    tables = load_built(config, "dev")
    questions = [
        Question(
            question_id=row["question_id"],
            dataset=row["dataset"],
            question=row["question"],
            answers=row["answers"],
            chunks=[tables.chunk(chunk_id) for chunk_id in row["chunk_ids"]],
            nugget_scores=row["nugget_scores"],
            gold_chunk_ids=row["gold_chunk_ids"],
        )
        for row in tables.samples
    ]
    if not questions:
        raise UserError("the built dev data holds no questions: check data.dev and build again")
    return questions


def arm_questions(arm: Arm, limit: int | None) -> dict[str, Question]:
    """The questions of an arm by id; at most the first `limit` of each data set.

    Raises:
        UserError: see `dev_questions`; names the arm.
    """
    taken: Counter[str] = Counter()
    questions = {}
    try:
        found = dev_questions(arm.config)
    except UserError as error:
        if not arm.name:
            raise
        raise UserError(
            f"arm {arm.name!r}: {error} (a build of the recipe with its arms builds this too)"
        ) from error
    for question in found:
        taken[question.dataset] += 1
        if limit is None or taken[question.dataset] <= limit:
            questions[question.question_id] = question
    return questions


def planted(config: Recipe, asked: Collection[str]) -> dict[str, Injection]:
    """What was planted in the dev questions, by question; nothing without `eval.injections`.

    Raises:
        UserError: none of the questions that are asked, by id, was attacked, or see
            `injection.load_injections` and `injection.refuse_clean_data`.
    """
    if config.eval.injections is None:
        return {}
    path = Path(config.eval.injections)
    found = load_injections(path)
    refuse_clean_data(found, load_built(config, "dev").chunks["text"][:], path)
    if found.keys().isdisjoint(asked):
        raise UserError(
            f"eval.injections: {path} attacks none of the questions that are asked; raise "
            "eval.questions_per_dataset, or inject into more of them"
        )
    return found


def shown_chunks(questions: Iterable[Mapping[str, Question]]) -> dict[str, dict[str, str]]:
    """Title and text of every retrieved chunk, by id."""
    found: list[Chunk] = [c for own in questions for q in own.values() for c in q.chunks]
    return {chunk.chunk_id: {"title": chunk.title, "text": chunk.text} for chunk in found}
