"""A chat server for tests: speaks the OpenAI API over HTTP from a script and keeps what it was sent.

A script is a list of steps, one a request; each is an answer or a function from the request to one.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A chat completion; streamed in pieces if the client asks for it."""

    text: str = ""
    calls: Sequence[tuple[str, Any]] = ()
    """Tool name and arguments; a str goes out as it is, malformed or not."""
    finish: str | None = None
    refusal: str = ""
    usage: tuple[int, int] | None = (100, 20)
    """Prompt and completion tokens; None to keep silent about them."""
    cut_after: int | None = None
    """Close the connection after so many pieces of a stream."""
    delay: float = 0.0
    piece: int = 7
    """Characters a piece."""


@dataclass(frozen=True)
class Fail:
    """An HTTP error."""

    status: int
    message: str = "no"
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Garbage:
    """Something that is no chat completion."""

    body: str = "<html>gateway</html>"
    content_type: str = "text/html"


Step = Answer | Fail | Garbage | Callable[[dict[str, Any]], "Answer | Fail | Garbage"]


class Server:
    """What the tests see of the server."""

    def __init__(self, steps: Sequence[Step], models: Sequence[str]) -> None:
        self.steps, self.models = list(steps), models
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.url = ""
        self._lock = threading.Lock()

    def next(self, request: dict[str, Any], headers: dict[str, str]) -> Answer | Fail | Garbage:
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            self.headers.append(headers)
            self.times.append(time.monotonic())
            step = self.steps[min(number, len(self.steps) - 1)]
        return step if isinstance(step, (Answer, Fail, Garbage)) else step(request)


@contextmanager
def serve(*steps: Step, models: Sequence[str] = ("test-model", "other-model")) -> Iterator[Server]:
    """Run a server with a script; the last step is repeated for further requests."""
    server = Server(steps, models)
    handler = type("Handler", (_Handler,), {"script": server})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()


class _Handler(BaseHTTPRequestHandler):
    script: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        self._json(200, {"object": "list", "data": [_model(m) for m in self.script.models]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = json.loads(body)
        step = self.script.next(request, {k.lower(): v for k, v in self.headers.items()})
        match step:
            case Fail(status, message, code, headers):
                self._json(status, {"error": {"message": message, "type": "error", "code": code}}, headers)
            case Garbage(text, kind):
                self._raw(200, text.encode(), kind, {})
            case Answer():
                time.sleep(step.delay)
                if request.get("stream"):
                    self._stream(step)
                else:
                    self._json(200, _completion(step))

    def _json(self, status: int, document: object, headers: dict[str, str] | None = None) -> None:
        self._raw(status, json.dumps(document).encode(), "application/json", headers or {})

    def _raw(self, status: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, answer: Answer) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for n, chunk in enumerate(_pieces(answer)):
            if n == answer.cut_after:
                self.close_connection = True
                self.connection.close()
                return
            self._chunk(f"data: {json.dumps(chunk)}\n\n".encode())
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tests"}


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given)


def _finish(answer: Answer) -> str:
    return answer.finish or ("tool_calls" if answer.calls else "stop")


def _usage(answer: Answer) -> dict[str, int] | None:
    if answer.usage is None:
        return None
    prompt, completion = answer.usage
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _completion(answer: Answer) -> dict[str, Any]:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": _arguments(given)}}
        for n, (name, given) in enumerate(answer.calls)
    ]
    message = {"role": "assistant", "content": answer.text or None, "refusal": answer.refusal or None}
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "finish_reason": _finish(answer)}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "test-model",
            "choices": [choice], "usage": _usage(answer)}  # fmt: skip


def _pieces(answer: Answer) -> Iterator[dict[str, Any]]:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "test-model",
                "choices": [choice]}  # fmt: skip

    yield chunk({"role": "assistant", "content": ""})
    for at in range(0, len(answer.text), answer.piece):
        yield chunk({"content": answer.text[at : at + answer.piece]})
    if answer.refusal:
        yield chunk({"refusal": answer.refusal})
    for n, (name, _) in enumerate(answer.calls):
        function = {"name": name, "arguments": ""}
        yield chunk(
            {"tool_calls": [{"index": n, "id": f"call_{n}", "type": "function", "function": function}]}
        )
    for n, (_, given) in enumerate(answer.calls):  # arguments of parallel calls may come interleaved
        text = _arguments(given)
        for at in range(0, len(text), answer.piece):
            part = {"arguments": text[at : at + answer.piece]}
            yield chunk({"tool_calls": [{"index": n, "function": part}]})
    yield chunk({}, _finish(answer))
    if (said := _usage(answer)) is not None:
        yield {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "test-model",
               "choices": [], "usage": said}  # fmt: skip
