import logging
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from small import encode_words
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from data_builders.candidates import rerank
from data_builders.retrieval import SCORE_DECIMALS, scores
from data_builders.scorers import load_scorer
from data_builders.scorers.cross_encoder import cross_encoder_key, load_cross_encoder
from data_builders.tables import Chunk
from data_builders.workers import ScoreWork, scored_item
from recipes.errors import UserError
from recipes.retrieval import CrossEncoderConfig
from recipes.schema import Recipe

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
LIMIT = 40
ASKED = [
    ("where is paris", ["paris is in france", "berlin", ""]),
    ("what is the capital of germany", []),
    ("the unknownword of rome", ["the the the capital", "rome", "an unknownword of rome"]),
    ("where is paris", ["paris is in france"]),
]


def save_cross_encoder(folder: Path, kind=XLMRobertaForSequenceClassification, labels=1) -> Path:
    """A random XLM-RoBERTa of two layers over whole words, as bge-reranker-v2-m3 is one."""
    words = "a an paris berlin rome is where the capital of france germany in what".split()
    vocabulary = {word: at for at, word in enumerate([*SPECIALS, *words])}
    pipeline = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    pipeline.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    names = dict(zip(("cls_token", "pad_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    PreTrainedTokenizerFast(
        tokenizer_object=pipeline, model_max_length=LIMIT, **names
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LIMIT + 2,
        pad_token_id=1,
        num_labels=labels,
        # Scores far enough apart that rounding does not hide a mistake.
        initializer_range=0.5,
    )
    kind(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return save_cross_encoder(tmp_path_factory.mktemp("tiny-reranker"))


def section(folder: Path, **options) -> CrossEncoderConfig:
    return CrossEncoderConfig(path=str(folder), **options)


@cache
def plain_model(folder: Path):
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    return model, AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def scored_by_hand(folder: Path, question: str, text: str) -> float:
    """The logit of a pair from the weights, one pair at a time."""
    model, tokenizer = plain_model(folder)
    ids = tokenizer(question, text)["input_ids"]
    return model(torch.tensor([ids])).logits.item()


@pytest.mark.parametrize("batch_size", [None, 4])
def test_scores_are_the_logits_of_the_pairs(tiny, batch_size):
    found = load_cross_encoder(section(tiny, batch_size=batch_size), None)(ASKED)
    expected = [
        [scored_by_hand(tiny, question, text) for text in texts] for question, texts in ASKED
    ]
    assert [len(row) for row in found] == [3, 0, 3, 1]
    for ours, by_hand in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, by_hand, atol=2e-5)
    flat = [score for row in found for score in row]
    assert np.ptp(flat) > 0.1
    assert flat == np.round(flat, SCORE_DECIMALS).astype(np.float32).tolist()


def test_on_a_cpu_a_pair_has_the_same_score_in_any_company(tiny):
    score = load_cross_encoder(section(tiny), 1)
    together = score(ASKED)
    assert together == [
        [score([(question, [text])])[0][0] for text in texts] for question, texts in ASKED
    ]
    assert together[3] == together[0][:1]
    assert score([]) == []
    assert score([("where", [])]) == [[]]


def test_long_pairs_are_cut_counted_and_told(tiny, caplog, capfd):
    caplog.set_level(logging.WARNING)
    score = load_cross_encoder(section(tiny, max_tokens=32), None)
    # Two words and four special tokens leave room for 26 more.
    fits, long = " ".join(["rome"] * 26), " ".join(["rome"] * 27)
    score([("where is", [fits, "berlin"])])
    assert not caplog.records
    [first, second] = score([("where is", [long, long + " paris"])])[0]
    score([("where is", [long])])
    assert "it/s" not in capfd.readouterr().err
    assert first == second == pytest.approx(scored_by_hand(tiny, "where is", fits), abs=2e-5)
    assert [record.getMessage()[:56] for record in caplog.records] == [
        "a question and a text have more than the 32 tokens that "
    ]
    del score
    assert "3 of 5 scored pairs have more than 32 cross-encoder tokens" in caplog.text


class Payload:
    """Unpickled without care, it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.mkdir, (self.target,))


def test_pickled_weights_are_refused_unread(tmp_path):
    folder = save_cross_encoder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Payload(tmp_path / "ran")}, folder / "pytorch_model.bin")
    for beside in (None, "other.safetensors"):
        if beside is not None:
            (folder / beside).touch()
        with pytest.raises(UserError, match="has no weights in safetensors, and pickled ones are"):
            load_cross_encoder(section(folder), None)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_cross_encoder_is_refused(tmp_path):
    # With random weights for its head, the library would load it.
    encoder = save_cross_encoder(tmp_path / "encoder", XLMRobertaModel)
    classes = save_cross_encoder(tmp_path / "classes", labels=3)
    for folder, found in ((encoder, "XLMRobertaModel"), (classes, "3 label")):
        with pytest.raises(UserError, match=rf"^retrieval\.cross_encoder\.path: [^:]*{found}"):
            load_cross_encoder(section(folder), None)
    (classes / "config.json").write_text("{}")
    with pytest.raises(UserError, match="does not load as a cross-encoder: Unrecognized model"):
        load_cross_encoder(section(classes), None)


def test_half_weights_are_computed_with_in_full(tmp_path):
    folder = save_cross_encoder(tmp_path / "model")
    XLMRobertaForSequenceClassification.from_pretrained(folder).half().save_pretrained(folder)
    [[found]] = load_cross_encoder(section(folder), None)([("where is paris", ["paris"])])
    assert found == pytest.approx(scored_by_hand(folder, "where is paris", "paris"), abs=2e-5)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    folder = save_cross_encoder(tmp_path / "model")
    model = XLMRobertaForSequenceClassification.from_pretrained(folder)
    model.classifier.out_proj.bias.data[0] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(UserError, match="gives NaN or infinite scores"):
        load_cross_encoder(section(folder), None)([("where", ["rome"])])


def test_what_is_not_there_is_named(tiny):
    with pytest.raises(UserError, match=r"retrieval\.cross_encoder\.path: no model at 'no/such'"):
        load_cross_encoder(CrossEncoderConfig(path="no/such"), None)
    with pytest.raises(UserError, match=r"retrieval\.cross_encoder\.device: no cuda:99 on this"):
        load_cross_encoder(section(tiny, device="cuda:99"), None)


def test_the_key_is_of_what_decides_a_score(tiny, tmp_path):
    copy = save_cross_encoder(tmp_path / "elsewhere")
    key = cross_encoder_key(section(tiny))
    assert key == cross_encoder_key(section(copy, batch_size=1))
    assert key != cross_encoder_key(section(tiny, batch_size=2))
    assert key != cross_encoder_key(section(tiny, max_tokens=64))
    config = copy / "tokenizer_config.json"
    config.write_text(config.read_text() + " ")
    assert key != cross_encoder_key(section(copy))


def test_work_travels_and_gives_the_same_scores(tiny):
    work = pickle.loads(pickle.dumps(ScoreWork(section(tiny), torch.get_num_threads())))
    values = work()([scored_item(*asked)[1] for asked in ASKED])
    found = [np.frombuffer(value, "<f4").tolist() for value in values]
    assert found == load_cross_encoder(section(tiny), None)(ASKED)
    keys = {scored_item(*asked)[0] for asked in (*ASKED, ("a", ["b", "c"]), ("a", ["b c"]))}
    assert len(keys) == 6


def chunk(number: int, *nuggets: str) -> Chunk:
    text = ". ".join(nuggets)
    return Chunk(
        str(number), "", text, [], [(at, at + 1) for at in range(len(nuggets))], [*nuggets]
    )


CHUNKS = [chunk(0, "paris is in france", "berlin is not"), chunk(1), chunk(2, "where is paris")]


def recipe(**retrieval) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "model": {"path": "model"},
            "data": {"train": ["train.jsonl"], "dev": ["dev.jsonl"]},
            "retrieval": {"encoder": "encoder", **retrieval},
            "train": {"run_folder": "run"},
        }
    )


def test_the_bi_encoder_scores_as_retrieval_does():
    config = recipe(weights={"dense": 0.5})
    found = load_scorer(config, encode_words, None)("where is paris", CHUNKS)
    query = encode_words(["where is paris"])[0]
    assert found == [
        scores(query, encode_words(chunk.nugget_texts), config.retrieval.weights)
        for chunk in CHUNKS
    ]
    assert [len(row) for row in found] == [2, 0, 1]
    assert found[2] == [0.5]


def test_the_cross_encoder_scores_nuggets_and_reads_no_vectors(tiny):
    def refuse(texts):
        raise AssertionError(texts)

    config = recipe(nugget_scorer="cross_encoder", cross_encoder={"path": str(tiny)})
    read_together = load_cross_encoder(config.retrieval.cross_encoder, None)
    found = load_scorer(config, refuse, read_together)("where is paris", CHUNKS)
    for row, of_chunk in zip(found, CHUNKS, strict=True):
        expected = [scored_by_hand(tiny, "where is paris", text) for text in of_chunk.nugget_texts]
        np.testing.assert_allclose(row, expected, atol=2e-5)


def test_reranking_keeps_the_best_and_the_order_of_equals():
    values = {"a": 0.5, "b": -3.0, "c": 2.0, "d": 0.5, "e": 2.0}
    chunks = [chunk(at, text) for at, text in enumerate(values)]

    def by_table(asked):
        return [[values[text] for text in texts] for _, texts in asked]

    kept, kept_scores = rerank("?", chunks, by_table, 4)
    assert [one.text for one in kept] == ["c", "e", "a", "d"]
    assert kept_scores == [2.0, 2.0, 0.5, 0.5]
    assert rerank("?", chunks, by_table, 2)[0] == kept[:2]
    assert rerank("?", [], by_table, 2) == ([], [])
