"""The main invariant on pretrained weights and on a GPU, each where it is to be had."""

from pathlib import Path

import pytest
import torch
from reference import answer_logits
from tiny import tiny_model

from cache_ops.attention import PACKED
from cache_ops.hf import load_model, load_tokenizer
from cache_ops.packing import Example, pack
from cache_ops.plan import PROMPT, Span, plan_prefix
from cache_ops.rope import Rope
from data_builders.world import iter_passages

MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"


def examples_over(chunks: dict[str, list[int]]) -> list[Example]:
    names = [name for name in chunks if name != PROMPT]
    made = []
    for shift in range(2):
        spans = [
            Span(name, 7 * (number + shift), 7 * (number + shift) + 11)
            for number, name in enumerate(names)
        ]
        plan = plan_prefix(spans, prompt_length=len(chunks[PROMPT]), chunk_ranks=names)
        made.append(Example(plan, chunks[names[shift]][:9], chunks[names[shift]][9:13]))
    return made


@pytest.mark.skipif(not MODEL.is_dir(), reason="models/smollm2-135m-instruct is not prepared")
def test_packed_pass_equals_two_passes_on_pretrained_weights() -> None:
    model, tokenizer = load_model(str(MODEL), "float32"), load_tokenizer(str(MODEL))
    texts = [f"{title}\n{text}\n" for title, text in iter_passages(seed=0, count=3)]
    chunks = {f"chunk{number}": tokenizer(text)["input_ids"] for number, text in enumerate(texts)}
    chunks[PROMPT] = tokenizer("Answer from these passages.\n")["input_ids"]
    examples = examples_over(chunks)
    batch = pack(examples, chunks, Rope.from_config(model.config))
    with torch.no_grad():
        expected = torch.cat([answer_logits(model, example, chunks) for example in examples])
        model.set_attn_implementation(PACKED)
        packed = model(**batch.model_inputs()).logits[0]
    assert (packed - expected).abs().max() < 1e-4 * expected.abs().max()
    # Real weights answer differently when slices keep their old positions, so the test can fail.
    unmoved = pack(examples, chunks, Rope(torch.zeros(32)))
    with torch.no_grad():
        wrong = model(**unmoved.model_inputs()).logits[0]
    assert (wrong - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_packed_pass_on_a_gpu_equals_the_cpu(dtype, tolerance) -> None:
    model = tiny_model("qwen2")
    generator = torch.Generator().manual_seed(0)
    chunks = {
        name: torch.randint(100, (60,), generator=generator).tolist() for name in (PROMPT, *"abc")
    }
    examples = examples_over(chunks)
    batch = pack(examples, chunks, Rope.from_config(model.config))
    with torch.no_grad():
        expected = torch.cat([answer_logits(model, example, chunks) for example in examples])
        model.set_attn_implementation(PACKED)
        model.to(device="cuda", dtype=getattr(torch, dtype))
        logits = model(**batch.to(torch.device("cuda")).model_inputs()).logits[0].float().cpu()
    assert (logits - expected).abs().max() < tolerance * expected.abs().max()
