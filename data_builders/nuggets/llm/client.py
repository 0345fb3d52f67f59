"""One request to an OpenAI-compatible server: its answer, or why there is none.

Retries are not the official client's: every request has to be counted against the budgets, a wait
that a server asks for has to hold for all requests, and a server that is down has to end the run.
The key comes from the environment and is cut out of everything that a server says.
"""

import asyncio
import hashlib
import ipaddress
import json
import logging
import os
import re
from typing import Any
from urllib.parse import urlsplit

import openai

from data_builders.nuggets.llm.outcome import Answer, RequestFailedError
from data_builders.nuggets.llm.requests import (
    OUTPUT_MODES,
    LengthField,
    OutputMode,
    encode_body,
    request_body,
    server_url,
)
from data_builders.nuggets.llm.responses import (
    completion,
    error_message,
    failure_kind,
    retry_after_seconds,
)
from recipes.building import LlmConfig
from recipes.errors import UserError

# A longer wait is a used-up quota: the run ends and can be started again later.
MAX_RETRY_AFTER_SECONDS = 300.0
_HTTP_TROUBLE = {402: "asks for payment", 401: "does not accept the key", 403: "forbids this"}
_SHORTEST_SECRET = 8
# At debug level they log response headers as they come, with whatever a server repeats there.
_LOUD_LOGGERS = ("openai", "httpcore", "httpcore2")
_MESSAGE_CHARACTERS = 300

# How servers word what they refuse in a request's form, in lower case.
_FORM = re.compile(r"response_format|json_schema|json_object|structured output|grammar")
_LENGTH_FIELD = re.compile(r"max_completion_tokens")


class Client:
    """Asks the server of a recipe; with `output: auto` in the strictest form that it takes.

    Raises:
        UserError: the key is not in the environment, or cannot be one.
    """

    def __init__(self, config: LlmConfig) -> None:
        self._config = config
        self._url = server_url(config)
        self._mode: OutputMode = OUTPUT_MODES[0] if config.output == "auto" else config.output
        self._length_field: LengthField = "max_tokens"
        self._secret = _key_from_environment(config, self._url)
        for name in _LOUD_LOGGERS:
            library = logging.getLogger(name)
            library.setLevel(max(library.level, logging.INFO))
        self._client = openai.AsyncOpenAI(
            api_key=self._secret or "none",
            base_url=self._url,
            timeout=config.timeout_seconds,
            max_retries=0,
        )

    def body(self, text: str) -> dict[str, Any]:
        """The request for a text in the form that the server is known to take."""
        return request_body(text, self._config, self._mode, self._length_field)

    async def ask(self, body: dict[str, Any]) -> Answer:
        """Send one request.

        Raises:
            RequestFailedError: there is no answer to this request; another may have one.
            UserError: no request can succeed: key, model, address or quota are wrong.
        """
        key = hashlib.sha256(encode_body(body)).hexdigest()
        try:
            # The client's own limit is for each read; a server may send a byte now and then.
            async with asyncio.timeout(self._config.timeout_seconds):
                response = await self._client.chat.completions.with_raw_response.create(
                    **body, extra_headers={"Idempotency-Key": key}
                )
        except (TimeoutError, openai.APITimeoutError):
            seconds = self._config.timeout_seconds
            raise RequestFailedError("timeout", f"no answer in {seconds:g} s") from None
        except openai.APIConnectionError as error:
            raise RequestFailedError("connection", self._reason(error)) from None
        except openai.APIStatusError as error:
            headers = error.response.headers
            raise self._status_failure(error.status_code, error.response.text, headers) from None
        return self._answer(response.text, body)

    def _answer(self, text: str, body: dict[str, Any]) -> Answer:
        """The completion in a response of status 200."""
        try:
            return completion(json.loads(self._clean(text)), body)
        except ValueError as error:
            # Gateways send web pages, or errors under status 200.
            raise RequestFailedError(
                "server_error", self._shortened(f"HTTP 200: {error}")
            ) from None

    def _status_failure(self, status: int, text: str, headers: Any) -> Exception:
        """What an error response means; a form refused by the server is changed at once."""
        message = f"HTTP {status}: {self._shortened(error_message(text))}"
        said = text.lower()
        if status in (400, 422) and self._take_other_form(said):
            return RequestFailedError("bad_request", message, ask_again=True)
        kind = failure_kind(status, text)
        if kind is None:
            return self._users_mistake(status, message)
        wait = retry_after_seconds(headers) if kind in ("rate_limit", "server_error") else None
        if wait is not None and wait > MAX_RETRY_AFTER_SECONDS:
            return UserError(
                f"{self._url} asks to wait {wait:,.0f} s ({message}); all answers so far are "
                "kept: run the same command again then"
            )
        return RequestFailedError(kind, message, wait_seconds=wait)

    def _take_other_form(self, said: str) -> bool:
        """Whether the refusal is about the request's form and there is another one."""
        if self._length_field == "max_tokens" and _LENGTH_FIELD.search(said):
            self._length_field = "max_completion_tokens"
            return True
        if self._config.output == "auto" and self._mode != "text" and _FORM.search(said):
            self._mode = OUTPUT_MODES[OUTPUT_MODES.index(self._mode) + 1]
            return True
        return False

    def _users_mistake(self, status: int, message: str) -> UserError:
        trouble = _HTTP_TROUBLE.get(status, "cannot serve this")
        return UserError(
            f"{self._url} {trouble} for model {self._config.model!r}: {message}; check "
            f"nuggets.llm.model, base_url and the key in {self._config.api_key_variable}"
        )

    def _reason(self, error: Exception) -> str:
        cause = error.__cause__ or error
        return self._shortened(f"{type(cause).__name__} {cause}".strip())

    def _clean(self, text: str) -> str:
        """Without the key, should the server say it."""
        secret = self._secret
        return text.replace(secret, "[key]") if len(secret) >= _SHORTEST_SECRET else text

    def _shortened(self, text: str) -> str:
        return " ".join(self._clean(text).split())[:_MESSAGE_CHARACTERS]

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def _key_from_environment(config: LlmConfig, url: str) -> str:
    key = os.environ.get(config.api_key_variable, "").strip()
    if not key and not _is_this_machine(url):
        raise UserError(
            f"no key for {url}: set the environment variable {config.api_key_variable} "
            "(to any word if the server takes requests without one)"
        )
    if not re.fullmatch(r"[!-~]*", key):
        raise UserError(
            f"the environment variable {config.api_key_variable} does not hold a key: "
            "it has blanks or characters outside ASCII"
        )
    return key


def _is_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
