"""The section that says how `coinrag train-scorer` trains; see `recipes.schema` for the whole."""

from typing import Annotated

from pydantic import Field

from recipes.section import Natural, Positive, Section, Text


class ScorerConfig(Section):
    """How a trained `retrieval.nugget_scorer` learns, by Adam with decoupled weight decay."""

    # What a cross_encoder starts from: an encoder, which gets a new head, or a reranker.
    base: Text | None = None
    # Of a cross_encoder: nuggets of the same question that a good one stands against in a step.
    negatives: Positive = 7
    seed: Annotated[Natural, Field(lt=2**32)] = 0
    epochs: Positive = 30
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-4
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    # Of one optimizer step.
    batch_questions: Positive = 16
    # Of the questions, by a hash of their ids: these are not learned from and tell when to stop.
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    # Epochs without a lower loss on the held-out questions after which the training ends.
    patience: Positive = 5
    # Where no nugget of a gold passage holds the answer, the one that the bi-encoder puts first
    # counts as if it did.
    weak_labels: bool = True
