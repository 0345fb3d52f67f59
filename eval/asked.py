"""A question on its way through the engine, and the reply that it ends with."""

import queue
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from eval.telemetry import RequestReport


@dataclass(frozen=True)
class Reply:
    """The answer to a question, and what it took."""

    answer: str
    token_ids: list[int]
    report: RequestReport


class Asked:
    """A question on its way through the engine. Iterating gives the answer's text as it comes."""

    def __init__(self, question: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.question = question
        self.since = time.perf_counter()
        self._tokenizer = tokenizer
        self._tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._reply: Future[Reply] = Future()

    def reply(self) -> Reply:
        """Waits for the whole answer; raises what went wrong on the way."""
        return self._reply.result()

    def __iter__(self) -> Iterator[str]:
        stream = DecodeStream(skip_special_tokens=True)
        given = ""
        for token in iter(self._tokens.get, None):
            piece = stream.step(self._tokenizer.backend_tokenizer, token) or ""
            # An answer begins with its first word.
            piece = piece if given else piece.lstrip()
            if piece:
                given += piece
                yield piece
        # Whoever iterates again gets the whole answer at once.
        self._tokens.put(None)
        # Bytes of a character that was never completed.
        if rest := self.reply().answer[len(given) :]:
            yield rest

    def push(self, token: int) -> None:
        """The next token of the answer."""
        self._tokens.put(token)

    def end(self, reply: Reply | Exception) -> None:
        """The whole answer, or why there is none."""
        if isinstance(reply, Exception):
            self._reply.set_exception(reply)
        else:
            self._reply.set_result(reply)
        self._tokens.put(None)
