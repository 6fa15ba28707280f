"""The tools an author calls, with their arguments as data: for the conversation loop and for MCP alike."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workbench.agent.desk import Desk, DeskError
from workbench.agent.model.messages import ToolCall, ToolSpec
from workbench.errors import WorkbenchError

_LONGEST = 60_000
"""Characters of an answer."""


class _Arguments(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Read(_Arguments):
    """Read the op's contract (its verifier), a template's source, the page of an ordering rule, or notes."""

    what: Literal["contract", "template", "rule", "notes"]
    name: str = ""
    """Of the template, rule or notes; notes are `cute_dsl` unless named."""


class ListSpace(_Arguments):
    """List the knobs of a template or candidate and count its valid points."""

    name: str


class EditArgument(_Arguments):
    """One replacement."""

    old: str
    """Text of the base that occurs exactly once."""
    new: str


class Submit(_Arguments):
    """Submit a candidate, a whole source or a base with edits: it is compiled, checked, and its time
    predicted.
    """

    source: str | None = None
    """The whole Python file."""
    base: str | None = None
    """A candidate (`c0-3`) or template to start from instead."""
    edits: list[EditArgument] = []
    """Made to the base's source, in order."""
    knobs: dict[str, int | str | bool] = {}
    """Knobs that differ from the default."""
    idea: str = Field(default="", max_length=2000)
    """What you try, in one line."""


class ReadReport(_Arguments):
    """Read the report of a candidate again."""

    candidate: str


class Compare(_Arguments):
    """Compare two candidates: outcome, predicted time, resources, changed lines."""

    first: str
    second: str


class WhatBounds(_Arguments):
    """Ask the cost model what bounds a candidate."""

    candidate: str


class Finish(_Arguments):
    """End the work."""

    summary: str = ""
    """What was reached and how."""
    lessons: list[str] = []
    """What the next author should know, each in one sentence."""


TOOLS: dict[str, type[_Arguments]] = {
    "read": Read,
    "list_space": ListSpace,
    "submit": Submit,
    "read_report": ReadReport,
    "compare": Compare,
    "what_bounds": WhatBounds,
    "finish": Finish,
}
"""Name to arguments; the arguments' docstring is the tool's description."""


def specs() -> tuple[ToolSpec, ...]:
    """All tools as a model is told of them."""
    found = []
    for name, arguments in TOOLS.items():
        schema = arguments.model_json_schema()
        description = schema.pop("description", "")
        found.append(ToolSpec(name=name, description=description, parameters=schema))
    return tuple(found)


def parse(call: ToolCall) -> _Arguments:
    """Read a call's arguments.

    Raises:
        DeskError: if there is no such tool or an argument is wrong; one line that says which.
    """
    if call.name not in TOOLS:
        raise DeskError(f"there is no tool {call.name!r}; there are: {', '.join(TOOLS)}")
    try:
        given: Any = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as e:
        raise DeskError(f"the arguments of {call.name} are not JSON: {e}; send the call again") from e
    if not isinstance(given, dict):
        raise DeskError(f"the arguments of {call.name} must be an object")
    try:
        return TOOLS[call.name].model_validate(given)
    except ValidationError as e:
        first = e.errors()[0]
        place = ".".join(str(p) for p in first["loc"]) or "the arguments"
        raise DeskError(f"{call.name}: {place}: {first['msg']}") from e


def answer(desk: Desk, arguments: _Arguments) -> str:
    """Answer any tool but `submit` and `finish`.

    Raises:
        DeskError: if the request cannot be met.
    """
    try:
        match arguments:
            case Read(what=what, name=name):
                text = desk.read(what, name)
            case ListSpace(name=name):
                text = desk.space(name)
            case ReadReport(candidate=name):
                text = desk.report(desk.find(name))
            case Compare(first=first, second=second):
                text = desk.compare(first, second)
            case WhatBounds(candidate=name):
                text = desk.bound(name)
            case _:
                raise DeskError(f"{type(arguments).__name__} is not answered here")
    except DeskError:
        raise
    except WorkbenchError as e:
        raise DeskError(str(e)) from e
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "\n[shortened]"
