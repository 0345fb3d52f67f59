"""Small stand-ins for tests: a byte-level tokenizer, an encoder, rows of data."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, LlamaConfig, PreTrainedTokenizerFast

from data_builders.encoded import Encoded

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "Answer the question based on the given passages. Question: Answer: The following are",
    "user assistant system The born director city of in was and who won the prize He She It",
]


def tiny_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE with few merges, so that characters are often split over tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", additional_special_tokens=special
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny_encoder(folder: Path) -> None:
    """A random BERT over letters and digits, for FlagEmbedding with mean pooling."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    vocabulary = {name: at for at, name in enumerate(names)}
    pipeline = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    pipeline.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    pipeline.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=pipeline,
        model_max_length=128,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)
    torch.manual_seed(0)
    # Wide enough that a matrix product is shared by threads.
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(names), intermediate_size=512, **shape)).save_pretrained(
        folder
    )


def save_stand_ins(folder: Path) -> None:
    """A `model` without weights and an `encoder` that only has a name, in `folder`."""
    tiny_tokenizer().save_pretrained(folder / "model")
    LlamaConfig().save_pretrained(folder / "model")
    (folder / "encoder").mkdir()
    (folder / "encoder" / "config.json").write_text("{}")


def words_encoder(texts):
    """Unit rows from hashed words: texts that share words are similar."""
    rows = np.zeros((len(texts), 64), dtype=np.float32)
    for row, text in zip(rows, texts, strict=True):
        for word in text.lower().split():
            row[hashlib.sha256(word.encode()).digest()[0] % 64] += 1
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def encode_words(texts):
    """`words_encoder` as an encoder of the build."""
    return [Encoded(row) for row in words_encoder(texts)]


def hashed_pairs(asked):
    """A cross-encoder of the build whose order is like no other: scores from hashes."""
    return [
        [hashlib.sha256(f"{question}|{text}".encode()).digest()[0] / 256 for text in texts]
        for question, texts in asked
    ]


def data_row(number: int, dataset: str = "d") -> dict:
    """A row with one supporting passage, which holds the answer, and three distractors."""
    name = f"{dataset}{number}"
    contexts = [
        {
            "idx": index,
            "title": f"Person {name} {index}",
            "paragraph_text": f"Person{name}x{index} was born in Town{name}x{index}. "
            f"She won the prize of {1000 + number} in the city.She died.",
            "is_supporting": index == 1,
        }
        for index in range(4)
    ]
    date = {"day": "", "month": "", "year": ""}
    return {
        "dataset": dataset,
        "question_id": f"{dataset}-{number}",
        "question_text": f"Where was Person{name}x1 born?",
        "answers_objects": [{"number": "", "date": date, "spans": [f"Town{name}x1"]}],
        "contexts": contexts,
    }


def write_rows(path: Path, rows: list[dict]) -> str:
    """JSON Lines at `path`; its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
