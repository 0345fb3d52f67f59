"""Reads what OpenAI-compatible servers respond: completions, errors and waits."""

import email.utils
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from data_builders.nuggets.llm.outcome import Answer, FailureKind
from data_builders.nuggets.llm.requests import encode_body

# Where a response does not say what it was billed for.
_BYTES_A_TOKEN = 4

# How servers word it in error bodies, in lower case.
_TOO_LONG = re.compile(
    r"context_length|context length|context window|context size|too long|too large|too many tokens"
)
_FILTERED = re.compile(r"content_filter|content filter|content_policy|moderation|flagged")
_NO_MODEL = re.compile(r"model_not_found|model.{0,80}(?:not found|does not exist)|pinned to")
_NO_QUOTA = re.compile(r"insufficient_quota|billing")


def completion(response: Any, body: dict[str, Any]) -> Answer:
    """The answer in the JSON of a chat completion; `body` is the request's.

    Raises:
        ValueError: it is not a chat completion; says what it is.
    """
    try:
        choice = response["choices"][0]
        message = choice["message"]
        text = _content_text(message.get("content"))
        refusal, finish_reason = message.get("refusal"), choice.get("finish_reason")
    except (TypeError, KeyError, IndexError, AttributeError):
        said = error_message(json.dumps(response))
        raise ValueError(f"not a chat completion: {said}") from None
    counts = _billed_tokens(response.get("usage"))
    guesses = [_guess(encode_body(body)), _guess((text or "").encode())]
    input_tokens, output_tokens = counts or guesses
    return Answer(
        text=text,
        refusal=_text(refusal),
        finish_reason=_text(finish_reason),
        model=_text(response.get("model")),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        is_estimate=counts is None,
    )


def _billed_tokens(usage: Any) -> list[int] | None:
    """Input and output tokens; None if they are missing or no counts."""
    if not isinstance(usage, dict):
        return None
    counts = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    known = [count for count in counts if isinstance(count, int) and 0 <= count < 2**31]
    return known if len(known) == len(counts) else None


def _guess(encoded: bytes) -> int:
    return len(encoded) // _BYTES_A_TOKEN


def _content_text(content: Any) -> str | None:
    """The content, which some servers send as a list of parts; lone surrogates become `?`."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    return _text(content)


def _text(value: Any) -> str | None:
    return None if value is None else str(value).encode("utf-8", "replace").decode()


def failure_kind(status: int, text: str) -> FailureKind | None:
    """The kind of failure of an HTTP status of 400 or more; None: no request can succeed."""
    said = text.lower()
    if status in (400, 403, 422) and _FILTERED.search(said):
        return "refused"
    if status == 413 or (status in (400, 422) and _TOO_LONG.search(said)):
        return "too_long"
    if status in (401, 402, 403, 404) or (status == 400 and _NO_MODEL.search(said)):
        return None
    if status == 429:
        return None if _NO_QUOTA.search(said) else "rate_limit"
    if status in (408, 504):
        return "timeout"
    return "server_error" if status == 409 or status >= 500 else "bad_request"


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """How long a response asks to wait: Retry-After in seconds or as a date, or milliseconds."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * scale
        except ValueError:
            date = email.utils.parsedate_tz(value)
            if date is None:
                continue
            seconds = email.utils.mktime_tz(date) - time.time()
        if math.isfinite(seconds):
            return max(0.0, seconds)
    return None


def error_message(text: str) -> str:
    """The message in an error body, which is JSON at best."""
    try:
        error = json.loads(text)
        error = error.get("error", error)
        message = error if isinstance(error, str) else error.get("message") or error.get("detail")
    except (ValueError, AttributeError):
        return text
    return str(message or text)
