"""What goes to a model and what comes back, free of any vendor's types."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from workbench.artifact import stable_hash


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")


class ToolCall(_Data):
    """A call that the model asks for."""

    id: str
    name: str
    arguments: str
    """JSON as the model wrote it; it may be malformed."""


class Message(_Data):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant's message."""
    tool_call_id: str | None = None
    """Of a tool's message: the call that it answers."""


class ToolSpec(_Data):
    """A tool as the model is told of it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""


class Usage(_Data):
    """Tokens of one call."""

    prompt: int = 0
    cached: int = 0
    """Of the prompt, those read from the server's cache."""
    completion: int = 0
    estimated: bool = False
    """True if the server did not say and the numbers were estimated from the text."""

    @property
    def total(self) -> int:
        """Prompt and completion."""
        return self.prompt + self.completion

    def plus(self, other: Usage) -> Usage:
        """Both together."""
        return Usage(
            prompt=self.prompt + other.prompt,
            cached=self.cached + other.cached,
            completion=self.completion + other.completion,
            estimated=self.estimated or other.estimated,
        )


class Request(_Data):
    """One call of a model."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_output_tokens: int
    sampling: dict[str, Any] = {}
    """Temperature and the like, passed on as they are."""

    @property
    def hash(self) -> str:
        """Identity of the request; what a replay is compared by. The room for output does not count."""
        return stable_hash(self.model_dump(mode="json", exclude={"max_output_tokens"}))

    @property
    def estimated_tokens(self) -> int:
        """A guess at the prompt's tokens that errs on the high side: three bytes a token."""
        text = sum(
            len(m.content.encode(errors="replace"))
            + sum(len(c.name) + len(c.arguments.encode(errors="replace")) + 16 for c in m.tool_calls)
            for m in self.messages
        )
        tools = sum(len(t.model_dump_json()) for t in self.tools)
        return (text + tools) // 3 + 8 * len(self.messages)


class Reply(_Data):
    """What a model answered."""

    message: Message
    finish: str = "stop"
    """Why it ended: `stop`, `tool_calls`, `length`, `content_filter`, or what else a server says."""
    refusal: str = ""
    """The model's words if it declined."""
    usage: Usage
    wasted: Usage = Usage()
    """Tokens of attempts that broke off before this answer; they may have been charged for."""
    attempts: int = 1
