"""What scores the nuggets of retrieved chunks: one seam for builds and for retrieval online."""

from collections.abc import Callable, Sequence
from typing import Any

from data_builders.encoded import Encoder
from data_builders.retrieval import scores
from data_builders.scorers.cross_encoder import CrossEncoder, cross_encoder_key
from data_builders.scorers.hidden_ffn import (
    NuggetVectors,
    encoder_vectors,
    ffn_key,
    load_ffn,
    score_by_ffn,
)
from data_builders.tables import Chunk
from recipes.retrieval import CrossEncoderConfig, RetrievalConfig
from recipes.schema import Recipe

NuggetScorer = Callable[[str, Sequence[Chunk]], list[list[float]]]
"""A question and chunks to, for each chunk, a rounded score for each of its nuggets."""


def load_scorer(
    config: Recipe,
    encoded: Encoder,
    cross_encoder: CrossEncoder | None,
    generator: NuggetVectors | None = None,
) -> NuggetScorer:
    """The scorer of `retrieval.nugget_scorer`.

    Args:
        config: the recipe.
        encoded: what the retrieval encoder knows of the question and, where `compares_vectors`,
            of the nuggets.
        cross_encoder: that of the recipe, or a lookup of what it has given; None: it has none.
        generator: where the generator's vectors come from; None: nothing `reads_generator`.

    Raises:
        UserError: see `hidden_ffn.load_ffn`.
    """
    retrieval = config.retrieval
    if retrieval.nugget_scorer == "cross_encoder":
        read_together = cross_encoder
        assert read_together is not None, "the cross-encoder's scores are not at hand"
        return lambda question, chunks: read_together(
            [(question, chunk.nugget_texts) for chunk in chunks]
        )

    if retrieval.nugget_scorer == "hidden_ffn":
        vectors = generator if reads_generator(retrieval) else encoder_vectors(encoded)
        assert vectors is not None, "the generator's vectors are not at hand"
        return score_by_ffn(load_ffn(config), vectors)

    def by_vectors(question: str, chunks: Sequence[Chunk]) -> list[list[float]]:
        query = encoded([question])[0]
        return [scores(query, encoded(chunk.nugget_texts), retrieval.weights) for chunk in chunks]

    return by_vectors


def used_cross_encoder(config: RetrievalConfig) -> CrossEncoderConfig | None:
    """The section of the cross-encoder if it scores nuggets or chunks."""
    used = config.nugget_scorer == "cross_encoder" or config.rerank_chunks is not None
    return config.cross_encoder if used else None


def compares_vectors(config: RetrievalConfig) -> bool:
    """Whether nuggets are scored by what the retrieval encoder knows of them."""
    return config.nugget_scorer != "cross_encoder" and not reads_generator(config)


def reads_generator(config: RetrievalConfig) -> bool:
    """Whether nuggets are scored by the generator's hidden states."""
    section = config.hidden_ffn if config.nugget_scorer == "hidden_ffn" else None
    return section is not None and section.vectors == "generator"


def scorer_key(config: Recipe) -> dict[str, Any] | None:
    """What decides the scores of nuggets beside the retrieval encoder; None: nothing does.

    Raises:
        UserError: the scorer's model is not there.
    """
    retrieval = config.retrieval
    if retrieval.nugget_scorer == "cross_encoder":
        assert retrieval.cross_encoder is not None, "the recipe was validated"
        return {"scorer": "cross_encoder", **cross_encoder_key(retrieval.cross_encoder)}
    if retrieval.nugget_scorer == "hidden_ffn":
        return {"scorer": "hidden_ffn", **ffn_key(config)}
    return None
