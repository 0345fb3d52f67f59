"""`coinrag build`: from questions and passages to the chunks and samples tables.

Input is read into an intake on disk; the distinct passages are chunked and their nuggets located;
what is compared is embedded; every question gets its chunks and nuggets. Whatever costs time or
money is an asset kept by content under `data.built_root/assets`: a build that was stopped goes on,
and one with changed input makes only what changed. Either way the tables have the same bytes.
"""

import fcntl
import json
import logging
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC, EROFS
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cache_ops.hf import load_config, load_tokenizer
from data_builders.assets import Needed, is_damaged
from data_builders.extraction import ChunkTexts, asked_model, open_journal
from data_builders.intake import Intake
from data_builders.key import (
    SPLITS,
    Split,
    assets_folder,
    build_key,
    key_folder,
    split_files,
    split_format,
    split_rows,
)
from data_builders.models import check_device
from data_builders.nuggets.llm.batch_files import BatchReport, read_batch_files, write_batch_files
from data_builders.pipeline import Pipeline
from data_builders.ray_cluster import leaving_ray
from data_builders.readers import read_corpus, read_questions
from data_builders.records import Question
from data_builders.report import render_report
from data_builders.scorers import used_cross_encoder
from data_builders.scorers.cross_encoder import check_cross_encoder
from data_builders.scorers.hidden_ffn import load_ffn
from data_builders.tables import Tables, load_tables
from recipes.errors import UserError
from recipes.schema import Recipe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """A finished build: its folder, and what was made anew for it; nothing if it was there."""

    folder: Path
    made: dict[str, Needed]

    @property
    def report(self) -> dict[str, Any]:
        """What the build found, see `report.Tally`."""
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text("utf-8"))
        return report


def build(config: Recipe, split: Split, *, retry_failed: bool = False) -> Built:
    """Builds the tables of a split, unless the same content was built before.

    Args:
        config: the recipe.
        split: which of its data.
        retry_failed: ask the model of `nuggets.llm` again about chunks for which it has failed.

    Returns:
        The folder with `chunks.arrow`, `samples.arrow`, `report.json` and `key.json`.

    Raises:
        ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_config`.
        UserError: malformed data; a data file, model or encoder that is not there; a
            `data.built_root` that cannot be written; a model server or cluster that fails.
    """
    if retry_failed:
        asked_model(config)
    key = build_key(config, split)
    folder = key_folder(config, split, key)
    partial = folder.with_name(f"{folder.name}.partial")
    if _is_built(folder) and not (retry_failed and _has_failures(Built(folder, {}))):
        log.info("build of %s: hit, %s has the same content and settings", split, folder)
        if partial.exists():
            # Left by a build that was killed when all was done, unless another retries there.
            with suppress(UserError), _locked(partial):
                shutil.rmtree(partial)
        return Built(folder, {})
    log.info("build of %s: miss, building %s", split, folder)
    # What cannot work is told now, and not when hours of building are done.
    load_config(config.model.path)
    if config.retrieval.nugget_scorer == "hidden_ffn":
        load_ffn(config)
    if config.build.executor == "local":
        _check_devices(config)
    with (
        _locked(partial),
        told_about_assets(config, partial),
        Intake(partial / "intake.sqlite") as intake,
    ):
        try:
            intake.fill(read_corpus(config.data.corpus), _questions(config, split))
        except UserError:
            _forget(partial)
            raise
        final, replaced = partial / "final", partial / "replaced"
        for left in (final, replaced):
            shutil.rmtree(left, ignore_errors=True)
        final.mkdir()
        with ExitStack() as stack:
            stack.enter_context(leaving_ray())
            pipeline = Pipeline.open(config, split, partial, intake, stack)
            report = pipeline.run(final, retry_failed=retry_failed)
        (final / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        (final / "key.json").write_text(json.dumps(key, indent=2), encoding="utf-8")
        if folder.exists():
            folder.rename(replaced)
        final.rename(folder)
        shutil.rmtree(partial)
    log.info("built %s\n%s\n%s", folder, render_report(report), render_made(pipeline.assets.made))
    return Built(folder, pipeline.assets.made)


def built_folder(config: Recipe, split: Split) -> Path:
    """Where the tables of a split lie or would lie, by content of inputs and settings."""
    return key_folder(config, split, build_key(config, split))


def load_built(config: Recipe, split: Split) -> Tables:
    """The tables of a split.

    Raises:
        UserError: they are not built, or were built from other inputs or settings.
    """
    folder = built_folder(config, split)
    if not _is_built(folder):
        raise UserError(
            f"no built {split} data for recipe {config.name!r} with these inputs and settings "
            f"({folder}); run `coinrag build` with the same recipe and overrides first"
        )
    return load_tables(folder)


def render_made(made: dict[str, Needed]) -> str:
    """How much of each kind of asset was there before, one line a kind."""
    return "\n".join(
        f"{kind}: {needed.distinct - needed.missing:,} of {needed.distinct:,} reused, "
        f"{needed.missing:,} made"
        for kind, needed in made.items()
    )


def write_batches(config: Recipe, folder: Path, *, retry_failed: bool = False) -> list[Path]:
    """Batch-API files of the requests that building both splits would make, a folder for each.

    Raises:
        UserError: the recipe asks no model, malformed data, or `folder` cannot be written or holds
            such files already.
    """
    asked_model(config)
    tokenizer = load_tokenizer(config.model.path)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="coinrag-")))
        texts = {}
        # Both are read before anything is written.
        for split in SPLITS:
            intake = stack.enter_context(Intake(scratch / f"{split}.sqlite"))
            intake.fill(read_corpus(config.data.corpus), _questions(config, split))
            texts[split] = ChunkTexts(intake, tokenizer, config.data.chunk_tokens)
        journal = stack.enter_context(closing(open_journal(config)))
        return [
            file
            for split in SPLITS
            for file in write_batch_files(
                texts[split], journal, folder / split, retry_failed=retry_failed
            )
        ]


