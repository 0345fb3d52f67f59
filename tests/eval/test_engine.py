from collections.abc import Sequence

import pytest
import torch
from tiny import ARCHITECTURES, tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache_ops.plan import PROMPT
from cache_ops.rope import Rope
from data_builders.prompt import PromptTemplate
from data_builders.tables import Chunk
from eval import engine
from eval.systems import SYSTEMS, Question, Request, Width
from recipes.building import RetrievalConfig
from recipes.schema import PromptConfig

RETRIEVAL = RetrievalConfig(encoder="none")
WIDTH = Width(k_c=3, k=4)


@pytest.fixture(scope="module")
def template(tokenizer: PreTrainedTokenizerBase) -> PromptTemplate:
    config = PromptConfig(before_passages="Answer. ", after_passages=" Question: {question}")
    return PromptTemplate(tokenizer, config)


def greedy_without_cache(model: PreTrainedModel, ids: Sequence[int], count: int) -> list[int]:
    """The plain way: every token by a forward over the whole text."""
    text = list(ids)
    for _ in range(count):
        with torch.no_grad():
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(ids) :]


def serve(
    model: PreTrainedModel,
    request: Request,
    chunks: Sequence[Chunk],
    prompt_ids: Sequence[int],
    *,
    stop_ids: frozenset[int] = frozenset(),
    max_new_tokens: int = 12,
) -> engine.Completion:
    texts = [(PROMPT, prompt_ids), *((c.chunk_id, c.token_ids) for c in chunks)]
    chunk_kv, _ = engine.encode_chunks(model, texts)
    return engine.answer(
        model,
        Rope.from_config(model.config),
        request.plan,
        request.online_ids,
        chunk_kv,
        stop_ids=stop_ids,
        max_new_tokens=max_new_tokens,
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_standard_rag_decodes_as_a_plain_loop_does(
    architecture: str, question: Question, template: PromptTemplate
) -> None:
    model = tiny_model(architecture, seed=4)
    request = SYSTEMS["standard_rag"].request(question, WIDTH, template, RETRIEVAL)
    expected_ids = [
        *template.prompt_ids,
        *(token for chunk in question.chunks for token in chunk.token_ids),
        *template.query_ids(question.question),
    ]
    assert list(request.online_ids) == expected_ids
    completion = serve(model, request, question.chunks, template.prompt_ids)
    assert completion.token_ids == greedy_without_cache(model, expected_ids, 12)
    assert len(set(completion.token_ids)) > 1, "a constant answer would prove little"
    assert not completion.stopped
    assert completion.ttft_ms > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_cached_chunk_without_a_prompt_answers_as_full_prefill(
    architecture: str, question: Question, template: PromptTemplate
) -> None:
    model = tiny_model(architecture, seed=4)
    template.prompt_ids, kept = [], template.prompt_ids
    try:
        width = Width(k_c=1, k=None)
        cached, computed = (
            SYSTEMS[name].request(question, width, template, RETRIEVAL)
            for name in ("turborag", "standard_rag")
        )
    finally:
        template.prompt_ids = kept
    assert cached.active_tokens == computed.active_tokens == len(question.chunks[0].token_ids)
    answers = [serve(model, request, question.chunks, []) for request in (cached, computed)]
    assert answers[0].token_ids == answers[1].token_ids


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(
    question: Question, template: PromptTemplate
) -> None:
    model = tiny_model(seed=4)
    request = SYSTEMS["coinrag"].request(question, WIDTH, template, RETRIEVAL)
    free = serve(model, request, question.chunks, template.prompt_ids).token_ids
    stop = next(token for token in free if token != free[0])
    stopped = serve(
        model, request, question.chunks, template.prompt_ids, stop_ids=frozenset({stop})
    )
    assert stopped.stopped
    assert stopped.token_ids == free[: free.index(stop)]
    at_once = serve(
        model, request, question.chunks, template.prompt_ids, stop_ids=frozenset({free[0]})
    )
    assert (at_once.token_ids, at_once.stopped) == ([], True)
    limited = serve(model, request, question.chunks, template.prompt_ids, max_new_tokens=1)
    assert (limited.token_ids, limited.stopped) == (free[:1], False)


def test_a_chunk_named_twice_is_encoded_once_and_an_empty_one_not_at_all() -> None:
    model = tiny_model()
    chunk_kv, milliseconds = engine.encode_chunks(
        model, [("a", [1, 2, 3]), ("a", [1, 2, 3]), ("b", [])]
    )
    config = model.config
    assert set(chunk_kv) == {"a"}
    assert chunk_kv["a"].shape[:4] == (3, config.num_hidden_layers, 2, config.num_key_value_heads)
    assert milliseconds > 0
