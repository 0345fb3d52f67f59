"""From rows of the built tables to packed micro-batches."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cache_ops.packing import Example, PackedBatch, pack, pack_over_prefix
from cache_ops.plan import PROMPT, PrefixPlan, Span, plan_prefix
from cache_ops.rope import Rope
from cache_ops.store.stored import union_ranges
from data_builders.prompt import PromptTemplate
from data_builders.tables import Tables
from recipes.errors import UserError
from recipes.schema import Recipe
from train.context import FrozenContext, UsedRanges


@dataclass(frozen=True)
class Lengths:
    """One sample as it will be trained on."""

    tokens: int
    """Prefix, question and answer together."""
    answer_tokens: int
    dropped_spans: int
    """Selected nuggets left out because of `train.max_length_tokens`."""


class ExampleBuilder:
    """Builds what the model is trained on from the samples of one built split."""

    def __init__(
        self, tables: Tables, template: PromptTemplate, rope: Rope, config: Recipe
    ) -> None:
        self._tables = tables
        self._template = template
        self._rope = rope
        self._config = config
        self._samples = tables.samples

    def lengths(self, index: int) -> Lengths:
        """Token counts of one sample; the same errors as `example`."""
        example, dropped = self.example(index)
        own = len(example.query_ids) + len(example.answer_ids)
        return Lengths(example.plan.tokens + own, len(example.answer_ids), dropped)

    def question_ids(self, indices: Sequence[int]) -> list[str]:
        """The samples' question ids, for messages."""
        ids: list[str] = self._samples[list(indices)]["question_id"]
        return ids

    def example(self, index: int) -> tuple[Example, int]:
        """The example of one sample, and how many spans were dropped to make it fit.

        The first answer is the one learned. A sample that is longer than
        `train.max_length_tokens` loses its lowest-scored spans; question and answer are never cut.

        Raises:
            UserError: prompt, question and answer alone are too long.
        """
        row = self._samples[index]
        query_ids = self._template.query_ids(row["question"])
        answer_ids = self._template.answer_ids(row["answers"][0])
        room = self._config.train.max_length_tokens - len(query_ids) - len(answer_ids)
        if room < len(self._template.prompt_ids):
            needed = len(self._template.prompt_ids) + len(query_ids) + len(answer_ids)
            raise UserError(
                f"question {row['question_id']!r}: prompt, question and answer take {needed} "
                f"tokens without any nugget, more than train.max_length_tokens "
                f"({self._config.train.max_length_tokens})"
            )
        spans = sample_spans(row)
        plan = self._plan(row, spans)
        kept = len(spans)
        while plan.tokens > room:
            kept -= 1
            plan = self._plan(row, spans[:kept])
        return Example(plan, query_ids, answer_ids), len(spans) - kept

    def micro_batch(
        self, indices: Sequence[int], frozen: FrozenContext | None = None
    ) -> PackedBatch:
        """One packed row of these samples; a chunk that several of them use stands once.

        With a frozen context the chunks themselves are not in the row.
        """
        examples = [self.example(index)[0] for index in indices]
        used = {piece.chunk for example in examples for piece in example.plan.slices} - {PROMPT}
        chunks = [self._tables.chunk(chunk_id) for chunk_id in used]
        chunk_ids: dict[str, Sequence[int]] = {PROMPT: self._template.prompt_ids}
        chunk_ids |= {chunk.chunk_id: chunk.token_ids for chunk in chunks}
        if frozen is not None:
            nuggets = {chunk.chunk_id: chunk.nuggets for chunk in chunks}
            prefix_kv_PL2HD = frozen.prefix(examples, chunk_ids, nuggets)
            return pack_over_prefix(examples, prefix_kv_PL2HD, self._rope)
        detach = self._config.context.gradient == "detach"
        return pack(examples, chunk_ids, self._rope, detach_context=detach)

    def used_ranges(self) -> list[UsedRanges]:
        """Every chunk, the prompt among them, that some sample's prefix needs slices of."""
        used: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for index in range(len(self._samples)):
            for piece in self.example(index)[0].plan.slices:
                used[piece.chunk].append((piece.start, piece.end))
        return [(self._token_ids(chunk), union_ranges(ranges)) for chunk, ranges in used.items()]

    def _token_ids(self, chunk: str) -> Sequence[int]:
        return self._template.prompt_ids if chunk == PROMPT else self._tables.chunk(chunk).token_ids

    def _plan(self, row: Mapping[str, Any], spans: Sequence[Span]) -> PrefixPlan:
        return plan_prefix(
            spans,
            prompt_length=len(self._template.prompt_ids),
            chunk_ranks=row["chunk_ids"],
            order=self._config.retrieval.order,
            overlap=self._config.retrieval.overlap,
        )


def sample_spans(row: Mapping[str, Any]) -> list[Span]:
    """The selected spans of a row of the samples table, best score first."""
    places = zip(row["span_chunks"], row["span_starts"], row["span_ends"], strict=True)
    return [Span(row["chunk_ids"][chunk], start, end) for chunk, start, end in places]
