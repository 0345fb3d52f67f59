"""Adapters: an activated one over base-model slices, merged ones, and what is refused."""

import json
from copy import deepcopy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from peft import PeftModel
from reference import answer_logits
from small import CHATML, tiny_tokenizer
from tiny import tiny_model

from cache_ops.assemble import gather
from cache_ops.attention import enable_packed
from cache_ops.cached import RequestCache, enable_cached, forward_cached
from cache_ops.encode import encode_chunk, encode_chunk_by_base
from cache_ops.hf import load_model, load_tokenizer
from cache_ops.packing import Example, pack_over_prefix
from cache_ops.plan import PROMPT, Span, plan_prefix
from cache_ops.rope import Rope
from data_builders.prompt import PromptTemplate
from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.schema import PromptConfig
from recipes.training import LoraConfig
from train.adapters import invocation_ids, mark_activated, merge, refuse_quantized, with_adapter

INVOCATION = [90, 91, 92]
QUERY = [*INVOCATION, 93, 94, 95]
ANSWER = [40, 41, 42, 43]
CHUNKS = {PROMPT: [5, 6, 7], "a": list(range(10, 60)), "b": list(range(60, 90))}
WHOLE = plan_prefix([Span("a", 0, 50)], prompt_length=0, chunk_ranks=["a"])
"""Serving from it is a plain forward pass over the chunk, the query and the answer."""
SLICED = plan_prefix(
    [Span("b", 3, 9), Span("a", 20, 31), Span("a", 2, 7)],
    prompt_length=3,
    chunk_ranks=["b", "a"],
)


