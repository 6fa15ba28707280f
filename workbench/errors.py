"""Errors that reach the user as one line: what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WorkbenchError(Exception):
    """Bad usage or unreadable input; the command line prints the message and exits with code 2."""


class UnknownNameError(WorkbenchError):
    """A name that does not exist; the message lists the nearest ones that do."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        near = difflib.get_close_matches(name, self.known, n=3, cutoff=0.4) or self.known[:8]
        hint = f"nearest: {', '.join(near)}" if near else f"there is no {kind} here"
        super().__init__(f"unknown {kind} {name!r}; {hint}")


class ContentError(WorkbenchError):
    """A verifier, template or data file that cannot be used; names the file and, if known, the line."""

    def __init__(self, path: object, message: str, line: int | None = None) -> None:
        self.path, self.message, self.line = path, message, line
        place = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{place}: {message}")


class MissingToolError(WorkbenchError):
    """An external program or package that is absent; the message says how to install it."""


class MemoryShortageError(WorkbenchError):
    """This machine has not enough memory left; says nothing about what was being worked on."""
