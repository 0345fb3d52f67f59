"""`coinrag build`: from questions and passages to the chunks and samples tables.

Three stages, each in shards that are put on disk whole or not at all: chunks of the distinct
passages, embeddings of the distinct texts, samples. A build that was stopped goes on after its last
finished shard and gives the same tables.
"""

import fcntl
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from cache_ops.hf import load_config, load_tokenizer
from data_builders.ircot import read_ircot
from data_builders.key import Split, build_key, key_folder, split_files, split_rows
from data_builders.nuggets.extract import EXTRACTORS
from data_builders.raft import DistractorPools, Noised, add_noise
from data_builders.records import Passage, Question
from data_builders.report import make_report, render_report
from data_builders.retrieval import load_encoder
from data_builders.shards import embed_once, run_shards
from data_builders.stages import (
    CHUNK_SHARD_COLUMNS,
    SAMPLE_SHARD_COLUMNS,
    chunk_rows,
    retrieve_chunks,
    sample_row,
)
from data_builders.tables import (
    CHUNK_COLUMNS,
    SAMPLE_COLUMNS,
    Chunk,
    Tables,
    chunk_from_row,
    load_tables,
    read_table,
    write_table,
)
from recipes.errors import UserError
from recipes.schema import Recipe

log = logging.getLogger(__name__)

# Items a shard; a change moves unfinished builds' shards, so raise key.FORMAT with it.
PASSAGES_A_SHARD = 1024
QUESTIONS_A_SHARD = 256


def build(config: Recipe, split: Split) -> Path:
    """Builds the tables of a split, unless the same content was built before.

    Returns:
        The folder with `chunks/`, `samples/`, `report.json` and `key.json`.

    Raises:
        ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_config`.
        UserError: malformed data; a data file, model or encoder that is not there; a
            `data.built_root` that cannot be written.
    """
    key = build_key(config, split)
    folder = key_folder(config, split, key)
    if _is_built(folder):
        log.info("build of %s: hit, %s has the same content and settings", split, folder)
        return folder
    log.info("build of %s: miss, building %s", split, folder)
    # A model that cannot be trained is told now, and not when hours of building are done.
    load_config(config.model.path)
    questions = read_ircot(*split_files(config, split), limit=split_rows(config, split))
    partial = folder.with_name(f"{folder.name}.partial")
    with _locked(partial):
        _build_tables(config, split, questions, partial)
        final = partial / "final"
        (final / "key.json").write_text(json.dumps(key, indent=2), encoding="utf-8")
        final.replace(folder)
        shutil.rmtree(partial)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    log.info("built %s\n%s", folder, render_report(report))
    return folder


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


def _is_built(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError as error:
        raise _unusable_root(error) from error


def _unusable_root(error: OSError) -> UserError:
    return UserError(f"data.built_root: cannot use {error.filename}: {error.strerror}")


def _build_tables(
    config: Recipe, split: Split, questions: Sequence[Question], partial: Path
) -> None:
    """Runs the stages inside `partial`; leaves tables and report in `partial/final`."""
    passages = list(
        {passage.full_text: passage for row in questions for passage in row.passages}.values()
    )
    chunk_shards = _chunk_stage(config, passages, partial / "chunks")
    chunk_table = read_table(*chunk_shards)
    rows = {name: row for row, name in reversed(list(enumerate(chunk_table["chunk_id"][:])))}
    distinct = chunk_table.select(sorted(rows.values()))
    chunks = {row["chunk_id"]: chunk_from_row(row) for row in distinct}
    passage_chunks: dict[str, list[Chunk]] = {passage.full_text: [] for passage in passages}
    for passage, name in zip(chunk_table["passage"][:], chunk_table["chunk_id"][:], strict=True):
        passage_chunks[passages[passage].full_text].append(chunks[name])

    def chunks_of(passage: Passage) -> list[Chunk]:
        return passage_chunks[passage.full_text]

    noised = _raft(config, split, questions)
    load = cache(lambda: load_encoder(config.retrieval))
    texts = [chunk.text for chunk in chunks.values()] + [question.text for question in questions]
    embed = embed_once(partial / "embeddings", texts, load, "chunks and questions")
    retrieved = [
        retrieve_chunks(row.question, chunks_of, embed, config.retrieval.k_c) for row in noised
    ]
    # Only nuggets of retrieved chunks are ever compared with a question.
    nuggets = [text for row in retrieved for chunk in row.chunks for text in chunk.nugget_texts]
    embed_nuggets = embed_once(partial / "nugget_embeddings", nuggets, load, "nuggets")

    def write_samples(target: Path, shard: range) -> None:
        made = [
            sample_row(
                noised[index], retrieved[index], chunks_of, embed_nuggets, config.retrieval.k
            )
            for index in shard
        ]
        write_table(target, made, SAMPLE_SHARD_COLUMNS)

    samples = read_table(
        *run_shards(partial / "samples", len(noised), QUESTIONS_A_SHARD, write_samples, "questions")
    )
    final = partial / "final"
    shutil.rmtree(final, ignore_errors=True)
    distinct.select_columns(list(CHUNK_COLUMNS)).save_to_disk(final / "chunks")
    samples.select_columns(list(SAMPLE_COLUMNS)).save_to_disk(final / "samples")
    context_passages = sum(len(question.passages) for question in questions)
    report = make_report(distinct, samples, context_passages)
    (final / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")


def _chunk_stage(config: Recipe, passages: Sequence[Passage], folder: Path) -> list[Path]:
    tokenizer = load_tokenizer(config.model.path)
    extract = EXTRACTORS[config.nuggets.extractor]

    def write(target: Path, shard: range) -> None:
        rows = [
            row
            for index in shard
            for row in chunk_rows(
                passages[index],
                index,
                tokenizer,
                config.data.chunk_tokens,
                extract,
                config.nuggets.fuzzy_threshold,
            )
        ]
        write_table(target, rows, CHUNK_SHARD_COLUMNS)

    return run_shards(folder, len(passages), PASSAGES_A_SHARD, write, "passages")


def _raft(config: Recipe, split: Split, questions: Sequence[Question]) -> list[Noised]:
    if split != "train":
        return [Noised(question, drawn=False, noised=False) for question in questions]
    pools = DistractorPools(questions)
    probability = config.raft.noise_probability
    return [add_noise(question, pools, probability, config.seed) for question in questions]


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
