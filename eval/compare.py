"""Arms x systems x checkpoints x widths on the same questions, in one run (`coinrag compare`).

Each set of weights is loaded once and answers in all cells that use it. Within a question these run
in turn, the order rotated by one from question to question, so that none is timed on a warmer
machine. Cells of different weights, and those that a later run adds, are timed one after the other:
on a machine that is not quiet, compare times within one set of weights.
"""

import json
import logging
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cache_ops.hf import load_tokenizer
from data_builders.build import built_folder, load_built
from data_builders.injection import Injection
from data_builders.prompt import PromptTemplate
from data_builders.tables import Chunk
from eval.answers import Variant, append_answers, read_answers, resume_answers
from eval.cells import Cell, cells_of
from eval.checkpoints import Weights, weights_of
from eval.environment import environment
from eval.figures import draw_all, draw_overview
from eval.identity import answer_key, setting, weights_digest
from eval.injection import load_clean, load_injections, refuse_clean_data, score
from eval.page import write_page
from eval.runner import Runner
from eval.summary import summarize
from eval.systems import Question
from recipes.arms import Arm
from recipes.errors import UserError
from recipes.fields import leaves
from recipes.files import write_text
from recipes.progress import track
from recipes.schema import Recipe

logger = logging.getLogger(__name__)

Turn = list[tuple[Cell, Question]]
Done = AbstractSet[tuple[Variant, str]]


@dataclass(frozen=True)
class Group:
    """The cells that one set of weights answers in."""

    weights: Weights
    cells: list[Cell]

    @property
    def name(self) -> str:
        """For the log."""
        systems = Counter(cell.system for cell in self.cells)
        return f"{self.cells[0].checkpoint} weights of {self.weights.folder} ({', '.join(systems)})"


