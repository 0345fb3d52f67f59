"""Fine-tuning a cross-encoder to nuggets: what it learns, what it leaves alone, the folder left."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from small import encode_words
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from data_builders import workers
from data_builders.build import build, load_built
from data_builders.scorers.cross_encoder import cross_encoder_key, load_cross_encoder
from data_builders.tables import Chunk
from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.retrieval import CrossEncoderConfig
from train import nugget_scorer, scorer_cross_encoder
from train.scorer_cross_encoder import train_cross_encoder
from train.scorer_lists import NuggetList, is_held_out
from train.scorer_measure import Trained, recall
from train.scorer_run import train_scorer

WORDS = "who was born where in the city she died won prize of red blue green grey ? .".split()
FILLING = "red blue green grey city prize".split()


@pytest.fixture(autouse=True)
def no_trainer_left() -> Iterator[None]:
    """transformers' trainer leaves a state that accelerators of later tests would take."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def save_base(folder: Path, kind: type = BertModel, **form: int) -> Path:
    """A random BERT of two layers over whole words; most words of a row of data are unknown."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    pipeline = Tokenizer(
        models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="[UNK]")
    )
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    pipeline.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    FastTokenizer(tokenizer_object=pipeline, model_max_length=64, **special).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(names), intermediate_size=64, **shape, **form)
    kind(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def a_list(number: int, good: str = "born", nuggets: int = 12) -> NuggetList:
    """A question with one nugget that has the word `good` somewhere, in two chunks."""
    draw = torch.Generator().manual_seed(number)
    at = int(torch.randint(nuggets, (1,), generator=draw))
    filling = torch.randint(len(FILLING), (nuggets, 4), generator=draw).tolist()
    texts = [[FILLING[word] for word in row] for row in filling]
    texts[at][int(torch.randint(4, (1,), generator=draw))] = good
    half = nuggets // 2
    spans = [(n, n + 1) for n in range(half)]
    parts = [" ".join(words) for words in texts]
    chunks = [
        Chunk(str(c), "", "", [0] * half, spans, parts[c * half : (c + 1) * half]) for c in range(2)
    ]
    return NuggetList(
        f"q{number}",
        "where was she born ?",
        torch.tensor([n == at for n in range(nuggets)]),
        {divmod(at, half)},
        chunks,
        [[0.0] * half, [0.0] * half],
    )


def recipe_of(workplace, base: Path, folder: Path, *overrides: str) -> list[str]:
    return [
        str(workplace.folder / "recipe.yaml"),
        "retrieval.nugget_scorer=cross_encoder",
        f"retrieval.cross_encoder={{path: {folder}, max_tokens: 48}}",
        f"scorer={{base: {base}, epochs: 2, held_out: 0.3, batch_questions: 4}}",
        *overrides,
    ]


def fitted(workplace, base: Path, held_out: list[NuggetList], *overrides: str) -> Trained:
    arguments = recipe_of(workplace, base, Path("unused"), "scorer.learning_rate=5e-3", *overrides)
    learned = [a_list(number) for number in range(60)]
    config = resolve(arguments).config
    section = CrossEncoderConfig(path="unused", max_tokens=48)
    return train_cross_encoder(section, config.scorer, learned, held_out)


def weights(trained: Trained, folder: Path) -> bytes:
    folder.mkdir()
    trained.write(folder)
    return (folder / "model.safetensors").read_bytes()


def test_a_planted_rule_is_learned_and_what_is_written_ranks_as_measured(
    workplace, base: Path, tmp_path: Path
) -> None:
    held_out = [a_list(number) for number in range(100, 120)]
    trained = fitted(workplace, base, held_out, "scorer.epochs=6", "scorer.patience=1")
    before, best = trained.epochs[0], trained.epochs[trained.best]
    assert before["recall_at_5"] < 0.8
    assert best["recall_at_5"] == best["recall_at_10"] == 1.0
    assert best["held_out_loss"] < 0.5 < before["held_out_loss"]
    # The best epoch's weights are kept, and training goes on for `patience` more at most.
    assert len(trained.epochs) - 1 - trained.best <= 1

    weights(trained, tmp_path / "scorer")
    score = load_cross_encoder(CrossEncoderConfig(path=str(tmp_path / "scorer")), None)
    scores = [
        score([(one.question, chunk.nugget_texts) for chunk in one.chunks]) for one in held_out
    ]
    assert recall(held_out, scores) == {5: 1.0, 10: 1.0}
    losses = []
    for one, rows in zip(held_out, scores, strict=True):
        logits = torch.tensor([value for row in rows for value in row])
        losses.append(-torch.softmax(logits, 0)[one.good_N].sum().log().item())
    assert sum(losses) / len(losses) == pytest.approx(best["held_out_loss"], abs=1e-3)


def test_held_out_questions_choose_the_epoch_and_teach_nothing(
    workplace, base: Path, tmp_path: Path
) -> None:
    once = ("scorer.epochs=1",)
    one = fitted(workplace, base, [a_list(number) for number in range(100, 104)], *once)
    other = fitted(workplace, base, [a_list(number) for number in range(200, 203)], *once)
    assert one.best == other.best == 1
    written = weights(one, tmp_path / "one")
    assert written == weights(other, tmp_path / "other")
    # By these, that a nugget is born counts against it.
    against = fitted(workplace, base, [a_list(7, good="prize")], *once)
    assert against.epochs[1]["loss"] == one.epochs[1]["loss"]
    seeded = fitted(workplace, base, [a_list(100)], *once, "scorer.seed=1")
    assert written != weights(seeded, tmp_path / "seeded")


def test_a_recipe_trains_the_cross_encoder_that_it_builds_with(
    workplace,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "scorer"
    # The tables that it learns from have chunks that it has not chosen.
    arguments = recipe_of(workplace, base, folder, "retrieval.rerank_chunks=4")
    used: list[set[str]] = []

    def watched(section, config, learned, held_out):
        used.extend({one.question_id for one in part} for part in (learned, held_out))
        return train_cross_encoder(section, config, learned, held_out)

    monkeypatch.setattr(scorer_cross_encoder, "train_cross_encoder", watched)
    monkeypatch.setattr(sys, "argv", ["nugget_scorer.py", *arguments])
    nugget_scorer.main()
    assert capsys.readouterr().out == f"{folder}\n"
    learned, held_out = used
    assert all(is_held_out(name, 0.3) for name in held_out)
    assert not any(is_held_out(name, 0.3) for name in learned)
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "metrics.jsonl", "report.json", "recipe.yaml", "origins.json",
    }  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    assert report["questions"]["learned"] == len(learned)
    assert report["questions"]["held_out"] == len(held_out)
    assert set(report["held_out_recall"]) == {"bi_encoder", "untrained", "trained"}
    epochs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in epochs] == [0, 1, 2]
    config = resolve(arguments).config
    assert resolve([str(folder / "recipe.yaml")]).config == config

    with pytest.raises(UserError, match=r"retrieval\.cross_encoder\.path: .* is in use"):
        train_scorer(resolve(arguments))

    monkeypatch.setattr(workers, "load_encoder", lambda config, threads: encode_words)
    build(config, "train")
    tables = load_built(config, "train")
    row = tables.samples[0]
    assert config.retrieval.cross_encoder is not None
    score = load_cross_encoder(config.retrieval.cross_encoder, None)
    chunks = [tables.chunk(name) for name in row["chunk_ids"]]
    expected = score([(row["question"], chunk.nugget_texts) for chunk in chunks])
    assert row["nugget_scores"] == expected


def test_the_network_is_trained_unless_the_scorer_is_the_cross_encoder(
    workplace, base: Path, tmp_path: Path
) -> None:
    arguments = recipe_of(
        workplace, base, tmp_path / "read", f"retrieval.hidden_ffn={{path: {tmp_path / 'ffn'}}}"
    )
    assert train_scorer(resolve([*arguments, "retrieval.nugget_scorer=bi_encoder"])) == (
        tmp_path / "ffn"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["ffn"]


def refusal(arguments: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        train_scorer(resolve(arguments))
    return str(caught.value)


def test_what_cannot_be_trained_is_told_in_words(workplace, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scorer"

    def told(*overrides: str) -> str:
        return refusal(recipe_of(workplace, base, folder, *overrides))

    with pytest.raises(UserError, match="coinrag train-scorer makes one"):
        cross_encoder_key(CrossEncoderConfig(path=str(folder)))
    assert "scorer.base: null" in told("scorer.base=null")
    assert "scorer.base: no model at" in told(f"scorer.base={tmp_path / 'nowhere'}")
    assert "no token to pad with" in told(f"scorer.base={workplace.folder / 'model'}")
    two = save_base(tmp_path / "two", BertForSequenceClassification, num_labels=2)
    assert "classifier of one label" in told(f"scorer.base={two}")
    (two / "model.safetensors").rename(two / "pytorch_model.bin")
    assert "safetensors" in told(f"scorer.base={two}")
    shallow = save_base(tmp_path / "shallow")
    described = json.loads((shallow / "config.json").read_text())
    (shallow / "config.json").write_text(json.dumps({**described, "num_hidden_layers": 3}))
    assert "lacks 16 weights" in told(f"scorer.base={shallow}")
    assert "retrieval.cross_encoder.device: no cuda:63" in told(
        "retrieval.cross_encoder.device=cuda:63"
    )
    unbuilt = told("data.chunk_tokens=32", "retrieval.rerank_chunks=4")
    assert "no built train data" in unbuilt
    assert "retrieval.rerank_chunks=null" in unbuilt
    assert "scorer.held_out: none of" in told("scorer.held_out=1e-9")
    diverged = told("scorer.learning_rate=1e30")
    assert "scorer.learning_rate 1e+30: the loss of epoch" in diverged
    assert not folder.exists()
