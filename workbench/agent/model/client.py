"""The one module that talks to a model server: the `openai` client, against any server that speaks its API.

The client itself tries again after 429, 5xx and broken connections, as Retry-After says. An answer that
breaks off in the middle is asked for again here, and what it may have cost is counted. Whatever goes wrong in
the end is one `ModelError` with one line; the key is taken out of every message.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import openai
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from workbench.agent.model.messages import Message, Reply, Request, ToolCall, Usage
from workbench.agent.model.profile import Profile
from workbench.agent.model.provider import ContextOverflowError, ModelError

_OVERFLOW = ("context_length_exceeded", "context length", "context window", "too many tokens")
_TRANSPORT = ("httpx", "httpx2", "httpcore", "httpcore2", "h11", "ssl", "socket")
"""Packages below the client whose errors mean a broken connection."""
_LONGEST_LINE = 300


class OpenAIProvider:
    """A server behind the `openai` client.

    Args:
        profile: which model, where, and how.
        on_text: is given each piece of text as it streams in.

    Raises:
        WorkbenchError: if the environment has no key.
    """

    def __init__(self, profile: Profile, on_text: Callable[[str], None] = lambda text: None) -> None:
        self.profile, self._on_text = profile, on_text
        self._key = profile.api_key()
        self._client = OpenAI(
            api_key=self._key,
            base_url=profile.base_url,
            max_retries=profile.retries,
            timeout=profile.timeout_seconds,
        )

    def complete(self, request: Request, chain: int, turn: int) -> Reply:
        """Answer one request; see `Provider`."""
        wasted = Usage()
        for attempt in range(1, self.profile.retries + 2):
            partial, last = _Partial(), attempt > self.profile.retries
            try:
                self._ask(request, partial)
            except Exception as e:
                wasted = wasted.plus(partial.cost(request))
                # Before the first piece the client has tried again itself.
                if last or not partial.begun or isinstance(e, openai.APIStatusError):
                    raise self._translated(e, partial.begun, wasted) from e
                continue
            if partial.finish is not None:
                return partial.reply(request, wasted, attempt)
            wasted = wasted.plus(partial.cost(request))  # the stream ended without an end
            if last:
                raise ModelError(f"the server at {self._where} broke off its answer {attempt} times", wasted)
        raise AssertionError("the last attempt returns or raises")

    @property
    def _where(self) -> str:
        return str(self._client.base_url)

    def _ask(self, request: Request, partial: _Partial) -> None:
        arguments: dict[str, Any] = {
            "model": request.model,
            "messages": [_message(m) for m in request.messages],
            "max_completion_tokens": request.max_output_tokens,
            **request.sampling,
        }
        if request.tools:
            arguments["tools"] = [
                {
                    "type": "function",
                    "function": {"name": t.name, "description": t.description, "parameters": t.parameters},
                }
                for t in request.tools
            ]
        if not self.profile.stream:
            answer = self._client.chat.completions.create(**arguments)
            partial.whole(answer)
            return
        stream = self._client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
        try:
            for chunk in stream:
                piece = partial.add(chunk)
                if piece:
                    self._on_text(piece)
        finally:
            stream.close()

    def _translated(self, error: Exception, begun: bool, wasted: Usage) -> ModelError:
        """One line for whatever went wrong."""
        model, tries = self.profile.model, self.profile.retries + 1
        said = str(getattr(error, "message", error))
        code = str(getattr(error, "code", "") or "")
        server = f"the server at {self._where}"
        match error:
            case openai.AuthenticationError() | openai.PermissionDeniedError():
                text = f"{server} does not accept the key in {self.profile.api_key_env}: {said}"
            case openai.NotFoundError():
                text = f"{server} has no model {model!r}{self._others()}: {said}"
            case openai.BadRequestError() if any(w in f"{code} {said.lower()}" for w in _OVERFLOW):
                text = f"the conversation is too long for {model}: {said}"
                return ContextOverflowError(self._line(text), wasted)
            case openai.BadRequestError():
                text = f"{server} refuses the request: {said}"
            case openai.RateLimitError():
                text = f"{server} is out of quota or too busy, after {tries} tries: {said}"
            case openai.APIStatusError():
                text = f"{server} failed with {error.status_code}, after {tries} tries: {said}"
            case openai.APIConnectionError() if not begun:
                text = f"{server} cannot be reached: {_cause(error)}"
            case _ if _is_transport(error):
                text = f"{server} broke off its answer, after {tries} tries: {_cause(error)}"
            case openai.APIError() if not isinstance(error, openai.APIResponseValidationError):
                text = f"{server} failed: {said}"
            case _:
                text = f"{server} sent something that is no chat completion: {type(error).__name__}: {said}"
        return ModelError(self._line(text), wasted)

    def _others(self) -> str:
        """Names of models that the server has, for the message about one that it does not."""
        try:
            names = sorted(m.id for m in self._client.with_options(max_retries=0, timeout=10).models.list())
        except Exception:  # this only embellishes a message
            return ""
        near = difflib.get_close_matches(self.profile.model, names, n=3, cutoff=0.3) or names[:3]
        return f" (it has {', '.join(near)})" if near else ""

    def _line(self, text: str) -> str:
        """One line without the key."""
        line = " ".join(text.replace(self._key, "***").split())
        return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"


class _Partial:
    """An answer while it comes in."""

    def __init__(self) -> None:
        self.begun = False
        self.finish: str | None = None
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._usage: Usage | None = None

    def add(self, chunk: Any) -> str:
        """Take in a piece of a stream; returns its text."""
        self.begun = True
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage)
        if not chunk.choices:
            return ""
        choice = chunk.choices[0]
        self.finish = choice.finish_reason or self.finish
        delta = choice.delta
        if delta is None:
            return ""
        self._take(delta.content, delta.refusal if hasattr(delta, "refusal") else None)
        for call in delta.tool_calls or ():
            held = self._calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            held["id"] = held["id"] or call.id or ""
            if call.function is not None:
                held["name"] += call.function.name or ""
                held["arguments"] += call.function.arguments or ""
        return delta.content or ""

    def whole(self, answer: Any) -> None:
        """Take in an answer that came in one piece."""
        self.begun = True
        if answer.usage is not None:
            self._usage = _usage(answer.usage)
        choice = answer.choices[0]
        self.finish = choice.finish_reason or "stop"
        self._take(choice.message.content, getattr(choice.message, "refusal", None))
        for n, call in enumerate(choice.message.tool_calls or ()):
            self._calls[n] = {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}

    def _take(self, text: str | None, refusal: str | None) -> None:
        if text:
            self._text.append(text)
        if refusal:
            self._refusal.append(refusal)

    def cost(self, request: Request) -> Usage:
        """What an answer that broke off may have cost: what the server said, or a guess on the high side."""
        if not self.begun:
            return Usage()
        if self._usage is not None:
            return self._usage
        written = sum(map(len, self._text)) + sum(len(c["arguments"]) for c in self._calls.values())
        return Usage(prompt=request.estimated_tokens, completion=written // 3 + 1, estimated=True)

    def reply(self, request: Request, wasted: Usage, attempts: int) -> Reply:
        """The finished answer."""
        calls = tuple(
            ToolCall(id=c["id"] or f"call_{n}", name=c["name"], arguments=c["arguments"])
            for n, c in sorted(self._calls.items())
        )
        return Reply(
            message=Message(role="assistant", content="".join(self._text), tool_calls=calls),
            finish=self.finish or "stop",
            refusal="".join(self._refusal),
            usage=self.cost(request),
            wasted=wasted,
            attempts=attempts,
        )


def _usage(said: Any) -> Usage:
    details = getattr(said, "prompt_tokens_details", None)
    return Usage(
        prompt=said.prompt_tokens or 0,
        cached=getattr(details, "cached_tokens", None) or 0,
        completion=said.completion_tokens or 0,
    )


def _message(m: Message) -> ChatCompletionMessageParam:
    if m.role == "tool":
        return {"role": "tool", "content": m.content, "tool_call_id": m.tool_call_id or ""}
    if m.role == "assistant" and m.tool_calls:
        return {
            "role": "assistant",
            "content": m.content or None,
            "tool_calls": [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in m.tool_calls
            ],
        }
    if m.role == "assistant":
        return {"role": "assistant", "content": m.content}
    if m.role == "system":
        return {"role": "system", "content": m.content}
    return {"role": "user", "content": m.content}


def _is_transport(error: Exception) -> bool:
    """True for a broken connection, whatever layer says so."""
    package = type(error).__module__.split(".")[0]
    return isinstance(error, (openai.APIConnectionError, OSError)) or package in _TRANSPORT


def _cause(error: BaseException) -> str:
    """The innermost reason of a failed connection."""
    causes: Iterable[BaseException] = _chain(error)
    texts = [str(c).strip() for c in causes if str(c).strip()]
    return texts[-1] if texts else type(error).__name__


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