def read_batches(config: Recipe, files: Sequence[Path]) -> BatchReport:
    """Takes the results in Batch-API output and error files into the journal.

    Raises:
        UserError: the recipe asks no model, or the files hold no results of its requests.
    """
    with closing(open_journal(config)) as journal:
        return read_batch_files(files, journal)


def _check_devices(config: Recipe) -> None:
    check_device(config.retrieval.device, "retrieval.device")
    if (cross_encoder := used_cross_encoder(config.retrieval)) is not None:
        check_cross_encoder(cross_encoder)
    if config.nuggets.extractor == "local_model" and config.nuggets.local_model is not None:
        check_device(config.nuggets.local_model.device, "nuggets.local_model.device")


def _has_failures(built: Built) -> bool:
    return bool(built.report.get("extraction", {}).get("failed"))


def _questions(config: Recipe, split: Split) -> Iterator[Question]:
    """The questions of a split, each with something to be searched in."""
    files, rows = split_files(config, split), split_rows(config, split)
    for question in read_questions(files, split_format(config, split), rows):
        if config.retrieval.candidates == "contexts" and not question.passages:
            raise UserError(
                f"{question.place}: contexts: none; to search such questions in the passages of "
                "data.corpus, set retrieval.candidates=corpus"
            )
        yield question


def _is_built(folder: Path) -> bool:
    try:
        return (folder / "key.json").is_file()
    except OSError as error:
        raise _unusable_root(error) from error


@contextmanager
def told_about_assets(config: Recipe, partial: Path | None = None) -> Iterator[None]:
    """A full or read-only disk and a damaged file are the user's to mend.

    Args:
        config: the recipe whose assets are read and made.
        partial: the folder of a build under way.

    Raises:
        UserError: in place of what the system or SQLite raises.
    """
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (ENOSPC, EROFS, EDQUOT)
        if full or isinstance(error, sqlite3.OperationalError):
            raise UserError(
                f"data.built_root: cannot write {config.data.built_root}: {error}"
            ) from error
        raise
    except sqlite3.DatabaseError as error:
        # SQLite does not say in which file.
        folders = [assets_folder(config), *([partial] if partial else [])]
        files = [file for folder in folders for file in folder.glob("*.sqlite")]
        damaged = ", ".join(str(file) for file in files if is_damaged(file))
        if damaged:
            raise UserError(f"{damaged}: {error}; delete it, what it held is made again") from error
        raise


def _unusable_root(error: OSError) -> UserError:
    return UserError(f"data.built_root: cannot use {error.filename}: {error.strerror}")


def _forget(partial: Path) -> None:
    """Leaves nothing of a build whose input was wrong."""
    shutil.rmtree(partial)
    with suppress(OSError):
        partial.parent.rmdir()


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Keeps a second build of the same content out; the lock ends with the process."""
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = (partial / "lock").open("w")
    except OSError as error:
        raise _unusable_root(error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another process is building {partial}; wait for it") from error
        yield
