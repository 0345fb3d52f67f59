"""Nuggets extracted for one question, while somebody waits for its answer.

Unlike the nuggets of a build they depend on the question, so that nothing about them can be
prepared: neither the extraction nor keys and values.
"""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from cache_ops.plan import Span, merge_spans
from data_builders.answers import answer_key
from data_builders.nuggets.align import align
from data_builders.nuggets.extract import extractor_identity
from data_builders.nuggets.instructions import Messages
from data_builders.nuggets.online_instructions import QUESTION_PROMPT_VERSION, question_messages
from data_builders.nuggets.rules import rules
from data_builders.tables import Chunk
from recipes.building import NuggetsConfig
from recipes.errors import UserError
from recipes.schema import Recipe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnlineNugget:
    """A short text that stands alone.

    Attributes:
        chunk: the index of the chunk that it comes from.
        text: verbatim from the chunk, or a model's own words.
        place: sorts the nuggets of one chunk as they are to be read.
    """

    chunk: int
    text: str
    place: int


OnlineExtractor = Callable[[str, Sequence[Chunk]], list[OnlineNugget]]
"""From a question and its retrieved chunks to nuggets, best first. One thread's."""


def open_online_extractor(config: Recipe) -> OnlineExtractor:
    """The extractor that `systems.online_nuggets` names, with its model loaded.

    `rules` ranks the sentences and clauses of all chunks by the words that they share with the
    question. A model is asked once a chunk, about all chunks of a question at once; what it gives
    first in each chunk comes before what it gives second in any. In style `ginger` its phrases are
    located in their chunk as those of a build are; where they overlap they are joined, and those
    that are not there are dropped. In style `crucible` its words are kept as they are. What was
    dropped is logged when the extractor is freed. Nothing is kept from one call to the next: a
    question that comes again takes its time again.

    Raises:
        UserError, ModelNotFoundError: the model's section is missing from the recipe, or see
            `local_model.load_asked_model` and `llm.chats.open_asked_model`.
    """
    nuggets, style = _own_nuggets(config), config.systems.online_nuggets.style
    if nuggets.extractor == "rules":
        return _extract_by_rules
    ask = _open_model(nuggets, config.retrieval.k_c)
    threshold = nuggets.fuzzy_threshold
    dropped: Counter[str] = Counter()

    def extract(question: str, chunks: Sequence[Chunk]) -> list[OnlineNugget]:
        chats = [question_messages(style, question, chunk.text) for chunk in chunks]
        found = []
        for chunk, candidates in zip(chunks, ask(chats), strict=True):
            if style == "ginger":
                found.append(_located(chunk.text, candidates, threshold, dropped))
            else:
                found.append(_answered(candidates, dropped))
        return _in_turn(found)

    weakref.finalize(extract, _report_dropped, dropped)
    return extract


def online_identity(config: Recipe) -> dict[str, Any]:
    """Everything beside question and chunks that decides an extractor's nuggets, as JSON values.

    Raises:
        UserError: the model's section is missing from the recipe, or the local model is not there.
    """
    nuggets = _own_nuggets(config)
    return {
        **extractor_identity(nuggets),
        "question_prompt": QUESTION_PROMPT_VERSION,
        "style": config.systems.online_nuggets.style,
        "fuzzy_threshold": nuggets.fuzzy_threshold,
    }


def _own_nuggets(config: Recipe) -> NuggetsConfig:
    """The recipe's `nuggets` with the extractor of `systems.online_nuggets` in place of its own."""
    extractor = config.systems.online_nuggets.extractor
    # A recipe is checked for it, but not where online nuggets are an arm's alone.
    if extractor != "rules" and getattr(config.nuggets, extractor) is None:
        raise UserError(
            f"systems.online_nuggets.extractor {extractor} needs the section nuggets.{extractor}"
        )
    return config.nuggets.model_copy(update={"extractor": extractor})


def _open_model(
    nuggets: NuggetsConfig, chunks: int
) -> Callable[[Sequence[Messages]], list[list[str]]]:
    """A function from chats to each one's candidates; `chunks` chats will come at once."""
    if nuggets.extractor == "local_model":
        assert nuggets.local_model is not None, "checked by _own_nuggets"
        from data_builders.nuggets.local_model import load_asked_model

        # Whoever waits for one question is helped by its chunks sharing a forward pass.
        batch = nuggets.local_model.batch_size or chunks
        return load_asked_model(nuggets.local_model.model_copy(update={"batch_size": batch}))
    assert nuggets.llm is not None, "checked by _own_nuggets"
    from data_builders.nuggets.llm.chats import open_asked_model

    return open_asked_model(nuggets.llm)


def _extract_by_rules(question: str, chunks: Sequence[Chunk]) -> list[OnlineNugget]:
    """Best first by the sum over shared words of log(1 + candidates / candidates with the word)."""
    asked = set(answer_key(question).split())
    found = [
        (OnlineNugget(number, text, place), asked & set(answer_key(text).split()))
        for number, chunk in enumerate(chunks)
        for place, text in enumerate(rules(chunk.text))
    ]
    holders = Counter(word for _, words in found for word in words)
    weights = {word: math.log1p(len(found) / count) for word, count in holders.items()}
    # Rounded, since equal sums may differ in their last bits.
    found.sort(key=lambda one: -round(sum(weights[word] for word in one[1]), 9))
    return [nugget for nugget, _ in found]


def _located(
    text: str, candidates: Sequence[str], threshold: float | None, dropped: Counter[str]
) -> list[tuple[int, str]]:
    """(begin, text) of phrases as the chunk has them, in the order of the candidates."""
    alignment = align(text, candidates, threshold)
    dropped["given"] += len(candidates)
    dropped["not in their chunk, or repeated"] += alignment.counts["abandoned"]
    spans = merge_spans([Span("", found.start, found.end) for found in alignment.located])
    return [(span.start, text[span.start : span.end]) for span in spans]


def _answered(candidates: Sequence[str], dropped: Counter[str]) -> list[tuple[int, str]]:
    """(number, text) of distinct question-answer pairs; a question alone says nothing."""
    pairs = [text for text in dict.fromkeys(candidates) if not text.endswith("?")]
    dropped["given"] += len(candidates)
    dropped["repeated or without an answer"] += len(candidates) - len(pairs)
    return list(enumerate(pairs))


def _in_turn(found: Sequence[Sequence[tuple[int, str]]]) -> list[OnlineNugget]:
    """The first nugget of every chunk, then the second of every chunk, and so on."""
    return [
        OnlineNugget(chunk, one[1], one[0])
        for turn in zip_longest(*found)
        for chunk, one in enumerate(turn)
        if one is not None
    ]


def _report_dropped(dropped: Counter[str]) -> None:
    for reason in sorted(dropped.keys() - {"given"}):
        if dropped[reason]:
            log.warning(
                "%d of %d nuggets that were extracted online are dropped: %s",
                dropped[reason],
                dropped["given"],
                reason,
            )
