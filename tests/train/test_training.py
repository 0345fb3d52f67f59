"""Training through the real command line: the same step however it is dealt, and what it leaves."""

import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cache_ops.hf import ModelNotFoundError
from launch.training import SCRIPT
from recipes.errors import UserError


def losses(metrics):
    return [line["loss"] for line in metrics]


def weights(workplace, name):
    return load_file(workplace.folder / name / "checkpoint" / "model.safetensors")


def assert_same_weights(workplace, one, other, tolerance):
    first, second = weights(workplace, one), weights(workplace, other)
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.allclose(weight, second[name], atol=tolerance, rtol=0), name


@pytest.fixture(scope="module")
def plain(workplace):
    return workplace.train("plain", "train.epochs=3")


def test_loss_falls_and_every_step_is_recorded(workplace, plain) -> None:
    assert [line["step"] for line in plain] == list(range(1, 10))
    assert plain[-1]["epoch"] == 3
    assert min(losses(plain)[-3:]) < 0.8 * losses(plain)[0]
    needed = "step epoch loss gradient_norm learning_rate answer_tokens packed_tokens "
    needed += "samples_per_second tokens_per_second elapsed_seconds peak_memory_gib"
    assert set(needed.split()) <= plain[0].keys()


@pytest.mark.parametrize("micro", [1, 8])
def test_micro_batch_size_changes_nothing(workplace, plain, micro) -> None:
    name = f"micro{micro}"
    metrics = workplace.train_here(name, "train.epochs=3", f"train.micro_batch_samples={micro}")
    assert losses(metrics) == pytest.approx(losses(plain), abs=1e-5)
    norms = [line["gradient_norm"] for line in metrics]
    assert norms == pytest.approx([line["gradient_norm"] for line in plain], rel=1e-4)
    assert_same_weights(workplace, name, "plain", 1e-5)


def test_accelerate_launch_runs_the_script(workplace, plain) -> None:
    arguments = workplace.arguments("accelerate", "train.epochs=3", "train.max_steps=2")
    command = [sys.executable, "-m", "accelerate.commands.launch", "train/nugget_ft.py"]
    subprocess.run([*command, *arguments], check=True, cwd=SCRIPT.parent.parent)
    # The schedule is that of two steps; the losses before its first update are the same.
    assert losses(workplace.metrics("accelerate"))[0] == losses(plain)[0]


def test_gradient_checkpointing_changes_nothing(workplace, plain) -> None:
    metrics = workplace.train_here(
        "checkpointing", "train.epochs=3", "train.gradient_checkpointing=true"
    )
    assert losses(metrics) == losses(plain)
    assert_same_weights(workplace, "checkpointing", "plain", 0)


def test_detach_trains_otherwise_than_full(workplace, plain) -> None:
    metrics = workplace.train_here("detach", "train.epochs=3", "context.gradient=detach")
    assert losses(metrics)[0] == pytest.approx(losses(plain)[0], rel=1e-6)
    assert losses(metrics)[2:] != losses(plain)[2:]


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(workplace, plain) -> None:
    schedule = ["train.epochs=3", "train.save_every_steps=2"]
    run = workplace.folder / "killed"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *workplace.arguments("killed", *schedule)],
        stderr=subprocess.DEVNULL,
        cwd=SCRIPT.parent.parent,
    )
    metrics_file = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics_file.exists() or len(metrics_file.read_text().splitlines()) < 5:
        assert process.poll() is None, "training ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not (run / "checkpoint").exists()
    # A line that was being written when the process died.
    with metrics_file.open("a") as file:
        file.write('{"step": 9, "lo')
    resumed = workplace.train("killed", *schedule, "train.resume=true")
    assert [line["step"] for line in resumed] == list(range(1, 10))
    assert losses(resumed) == losses(plain)
    assert_same_weights(workplace, "killed", "plain", 0)
    # Asked again, a finished run stays as it is.
    assert workplace.train("killed", *schedule, "train.resume=true") == resumed


