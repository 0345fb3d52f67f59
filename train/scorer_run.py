"""A nugget scorer from a recipe: which one, what it learns from, and the folder that is left.

Beside the scorer's own files, those of `data_builders.scorers.hidden_ffn` or a model that
`AutoModelForSequenceClassification` loads, it has

metrics.jsonl               one line an epoch, the first before training
report.json                 questions by use, and recall beside the bi-encoder's
recipe.yaml, origins.json   the resolved recipe and where each value came from
"""

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from data_builders.build import load_built
from data_builders.tables import Tables
from recipes.errors import UserError
from recipes.resolve import Resolved, with_changes
from recipes.retrieval import CrossEncoderConfig
from recipes.schema import Recipe
from train.run_folder import refuse_unwritable, replace_folder
from train.scorer_base import refuse_untrainable
from train.scorer_ffn import train_ffn
from train.scorer_lists import NuggetList, is_held_out, nugget_lists
from train.scorer_measure import Trained, report

logger = logging.getLogger(__name__)


class _Target(NamedTuple):
    """Where the scorer goes, and which option says so."""

    option: str
    folder: Path


def train_scorer(resolved: Resolved) -> Path:
    """Trains the scorer of a recipe on its train tables; its folder.

    With `retrieval.nugget_scorer: cross_encoder` it is the cross-encoder, else the network of
    `retrieval.hidden_ffn`. The tables are those of `bi_encoder`, whatever the recipe's own is.

    Raises:
        UserError: no such section, several ranks, a folder that is used or cannot be written, no
            built tables, too few questions with answers in their chunks, or see
            `train.scorer_ffn`, `train.scorer_base` and `train.scorer_cross_encoder`.
        ModelNotFoundError, UnsupportedModelError: see `train.scorer_ffn`.
    """
    config = resolved.config
    target = _target(config)
    _refuse_ranks()
    _refuse_used(target)
    refuse_unwritable(target.folder, target.option)
    if (cross_encoder := _cross_encoder(config)) is not None:
        refuse_untrainable(cross_encoder, config.scorer)
    tables = _first_stage_tables(config)
    lists = list(nugget_lists(tables, weak=config.scorer.weak_labels))
    held_out = [one for one in lists if is_held_out(one.question_id, config.scorer.held_out)]
    learned = [
        one
        for one in lists
        if one.teaches and not is_held_out(one.question_id, config.scorer.held_out)
    ]
    _refuse_too_few(learned, held_out)
    trained = _train(config, tables, learned, held_out)
    found = report(len(tables.samples), learned, held_out, trained)

    def write(fresh: Path) -> None:
        trained.write(fresh)
        lines = "".join(json.dumps(line) + "\n" for line in trained.epochs)
        (fresh / "metrics.jsonl").write_text(lines, encoding="utf-8")
        (fresh / "report.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        resolved.write(fresh)

    _refuse_used(target)
    try:
        replace_folder(target.folder, write)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{target.option}: {target.folder} cannot be written: {error}") from error
    logger.info("%s: %s", target.folder, json.dumps(found, indent=1))
    return target.folder


def _cross_encoder(config: Recipe) -> CrossEncoderConfig | None:
    """The section of the cross-encoder where that is the scorer."""
    retrieval = config.retrieval
    return retrieval.cross_encoder if retrieval.nugget_scorer == "cross_encoder" else None


def _train(
    config: Recipe, tables: Tables, learned: Sequence[NuggetList], held_out: Sequence[NuggetList]
) -> Trained:
    cross_encoder = _cross_encoder(config)
    if cross_encoder is None:
        return train_ffn(config, tables, learned, held_out)
    # FlagEmbedding's trainer takes seconds to import.
    from train.scorer_cross_encoder import train_cross_encoder

    return train_cross_encoder(cross_encoder, config.scorer, learned, held_out)


def _target(config: Recipe) -> _Target:
    if (cross_encoder := _cross_encoder(config)) is not None:
        folder = Path(cross_encoder.path)
        # It is read so; an unknown user's home stays as it is written.
        with suppress(RuntimeError):
            folder = folder.expanduser()
        return _Target("retrieval.cross_encoder.path", folder)
    if config.retrieval.hidden_ffn is None:
        raise UserError(
            "retrieval.hidden_ffn: null, but it says what is trained and where it goes; the recipe "
            "options/hidden_ffn has it, or set retrieval.hidden_ffn.path=FOLDER (a cross-encoder "
            "is trained with options/cross_encoder)"
        )
    return _Target("retrieval.hidden_ffn.path", Path(config.retrieval.hidden_ffn.path))


def _refuse_ranks() -> None:
    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise UserError(
            f"train/nugget_scorer.py trains a scorer on one rank, and {ranks} were started: "
            "accelerate launch --num_processes 1"
        )


def _refuse_used(target: _Target) -> None:
    folder = target.folder
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{target.option}: {folder} is in use; choose another")


def _first_stage_tables(config: Recipe) -> Tables:
    changes = ["retrieval.nugget_scorer=bi_encoder"]
    if _cross_encoder(config) is not None:
        # The chunks, too, are those that it has not chosen yet.
        changes.append("retrieval.rerank_chunks=null")
    try:
        return load_built(with_changes(config, changes), "train")
    except UserError as error:
        raise UserError(
            f"{error} (a scorer learns from the tables of {' '.join(changes)})"
        ) from error


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
