"""The network of `retrieval.hidden_ffn`: the vectors that it takes, and its folder's files."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from data_builders.build import told_about_assets
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
from recipes.resolve import with_changes
from recipes.schema import Recipe
from train.scorer_fit import VectorList, fit
from train.scorer_lists import NuggetList
from train.scorer_measure import Trained


def train_ffn(
    config: Recipe, tables: Tables, learned: Sequence[NuggetList], held_out: Sequence[NuggetList]
) -> Trained:
    """The network of a recipe's `retrieval.hidden_ffn`; the vectors of all lists stay in memory.

    Args:
        config: has the section.
        tables: where the lists are from.
        learned: all of them teach.
        held_out: at least one has an answering nugget.

    Raises:
        UserError: see `fit` and `data_builders.build.told_about_assets`.
        ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_model`.
    """
    section = config.retrieval.hidden_ffn
    assert section is not None, "only a recipe that has it comes here"
    with told_about_assets(config), ExitStack() as stack:
        stack.enter_context(leaving_ray())
        vectors = _vectors(config, tables, stack)
        known: dict[str, Tensor] = {}
        learned_from = [_with_vectors(one, vectors, known) for one in learned]
        measured_on = [_with_vectors(one, vectors, known) for one in held_out]
    fitted = fit(learned_from, measured_on, section, config.scorer)
    described = Described(
        vectors=section.vectors,
        dimensions=len(learned_from[0].question_E),
        width=section.width,
        add_cosine=section.add_cosine,
        made_for=vectors_identity(config),
    )

    def write(folder: Path) -> None:
        write_ffn(folder, fitted.ffn, described)

    return Trained(fitted.epochs, fitted.best, write)


def _with_vectors(one: NuggetList, vectors: NuggetVectors, known: dict[str, Tensor]) -> VectorList:
    """A list with its vectors; `known` are those of chunks' nuggets, by chunk id."""
    for chunk in one.chunks:
        if chunk.nuggets and chunk.chunk_id not in known:
            known[chunk.chunk_id] = torch.tensor(vectors.of_nuggets(chunk))
    return VectorList(
        one,
        torch.tensor(vectors.of_question(one.question)),
        torch.cat([known[chunk.chunk_id] for chunk in one.chunks if chunk.nuggets]),
    )


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
