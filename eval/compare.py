"""Systems x checkpoints x widths on the same questions, in one run (`coinrag compare`).

Checkpoints run one after the other; within a question all systems and widths run in turn, the
order rotated by one from question to question, so that none is timed on a warmer machine.
"""

import hashlib
import json
import logging
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from cache_ops.hf import load_model, load_tokenizer
from cache_ops.plan import PROMPT
from cache_ops.rope import Rope
from data_builders.build import built_folder
from data_builders.prompt import PromptTemplate
from data_builders.tables import Tables, load_tables
from eval import engine
from eval.answers import Answer, append_answers, read_answers, write_answers
from eval.environment import environment, machine
from eval.metrics import exact_match, token_f1
from eval.report import plot
from eval.summary import summarize
from eval.systems import SYSTEMS, Question, Request, Width
from recipes.errors import UserError
from recipes.schema import Recipe

logger = logging.getLogger(__name__)

Variant = tuple[str, Width]


@dataclass(frozen=True)
class _Served:
    """A checkpoint in memory, with what all of its questions share."""

    checkpoint: str
    key: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    template: PromptTemplate
    rope: Rope
    prompt_kv: Mapping[str, torch.Tensor]


def compare(config: Recipe) -> dict[str, Any]:
    """Measure every system of `eval.systems` at every width with every checkpoint.

    Writes into `eval.output` (default `<train.run_folder>/compare`): `answers.jsonl` as answers
    are earned, then `compare.json` and `compare.png`, each whole or not at all. Returns the content
    of `compare.json`; `report.render_table` makes it readable. Started again after a kill, it goes
    on with the questions that are missing; answers given under another setting, other weights or
    on another machine are moved to `answers.previous.jsonl`.

    Raises UserError: no built dev data, no checkpoint, widths beyond the built data.
    """
    start = time.perf_counter()
    variants = _variants(config)
    weights = _weights_folders(config)
    dev = built_folder(config, "dev")
    questions = _questions(load_tables(dev))
    tokenizer = load_tokenizer(config.model.path)
    template = PromptTemplate(tokenizer, config.prompt)

    output = Path(config.eval.output or Path(config.train.run_folder) / "compare")
    output.mkdir(parents=True, exist_ok=True)
    setting = _setting(config, dev, template)
    keys = {name: _digest(setting, _weights_digest(path)) for name, path in weights.items()}
    answers_path = output / "answers.jsonl"
    done = {(a.variant, a.question_id) for a in _resume(answers_path, keys)}

    for checkpoint, path in weights.items():
        missing = [
            (question, left)
            for number, question in enumerate(questions)
            if (left := _left(checkpoint, question, _rotated(variants, number), done))
        ]
        logger.info(
            "%s (%s): %d of %d questions to answer", checkpoint, path, len(missing), len(questions)
        )
        if not missing:
            continue
        served = _serve(config, checkpoint, keys[checkpoint], path, tokenizer, template)
        for question, _ in missing[: config.eval.warmup_questions]:
            _answer_question(config, served, question, variants)
        for question, left in _progress(missing, checkpoint):
            append_answers(answers_path, _answer_question(config, served, question, left))
        del served

    measured = {(name, system, w.k_c, w.k) for name in weights for system, w in variants}
    answers = [a for a in read_answers(answers_path) if a.variant in measured]
    result = {
        "recipe": config.name,
        **summarize(answers, resamples=config.eval.bootstrap_resamples, seed=config.seed),
        "setting": {**setting, "weights": {name: str(path) for name, path in weights.items()}},
        "environment": environment(),
        "seconds": time.perf_counter() - start,
        "peak_memory_gib": _peak_memory_gib(),
    }
    _write_json(output / "compare.json", result)
    plot(result, output / "compare.png")
    logger.info("wrote compare.json, compare.png and answers.jsonl to %s", output)
    return result


def _variants(config: Recipe) -> list[Variant]:
    """Systems x widths; a system of whole chunks is measured once a `k_c`."""
    built = config.retrieval
    widths = [Width(w.k_c, w.k) for w in config.eval.widths] or [Width(built.k_c, built.k)]
    if too_wide := [width.k_c for width in widths if width.k_c > built.k_c]:
        raise UserError(
            f"eval.widths: k_c={max(too_wide)} is more than the {built.k_c} chunks a question that "
            f"the dev data is built with; set retrieval.k_c={max(too_wide)} and run coinrag build"
        )
    variants = [
        (name, width if SYSTEMS[name].selects_nuggets else replace(width, k=None))
        for width in widths
        for name in config.eval.systems
    ]
    return list(dict.fromkeys(variants))


def _weights_folders(config: Recipe) -> dict[str, Path]:
    """The folder of each checkpoint to measure, checked before anything runs."""
    folders = {}
    if "base" in config.eval.checkpoints:
        folders["base"] = _base_folder(config.model.path)
    if "fine_tuned" in config.eval.checkpoints:
        folders["fine_tuned"] = Path(config.train.run_folder) / "checkpoint"
        if not (folders["fine_tuned"] / "config.json").is_file():
            raise UserError(
                f"no fine-tuned checkpoint at {folders['fine_tuned']}: run coinrag train with this "
                "recipe first, or compare the base model alone with eval.checkpoints=[base]"
            )
    return folders