def adapted(architecture: str, **options: object) -> torch.nn.Module:
    """A tiny model under an adapter that is not zero; dropout shows whether eval was forgotten."""
    model = tiny_model(architecture)
    enable_packed(model)
    model = with_adapter(model, LoraConfig(rank=4, dropout=0.3, **options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("rank_stabilized", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_base_slices_serve_an_activated_adapter(architecture, rank_stabilized, tmp_path) -> None:
    model = adapted(architecture, activated=True, rank_stabilized=rank_stabilized)
    base = tiny_model(architecture)
    rope = Rope.from_config(base.config)
    by_base = {name: encode_chunk(base, ids) for name, ids in CHUNKS.items()}
    for name, ids in CHUNKS.items():
        assert torch.equal(encode_chunk_by_base(model, ids), by_base[name])

    trained = {}
    for name, plan in (("whole", WHOLE), ("sliced", SLICED)):
        batch = pack_over_prefix([Example(plan, QUERY, ANSWER)], gather(plan, by_base), rope)
        with torch.no_grad():
            trained[name] = model(**batch.model_inputs()).logits[0]

    model.save_pretrained(tmp_path)
    mark_activated(tmp_path, INVOCATION)
    merged = merge(deepcopy(model))

    # peft's own activation, found by the invocation tokens in the plain text.
    activated = PeftModel.from_pretrained(deepcopy(base), tmp_path).eval()
    assert activated.peft_config["default"].alora_invocation_tokens == INVOCATION
    text = torch.tensor([[*CHUNKS["a"], *QUERY, *ANSWER]])
    with torch.no_grad():
        by_peft = activated(text).logits[0, -len(ANSWER) - 1 : -1]
        merged.set_attn_implementation("sdpa")
        by_plain_lora = merged(text).logits[0, -len(ANSWER) - 1 : -1]
    assert torch.allclose(trained["whole"], by_peft, atol=1e-4)
    assert not torch.allclose(by_plain_lora, by_peft, atol=1e-2)

    for name, plan in (("whole", WHOLE), ("sliced", SLICED)):
        merged.set_attn_implementation("sdpa")
        with torch.no_grad():
            expected = answer_logits(merged, Example(plan, QUERY, ANSWER), CHUNKS, base)
        assert torch.allclose(trained[name], expected, atol=1e-4)
        enable_cached(merged)
        cache = RequestCache(plan, gather(plan, by_base), rope, room=len(QUERY) + len(ANSWER))
        fed = [QUERY, *([token] for token in ANSWER[:-1])]
        served = torch.cat([forward_cached(merged, [(cache, tokens)]) for tokens in fed])
        assert torch.allclose(served, trained[name], atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rank_stabilized": True}])
def test_merged_is_unmerged_and_everything_new_learns(options, tmp_path) -> None:
    model = adapted("llama", **options)
    model.set_attn_implementation("sdpa")
    text = torch.arange(40)[None]
    logits = model(text).logits
    logits.square().mean().backward()
    moved = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(weight.grad.abs().sum() > 0 for weight in moved.values())
    assert any("lora_magnitude_vector" in name for name in moved) == bool(options.get("dora"))

    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text("utf-8"))
    assert saved["use_dora"] == options.get("dora", False)
    assert saved["use_rslora"] == options.get("rank_stabilized", False)
    base = tiny_model("llama")
    with torch.no_grad():
        again = PeftModel.from_pretrained(tiny_model("llama"), tmp_path).eval()(text).logits
        merged = merge(model)(text).logits
        assert torch.allclose(again, logits, atol=1e-5)
        assert torch.allclose(merged, logits, atol=1e-4)
        assert not torch.allclose(base(text).logits, logits, atol=1e-2)


def test_rank_stabilized_scales_by_the_root_of_the_rank() -> None:
    changes = []
    for rank_stabilized in (False, True):
        model = adapted("llama", rank_stabilized=rank_stabilized)
        before = tiny_model("llama").model.layers[0].mlp.up_proj.weight
        changes.append(merge(model).model.layers[0].mlp.up_proj.weight - before)
    # alpha / sqrt(4) in place of alpha / 4.
    assert torch.allclose(changes[1], 2 * changes[0], atol=1e-5)


TEMPLATES = [PromptTemplate(tiny_tokenizer(chat), PromptConfig()) for chat in (CHATML, None)]
INVOCATIONS = [invocation_ids(template) for template in TEMPLATES]


@given(question=st.text(min_size=1) | st.sampled_from(["<|im_end|>", "Question: Why?"]))
@settings(max_examples=100, deadline=None)
def test_every_query_begins_with_the_invocation(question) -> None:
    for template, invocation in zip(TEMPLATES, INVOCATIONS, strict=True):
        assert len(invocation) > 3
        assert template.query_ids(question)[: len(invocation)] == invocation


def test_a_query_that_begins_with_the_question_has_no_invocation() -> None:
    template = PromptTemplate(tiny_tokenizer(), PromptConfig(after_passages="{question}"))
    with pytest.raises(UserError, match="'Question: ' say"):
        invocation_ids(template)


def test_an_activated_adapter_needs_the_base_models_context(workplace) -> None:
    def refused(*options: str) -> str:
        with pytest.raises(UserError) as caught:
            resolve(workplace.arguments("new", "train.lora.activated=true", *options))
        return str(caught.value)

    lora, frozen = "train.tuning=lora", "context.gradient=frozen"
    assert "expected frozen, got full" in refused(lora)
    assert "expected frozen, got detach" in refused(lora, "context.gradient=detach")
    assert "expected coinrag or turborag" in refused(lora, frozen, "train.system=kvlink")
    assert "cannot be a DoRA" in refused(lora, frozen, "train.lora.dora=true")
    resolve(workplace.arguments("new", "train.lora.activated=true", lora, frozen))


def test_a_run_leaves_an_adapter_that_acts_where_the_query_begins(workplace) -> None:
    options = ["train.tuning=lora", "train.lora.activated=true", "context.gradient=frozen"]
    asked = 'prompt.after_passages="\\n\\nQuestion: {question}"'
    metrics = workplace.train_here("activated", *options, "train.learning_rate=1e-2", asked)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    run = workplace.folder / "activated"
    config = resolve([str(run / "recipe.yaml")]).config
    template = PromptTemplate(load_tokenizer(config.model.path), config.prompt)
    base = load_model(config.model.path, "float32")
    activated = PeftModel.from_pretrained(deepcopy(base), run / "adapter").eval()
    found = activated.peft_config["default"].alora_invocation_tokens
    assert found == invocation_ids(template)

    query, answer = template.query_ids("Where was Person1 born?"), template.answer_ids("Town1")
    merged = load_model(str(run / "checkpoint"), "float32")
    with torch.no_grad():
        by_peft = activated(torch.tensor([[*CHUNKS["a"], *query, *answer]])).logits[0]
        served = answer_logits(merged, Example(WHOLE, query, answer), CHUNKS, base)
    assert torch.allclose(served, by_peft[-len(answer) - 1 : -1], atol=1e-4)


def test_nothing_is_merged_into_quantized_weights() -> None:
    model = adapted("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for refusing in (lambda: merge(model), lambda: refuse_quantized(model.config)):
        with pytest.raises(UserError, match=r"quantized \(bitsandbytes\)"):
            refusing()
