"""Layout of packed rows: nothing padded, chunks shared and trimmed, mistakes refused."""

import pytest
import torch
from tiny import tiny_model

from cache_ops.assemble import assemble
from cache_ops.attention import enable_packed
from cache_ops.encode import encode_chunk
from cache_ops.packing import Example, pack, pack_over_prefix
from cache_ops.plan import PROMPT, Span, plan_prefix
from cache_ops.rope import Rope

CHUNKS = {PROMPT: [1, 2], "a": list(range(10, 30)), "b": list(range(40, 50))}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def example(*spans: Span) -> Example:
    plan = plan_prefix(spans, prompt_length=2, chunk_ranks=["a", "b"])
    return Example(plan, query_ids=[3, 4], answer_ids=[5, 6])


def test_shared_chunks_stand_once_and_end_after_their_last_used_token(model) -> None:
    rope = Rope.from_config(model.config)
    batch = pack([example(Span("a", 2, 5)), example(Span("a", 4, 8))], CHUNKS, rope)
    assert batch.layout.segment_lengths == (2, 8)
    assert batch.input_ids[0].tolist() == [1, 2, *range(10, 18), *([3, 4, 5, 6] * 2)]
    own = [5, 6, 7, 8, 6, 7, 8, 9]
    assert batch.position_ids[0].tolist() == [0, 1, *range(8), *own]
    assert batch.labels_A.tolist() == [5, 6, 5, 6]
    assert batch.answer_rows_A.tolist() == [11, 12, 15, 16]
    assert batch.examples_A.tolist() == [0, 0, 1, 1]
    assert batch.tokens == 18


def test_a_row_over_given_prefixes_holds_own_tokens_alone(model) -> None:
    examples = [example(Span("a", 2, 5)), example(Span("a", 4, 8))]
    prefix_kv = torch.zeros(11, 2, 2, 2, 16)
    batch = pack_over_prefix(examples, prefix_kv, Rope.from_config(model.config))
    assert batch.layout.segment_lengths == ()
    assert batch.input_ids[0].tolist() == [3, 4, 5, 6] * 2
    assert batch.position_ids[0].tolist() == [5, 6, 7, 8, 6, 7, 8, 9]
    assert batch.answer_rows_A.tolist() == [1, 2, 5, 6]
    assert batch.to(torch.device("cpu")).layout.prefix_kv_PL2HD is prefix_kv


def test_logits_come_at_answer_positions_only(model) -> None:
    batch = pack([example(Span("b", 0, 3))], CHUNKS, Rope.from_config(model.config))
    enable_packed(model)
    with torch.no_grad():
        assert model(**batch.model_inputs()).logits.shape == (1, 2, model.config.vocab_size)


def test_mistakes_are_refused(model) -> None:
    rope = Rope.from_config(model.config)
    with pytest.raises(ValueError, match="at least one example"):
        pack([], CHUNKS, rope)
    with pytest.raises(ValueError, match="needs query tokens"):
        pack([Example(example().plan, [], [1])], CHUNKS, rope)
    beyond = example(Span("b", 8, 11))
    with pytest.raises(ValueError, match=r"beyond the 10 tokens of chunk 'b'"):
        pack([beyond], CHUNKS, rope)
    with pytest.raises(ValueError, match="the plans have 5 prefix tokens, the keys and values 4"):
        pack_over_prefix([example(Span("b", 0, 3))], torch.zeros(4, 2, 2, 2, 16), rope)
    encoded = {name: encode_chunk(tiny_model("llama"), ids) for name, ids in CHUNKS.items()}
    with pytest.raises(ValueError, match=r"beyond the 10 cached tokens of chunk 'b'"):
        assemble(beyond.plan, encoded, rope)
    enable_packed(model)
    with pytest.raises(ValueError, match="takes packed batches only"):
        model(input_ids=torch.tensor([[1, 2]]))
