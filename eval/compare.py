"""Systems x checkpoints x widths on the same questions, in one run (`coinrag compare`).

Checkpoints run one after the other; within a question all systems and widths run in turn, the
order rotated by one from question to question, so that none is timed on a warmer machine.
"""

import json
import logging
import resource
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any

from cache_ops.hf import load_tokenizer
from data_builders.build import built_folder, load_built
from data_builders.prompt import PromptTemplate
from eval.answers import Variant, append_answers, read_answers, resume_answers
from eval.checkpoints import Checkpoint, context_checkpoint, weights_folder
from eval.environment import environment
from eval.identity import answer_key, setting, weights_digest
from eval.report import plot
from eval.runner import Runner
from eval.summary import summarize
from eval.systems import SYSTEMS, Question, Width
from recipes.errors import UserError
from recipes.files import write_text
from recipes.progress import track
from recipes.schema import Recipe

logger = logging.getLogger(__name__)


def compare(config: Recipe) -> dict[str, Any]:
    """Measure every system of `eval.systems` at every width with every checkpoint.

    Writes into `eval.output` (default `<train.run_folder>/compare`): `answers.jsonl` as answers
    are earned, then `compare.json` and `compare.png`, each whole or not at all. Returns the content
    of `compare.json`; `report.render_table` makes it readable. Started again after a kill, it goes
    on with the answers that are missing; those given under another setting, by other weights or on
    another machine are moved to `answers.previous.jsonl`.

    Raises UserError for no built dev data and for no fine-tuned checkpoint, ModelNotFoundError for
    no base model, before anything is written.
    """
    start = time.perf_counter()
    systems = _systems(config)
    tokenizer = load_tokenizer(config.model.path)
    template = PromptTemplate(tokenizer, config.prompt)
    weights = {name: weights_folder(config, name) for name in config.eval.checkpoints}
    questions = dev_questions(config)

    output = Path(config.eval.output or Path(config.train.run_folder) / "compare")
    output.mkdir(parents=True, exist_ok=True)
    answers_path = output / "answers.jsonl"
    conditions = setting(config, built_folder(config, "dev"), template)
    keys = _keys(config, conditions, weights)
    done = {(a.variant, a.question_id) for a in resume_answers(answers_path, keys)}

    for checkpoint, folder in weights.items():
        missing = _missing(checkpoint, questions, systems, done)
        logger.info(
            "%s (%s): %d of %d questions to answer",
            checkpoint,
            folder,
            len(missing),
            len(questions),
        )
        if not missing:
            continue
        with Runner.load(config, checkpoint, keys[checkpoint], tokenizer, template) as runner:
            for question, _ in missing[: config.eval.warmup_questions]:
                runner.answer(question, systems)
            for question, left in track(missing, f"compare {checkpoint}", unit="questions"):
                append_answers(answers_path, runner.answer(question, left))
        # One checkpoint's weights are gone before the next one's come.
        del runner

    measured = {_variant(checkpoint, s) for checkpoint in weights for s in systems}
    answers = [answer for answer in read_answers(answers_path) if answer.variant in measured]
    result = {
        "recipe": config.name,
        **summarize(answers, resamples=config.eval.bootstrap_resamples, seed=config.seed),
        "setting": {**conditions, "weights": {name: str(path) for name, path in weights.items()}},
        "config": config.model_dump(mode="json"),
        "environment": environment(),
        "seconds_this_run": time.perf_counter() - start,
        "peak_memory_gib": _peak_memory_gib(),
    }
    write_text(output / "compare.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    plot(result, output / "compare.png")
    logger.info("wrote compare.json, compare.png and answers.jsonl to %s", output)
    return result


def _keys(
    config: Recipe, conditions: Mapping[str, Any], weights: Mapping[Checkpoint, Path]
) -> dict[str, str]:
    """What each checkpoint's answers depend on: also the weights whose slices it answers from."""
    keys: dict[str, str] = {}
    for name, folder in weights.items():
        digests = [weights_digest(folder)]
        if (source := context_checkpoint(config, name)) != name:
            digests.append(weights_digest(weights_folder(config, source)))
        keys[name] = answer_key(conditions, digests)
    return keys


def _systems(config: Recipe) -> list[tuple[str, Width]]:
    """Systems x widths; a system of whole chunks is measured once a `k_c`."""
    widths = [Width(w.k_c, w.k) for w in config.eval.widths]
    systems = [
        (name, width if SYSTEMS[name].selects_nuggets else replace(width, k=None))
        for width in widths or [Width(config.retrieval.k_c, config.retrieval.k)]
        for name in config.eval.systems
    ]
    return list(dict.fromkeys(systems))


def _variant(checkpoint: str, system: tuple[str, Width]) -> Variant:
    name, width = system
    return checkpoint, name, width.k_c, width.k


def _missing(
    checkpoint: str,
    questions: Sequence[Question],
    systems: Sequence[tuple[str, Width]],
    done: AbstractSet[tuple[Variant, str]],
) -> list[tuple[Question, list[tuple[str, Width]]]]:
    """Each question with the systems that still have to answer it, in its rotated order."""
    missing = []
    for number, question in enumerate(questions):
        shift = number % len(systems)
        rotated = [*systems[shift:], *systems[:shift]]
        left = [s for s in rotated if (_variant(checkpoint, s), question.question_id) not in done]
        if left:
            missing.append((question, left))
    return missing


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
        )
        for row in tables.samples
    ]
    if not questions:
        raise UserError("the built dev data holds no questions: check data.dev and build again")
    return questions


def _peak_memory_gib() -> float:
    """The process's largest resident size; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
