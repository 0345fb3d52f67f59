"""From rows of the built tables to packed micro-batches, in the layout of the trained system."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cache_ops.layout import Layout, computed, linked_chunks, whole_chunks
from cache_ops.packing import Example, PackedBatch, pack, pack_over_prefix, used_tokens
from cache_ops.plan import PROMPT, Span
from cache_ops.rope import Rope
from cache_ops.soft_tokens import SoftTokens
from cache_ops.store.stored import union_ranges
from data_builders.prefix import nugget_prefix
from data_builders.prompt import PromptTemplate
from data_builders.tables import Tables
from recipes.errors import UserError
from recipes.schema import Recipe
from train.context import FrozenContext, UsedRanges


@dataclass(frozen=True)
class Lengths:
    """One sample as it will be trained on."""

    tokens: int
    """Prefix, question and answer together, of the longest form."""
    prefix_tokens: int
    """Of these, those of the prefix."""
    answer_tokens: int
    """Of all forms together."""
    row_tokens: int
    """What it adds to a packed row that shares no chunk with it."""
    dropped: int
    """Selected nuggets, or retrieved chunks, left out because of `train.max_length_tokens`."""
    all_dropped: bool
    """There were some, and none is left."""


@dataclass(frozen=True)
class Sample:
    """One sample as it is packed: an example for each form that the system learns."""

    examples: list[Example]
    segments: Mapping[str, Sequence[int]]
    """The tokens of every chunk of their plans."""
    dropped: int
    kept: int
    """Nuggets or chunks."""


class ExampleBuilder:
    """Builds what the model is trained on from the samples of one built split."""

    def __init__(
        self,
        tables: Tables,
        template: PromptTemplate,
        rope: Rope,
        config: Recipe,
        soft_tokens: Mapping[str, SoftTokens] | None = None,
        answers: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Builds from the samples of `tables`.

        `answers` are the tokens that a teacher's answers have, by sample, for a recipe that learns
        these. Where they are not there yet, the longest possible stand in for them, and room for
        these is always kept: a prefix does not depend on an answer.
        """
        self._tables = tables
        self._template = template
        self._rope = rope
        self._config = config
        self._soft_tokens = soft_tokens or {}
        self._samples = tables.samples
        distillation = config.train.distillation
        self._answers = answers or {}
        self._longest: list[int] = []
        if distillation is not None and distillation.answers == "teacher":
            self._longest = [min(template.stop_ids)] * config.eval.max_new_tokens

    def lengths(self, index: int) -> Lengths:
        """Token counts of one sample; the same errors as `sample`."""
        sample = self.sample(index)
        tokens, prefix_tokens = max(
            (one.plan.tokens + len(one.query_ids) + len(one.answer_ids), one.plan.tokens)
            for one in sample.examples
        )
        answer_tokens = sum(len(one.answer_ids) for one in sample.examples)
        row_tokens = sum(len(one.query_ids) + len(one.answer_ids) for one in sample.examples)
        if self._config.context.gradient != "frozen":
            row_tokens += sum(used_tokens(sample.examples, sample.segments).values())
        all_dropped = sample.dropped > 0 and not sample.kept
        return Lengths(
            tokens, prefix_tokens, answer_tokens, row_tokens, sample.dropped, all_dropped
        )

    def chunk_ids(self) -> list[list[str]]:
        """The retrieved chunks of every sample."""
        ids: list[list[str]] = self._samples["chunk_ids"]
        return ids

    def question_ids(self, indices: Sequence[int]) -> list[str]:
        """The samples' question ids, for messages."""
        ids: list[str] = self._samples[list(indices)]["question_id"]
        return ids

    def has_answer(self, index: int) -> bool:
        """Whether the answer of a sample is known, or a teacher has still to give it."""
        return index in self._answers or not self._longest

    def sample(self, index: int) -> Sample:
        """The forms of one sample.

        The first answer is the one learned. A sample that is longer than
        `train.max_length_tokens` loses its lowest-scored nuggets, or its lowest-ranked chunks where
        whole chunks are served; question and answer are never cut.

        Raises:
            UserError: there is no answer to learn, or prompt, question and answer alone are too
                long; names the question.
        """
        row = self._samples[index]
        query_ids = self._template.query_ids(row["question"])
        answer_ids = self._answers.get(index, self._longest) or self._answer_ids(row)
        own_tokens = len(query_ids) + max(len(answer_ids), len(self._longest))
        room = self._config.train.max_length_tokens - own_tokens
        if room < len(self._template.prompt_ids):
            needed = len(self._template.prompt_ids) + own_tokens
            raise UserError(
                f"question {row['question_id']!r}: prompt, question and answer take {needed} "
                f"tokens without any passage, more than train.max_length_tokens "
                f"({self._config.train.max_length_tokens})"
            )
        pieces = len(row["span_chunks" if self._config.train.system == "coinrag" else "chunk_ids"])
        kept = pieces
        layouts, segments = self._forms(row, kept)
        while max(layout.tokens for layout in layouts) > room:
            kept -= 1
            layouts, segments = self._forms(row, kept)
        examples = [Example.of(layout, query_ids, answer_ids) for layout in layouts]
        return Sample(examples, segments, pieces - kept, kept)

    def _answer_ids(self, row: Mapping[str, Any]) -> list[int]:
        if not (row["answers"] and row["answers"][0].strip()):
            raise UserError(
                f"question {row['question_id']!r} of {row['dataset']} has no answer to learn (its "
                "first one is empty): give it one, or leave it out, and build again"
            )
        return self._template.answer_ids(row["answers"][0])

    def micro_batch(
        self, indices: Sequence[int], frozen: FrozenContext | None = None
    ) -> PackedBatch:
        """One packed row of these samples; a chunk that several of them use stands once.

        With a frozen context the chunks themselves are not in the row.
        """
        samples = [self.sample(index) for index in indices]
        examples = [example for sample in samples for example in sample.examples]
        segments = {name: ids for sample in samples for name, ids in sample.segments.items()}
        if frozen is not None:
            used = {chunk for index in indices for chunk in self._samples[index]["chunk_ids"]}
            nuggets = {chunk: self._tables.chunk(chunk).nuggets for chunk in used}
            prefix_kv_PL2HD = frozen.prefix(examples, segments, nuggets)
            return pack_over_prefix(examples, prefix_kv_PL2HD, self._rope)
        detach = self._config.context.gradient == "detach"
        return pack(examples, segments, self._rope, detach_context=detach)

    def used_ranges(self) -> list[UsedRanges]:
        """Every chunk, the prompt among them, that some sample's prefix needs slices of."""
        used: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        segments: dict[str, Sequence[int]] = {}
        for index in range(len(self._samples)):
            sample = self.sample(index)
            for example in sample.examples:
                for piece in example.plan.slices:
                    used[piece.chunk].append((piece.start, piece.end))
                    segments[piece.chunk] = sample.segments[piece.chunk]
        return [(segments[chunk], union_ranges(ranges)) for chunk, ranges in used.items()]

    def _forms(
        self, row: Mapping[str, Any], kept: int
    ) -> tuple[list[Layout], Mapping[str, Sequence[int]]]:
        """The layouts that the system learns a row in, of its best `kept` nuggets or chunks."""
        config, prompt_ids = self._config, self._template.prompt_ids
        chunk_ids = row["chunk_ids"]
        if config.train.system == "coinrag":
            spans = sample_spans(row)[:kept]
            chunk_ids = dict.fromkeys(span.chunk for span in spans)
        else:
            chunk_ids = chunk_ids[:kept]
        chunks = {chunk: self._tables.chunk(chunk).token_ids for chunk in chunk_ids}
        segments: Mapping[str, Sequence[int]] = {PROMPT: prompt_ids} | chunks
        lengths = [(chunk, len(ids)) for chunk, ids in chunks.items()]
        text = [*prompt_ids, *(token for ids in chunks.values() for token in ids)]
        match config.train.system:
            case "coinrag":
                layout, segments = nugget_prefix(
                    config, spans, segments, row["chunk_ids"], self._soft_tokens
                )
                return [layout], segments
            case "standard_rag":
                return [computed(text)], segments
            case "turborag":
                positions = config.systems.turborag.positions
                return [whole_chunks(lengths, len(prompt_ids), positions)], segments
            case "block_attention":
                return [whole_chunks(lengths, len(prompt_ids)), computed(text)], segments
            case "kvlink":
                group = self._soft_tokens.get("links")
                links = group.ids(len(chunks)) if group else [[]] * len(chunks)
                return [linked_chunks(lengths, len(prompt_ids), links)], segments


def sample_spans(row: Mapping[str, Any]) -> list[Span]:
    """The selected spans of a row of the samples table, best score first."""
    places = zip(row["span_chunks"], row["span_starts"], row["span_ends"], strict=True)
    return [Span(row["chunk_ids"][chunk], start, end) for chunk, start, end in places]
