"""What a system is: from a question and a width to what is cached and what is computed online."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from cache_ops.contextualizer import Contextualizer
from cache_ops.layout import Layout
from cache_ops.parallel import ParallelAttention
from cache_ops.plan import PROMPT
from cache_ops.recompute import Recompute
from cache_ops.soft_tokens import SoftTokens
from data_builders.nuggets.online import OnlineExtractor
from data_builders.prompt import PromptTemplate
from data_builders.tables import Chunk
from recipes.schema import Recipe


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
    gold_chunk_ids: list[str]


@dataclass(frozen=True)
class Width:
    """How much evidence a prefix holds: the top `k_c` chunks, and of them the top `k` nuggets.

    `k` is None where the system serves whole chunks.
    """

    k_c: int
    k: int | None


@dataclass(frozen=True)
class Evidence:
    """One piece of text that the model sees: a nugget, or a whole chunk."""

    chunk_id: str
    text: str


@dataclass(frozen=True)
class Request:
    """One question as a system serves it."""

    layout: Layout
    """The cached prefix, empty where everything is computed online, and what is computed."""
    segments: Mapping[str, Sequence[int]]
    """The tokens of every chunk of the plan, the prompt's under `PROMPT`."""
    evidence: list[Evidence]
    """What the model sees, best first."""
    recompute: Recompute | None = None
    """Which cached tokens are computed anew before the first token, if any."""
    parallel: ParallelAttention | None = None
    """How attention to the chunks is reweighted, if it is."""
    contextualizer: Contextualizer | None = None
    """Corrects the cached prefix before anything attends to it, if it is corrected."""
    online_segments: frozenset[str] = frozenset()
    """Chunks of the plan that depend on the question, so that no cache can hold them."""
    extract_ms: float = 0.0
    """Of the time to first token, what a call of a nugget extractor took."""
    cut: tuple[int, int] = (0, 0)
    """The context tokens [start, end) that were left out because the prompt was too long."""

    @property
    def cut_tokens(self) -> int:
        """How many tokens of the context were left out."""
        start, end = self.cut
        return end - start

    def prefix_ids(self) -> list[int]:
        """The tokens of the cached prefix, in the order of the plan."""
        pieces = self.layout.plan.slices
        return [token for p in pieces for token in self.segments[p.chunk][p.start : p.end]]


@dataclass(frozen=True)
class Serving:
    """What all questions of one recipe and checkpoint share, as far as a system may need it."""

    config: Recipe
    template: PromptTemplate
    tokenizer: PreTrainedTokenizerBase
    soft_tokens: Mapping[str, SoftTokens] = field(default_factory=dict)
    """Those of the weights at hand, by group."""
    extractor: OnlineExtractor | None = field(default=None, repr=False)
    """Finds nuggets for a question; see `online_nuggets`."""
    contextualizer: Contextualizer | None = field(default=None, repr=False)
    """That of the weights at hand, for the system that it was trained with."""
    max_positions: int | None = None
    """The positions that the weights were trained for; None: no prompt is too long for them."""

    def contextualizer_of(self, system: str) -> Contextualizer | None:
        """What corrects the prefixes of a system, if anything does."""
        found = self.contextualizer
        return found if found is not None and found.spec.system == system else None

    def segments(self, chunks: Sequence[Chunk]) -> dict[str, Sequence[int]]:
        """Tokens of chunks and of the prompt, by their keys in a plan."""
        segments: dict[str, Sequence[int]] = {c.chunk_id: c.token_ids for c in chunks}
        return {PROMPT: self.template.prompt_ids, **segments}


@dataclass(frozen=True)
class System:
    """A way to serve a question. Systems of one comparison differ in nothing else."""

    request: Callable[[Question, Width, Serving], Request]
    selects_nuggets: bool
    """Whether its prefix depends on `k`; whole-chunk systems are measured once a `k_c`."""
    extracts: bool = False
    """Whether it calls an extractor for every question, which nothing can be prepared for."""