def _base_folder(path: str) -> Path:
    """The model's folder, also where `path` is a name in the local Hugging Face cache."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(cached_file(path, "config.json", local_files_only=True)).parent
    except OSError as error:
        raise UserError(
            f"model.path: {path!r} is neither a folder nor a model in the local Hugging Face cache"
        ) from error


def _questions(tables: Tables) -> list[Question]:
    """The rows of the built dev data, with their chunks."""
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


def _setting(config: Recipe, dev: Path, template: PromptTemplate) -> dict[str, Any]:
    """What decides answers and timings beside the weights; a change of it starts anew."""
    return {
        "dev_data": dev.name,
        "template": template.digest,
        "dtype": config.model.dtype,
        "order": config.retrieval.order,
        "overlap": config.retrieval.overlap,
        "max_new_tokens": config.eval.max_new_tokens,
        "machine": machine(),
    }


def _weights_digest(folder: Path) -> str:
    """SHA-256 over the model's config and safetensors files, names and contents."""
    files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    digest = hashlib.sha256()
    for file in filter(Path.is_file, files):
        digest.update(file.name.encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _digest(setting: Mapping[str, Any], weights: str) -> str:
    text = json.dumps([setting, weights], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _resume(path: Path, keys: Mapping[str, str]) -> list[Answer]:
    """The answers that still hold; those of another key are moved out of the file.

    Answers of checkpoints that this run does not measure stay.
    """
    found = read_answers(path)
    stale = [a for a in found if keys.get(a.checkpoint, a.key) != a.key]
    kept = [a for a in found if keys.get(a.checkpoint, a.key) == a.key]
    if stale:
        previous = path.with_name("answers.previous.jsonl")
        write_answers(previous, stale)
        logger.warning(
            "settings, weights or machine changed: %d answers (%s) moved to %s and asked again",
            len(stale),
            ", ".join(sorted({a.checkpoint for a in stale})),
            previous,
        )
    if kept:
        logger.info("resuming: %d answers kept from %s", len(kept), path)
    write_answers(path, kept)
    return kept


def _rotated(variants: Sequence[Variant], number: int) -> list[Variant]:
    shift = number % len(variants)
    return [*variants[shift:], *variants[:shift]]


def _left(
    checkpoint: str, question: Question, variants: Sequence[Variant], done: set[Any]
) -> list[Variant]:
    return [
        (system, w)
        for system, w in variants
        if ((checkpoint, system, w.k_c, w.k), question.question_id) not in done
    ]


def _serve(
    config: Recipe,
    checkpoint: str,
    key: str,
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    template: PromptTemplate,
) -> _Served:
    model = load_model(str(path), config.model.dtype)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    prompt_kv, _ = engine.encode_chunks(model, [(PROMPT, template.prompt_ids)])
    rope = Rope.from_config(model.config)
    return _Served(checkpoint, key, model, tokenizer, template, rope, prompt_kv)


def _answer_question(
    config: Recipe, served: _Served, question: Question, variants: Sequence[Variant]
) -> list[Answer]:
    """Encode the question's chunks once, then let every variant answer from them."""
    requests = [
        SYSTEMS[system].request(question, width, served.template, config.retrieval)
        for system, width in variants
    ]
    used = {piece.chunk for request in requests for piece in request.plan.slices}
    chunks = {c.chunk_id: c.token_ids for c in question.chunks if c.chunk_id in used}
    chunk_kv, offline_ms = engine.encode_chunks(served.model, chunks.items())
    offline_tokens = sum(map(len, chunks.values()))
    return [
        _answer(config, served, question, variant, request, chunk_kv, offline_tokens, offline_ms)
        for variant, request in zip(variants, requests, strict=True)
    ]


def _answer(
    config: Recipe,
    served: _Served,
    question: Question,
    variant: Variant,
    request: Request,
    chunk_kv: Mapping[str, torch.Tensor],
    offline_tokens: int,
    offline_ms: float,
) -> Answer:
    completion = engine.answer(
        served.model,
        served.rope,
        request.plan,
        request.online_ids,
        {**served.prompt_kv, **chunk_kv},
        stop_ids=served.template.stop_ids,
        max_new_tokens=config.eval.max_new_tokens,
    )
    text = served.tokenizer.decode(completion.token_ids, skip_special_tokens=True).strip()
    system, width = variant
    return Answer(
        key=served.key,
        checkpoint=served.checkpoint,
        system=system,
        k_c=width.k_c,
        k=width.k,
        question_id=question.question_id,
        dataset=question.dataset,
        question=question.question,
        evidence=request.evidence,
        answer=text,
        gold=question.answers,
        f1=token_f1(text, question.answers),
        em=exact_match(text, question.answers),
        ttft_ms=completion.ttft_ms,
        active_tokens=request.active_tokens,
        new_tokens=len(completion.token_ids),
        stopped=completion.stopped,
        offline_tokens=offline_tokens,
        offline_ms=offline_ms,
    )


def _progress(
    missing: Sequence[tuple[Question, list[Variant]]], name: str
) -> Iterator[tuple[Question, list[Variant]]]:
    """A bar on a terminal, a line each tenth of the questions elsewhere."""
    terminal = sys.stderr.isatty()
    step = max(1, len(missing) // 10)
    for number, item in enumerate(tqdm(missing, desc=name, unit="q", disable=not terminal), 1):
        yield item
        if not terminal and number % step == 0:
            logger.info("%s: %d of %d questions answered", name, number, len(missing))


def _peak_memory_gib() -> float:
    """The process's largest resident size; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    temporary.replace(path)
