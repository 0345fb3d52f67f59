"""A nugget scorer from a recipe: vectors, lists, fitting, and the folder that is left.

Beside the files of `data_builders.scorers.hidden_ffn` it has

metrics.jsonl               one line an epoch, the first before training
report.json                 questions by use, and recall beside the bi-encoder's
recipe.yaml, origins.json   the resolved recipe and where each value came from
"""

import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from data_builders.build import load_built, told_about_assets
from data_builders.build_assets import BuildAssets, nugget_texts
from data_builders.ray_cluster import leaving_ray
from data_builders.scorers import reads_generator
from data_builders.scorers.hidden_ffn import (
    Described,
    NuggetVectors,
    encoder_vectors,
    vectors_identity,
    write_ffn,
)
from data_builders.tables import Chunk, Tables
from recipes.errors import UserError
from recipes.resolve import Resolved, with_changes
from recipes.retrieval import HiddenFfnConfig
from recipes.schema import Recipe
from train.run_folder import refuse_unwritable, replace_folder
from train.scorer_fit import Fitted, fit
from train.scorer_lists import RECALL_AT, NuggetList, is_held_out, nugget_lists, recall

logger = logging.getLogger(__name__)

_PATH_OPTION = "retrieval.hidden_ffn.path"


def train_scorer(resolved: Resolved) -> Path:
    """Trains the network of a recipe's `retrieval.hidden_ffn` on its train tables; its folder.

    The tables are those of `retrieval.nugget_scorer: bi_encoder`, whatever the recipe's own is.

    Raises:
        UserError: no such section, several ranks, a folder that is used or cannot be written, no
            built tables, too few questions with answers in their chunks, or see `fit` and
            `data_builders.build.told_about_assets`.
        ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_model`.
    """
    config = resolved.config
    section = _section(config)
    folder = Path(section.path)
    _refuse_used(folder)
    refuse_unwritable(folder, _PATH_OPTION)
    tables = _first_stage_tables(config)
    with told_about_assets(config), ExitStack() as stack:
        stack.enter_context(leaving_ray())
        vectors = _vectors(config, tables, stack)
        lists = list(nugget_lists(tables, vectors, weak=config.scorer.weak_labels))
    held_out = [one for one in lists if is_held_out(one.question_id, config.scorer.held_out)]
    learned = [
        one
        for one in lists
        if one.teaches and not is_held_out(one.question_id, config.scorer.held_out)
    ]
    _refuse_too_few(learned, held_out)
    fitted = fit(learned, held_out, section, config.scorer)
    report = _report(len(tables.samples), learned, held_out, fitted)
    described = Described(
        vectors=section.vectors,
        dimensions=len(learned[0].question_E),
        width=section.width,
        add_cosine=section.add_cosine,
        made_for=vectors_identity(config),
    )

    def write(fresh: Path) -> None:
        write_ffn(fresh, fitted.ffn, described)
        lines = "".join(json.dumps(line) + "\n" for line in fitted.epochs)
        (fresh / "metrics.jsonl").write_text(lines, encoding="utf-8")
        (fresh / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        resolved.write(fresh)

    _refuse_used(folder)
    try:
        replace_folder(folder, write)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{_PATH_OPTION}: {folder} cannot be written: {error}") from error
    logger.info("%s: %s", folder, json.dumps(report, indent=1))
    return folder


def _section(config: Recipe) -> HiddenFfnConfig:
    if config.retrieval.hidden_ffn is None:
        raise UserError(
            "retrieval.hidden_ffn: null, but it says what is trained and where it goes; the recipe "
            f"options/hidden_ffn has it, or set {_PATH_OPTION}=FOLDER"
        )
    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise UserError(
            f"train/nugget_scorer.py trains a small network on one rank, and {ranks} were started: "
            "accelerate launch --num_processes 1"
        )
    return config.retrieval.hidden_ffn


def _refuse_used(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{_PATH_OPTION}: {folder} is in use; choose another")


def _first_stage_tables(config: Recipe) -> Tables:
    try:
        return load_built(with_changes(config, ["retrieval.nugget_scorer=bi_encoder"]), "train")
    except UserError as error:
        raise UserError(
            f"{error} (a scorer learns from the tables of retrieval.nugget_scorer=bi_encoder)"
        ) from error


def _vectors(config: Recipe, tables: Tables, stack: ExitStack) -> NuggetVectors:
    """The vectors of the tables' questions and of their chunks' nuggets; missing ones are made."""
    scored = with_changes(config, ["retrieval.nugget_scorer=hidden_ffn"])
    assets = BuildAssets.open(scored, stack)
    questions: list[str] = tables.samples["question"][:]
    if reads_generator(scored.retrieval):
        assets.read_hidden_states(questions, _retrieved(tables))
    else:
        assets.encode("texts", chain(questions, nugget_texts(_retrieved(tables))))
    return assets.generator or encoder_vectors(assets.encoder)


def _retrieved(tables: Tables) -> Iterable[Chunk]:
    """Each chunk that some question was given."""
    names = {name: None for row in tables.samples["chunk_ids"] for name in row}
    return (tables.chunk(name) for name in names)


def _refuse_too_few(learned: Sequence[NuggetList], held_out: Sequence[NuggetList]) -> None:
    if not learned:
        raise UserError(
            "data.train: no question has good nuggets and others in its retrieved chunks: raise "
            "data.train_rows_per_file, or set scorer.weak_labels=true"
        )
    if not any(one.answering for one in held_out):
        raise UserError(
            f"scorer.held_out: none of {len(held_out)} held-out questions has a nugget that holds "
            "its answer: hold out more, or raise data.train_rows_per_file"
        )


def _report(
    questions: int, learned: Sequence[NuggetList], held_out: Sequence[NuggetList], fitted: Fitted
) -> dict[str, Any]:
    """Questions by use, and the recall of held-out ones before and after, and without it."""
    bi_encoder = recall(held_out, lambda one: one.bi_encoder)
    of_epoch = {"untrained": fitted.epochs[0], "trained": fitted.epochs[fitted.best]}
    return {
        "questions": {
            "in_tables": questions,
            "learned": len(learned),
            "learned_by_weak_labels": sum(not one.answering for one in learned),
            "held_out": len(held_out),
            "held_out_with_answer": sum(bool(one.answering) for one in held_out),
        },
        "best_epoch": fitted.best,
        "held_out_recall": {
            "bi_encoder": {f"recall_at_{k}": bi_encoder[k] for k in RECALL_AT},
            **{
                name: {f"recall_at_{k}": epoch[f"recall_at_{k}"] for k in RECALL_AT}
                for name, epoch in of_epoch.items()
            },
        },
    }
