"""A local OpenAI-compatible server that answers by script, faults included.

    python tests/data_builders/llm/scripted_server.py --port 0 --calls calls.jsonl

prints its address. What it answers to a text is decided by the text: `[[FAULT]]` in it names an
entry of `FAULTS`, and `[[FAULT:N]]` applies it to the first N calls for that text only. A text
without any gets the rule-based extractor's candidates. Every call is counted by text and, as soon
as its whole answer is sent, logged as a line of JSON.
"""

import argparse
import email.utils
import json
import os
import re
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from data_builders.nuggets.rules import rules

_FAULT = re.compile(r"\[\[([a-z_0-9]+)(?::(\d+))?\]\]")


def chunk(number, fault=None):
    """A text of two facts, unlike that of any other number, with a fault or without."""
    mark = f" [[{fault}]]" if fault else ""
    return (
        f"Lake {number} lies in the northern hills of Valdia{mark}. "
        f"Its {number} shores became a nature reserve in 1936."
    )


def text_of(body):
    """The text that a request is about."""
    return body["messages"][-1]["content"].removeprefix("Text:\n")


def nuggets(text):
    return rules(text)


def as_json(entries):
    return json.dumps({"nuggets": entries}, ensure_ascii=False)


# What the content of a completion is, by the name of the fault; the finish reason beside it.
CONTENTS = {
    "truncated": lambda text: (as_json(nuggets(text))[:-12], "length"),
    "truncated_early": lambda text: ('{"nuggets": [', "length"),
    "prose": lambda text: (
        f"Sure! Here are the nuggets:\n\n{as_json(nuggets(text))}\n\nAnything else?",
        "stop",
    ),
    "fence": lambda text: (f"```json\n{as_json(nuggets(text))}\n```", "stop"),
    "reversed": lambda text: (as_json(nuggets(text)[::-1]), "stop"),
    "duplicate": lambda text: (as_json(nuggets(text) * 2), "stop"),
    "rewritten": lambda text: (as_json([n.upper() for n in nuggets(text)]), "stop"),
    "empty_list": lambda text: (as_json([]), "stop"),
    "empty": lambda text: ("", "stop"),
    "null": lambda text: (None, "stop"),
    "garbage": lambda text: ("I would rather talk about the weather.", "stop"),
    "filtered": lambda text: ("", "content_filter"),
}
# Responses with an error status: status, message, code, further headers.
ERRORS = {
    "rate_limit": (429, "Rate limit reached", "rate_limit_exceeded", {"Retry-After": "0.2"}),
    "rate_limit_date": (429, "Rate limit reached", "rate_limit_exceeded", {"Retry-After": "DATE"}),
    "rate_limit_bare": (429, "Rate limit reached", "rate_limit_exceeded", {}),
    "rate_limit_long": (429, "Daily limit", "rate_limit_exceeded", {"Retry-After": "86400"}),
    "quota": (429, "You exceeded your current quota", "insufficient_quota", {}),
    "error_500": (500, "Internal error", None, {}),
    "error_503": (503, "Overloaded", None, {"Retry-After": "0.2"}),
    "unauthorized": (401, "Incorrect API key provided: KEY", "invalid_api_key", {}),
    "forbidden": (403, "Country not supported", "unsupported_country", {}),
    "moderated": (403, "Your input was flagged by moderation", None, {}),
    "no_model": (404, "The model does not exist", "model_not_found", {}),
    "too_long": (400, "maximum context length is 8192 tokens", "context_length_exceeded", {}),
    "bad_request": (400, "Something is wrong: KEY", "invalid_request_error", {}),
}
OTHERS = ("hang", "reset", "half_answer", "not_json", "html_error", "no_usage", "refusal", "echo")
FAULTS = (*CONTENTS, *ERRORS, *OTHERS)


