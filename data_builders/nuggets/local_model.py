"""Nugget candidates from an instruct model in this process, by transformers' `generate`.

Decoding is greedy. Texts of a batch are padded, which changes a score's last bits, so that only
with a batch size of 1 an answer is sure not to depend on the texts beside it.
"""

import logging
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cache_ops.hf import ModelNotFoundError, check_vocabulary, load_causal_model, load_tokenizer
from data_builders.models import check_device, model_folder
from data_builders.nuggets.instructions import Messages, messages, parse_candidates
from data_builders.prompt import special_tokens
from recipes.building import LocalModelConfig
from recipes.errors import UserError

log = logging.getLogger(__name__)

_OPTION = "nuggets.local_model"
GPU_BATCH_SIZE = 8


def load_local_model(config: LocalModelConfig) -> Callable[[Sequence[str]], list[list[str]]]:
    """A function from texts to each one's candidates; see `load_asked_model`."""
    ask = load_asked_model(config)
    return lambda texts: ask([messages(text) for text in texts])


def load_asked_model(config: LocalModelConfig) -> Callable[[Sequence[Messages]], list[list[str]]]:
    """A function from chats to each one's candidates, in the order in which the model gave them.

    An answer that cannot be read gives no candidates; how many there were is logged when the
    function, and the model with it, is freed.

    Raises:
        UserError, ModelNotFoundError: no such model or device; a model without weights or chat
            template. From the function, `UserError`: a text that is too long for the model.
    """
    check_device(config.device, f"{_OPTION}.device")
    path = str(model_folder(config.path, f"{_OPTION}.path"))
    tokenizer = load_tokenizer(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    try:
        # Any causal model will do: unlike the cache operations, generation is right for all.
        model = load_causal_model(path, config.dtype).eval()
    except ModelNotFoundError as error:
        raise UserError(f"{_OPTION}.path: {error}") from error
    model.to(torch.device(config.device))
    check_vocabulary(model, tokenizer)
    # The model's own settings may sample, or punish the repetition that copying is.
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=config.max_new_tokens,
        eos_token_id=model.generation_config.eos_token_id or tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    seen = {"chats": 0, "unread": 0}
    special = special_tokens(tokenizer)

    def extract(chats: Sequence[Messages]) -> list[list[str]]:
        if not chats:
            return []
        prompts = [_prompt_ids(tokenizer, special, chat) for chat in chats]
        lengths = [len(ids) for ids in prompts]
        _check_lengths(model, lengths, config.max_new_tokens)
        found: list[list[str]] = [[] for _ in chats]
        # Texts of like length together need the least padding.
        order = sorted(range(len(chats)), key=lengths.__getitem__)
        for first in range(0, len(order), batch_size(config)):
            batch = order[first : first + batch_size(config)]
            answers = _answers(model, tokenizer, [prompts[index] for index in batch])
            for index, answer in zip(batch, answers, strict=True):
                try:
                    found[index] = parse_candidates(answer)
                except ValueError as error:
                    log.debug("no candidates: %s", error)
                    seen["unread"] += 1
        seen["chats"] += len(chats)
        return found

    weakref.finalize(extract, _report_unread, seen)
    return extract


def batch_size(config: LocalModelConfig) -> int:
    """Texts generated for at once, which can decide between near ties."""
    return config.batch_size or (1 if config.device == "cpu" else GPU_BATCH_SIZE)


def _prompt_ids(
    tokenizer: PreTrainedTokenizerBase, special: re.Pattern[str], chat: Messages
) -> list[int]:
    """A chat's tokens. Special tokens that its messages spell out stay ordinary text."""
    texts = [message["content"] for message in chat]
    if not any(map(special.search, texts)):
        return _encode(tokenizer, _render(tokenizer, chat))
    marks = [f"@@coinrag-message-{number}@@" for number in range(len(chat))]
    marked = [{**message, "content": mark} for message, mark in zip(chat, marks, strict=True)]
    ids: list[int] = []
    for part in re.split(f"({'|'.join(marks)})", _render(tokenizer, marked)):
        if part in marks:
            ids += _encode(tokenizer, texts[marks.index(part)], split_special_tokens=True)
        else:
            ids += _encode(tokenizer, part)
    return ids


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, split_special_tokens: bool = False
) -> list[int]:
    ids: list[int] = tokenizer(
        text, add_special_tokens=False, split_special_tokens=split_special_tokens
    )["input_ids"]
    return ids


def _render(tokenizer: PreTrainedTokenizerBase, chat: Messages) -> str:
    try:
        prompt = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    except (ValueError, TemplateError) as error:
        raise UserError(
            f"{_OPTION}.path: needs an instruct model, whose tokenizer has a chat template: {error}"
        ) from error
    return str(prompt)


def _check_lengths(model: PreTrainedModel, lengths: Sequence[int], new_tokens: int) -> None:
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and max(lengths) + new_tokens > positions:
        raise UserError(
            f"{_OPTION}: a chunk makes a prompt of {max(lengths)} tokens, and with max_new_tokens "
            f"{new_tokens} the model's {positions} positions do not suffice; lower "
            "data.chunk_tokens or max_new_tokens"
        )


@torch.inference_mode()
def _answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]]
) -> list[str]:
    """The texts generated after each prompt's tokens, without special tokens."""
    inputs = tokenizer.pad(
        {"input_ids": list(prompts)}, padding_side="left", return_tensors="pt"
    ).to(model.device)
    generator: Any = model
    # Token ids of shape (prompts, padded prompt tokens + new tokens).
    ids = generator.generate(**inputs)
    new_ids = ids[:, inputs["input_ids"].shape[1] :]
    answers: list[str] = tokenizer.batch_decode(new_ids, skip_special_tokens=True)
    return answers


def _report_unread(seen: dict[str, int]) -> None:
    if seen["unread"]:
        log.warning(
            "%d of %d answers of the local model could not be read: their chunks have no nuggets",
            seen["unread"],
            seen["chats"],
        )
