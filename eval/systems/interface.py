"""What a system is: from a question and a width to what is cached and what is computed online."""

from collections.abc import Callable
from dataclasses import dataclass

from cache_ops.plan import PrefixPlan
from data_builders.prompt import PromptTemplate
from data_builders.tables import Chunk
from recipes.building import RetrievalConfig


@dataclass(frozen=True)
class Question:
    """One built sample with its retrieved chunks, best first.

    `nugget_scores` has one list a chunk with one score a nugget, in the chunk's order.
    """

    question_id: str
    dataset: str
    question: str
    answers: list[str]
    chunks: list[Chunk]
    nugget_scores: list[list[float]]


@dataclass(frozen=True)
class Width:
    """How much evidence a prefix holds: the top `k_c` chunks, and of them the top `k` nuggets.

    `k` is None where the system serves whole chunks.
    """

    k_c: int
    k: int | None


@dataclass(frozen=True)
class Request:
    """One question as a system serves it."""

    plan: PrefixPlan
    """The cached prefix; empty where everything is computed online."""
    context_ids: list[int]
    """Tokens computed online between the prefix and the query."""
    active_tokens: int
    """Tokens in the KV cache before the query."""
    evidence: list[str]
    """What the model sees, for the reader of the answers: nugget texts, or titles of chunks."""


@dataclass(frozen=True)
class System:
    """A way to serve a question. Systems of one comparison differ in nothing else."""

    request: Callable[[Question, Width, PromptTemplate, RetrievalConfig], Request]
    selects_nuggets: bool
    """Whether its prefix depends on `k`; whole-chunk systems are measured once a `k_c`."""
