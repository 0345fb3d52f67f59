"""A tiny chat model with its tokenizer, and a few questions over token chunks."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import VOCABULARY, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data_builders.tables import Chunk
from eval.systems import Question
from recipes.schema import Recipe

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PASSAGES = {
    "Ines Varga": "Ines Varga was born in Lower Tarn; she painted the harbour and wrote plays.",
    "Lower Tarn": "Lower Tarn is a town on the river Oss. Its mayor is Bela Kun.",
    "Oss": "The Oss rises in the Grey Hills, and it runs to the northern sea.",
}
TEXTS = [*(f"{title}\n{text}\n" for title, text in PASSAGES.items()), "Where was the painter born?"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """Pieces of words, fewer than `VOCABULARY` of them, with a ChatML template."""
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.decoder = decoders.Metaspace()
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8, special_tokens=special, show_progress=False
    )
    pieces.train_from_iterator(TEXTS * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, unk_token="<unk>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def chunks(tokenizer: PreTrainedTokenizerBase) -> list[Chunk]:
    """One chunk a passage, cut into nuggets of at most eight tokens."""
    made = []
    for title, text in zip(PASSAGES, TEXTS, strict=False):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        spans = [(start, min(start + 8, len(ids))) for start in range(0, len(ids), 8)]
        made.append(
            Chunk(
                chunk_id=hashlib.sha256(text.encode()).hexdigest(),
                title=title,
                text=text,
                token_ids=ids,
                nuggets=spans,
                nugget_texts=[tokenizer.decode(ids[start:end]) for start, end in spans],
            )
        )
    return made


@pytest.fixture
def question(chunks: list[Chunk]) -> Question:
    """A question whose best nuggets lie in the first and the last chunk."""
    scores = [[float(n + c == 2 or (c, n) == (0, 0)) for n in range(len(chunk.nuggets))]
              for c, chunk in enumerate(chunks)]  # fmt: skip
    return Question(
        question_id="q0",
        dataset="hotpotqa",
        question="Where was the painter born?",
        answers=["Lower Tarn"],
        chunks=chunks,
        nugget_scores=scores,
        gold_chunk_ids=[chunks[0].chunk_id, chunks[1].chunk_id],
    )


@pytest.fixture
def recipe(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Callable[..., Recipe]:
    """A function from `eval` settings to a recipe whose two checkpoints lie on the disk."""
    for folder, seed in ((tmp_path / "base", 1), (tmp_path / "run" / "checkpoint", 2)):
        tiny_model("qwen2", seed=seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def build(**evaluation: object) -> Recipe:
        return Recipe.model_validate(
            {
                "name": "tiny",
                "model": {"path": str(tmp_path / "base")},
                "data": {"train": ["train.jsonl"], "dev": ["dev.jsonl"]},
                "retrieval": {"encoder": "none", "k_c": 3, "k": 3},
                "train": {"run_folder": str(tmp_path / "run")},
                "eval": {"max_new_tokens": 6, "bootstrap_resamples": 200, **evaluation},
            }
        )

    return build
