"""The extractor by a local instruct model, on a random one and on the quickstart's."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from small import tiny_tokenizer
from tiny import tiny_model

from cache_ops.hf import load_tokenizer
from data_builders.models import folder_identity
from data_builders.nuggets import local_model
from data_builders.nuggets.extract import extractor_identity, load_extractor
from data_builders.nuggets.instructions import messages
from data_builders.nuggets.rules import rules
from recipes.building import LocalModelConfig, NuggetsConfig
from recipes.errors import UserError

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"
TEXTS = ["He was born in the city.", "She won.", "The prize was won by the director of the city."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random instruct model whose own settings would sample."""
    folder = tmp_path_factory.mktemp("local") / "model"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    model = tiny_model("llama", vocabulary=len(tokenizer))
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=1.5)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    return folder


def config_of(folder, **options):
    options = {"max_new_tokens": 12, **options}
    return NuggetsConfig(
        extractor="local_model", local_model=LocalModelConfig(path=str(folder), **options)
    )


@torch.inference_mode()
def greedy(model, tokenizer, text, new_tokens):
    """The likeliest token after the whole sequence, again and again, without cache or padding."""
    ids = tokenizer.apply_chat_template(
        messages(text), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    prompt = ids.shape[1]
    for _ in range(new_tokens):
        best = model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, best], dim=1)
        if best.item() == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[0, prompt:], skip_special_tokens=True)


def test_special_tokens_spelled_in_a_passage_stay_text(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(
        local_model, "_answers", lambda model, tokenizer, prompts: asked.extend(prompts) or [""]
    )
    extract = load_extractor(config_of(folder))
    tokenizer = load_tokenizer(str(folder))
    end = tokenizer.eos_token_id
    extract(["He was born in the city."])
    extract([f"He was born{tokenizer.eos_token} in the city."])
    plain, attacked = asked
    assert attacked.count(end) == plain.count(end)
    assert tokenizer.eos_token + " in the city." in tokenizer.decode(attacked)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_answers_are_the_greedy_ones_of_each_text_alone(folder, monkeypatch, batch_size):
    answers = []
    monkeypatch.setattr(
        local_model, "parse_candidates", lambda answer: answers.append(answer) or [answer]
    )
    found = load_extractor(config_of(folder, batch_size=batch_size))(TEXTS)
    tokenizer = load_tokenizer(str(folder))
    model = tiny_model("llama", vocabulary=len(tokenizer))
    assert found == [[greedy(model, tokenizer, text, 12)] for text in TEXTS]
    assert len(set(answers)) > 1


def test_unread_answers_give_no_candidates_and_are_counted_at_the_end(folder, caplog):
    extract = load_extractor(config_of(folder))
    assert extract([]) == []
    assert extract(TEXTS) == [[], [], []]
    with caplog.at_level(logging.WARNING):
        del extract
        gc.collect()
    assert "3 of 3 answers of the local model could not be read" in caplog.text


def test_what_cannot_be_used_is_the_users_error(folder, tmp_path):
    with pytest.raises(UserError, match=r"nuggets\.local_model\.path: no model at 'nowhere'"):
        load_extractor(config_of("nowhere"))
    with pytest.raises(UserError, match="with max_new_tokens 2000 the model's 2048 positions"):
        load_extractor(config_of(folder, max_new_tokens=2000))(TEXTS)
    plain = tmp_path / "plain"
    tiny_model("llama", vocabulary=len(tiny_tokenizer())).save_pretrained(plain)
    tiny_tokenizer(chat_template=None).save_pretrained(plain)
    with pytest.raises(UserError, match="needs an instruct model"):
        load_extractor(config_of(plain))(TEXTS)
    (plain / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"local_model\.path: .* no readable safetensors weights"):
        load_extractor(config_of(plain))


def test_identity_follows_what_decides_the_candidates(folder, tmp_path):
    known = extractor_identity(config_of(folder))
    moved = tmp_path / "moved"
    moved.symlink_to(folder, target_is_directory=True)
    assert extractor_identity(config_of(moved)) == known
    for options in ({"max_new_tokens": 13}, {"batch_size": 3}, {"dtype": "bfloat16"}):
        assert extractor_identity(config_of(folder, **options)) != known
    assert extractor_identity(NuggetsConfig()) != known


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_identity_follows_the_models_files(folder, tmp_path, name):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert folder_identity(copy) == folder_identity(folder)
    changed = copy / name
    changed.write_bytes(changed.read_bytes() + b" ")
    assert folder_identity(copy) != folder_identity(folder)


def test_rules_are_loaded_by_name():
    assert load_extractor(NuggetsConfig())(TEXTS) == [rules(text) for text in TEXTS]


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="the quickstart's model is absent")
def test_a_small_instruct_model_gives_candidates():
    text = "Ann Lee\nAnn Lee was a film director from Paris. She won the prize of the city in 1990."
    config = config_of(SMOLLM2, max_new_tokens=48)
    [found] = load_extractor(config)([text])
    assert found
    assert any("Ann Lee" in candidate for candidate in found)