def test_the_checkpoint_loads_in_a_process_that_knows_only_transformers(workplace, plain) -> None:
    folder = workplace.folder / "plain" / "checkpoint"
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})\n"
        "ids = tokenizer.apply_chat_template([{'role': 'user', 'content': 'Where?'}],"
        " add_generation_prompt=True, return_tensors='pt', return_dict=True)\n"
        "with torch.no_grad(): print(float(model(**ids).logits.double().abs().sum()))\n"
        "assert 'cache_ops' not in sys.modules and model.config._attn_implementation == 'sdpa'"
    )
    # -I: neither this repository nor an editable install's path is needed.
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert ended.returncode == 0, ended.stderr
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Where?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        here = AutoModelForCausalLM.from_pretrained(folder)(**ids).logits.double().abs().sum()
    assert float(ended.stdout) == pytest.approx(float(here))
    base = load_file(workplace.folder / "model" / "model.safetensors")
    trained = weights(workplace, "plain")
    assert base.keys() == trained.keys()
    assert not any(torch.equal(base[name], trained[name]) for name in base if "proj" in name)


def test_lora_leaves_an_adapter_and_a_merged_checkpoint(workplace) -> None:
    from peft import PeftModel

    options = ["train.tuning=lora", "train.lora.rank=4", "train.learning_rate=1e-2"]
    metrics = workplace.train_here("lora", *options, "train.epochs=3")
    assert losses(metrics)[-1] < losses(metrics)[0]
    run = workplace.folder / "lora"
    merged = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    base = AutoModelForCausalLM.from_pretrained(workplace.folder / "model")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        plain_logits = base(ids).logits
        adapted = PeftModel.from_pretrained(base, run / "adapter").eval()(ids).logits
        merged_logits = merged(ids).logits
    assert torch.allclose(adapted, merged_logits, atol=1e-4)
    assert not torch.allclose(adapted, plain_logits, atol=1e-2)


def test_mistakes_are_told_before_anything_is_written(workplace, plain) -> None:
    assert "is in use" in workplace.refused("plain")

    def refused(name, *overrides):
        with pytest.raises((UserError, ModelNotFoundError)) as caught:
            workplace.train_here(name, *overrides)
        return str(caught.value)

    assert "changed settings:\n  train.learning_rate: 0.001 -> 0.01" in refused(
        "plain", "train.epochs=3", "train.resume=true", "train.learning_rate=1e-2"
    )
    assert "no tokenizer at" in refused("new", "model.path=nowhere")
    assert "run `coinrag build`" in refused("new", "retrieval.k=3")
    assert "take" in refused("new", "train.max_length_tokens=5")
    assert "did you mean train.learning_rate" in refused("new", "train.learning_rat=1")
    assert "model.dtype=float32" in refused("new", "model.dtype=bfloat16")
    lora = ["train.tuning=lora", "train.lora.target_modules=[q_prj]"]
    assert "q_prj not in the model" in refused("new", *lora)
    uncached = ["train.system=standard_rag", "context.gradient=frozen", "train.tuning=lora"]
    assert "standard_rag caches nothing" in refused("new", *uncached)
    assert "recipe.yaml is not a folder that can be written to" in refused("recipe.yaml/run")
    assert not (workplace.folder / "new").exists()


def test_long_samples_lose_nuggets_and_never_the_answer(workplace) -> None:
    limit = "train.max_length_tokens=110"
    metrics = workplace.train_here("short", limit, "train.max_steps=1")
    full = workplace.metrics("plain")
    assert metrics[0]["answer_tokens"] == full[0]["answer_tokens"]
    assert metrics[0]["packed_tokens"] < full[0]["packed_tokens"]


def test_samples_that_lose_every_nugget_are_told(workplace, caplog) -> None:
    workplace.train_here("emptied", "train.max_length_tokens=40", "train.max_steps=1")
    assert "have no nugget or chunk left: train.max_length_tokens took all" in caplog.text
    assert "22 samples, first question d-0, have" in caplog.text


def test_wandb_offline_gets_the_metrics_and_no_network(workplace) -> None:
    options = ["train.wandb.project=coinrag-test", "train.max_steps=2"]
    metrics = workplace.train("wandb", *options)
    run = workplace.folder / "wandb"
    (record,) = run.rglob("offline-run-*/run-*.wandb")
    assert record.stat().st_size > 0
    assert len(metrics) == 2
