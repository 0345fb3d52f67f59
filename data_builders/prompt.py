"""One template for training, serving and export: static prompt, query, answer.

The tokenizer's own chat template is rendered once around sentinels. What comes before the passages
is the cached prompt; what follows them, with the question put in, is the query.
"""

import hashlib
import re

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from recipes.errors import UserError
from recipes.schema import PromptConfig

_PASSAGES = "@@coinrag-passages@@"
_QUESTION = "@@coinrag-question@@"
_ANSWER = "@@coinrag-answer@@"


class PromptTemplate:
    """Token ids of the parts of a chat around the passages.

    Attributes:
        prompt_ids: everything before the passages; the same for every question.
        prompt_text: their text, without what a tokenizer itself puts before plain text.
        query_parts: the text after the passages, before and after the question.
        stop_ids: tokens that end an answer.
        digest: SHA-256, in hex, of what determines the rendered parts and stop tokens.

    Raises:
        UserError: the chat template drops or repeats the user's message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PromptConfig) -> None:
        self._tokenizer = tokenizer
        before, self._after, self._answer_lead, end_of_turn = _render(tokenizer, config)
        self.prompt_text = before
        head, _, tail = self._after.partition(_QUESTION)
        self.query_parts = (head, tail)
        self._end_of_turn = end_of_turn
        self._special = special_tokens(tokenizer)
        self.prompt_ids: list[int] = self._encode(before)
        if not tokenizer.chat_template:
            self.prompt_ids = [*_leading_specials(tokenizer), *self.prompt_ids]
        ends = {end_of_turn, tokenizer.eos_token_id}
        self.stop_ids = frozenset(token for token in ends if token is not None)
        parts = [before, self._after, self._answer_lead, *map(str, sorted(self.stop_ids))]
        self.digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def query_ids(self, question: str) -> list[int]:
        """All after the passages, up to and including the generation prompt.

        Special tokens spelled inside the question stay ordinary text.
        """
        if not self._special.search(question):
            return self._encode(self._after.replace(_QUESTION, question))
        head, tail = self.query_parts
        return [*self._encode(head), *self._encode_plainly(question), *self._encode(tail)]

    def answer_ids(self, answer: str) -> list[int]:
        """The answer and the token that ends the turn: what the loss is taken over."""
        return [*self._encode_plainly(self._answer_lead + answer), self._end_of_turn]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _encode_plainly(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        return ids


def _render(tokenizer: PreTrainedTokenizerBase, config: PromptConfig) -> tuple[str, str, str, int]:
    """(before the passages, after them, what an answer starts with, the end-of-turn token)."""
    ask = config.after_passages.replace("{question}", _QUESTION)
    user = f"{config.before_passages}{_PASSAGES}{ask}"
    if not tokenizer.chat_template:
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has neither a chat template nor an end-of-text token")
        system = f"{config.system}\n\n" if config.system else ""
        # No template says how an answer begins; a space parts it from the query's last word.
        lead = "" if ask[-1:].isspace() else " "
        return system + config.before_passages, ask, lead, tokenizer.eos_token_id
    messages = [{"role": "user", "content": user}]
    if config.system is not None:
        messages.insert(0, {"role": "system", "content": config.system})
    rendered = _chat(tokenizer, messages, generate=True)
    if rendered.count(_PASSAGES) != 1 or rendered.count(_QUESTION) != 1:
        raise UserError(
            "the tokenizer's chat template must show the user's message exactly once; "
            "use another model folder or correct its chat_template"
        )
    before, after = rendered.split(_PASSAGES)
    messages.append({"role": "assistant", "content": _ANSWER})
    answered = _chat(tokenizer, messages, generate=False)
    return before, after, "", _end_of_turn(tokenizer, answered.rpartition(_ANSWER)[2])


def _chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, generate: bool
) -> str:
    try:
        # Templates of reasoning models open a thinking block unless told not to; others ignore it.
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, enable_thinking=False
        )
    except TemplateError as error:
        raise UserError(f"the tokenizer's chat template refuses these messages: {error}") from error
    return str(rendered)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, tail: str) -> int:
    """The first special token after an assistant's message, else the end-of-text token."""
    ended = special_tokens(tokenizer).search(tail)
    token = ended[0] if ended else tokenizer.eos_token
    if token is None:
        raise UserError("the chat template ends a turn with no special token, and there is no eos")
    return int(tokenizer.get_vocab()[token])


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the spelling of each special token of a tokenizer."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    texts = sorted(added | set(tokenizer.all_special_tokens), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _leading_specials(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer itself puts before plain text (a begin-of-text token, or nothing)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    return list(whole[: whole.index(plain[0])]) if plain else []
