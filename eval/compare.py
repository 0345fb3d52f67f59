"""Arms x systems x checkpoints x widths on the same questions, in one run (`coinrag compare`).

Each set of weights is loaded once and answers in all cells that use it. Within a question these run
in turn, the order rotated by one from question to question, so that none is timed on a warmer
machine. Cells of different weights, and those that a later run adds, are timed one after the other:
on a machine that is not quiet, compare times within one set of weights.
"""

import fcntl
import json
import logging
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cache_ops.hf import load_config, load_tokenizer
from data_builders.build import built_folder
from data_builders.prompt import PromptTemplate
from eval.answers import Answer, Variant, append_answers, read_answers, resume_answers
from eval.cells import Cell, cells_of
from eval.checkpoints import (
    Weights,
    check_contextualizer,
    check_soft_tokens,
    weights_of,
)
from eval.environment import environment
from eval.figures import draw_all, draw_overview
from eval.identity import answer_key, setting, weights_digest
from eval.injection import load_clean, score
from eval.page import write_page
from eval.questions import arm_questions, planted, shown_chunks
from eval.runner import Runner
from eval.summary import summarize
from eval.systems import Question
from eval.systems.cacheblend import check_blend
from eval.systems.coinrag import check_repair
from eval.trained_with import warn_of_other_training
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


@dataclass(frozen=True)
class Comparison:
    """Everything that is to be measured, checked before anything is written."""

    config: Recipe
    tokenizer: PreTrainedTokenizerBase
    weights: Mapping[Cell, Weights]
    questions: Mapping[str, Mapping[str, Question]]
    """By arm and question id."""
    keys: Mapping[Variant, str]


def compare(config: Recipe) -> dict[str, Any]:
    """Measure every cell of the recipe's `eval` section.

    Writes into `eval.output` (default `<train.run_folder>/compare`): `answers.jsonl` as answers
    are earned, then `compare.json`, `compare.png`, `compare.html` and `figures/`, each whole or not
    at all. Returns the content of `compare.json`; `report.render_table` makes it readable. Started
    again after a kill, it goes on with the answers that are missing; those given under another
    setting, by other weights or on another machine are moved to `answers.previous.jsonl`.

    Raises UserError for no built dev data, for weights that do not fit what is asked of them, for
    an arm that changes nothing, and for a folder that another comparison writes into;
    ModelNotFoundError for no base model. All before anything is written.
    """
    start = time.perf_counter()
    planned = _plan(config)
    injections = planted(config, planned.questions[""])
    clean = load_clean(Path(config.eval.injection_clean)) if config.eval.injection_clean else []
    output = Path(config.eval.output or Path(config.train.run_folder) / "compare")
    with _alone_in(output):
        answers = _answers(planned, output / "answers.jsonl")
        result = {"recipe": config.name, **_summary(planned, answers)}
        result["seconds_this_run"] = time.perf_counter() - start
        if injections:
            result["injection"] = score(
                answers,
                injections,
                lambda arm, question_id: planned.questions[arm][question_id].chunks,
                clean=clean,
                resamples=config.eval.bootstrap_resamples,
                seed=config.seed,
            )
        text = json.dumps(result, indent=1, ensure_ascii=False)
        write_text(output / "compare.json", f"{text}\n")
        draw_overview(result, output / "compare.png")
        draw_all(result, output / "figures")
        chunks = shown_chunks(planned.questions.values())
        write_page(result, answers, chunks, output / "compare.html")
    logger.info(
        "wrote compare.json, compare.html, compare.png, figures and answers.jsonl to %s", output
    )
    return result


def _plan(config: Recipe) -> Comparison:
    cells = cells_of(config)
    tokenizer = load_tokenizer(config.model.path)
    weights = {cell: weights_of(cell.arm.config, cell.checkpoint, cell.system) for cell in cells}
    for cell, found in weights.items():
        check_soft_tokens(cell.arm.config, found, cell.system)
        check_contextualizer(cell.arm.config, found, cell.system)
        if cell.system in ("cacheblend", "coinrag"):
            check = check_blend if cell.system == "cacheblend" else check_repair
            check(cell.arm.config, load_config(str(found.folder)).num_hidden_layers)
    # An arm without a run of its own changes the recipe on purpose.
    for cell in {(weights[cell], cell.system): cell for cell in reversed(cells)}.values():
        warn_of_other_training(cell.arm.config, weights[cell], cell.system)
    arms = {cell.arm.name: cell.arm for cell in cells}
    limit = config.eval.questions_per_dataset
    questions = {name: arm_questions(arm, limit) for name, arm in arms.items()}
    keys = _keys(weights, arms, tokenizer)
    _refuse_idle_arms(cells, keys)
    return Comparison(config, tokenizer, weights, questions, keys)


@contextmanager
def _alone_in(output: Path) -> Iterator[None]:
    """Makes a folder, and keeps other comparisons out of it.

    Raises:
        UserError: it cannot be made, or another comparison is in it.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"cannot write into {output} (eval.output): {error.strerror}") from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another comparison is writing into {output}: wait for it, or give another "
                "folder with eval.output=…"
            ) from error
        yield
    finally:
        os.close(folder)


def _answers(planned: Comparison, path: Path) -> list[Answer]:
    """All answers that were planned, those of earlier runs among them."""
    config, questions = planned.config, planned.questions
    done = {(a.variant, a.question_id) for a in resume_answers(path, planned.keys)}
    for group in _groups(planned.weights):
        turns = _turns(group.cells, questions, done)
        count = sum(map(len, turns))
        logger.info("%s: %d answers to %d questions are to be given", group.name, count, len(turns))
        if not turns:
            continue
        with Runner(config, group.weights, group.cells, planned.keys, planned.tokenizer) as runner:
            _warm_up(runner, turns, config.eval.warmup_questions)
            for turn in track(turns, f"compare {group.cells[0].checkpoint}", unit="questions"):
                append_answers(path, runner.answer(turn))
        # One group's weights are gone before the next one's come.
        del runner
    asked = {
        (variant, question_id) for variant in planned.keys for question_id in questions[variant.arm]
    }
    return [one for one in read_answers(path) if (one.variant, one.question_id) in asked]


def _summary(planned: Comparison, answers: Sequence[Answer]) -> dict[str, Any]:
    config = planned.config
    arms = {cell.arm.name: cell.arm for cell in planned.weights}
    template = PromptTemplate(planned.tokenizer, config.prompt)
    return {
        **summarize(
            answers,
            resamples=config.eval.bootstrap_resamples,
            seed=config.seed,
            budgets_ms=config.eval.budgets_ms,
        ),
        "setting": {
            **setting(config, built_folder(config, "dev"), template, arms[""].systems),
            "arms": {name: _changes(arm, config) for name, arm in arms.items() if name},
            "weights": {
                " ".join(cell.variant[:3]).strip(): str(found.folder)
                for cell, found in planned.weights.items()
            },
        },
        "config": config.model_dump(mode="json"),
        "environment": environment(),
        "peak_memory_gib": _peak_memory_gib(),
    }


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
    return {
        path: value
        for path, value in after
        if before.get(path) != value and path not in ("eval.systems", "eval.ablations", "eval.arms")
    }


def _peak_memory_gib() -> float:
    """The process's largest resident size; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
