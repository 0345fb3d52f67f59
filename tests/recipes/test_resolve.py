"""Precedence, origins and error messages of recipe resolution."""

import json
import logging
from pathlib import Path

import pytest

from recipes.errors import UserError
from recipes.resolve import resolve

MINIMAL = """\
name: tiny
model: {path: models/tiny}
data: {train: [train.jsonl], dev: [dev.jsonl]}
retrieval: {encoder: models/encoder}
train:
  run_folder: runs/tiny
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return str(path)


def _write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def _message(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve(arguments)
    return str(caught.value)


def test_later_files_and_the_command_line_win_with_their_origins(tiny: str, tmp_path: Path) -> None:
    second = _write(tmp_path, "b.yaml", "seed: 3\ntrain:\n  epochs: 2\n  learning_rate: 1e-5\n")
    resolved = resolve([tiny, second, "train.epochs=4"])
    assert (resolved.config.seed, resolved.config.train.epochs) == (3, 4)
    assert resolved.config.train.learning_rate == 1e-5
    assert resolved.config.train.run_folder == "runs/tiny"
    assert resolved.origins["train.epochs"] == "command line"
    assert resolved.origins["train.learning_rate"] == f"{second}:4"
    assert resolved.origins["train.run_folder"] == f"{tiny}:6"
    assert resolved.origins["train.schedule"] == "default"
    assert resolve([second, tiny]).config.train.epochs == 2


def test_command_line_wins_even_when_equal_to_the_default(tiny: str, tmp_path: Path) -> None:
    second = _write(tmp_path, "b.yaml", "train: {learning_rate: 0.5}\n")
    default = resolve([tiny]).config.train.learning_rate
    resolved = resolve([tiny, second, f"train.learning_rate={default}"])
    assert resolved.config.train.learning_rate == default
    assert resolved.origins["train.learning_rate"] == "command line"


@pytest.mark.parametrize(
    ("text", "value"), [("1e-5", 1e-5), ("2E3", 2e3), ("1.e-1", 0.1), ("+.5", 0.5), ("1", 1.0)]
)
def test_numbers_are_numbers(tiny: str, tmp_path: Path, text: str, value: float) -> None:
    second = _write(tmp_path, "b.yaml", f"train: {{learning_rate: {text}}}\n")
    assert resolve([tiny, second]).config.train.learning_rate == value
    assert resolve([tiny, f"train.learning_rate={text}"]).config.train.learning_rate == value


def test_lists_and_nested_sections_from_the_command_line(tiny: str) -> None:
    resolved = resolve(
        [tiny, "eval.widths=[{k_c: 5, k: 10}, {k_c: 1, k: 2}]", "train.wandb.project=x"]
    )
    assert [(width.k_c, width.k) for width in resolved.config.eval.widths] == [(5, 10), (1, 2)]
    assert resolved.config.train.wandb is not None
    assert resolved.config.train.wandb.mode == "offline"
    assert resolved.origins["train.wandb.project"] == "command line"
    assert resolved.origins["train.wandb.mode"] == "default"


def test_a_section_can_be_switched_off_again(tiny: str, tmp_path: Path) -> None:
    second = _write(tmp_path, "b.yaml", "train: {wandb: {project: x, mode: online}}\n")
    assert resolve([tiny, second, "train.wandb=null"]).config.train.wandb is None
    again = resolve([tiny, second, "train.wandb=null", "train.wandb.project=y"]).config.train.wandb
    assert again is not None
    assert (again.project, again.mode) == ("y", "offline")


@pytest.mark.parametrize(
    "text", ["2024", "a: b", "x=y", "*star", "é # no comment", "no", "[open", "'", "{question}?"]
)
def test_free_text_on_the_command_line_is_taken_literally(tiny: str, text: str) -> None:
    assert resolve([tiny, f"model.path={text}"]).config.model.path == text


def test_quoted_text_on_the_command_line_has_real_newlines(tiny: str) -> None:
    config = resolve([tiny, r'prompt.after_passages="\n\n{question}"', "prompt.system=null"]).config
    assert config.prompt.after_passages == "\n\n{question}"
    assert config.prompt.system is None


def test_unquoted_no_is_the_choice_no(tiny: str, tmp_path: Path) -> None:
    second = _write(tmp_path, "b.yaml", "train: {mixed_precision: no}\n")
    assert resolve([tiny, second]).config.train.mixed_precision == "no"
    assert resolve([tiny, "train.mixed_precision=no"]).config.train.mixed_precision == "no"


def test_all_mistakes_come_in_one_message(tiny: str, tmp_path: Path) -> None:
    second = _write(
        tmp_path,
        "b.yaml",
        "train:\n  learning_rat: 1e-5\n  epochs: two\nraft: {noise_probability: 2}\n",
    )
    message = _message(tiny, second, "train.tuning=loar", "retreival.k=3", "seed=[")
    assert message.startswith("6 mistakes")
    assert (
        f"train.learning_rat ({second}:2): unknown key; did you mean train.learning_rate?"
        in message
    )
    assert f"train.epochs ({second}:3): expected integer, got 'two'" in message
    assert f"raft.noise_probability ({second}:4): expected at most 1, got 2" in message
    assert (
        "train.tuning (command line): expected one of 'full', 'lora' or 'none', got 'loar'"
        in message
    )
    assert "did you mean lora?" in message
    assert "retreival.k (command line): unknown key; did you mean retrieval.k?" in message
    assert "seed (command line): not YAML" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learning_rate=1e-5", "did you mean train.learning_rate?"),
        ("eval.rank=1", "did you mean train.lora.rank?"),
        ("train.lora.alhpa=1", "did you mean train.lora.alpha?"),
        (
            "eval.widths=[{k_c: 1, k: 2, kk: 3}]",
            "eval.widths.0.kk (command line): unknown key; did you mean eval.widths.0.k?",
        ),
        ("eval.widths=[{k: 2}]", "eval.widths.0.k_c (command line): required"),
        ("train.epochs=1.5", "train.epochs (command line): expected"),
        ("train.epochs=true", "expected integer, got True"),
        ("train.learning_rate='1e-5'", "expected number, got '1e-5'"),
        ("train.learning_rate=.nan", "train.learning_rate (command line): expected"),
        ("train.learning_rate=0", "expected greater than 0, got 0"),
        ("train.resume=yes", "expected boolean, got 'yes'"),
        ("train=3", "expected a section of key: value lines, got 3"),
        ("data.train=train.jsonl", "expected list, got 'train.jsonl'"),
        ("data.train=[]", "expected at least one entry, got []"),
        ("data.dev=[train.jsonl]", "data.dev (command line): 'train.jsonl' is a training file too"),
        ("data.dev=[a, a]", "expected each entry once, got 'a' again"),
        ("eval.systems=[coinrag, coinrag]", "expected each entry once"),
        ("eval.systems=[coinrg]", "did you mean coinrag?"),
        ("model.path=", "expected some text, got ''"),
        (
            "train.micro_batch_samples=3",
            "expected a divisor of train.effective_batch_samples (16), got 3",
        ),
        ("prompt.after_passages=none", "expected {question} exactly once, found it 0 times"),
        ("prompt.after_passages={question}{question}", "found it 2 times"),
        ("prompt.system={question}", "belongs in prompt.after_passages"),
        ("raft.noise_probability=-0.1", "expected at least 0, got -0.1"),
        ("nuggets.fuzzy_threshold=1.1", "expected at most 1 or null, got 1.1"),
        ("retrieval.device=gpu", "expected cpu, mps, cuda or cuda:N, got 'gpu'"),
        (
            "eval.widths=[{k_c: 6, k: 1}]",
            "eval.widths (command line): expected k_c of at most retrieval.k_c (5), got 6",
        ),
        ("nuggets.fuzzy_threshold=off", "expected number or null, got 'off'"),
        ("=3", "unknown key"),
    ],
)
def test_one_mistake_is_named_with_its_remedy(tiny: str, override: str, expected: str) -> None:
    message = _message(tiny, override)
    assert message.startswith("1 mistake in the recipe:\n")
    assert expected in message
    assert "command line" in message


def test_cross_check_points_at_what_was_written_not_at_the_default(tiny: str) -> None:
    message = _message(tiny, "train.effective_batch_samples=6")
    assert "train.micro_batch_samples (command line)" in message


def test_missing_sections_are_told_as_the_options_to_set(tmp_path: Path) -> None:
    message = _message(_write(tmp_path, "a.yaml", "name: x\ntrain: {}\n"))
    paths = [line.split()[0] for line in message.splitlines()[1:]]
    assert paths == [
        "model.path",
        "data.train",
        "data.dev",
        "retrieval.encoder",
        "train.run_folder",
    ]


def test_equal_keys_are_an_error_with_both_lines(tiny: str, tmp_path: Path) -> None:
    second = _write(tmp_path, "b.yaml", "train:\n  epochs: 1\n  epochs: 2\nseed: 1\nseed: 1\n")
    message = _message(tiny, second)
    assert f"{second}:3: train.epochs is set twice, first on line 2" in message
    assert f"{second}:5: seed is set twice, first on line 4" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: [\n", "not YAML"),
        ("- a\n", "expected a mapping of sections, got a list"),
        ("seed: !!python/object/apply:os.getcwd []\n", "tags (!) are not supported"),
        ("seed: &a 1\nname: *a\n", "anchors and aliases"),
        ("a: &a [*a]\n", "anchors and aliases"),
        ("1: 2\n", "expected text as a key"),
        ("seed: 1\n---\nseed: 2\n", "not YAML"),
        ("seed: \x00\n", "not YAML"),
    ],
)
def test_unreadable_yaml_names_the_file(tmp_path: Path, text: str, expected: str) -> None:
    path = _write(tmp_path, "bad.yaml", text)
    message = _message(path)
    assert f"{path}" in message
    assert expected in message
    # What the file would have set is not reported as missing.
    assert "required" not in message


def test_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: é\n".encode("latin-1"))
    assert f"{path}: not UTF-8 text at byte 6" in _message(str(path))


def test_unknown_recipe_names_the_nearest_and_other_mistakes_too() -> None:
    message = _message("quikstart", "train.epoch=1")
    assert "quikstart: no such file or shipped recipe; did you mean quickstart?" in message
    assert "did you mean train.epochs?" in message
    assert "required" not in message


def test_no_recipe_lists_the_shipped_ones() -> None:
    assert "smollm2_135m/coinrag" in _message("seed=1")


def test_written_recipe_resolves_to_the_same(tiny: str, tmp_path: Path) -> None:
    resolved = resolve(
        [tiny, "train.learning_rate=3e-7", "name=1e5", "model.path=no", "prompt.system=é\n 'q'"]
    )
    resolved.write(tmp_path / "run")
    assert resolve([str(tmp_path / "run" / "recipe.yaml")]).config == resolved.config
    origins = json.loads((tmp_path / "run" / "origins.json").read_text(encoding="utf-8"))
    assert origins == resolved.origins
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "origins.json",
        "recipe.yaml",
    ]


def test_option_without_effect_is_warned_of(tiny: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve([tiny, "train.lora.rank=8", "train.tuning=lora"])
        assert not caplog.records
        resolve([tiny, "train.lora.rank=8"])
    assert "train.lora.rank has no effect" in caplog.text


def test_config_is_frozen(tiny: str) -> None:
    config = resolve([tiny]).config
    with pytest.raises(ValueError, match="frozen"):
        config.train.epochs = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('name="\\ud800"', "name (command line): expected Unicode text, got"),
        ('prompt.system="\\ud800"', "prompt.system (command line): expected Unicode text"),
        ('data.train=["a\\0b"]', "data.train.0 (command line): expected Unicode text without NUL"),
        ('prompt.system="\\UFFFFFFFF"', "prompt.system (command line): not YAML"),
        ("seed=" + "9" * 5000, "seed (command line): not YAML"),
        (f"seed={2**32}", "seed (command line): expected less than 4294967296"),
        ("data.train=[x, ./x]", "data.train (command line): expected each entry once"),
        (
            "data.dev=[a/../train.jsonl]",
            "data.dev (command line): 'a/../train.jsonl' is a training",
        ),
        (
            "eval.widths=[{k_c: 1, k: 2}, {k_c: 1, k: 2}]",
            "eval.widths (command line): expected each",
        ),
        ("=x", "=x (command line): unknown key"),
    ],
)
def test_values_that_nothing_could_use_are_refused(tiny: str, override: str, expected: str) -> None:
    assert expected in _message(tiny, override)


def test_an_override_may_be_longer_than_a_file_name(tiny: str) -> None:
    text = "word " * 2000
    assert resolve([tiny, f"prompt.before_passages={text}"]).config.prompt.before_passages == text