class ScriptedServer(ThreadingHTTPServer):
    """Counts calls by text in `calls`; `refused_forms` names response formats that it refuses."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port=0, calls_file=None, delay_seconds=0.0, refused_forms=()):
        super().__init__(("127.0.0.1", port), _Handler)
        self.calls = Counter()
        self.forms = Counter()
        self.keys_seen = Counter()
        self.authorizations = Counter()
        self.times = []
        self.most_at_once = self.at_once = 0
        self.delay_seconds, self.refused_forms = delay_seconds, tuple(refused_forms)
        self.refuses_max_tokens = False
        self.lock = threading.Lock()
        self._calls_file = calls_file

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def log_answered(self, text, status):
        if self._calls_file is not None:
            line = json.dumps({"text": text, "status": status, "time": time.time()})
            with self.lock, Path(self._calls_file).open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def handle_error(self, request, client_address):
        """A client that was killed is no error of the server's."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ScriptedServer

    def log_message(self, format, *arguments):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, server = text_of(body), self.server
        form = body.get("response_format", {}).get("type", "text")
        with server.lock:
            server.calls[text] += 1
            server.forms[form] += 1
            server.keys_seen[self.headers["Idempotency-Key"]] += 1
            server.authorizations[self.headers["Authorization"]] += 1
            server.times.append(time.monotonic())
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            call = server.calls[text]
        try:
            time.sleep(server.delay_seconds)
            if form in server.refused_forms:
                self._error(400, f"response_format {form} is unavailable", "invalid_request", {})
            elif server.refuses_max_tokens and "max_tokens" in body:
                message = "Unsupported parameter: use 'max_completion_tokens' instead."
                self._error(400, message, "unsupported_parameter", {})
            else:
                self._answer(text, self._fault(text, call))
        finally:
            with server.lock:
                server.at_once -= 1

    def _fault(self, text, call):
        for name, calls in _FAULT.findall(text):
            if not calls or call <= int(calls):
                return name
        return None

    def _answer(self, text, fault):
        key = self.headers["Authorization"]
        if fault in ERRORS:
            status, message, code, headers = ERRORS[fault]
            self._error(status, message.replace("KEY", key), code, headers)
        elif fault == "hang":
            time.sleep(60)
        elif fault == "reset":
            # No linger: close sends a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        elif fault == "half_answer":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.wfile.flush()
            self.close_connection = True
        elif fault in ("not_json", "html_error"):
            page = f"<html>{key}</html>".encode()
            self._send(text, 200 if fault == "not_json" else 502, page, "text/html")
        else:
            self._complete(text, fault, key)

    def _complete(self, text, fault, key):
        content, reason = CONTENTS.get(fault, lambda text: (as_json(nuggets(text)), "stop"))(text)
        message = {"role": "assistant", "content": content, "refusal": None}
        if fault == "refusal":
            message |= {"content": None, "refusal": "I cannot help with that."}
        if fault == "echo":
            message["content"] = as_json([f"my header is {key}"])
        completion = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "scripted-2026-01-01",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        }
        if fault != "no_usage":
            used = {"prompt_tokens": 200 + len(text) // 4, "completion_tokens": len(text) // 4}
            completion["usage"] = used | {"total_tokens": sum(used.values())}
        self._send(text, 200, json.dumps(completion).encode(), "application/json")

    def _error(self, status, message, code, headers):
        body = {"error": {"message": message, "type": "error", "param": None, "code": code}}
        headers = {
            name: email.utils.formatdate(time.time() + 1.0, usegmt=True) if at == "DATE" else at
            for name, at in headers.items()
        }
        self._send(None, status, json.dumps(body).encode(), "application/json", headers)

    def _send(self, text, status, body, kind, headers=None):
        self.send_response(status)
        # A careless gateway: the key must not be found in any log of headers either.
        extra = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
        extra["X-Request-Id"] = self.headers["Authorization"]
        for name, value in extra.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        if text is not None:
            self.server.log_answered(text, status)


@contextmanager
def serve(**options):
    """A server in a thread of this process, for the time of the context."""
    server = ScriptedServer(**options)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--calls", help="file that answered calls are appended to")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer")
    arguments = parser.parse_args()
    server = ScriptedServer(arguments.port, arguments.calls, arguments.delay)
    print(server.url, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        os._exit(0)


if __name__ == "__main__":
    main()
