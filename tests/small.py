"""Small stand-ins for tests: a byte-level tokenizer, an encoder, rows of data."""

import hashlib
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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


def words_encoder(texts):
    """Unit rows from hashed words: texts that share words are similar."""
    rows = np.zeros((len(texts), 64), dtype=np.float32)
    for row, text in zip(rows, texts, strict=True):
        for word in text.lower().split():
            row[hashlib.sha256(word.encode()).digest()[0] % 64] += 1
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


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
