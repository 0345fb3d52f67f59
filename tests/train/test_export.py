"""What an export is made of: weights in shards, an adapter that finds its base, the contract."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from plain_reading import read_here
from safetensors.torch import load_file, save_file
from small import data_row, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cache_ops.fingerprint import Fingerprint
from cache_ops.hf import load_model, load_tokenizer
from cache_ops.soft_tokens import SOFT_TOKENS_FILE, add_soft_tokens
from data_builders.key import tokenizer_identity
from data_builders.prompt import PromptTemplate
from launch import cli
from recipes.resolve import resolve
from recipes.training import LoraConfig
from train.adapters import invocation_ids, with_adapter
from train.checkpoint import save_model
from train.export import bytes_needed, open_run, write_export
from train.shards import copy_weights

KVLINK = ["train.system=kvlink", "systems.kvlink.link_tokens=2", "train.tuning=lora"]
VERSIONS = {"date": "today"}
IDS = torch.arange(40)[None]


def read(path):
    return json.loads(path.read_text("utf-8"))


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def finished(workplace, name, *overrides):
    """What a run under LoRA leaves, with an adapter that changes much; no dev data is built."""
    unbuilt = workplace.folder / "unbuilt.jsonl"
    write_rows(unbuilt, [data_row(200)])
    resolved = resolve(workplace.arguments(name, f"data.dev=[{unbuilt}]", *overrides))
    folder = workplace.folder / name
    resolved.write(folder)
    tokenizer = load_tokenizer(str(workplace.folder / "model"))
    model = with_adapter(load_model(str(workplace.folder / "model"), "float32"), LoraConfig(rank=4))
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if "lora_B" in weight_name:
                weight.normal_(std=0.1)
    if resolved.config.train.system == "kvlink":
        add_soft_tokens(model, {"links": (3, 2)}, seed=0)
    template = PromptTemplate(tokenizer, resolved.config.prompt)
    invocation = invocation_ids(template) if resolved.config.train.lora.activated else None
    save_model(folder, model, tokenizer, invocation=invocation)
    return folder


@pytest.fixture(scope="module")
def kvlink(workplace):
    """A run of KVLink, evaluated and compared."""
    folder = finished(workplace, "export", *KVLINK)
    evaluation = {"questions": 4, "f1": 12.5, "em": 0.0, "stop_rate": 1.0, "answers": []}
    lines = [{"step": 3, "loss": 2.0}, {"step": 3, "evaluation": evaluation}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {"arm": "", "k_c": 3, "k": None, "questions": 4, "f1": 9.5, "f1_low": 1.0}
    row |= {"f1_high": 20.0, "em": 0.0, "stop_rate": 0.5, "ttft_p50_ms": 7.0}
    rows = [
        {**row, "system": system, "checkpoint": checkpoint}
        for system in ("kvlink", "turborag")
        for checkpoint in ("base", "fine_tuned")
    ]
    runs = {"kvlink": None, "turborag": None}
    compared = {
        "results": rows,
        "config": {"eval": {"runs": runs}, "train": {"run_folder": str(folder)}},
        "environment": {"date": "2026-01-01"},
    }
    (folder / "compare").mkdir()
    (folder / "compare" / "compare.json").write_text(json.dumps(compared))
    return folder


def exported(run, folder, *options, **more):
    folder.mkdir()
    write_export(open_run(run), folder, *options, exported_with=VERSIONS, **more)
    return folder


@pytest.fixture(scope="module")
def merged(kvlink, tmp_path_factory):
    return exported(kvlink, tmp_path_factory.mktemp("merged") / "out", shard_bytes=40_000)


def test_shards_hold_the_checkpoint_bit_by_bit(kvlink, merged) -> None:
    shards = sorted(merged.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(len(load_file(path)) == 1 or path.stat().st_size < 50_000 for path in shards)
    index = read(merged / "model.safetensors.index.json")
    held = {name: path.name for path in shards for name in load_file(path)}
    assert index["weight_map"] == held
    weights = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    expected = load_file(kvlink / "checkpoint" / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    run = AutoModelForCausalLM.from_pretrained(kvlink / "checkpoint")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(merged)), logits(run))


def test_the_size_is_known_before(kvlink, merged) -> None:
    sizes = {path.name: path.stat().st_size for path in merged.iterdir()}
    for name in ("serving.json", "model.safetensors.index.json", "recipe.yaml", "origins.json"):
        del sizes[name]
    needed = bytes_needed(open_run(kvlink), "merged", None)
    assert needed <= sum(sizes.values()) < 1.5 * needed
    half = bytes_needed(open_run(kvlink), "merged", "bfloat16")
    assert half < 0.8 * needed


def test_weights_are_cast_and_say_so(kvlink, tmp_path) -> None:
    out = exported(kvlink, tmp_path / "out", "merged", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    run = AutoModelForCausalLM.from_pretrained(kvlink / "checkpoint", dtype=torch.bfloat16)
    for (name, one), other in zip(model.named_parameters(), run.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert load_file(out / SOFT_TOKENS_FILE)["links"].dtype == torch.float32
    assert read(out / "serving.json")["dtype"] == "bfloat16"


def test_weights_without_floats_stay(tmp_path) -> None:
    counts = torch.arange(3)
    save_file({"counts": counts, "weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "out").mkdir()
    copy_weights(tmp_path, tmp_path / "out", "bfloat16")
    copied = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(copied["counts"], counts)
    assert copied["weight"].dtype == torch.bfloat16


def test_files_are_for_any_reader(kvlink, merged) -> None:
    assert {path.stat().st_mode & 0o777 for path in merged.iterdir()} == {0o644}
    config, trained = read(merged / "config.json"), read(kvlink / "checkpoint" / "config.json")
    assert "coinrag" not in json.dumps(config)
    assert config["rope_theta"] == trained["rope_parameters"]["rope_theta"]
    assert config["rope_scaling"] is None
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert tokenizer.chat_template == load_tokenizer(str(kvlink / "checkpoint")).chat_template
    settings = GenerationConfig.from_pretrained(merged)
    ends = {"<|im_end|>", tokenizer.eos_token}
    assert set(settings.eos_token_id) == {tokenizer.convert_tokens_to_ids(end) for end in ends}
    assert (settings.do_sample, settings.max_new_tokens) == (False, 32)
    assert torch.equal(
        load_file(merged / SOFT_TOKENS_FILE)["links"],
        load_file(kvlink / "checkpoint" / SOFT_TOKENS_FILE)["links"],
    )


def test_the_contract_is_true(kvlink, merged) -> None:
    found = read(merged / "serving.json")
    run = open_run(kvlink)
    prompt = found["prompt"]
    assert prompt["static"]["token_ids"] == run.template.prompt_ids
    assert run.tokenizer.decode(prompt["static"]["token_ids"]) == prompt["static"]["text"]
    text = "Who?".join(prompt["query"].values())
    query_ids = run.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert query_ids == run.template.query_ids("Who?")
    chat = run.tokenizer.apply_chat_template(
        prompt["messages"], tokenize=False, add_generation_prompt=True
    )
    whole = prompt["static"]["text"] + "{passages}" + "{question}".join(prompt["query"].values())
    assert chat == whole
    assert prompt["stop_token_ids"] == sorted(run.template.stop_ids)
    groups = {"links": {"places": 3, "tokens_a_place": 2}}
    assert found["soft_tokens"] == {"file": SOFT_TOKENS_FILE, "groups": groups}
    assert found["prefix"] == {"of": "chunks", "positions": "reordered"}
    assert "k" not in found["retrieval"], "KVLink serves whole chunks"
    fingerprint = Fingerprint.from_model(
        load_model(str(kvlink / "checkpoint"), "float32"),
        "float32",
        tokenizer=tokenizer_identity(run.tokenizer),
        chunking="64 tokens",
    )
    assert found["context"]["encoded_by"] == "this_model"
    assert found["context"]["store_fingerprint"] == fingerprint.as_json()
    assert found["metrics"]["last_step"] == {"step": 3, "loss": 2.0}
    assert [one["f1"] for one in found["metrics"]["evaluations"]] == [12.5]
    (row,) = found["metrics"]["compared"]
    assert (row["f1"], "ttft_p50_ms" in row) == (9.5, False)
    lineage = found["lineage"]
    assert lineage["built_data"]["train"].startswith("train-")
    assert lineage["built_data"]["dev"] is None, "it is not built"
    assert lineage["exported_with"] == VERSIONS
    assert (merged / lineage["recipe"]).read_bytes() == (kvlink / "recipe.yaml").read_bytes()


def test_frozen_context_names_the_base_model(kvlink, workplace, tmp_path) -> None:
    recipe = kvlink / "recipe.yaml"
    text = recipe.read_text()
    try:
        recipe.write_text(text.replace("gradient: full", "gradient: frozen"))
        found = read(exported(kvlink, tmp_path / "out") / "serving.json")["context"]
    finally:
        recipe.write_text(text)
    assert found["encoded_by"] == "base_model"
    base = load_model(str(workplace.folder / "model"), "float32")
    fingerprint = Fingerprint.from_model(base, "float32", tokenizer="", chunking="")
    assert found["store_fingerprint"]["weights"] == fingerprint.weights


def verified(run, out, capsys):
    words = ["export", str(run), str(out), "--form", "adapter", "--questions", "3", "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["verification"]
    assert found == read(out / "verification.json")
    assert found["questions_from"] == "train", "dev is not built"
    assert set(found["read_by"]) == {"transformers", "peft"}
    assert (found["answers"]["equal"], found["answers"]["of"]) == (3, 3)
    return found


def test_an_adapter_finds_its_base(kvlink, workplace, tmp_path, capsys, monkeypatch) -> None:
    read_here(monkeypatch)
    out = tmp_path / "out"
    verified(kvlink, out, capsys)
    config, trained = (read(at / "adapter_config.json") for at in (out, kvlink / "adapter"))
    base = str(workplace.folder / "model")
    assert config == {**trained, "base_model_name_or_path": base}
    described = {"base_model": base, "invocation_token_ids": None}
    assert read(out / "serving.json")["adapter"] == described
    assert not list(out.glob("model*"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    run = AutoModelForCausalLM.from_pretrained(kvlink / "checkpoint")
    torch.testing.assert_close(logits(model), logits(run), rtol=0, atol=1e-4)


def test_an_activated_adapter_leaves_the_context_to_its_base(
    workplace, tmp_path, capsys, monkeypatch
) -> None:
    read_here(monkeypatch)
    run = finished(
        workplace,
        "activated",
        "train.tuning=lora",
        "train.lora.activated=true",
        "context.gradient=frozen",
        "prompt.after_passages=Query: {question}",
    )
    out = tmp_path / "out"
    verified(run, out, capsys)
    found = read(out / "serving.json")
    invocation = found["adapter"]["invocation_token_ids"]
    assert invocation == read(out / "adapter_config.json")["alora_invocation_tokens"]
    assert invocation
    assert found["context"]["encoded_by"] == "base_model"

    # As a plain adapter it would encode the context too.
    def forget(run, folder):
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(run.folder / "adapter" / name, folder)
        plain = {**read(folder / "adapter_config.json"), "alora_invocation_tokens": None}
        (folder / "adapter_config.json").write_text(json.dumps(plain))

    monkeypatch.setattr("train.export._write_adapter", forget)
    words = ["export", str(run), str(tmp_path / "plain"), "--form", "adapter", "--questions", "3"]
    assert cli.main([*words, "--json"]) == 1
    assert "logits differ" in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
