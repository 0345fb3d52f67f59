"""The request for the nuggets of one text, as chat completions and batch files both send it."""

import json
import os
from typing import Any, Literal

from data_builders.nuggets.instructions import NUGGETS_SCHEMA, PROMPT_VERSION, messages
from recipes.building import LlmConfig
from recipes.errors import UserError

OutputMode = Literal["json_schema", "json_object", "text"]
OUTPUT_MODES: tuple[OutputMode, ...] = ("json_schema", "json_object", "text")
"""Structured output, strictest first."""

# OpenAI's newer models refuse the first; many servers silently ignore the second.
LengthField = Literal["max_tokens", "max_completion_tokens"]

OPENAI_URL = "https://api.openai.com/v1"
# More than any chat template adds around the turns.
_TEMPLATE_TOKENS = 64


def server_url(config: LlmConfig) -> str:
    """The server's address: the recipe's, else the environment's OPENAI_BASE_URL, else OpenAI's.

    Raises:
        UserError: the environment's has a user, password or query, which would be shown.
    """
    if config.base_url:
        return config.base_url
    url = os.environ.get("OPENAI_BASE_URL", "").strip().rstrip("/")
    if "@" in url or "?" in url:
        raise UserError("OPENAI_BASE_URL: expected an address without user, password or query")
    return url or OPENAI_URL


def request_settings(config: LlmConfig) -> dict[str, Any]:
    """Everything that decides an answer beside the text: the identity of a journal's entries.

    The output mode counts as configured: with `auto`, a server that learns to take a stricter mode
    does not make its earlier answers void.
    """
    return {
        "model": config.model,
        "server": server_url(config),
        "prompt": PROMPT_VERSION,
        "output": config.output,
        "max_output_tokens": config.max_output_tokens,
        "temperature": config.temperature,
    }


def request_body(
    text: str, config: LlmConfig, mode: OutputMode, length_field: LengthField
) -> dict[str, Any]:
    """The body of a chat completion request; lone surrogates, which UTF-8 lacks, become `?`."""
    body: dict[str, Any] = {
        "model": config.model,
        "messages": messages(text.encode("utf-8", "replace").decode()),
        length_field: config.max_output_tokens,
    }
    if config.temperature is not None:
        body["temperature"] = config.temperature
    if mode == "json_schema":
        schema = {"name": "nuggets", "strict": True, "schema": NUGGETS_SCHEMA}
        body["response_format"] = {"type": mode, "json_schema": schema}
    elif mode == "json_object":
        body["response_format"] = {"type": mode}
    return body


def encode_body(body: dict[str, Any]) -> bytes:
    """The body as UTF-8 JSON on one line."""
    return json.dumps(body, ensure_ascii=False).encode()


def most_input_tokens(body: dict[str, Any]) -> int:
    """An upper bound of what a request's input can be counted as: byte-level tokens are bytes."""
    return len(encode_body(body)) + _TEMPLATE_TOKENS
