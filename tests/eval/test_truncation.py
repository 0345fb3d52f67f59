"""LongBench's cut of over-long prompts, and Standard RAG's prompts under it."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from data_builders.prompt import PromptTemplate
from eval.systems import SYSTEMS, Question, Request, Serving, Width
from eval.truncation import middle_to_cut, prompt_limit
from recipes.errors import UserError
from recipes.schema import PromptConfig, Recipe

LONGBENCH_PROMPT = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based "
    "on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
SIZES = st.integers(0, 40)


def longbench(ids: Sequence[Any], max_length: int) -> list[Any]:
    """The rule as LongBench states it: token by token, which of them are in either half."""
    if len(ids) <= max_length:
        return list(ids)
    half = max_length // 2
    return [token for place, token in enumerate(ids) if place < half or len(ids) - place <= half]


def parts(*sizes: int) -> list[list[int]]:
    """Lists of these sizes, all of whose tokens differ."""
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


@given(SIZES, SIZES, SIZES, SIZES)
def test_cutting_the_context_is_longbenchs_cut_of_the_whole_prompt(
    before: int, context: int, after: int, half: int
) -> None:
    prompt_ids, context_ids, query_ids = parts(before, context, after)
    for limit in (2 * half, 2 * half + 1):
        if max(before, after) > half:
            continue
        start, end = middle_to_cut(context, before, after, limit)
        kept = [*prompt_ids, *context_ids[:start], *context_ids[end:], *query_ids]
        assert kept == longbench([*prompt_ids, *context_ids, *query_ids], limit)


@given(SIZES, SIZES, SIZES, st.integers(0, 120))
def test_prompt_and_query_are_never_cut(before: int, context: int, after: int, limit: int) -> None:
    if before + after > limit - limit % 2:
        if before + context + after > limit:
            with pytest.raises(UserError, match=f"take {before + after} tokens without any passa"):
                middle_to_cut(context, before, after, limit)
        return
    start, end = middle_to_cut(context, before, after, limit)
    assert 0 <= start <= end <= context
    total = before + context + after
    # Of an odd limit one token is lost, as in LongBench.
    assert total - (end - start) == (total if total <= limit else limit - limit % 2)


def test_without_a_limit_nothing_is_cut() -> None:
    assert prompt_limit(None, None, 32) is None
    assert middle_to_cut(10_000, 5, 5, None) == (10_000, 10_000)


def test_the_limit_is_the_recipes_or_what_the_answer_leaves_of_the_positions() -> None:
    assert prompt_limit(900, None, 32) == 900
    assert prompt_limit(None, 1024, 32) == 992
    assert prompt_limit(900, 1024, 32) == 900
    assert prompt_limit(1000, 1024, 32) == 992


def test_the_default_prompt_is_longbenchs(tokenizer: PreTrainedTokenizerBase) -> None:
    config = PromptConfig()
    text = config.before_passages + "{context}" + config.after_passages
    assert text.replace("{question}", "{input}") == LONGBENCH_PROMPT


Ask = Callable[..., tuple[Serving, Request]]


@pytest.fixture
def ask(
    question: Question, tokenizer: PreTrainedTokenizerBase, recipe: Callable[..., Recipe]
) -> Ask:
    """Standard RAG's request over three chunks, under eval settings and trained positions."""

    def asked(max_positions: int | None = None, **evaluation: object) -> tuple[Serving, Request]:
        config = recipe(**evaluation)
        prompt = PromptConfig(before_passages="Answer: ", after_passages=" Q: {question}")
        template = PromptTemplate(tokenizer, prompt)
        serving = Serving(config, template, tokenizer, max_positions=max_positions)
        return serving, SYSTEMS["standard_rag"].request(question, Width(3, None), serving)

    return asked


@pytest.mark.parametrize("by_positions", [False, True])
def test_standard_rag_leaves_the_middle_of_its_context_out(
    question: Question, ask: Ask, by_positions: bool
) -> None:
    serving, whole = ask()
    query_ids = serving.template.query_ids(question.question)
    assert whole.cut_tokens == 0
    limit = whole.layout.length + len(query_ids) - 25
    if by_positions:
        _, cut = ask(max_positions=limit + 6)
    else:
        _, cut = ask(max_prompt_tokens=limit)
    kept = [*cut.layout.online_ids, *query_ids]
    assert kept == longbench([*whole.layout.online_ids, *query_ids], limit)
    assert cut.cut_tokens == len(whole.layout.online_ids) - len(cut.layout.online_ids) > 20
    assert cut.layout.online_positions == tuple(range(cut.layout.length))


def test_evidence_is_what_is_left_of_each_chunk(
    question: Question, tokenizer: PreTrainedTokenizerBase, ask: Ask
) -> None:
    serving, _ = ask()
    query_ids = serving.template.query_ids(question.question)
    owned = [(-1, token) for token in serving.template.prompt_ids]
    owned += [(n, t) for n, chunk in enumerate(question.chunks) for t in chunk.token_ids]
    owned += [(-1, token) for token in query_ids]
    seen = set()
    for limit in range(len(owned) + 1, 2 * len(query_ids), -9):
        _, cut = ask(max_prompt_tokens=limit)
        left = longbench(owned, limit)
        head = len(left) if len(left) == len(owned) else limit // 2
        expected = []
        for half in (left[:head], left[head:]):
            for number, pieces in groupby(half, key=lambda one: one[0]):
                ids = [token for _, token in pieces]
                if number < 0:
                    continue
                chunk = question.chunks[number]
                is_whole = len(ids) == len(chunk.token_ids)
                expected.append((chunk.chunk_id, chunk.text if is_whole else tokenizer.decode(ids)))
        assert [(piece.chunk_id, piece.text) for piece in cut.evidence] == expected
        seen.add(len({chunk_id for chunk_id, _ in expected}))
    assert seen == {2, 3}, "a chunk went as a whole, and chunks were cut"