def compare(config: Recipe) -> dict[str, Any]:
    """Measure every cell of the recipe's `eval` section.

    Writes into `eval.output` (default `<train.run_folder>/compare`): `answers.jsonl` as answers
    are earned, then `compare.json`, `compare.png`, `compare.html` and `figures/`, each whole or not
    at all. Returns the content of `compare.json`; `report.render_table` makes it readable. Started
    again after a kill, it goes on with the answers that are missing; those given under another
    setting, by other weights or on another machine are moved to `answers.previous.jsonl`.

    Raises UserError for no built dev data and for no fine-tuned checkpoint, ModelNotFoundError for
    no base model, before anything is written.
    """
    start = time.perf_counter()
    cells = cells_of(config)
    tokenizer = load_tokenizer(config.model.path)
    weights = {cell: weights_of(cell.arm.config, cell.checkpoint, cell.system) for cell in cells}
    arms = {cell.arm.name: cell.arm for cell in cells}
    questions = {name: _arm_questions(arm, config) for name, arm in arms.items()}
    injections = _injections(config)
    clean = load_clean(Path(config.eval.injection_clean)) if config.eval.injection_clean else []

    keys = _keys(weights, arms, tokenizer)
    _refuse_idle_arms(cells, keys)

    output = Path(config.eval.output or Path(config.train.run_folder) / "compare")
    output.mkdir(parents=True, exist_ok=True)
    answers_path = output / "answers.jsonl"
    done = {(a.variant, a.question_id) for a in resume_answers(answers_path, keys)}

    for group in _groups(weights):
        turns = _turns(group.cells, questions, done)
        count = sum(map(len, turns))
        logger.info("%s: %d answers to %d questions are to be given", group.name, count, len(turns))
        if not turns:
            continue
        with Runner(config, group.weights, group.cells, keys, tokenizer) as runner:
            _warm_up(runner, turns, config.eval.warmup_questions)
            for turn in track(turns, f"compare {group.cells[0].checkpoint}", unit="questions"):
                append_answers(answers_path, runner.answer(turn))
        # One group's weights are gone before the next one's come.
        del runner

    measured = {cell.variant for cell in cells}
    asked = {(name, question) for name, own in questions.items() for question in own}
    answers = [
        answer
        for answer in read_answers(answers_path)
        if answer.variant in measured and (answer.arm, answer.question_id) in asked
    ]
    template = PromptTemplate(tokenizer, config.prompt)
    result = {
        "recipe": config.name,
        **summarize(
            answers,
            resamples=config.eval.bootstrap_resamples,
            seed=config.seed,
            budgets_ms=config.eval.budgets_ms,
        ),
        "setting": {
            **setting(
                config,
                built_folder(config, "dev"),
                template,
                list(dict.fromkeys(cell.system for cell in cells if not cell.arm.name)),
            ),
            "arms": {name: _changes(arm, config) for name, arm in arms.items() if name},
            "weights": {
                " ".join(cell.variant[:3]).strip(): str(found.folder)
                for cell, found in weights.items()
            },
        },
        "config": config.model_dump(mode="json"),
        "environment": environment(),
        "seconds_this_run": time.perf_counter() - start,
        "peak_memory_gib": _peak_memory_gib(),
    }
    if injections:
        result["injection"] = score(
            answers,
            injections,
            lambda arm, question_id: questions[arm][question_id].chunks,
            clean=clean,
            resamples=config.eval.bootstrap_resamples,
            seed=config.seed,
        )
    write_text(output / "compare.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    draw_overview(result, output / "compare.png")
    draw_all(result, output / "figures")
    chunks = _shown_chunks(questions.values())
    write_page(result, answers, chunks, output / "compare.html")
    logger.info(
        "wrote compare.json, compare.html, compare.png, figures and answers.jsonl to %s", output
    )
    return result


def _arm_questions(arm: Arm, config: Recipe) -> dict[str, Question]:
    """The questions of an arm by id, the first so many of each data set."""
    limit = config.eval.questions_per_dataset
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


def _injections(config: Recipe) -> dict[str, Injection]:
    """What was planted in the dev questions, by question; nothing without `eval.injections`."""
    if config.eval.injections is None:
        return {}
    path = Path(config.eval.injections)
    found = load_injections(path)
    refuse_clean_data(found, load_built(config, "dev").chunks["text"][:], path)
    return found


def _keys(
    weights: Mapping[Cell, Weights], arms: Mapping[str, Arm], tokenizer: PreTrainedTokenizerBase
) -> dict[Variant, str]:
    """What each cell's answers depend on: also the weights whose slices it answers from."""
    folders = {folder for found in weights.values() for folder in (found.folder, found.context)}
    digests = {folder: weights_digest(folder) for folder in folders}
    built = {name: built_folder(arm.config, "dev") for name, arm in arms.items()}
    templates = {name: PromptTemplate(tokenizer, arm.config.prompt) for name, arm in arms.items()}
    keys = {}
    for cell, found in weights.items():
        name, own = cell.arm.name, dict.fromkeys((found.folder, found.context))
        conditions = setting(cell.arm.config, built[name], templates[name], [cell.system])
        keys[cell.variant] = answer_key(conditions, [digests[folder] for folder in own])
    return keys


def _refuse_idle_arms(cells: Sequence[Cell], keys: Mapping[Variant, str]) -> None:
    """Refuses an arm that would measure the recipe again and call it a change.

    Raises:
        UserError: names the arm and the system.
    """
    busy = {
        (cell.arm.name, cell.system)
        for cell in cells
        if keys[cell.variant] != keys.get(cell.variant._replace(arm=""))
    }
    for cell in cells:
        if cell.arm.name and (cell.arm.name, cell.system) not in busy:
            raise UserError(
                f"arm {cell.arm.name!r} changes nothing that decides an answer of {cell.system}; "
                f"a setting of training needs a run of its own (eval.runs.{cell.system}=…)"
            )


def _groups(weights: Mapping[Cell, Weights]) -> list[Group]:
    """Cells by the weights that answer in them."""
    groups: defaultdict[Weights, list[Cell]] = defaultdict(list)
    for cell, found in weights.items():
        groups[found].append(cell)
    return [Group(found, cells) for found, cells in groups.items()]


def _turns(
    cells: Sequence[Cell], questions: Mapping[str, Mapping[str, Question]], done: Done
) -> list[Turn]:
    """For each question the cells that still have to answer it, in their rotated order."""
    ids = dict.fromkeys(name for cell in cells for name in questions[cell.arm.name])
    turns = []
    for number, question_id in enumerate(ids):
        shift = number % len(cells)
        turn = [
            (cell, questions[cell.arm.name][question_id])
            for cell in [*cells[shift:], *cells[:shift]]
            if question_id in questions[cell.arm.name] and (cell.variant, question_id) not in done
        ]
        if turn:
            turns.append(turn)
    return turns


def _warm_up(runner: Runner, turns: Sequence[Turn], count: int) -> None:
    """Answers some questions for nothing, and says what the whole will take."""
    warm = turns[:count]
    if not warm:
        return
    start = time.perf_counter()
    for turn in warm:
        runner.answer(turn)
    # The first ones also wait for what later ones find ready.
    seconds = (time.perf_counter() - start) / sum(map(len, warm))
    answers = sum(map(len, turns))
    logger.info(
        "at most about %.1f s an answer: %.0f min for %d", seconds, seconds * answers / 60, answers
    )


def _changes(arm: Arm, config: Recipe) -> dict[str, Any]:
    """The options in which an arm differs from the recipe, with its values."""
    before = dict(leaves(config.model_dump(mode="json")))
    after = leaves(arm.config.model_dump(mode="json"))
    return {path: value for path, value in after if before.get(path) != value}


def _shown_chunks(questions: Iterable[Mapping[str, Question]]) -> dict[str, dict[str, str]]:
    """Title and text of every retrieved chunk, by id."""
    found: list[Chunk] = [c for own in questions for q in own.values() for c in q.chunks]
    return {chunk.chunk_id: {"title": chunk.title, "text": chunk.text} for chunk in found}


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


def _peak_memory_gib() -> float:
    """The process's largest resident size; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
