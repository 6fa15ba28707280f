"""A litmus text and places in it: the one error of the reader, and a cursor over tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from workbench.errors import ContentError


class LitmusError(ContentError):
    """A litmus text that cannot be understood; names the file and the line."""


@dataclass(frozen=True)
class Source:
    """A text and what to call it in errors."""

    name: str
    text: str

    def line(self, offset: int) -> int:
        """Line number, from 1, of an offset into the text."""
        return self.text.count("\n", 0, offset) + 1

    def fail(self, offset: int, message: str) -> NoReturn:
        """Raise LitmusError at an offset."""
        raise LitmusError(self.name, message, self.line(min(offset, len(self.text))))


def shown(text: str) -> str:
    """A piece of text as an error shows it: one line, quoted, not long."""
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= 40 else flat[:37] + "...")


_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]{1,16}|\d{1,20})(?![\w.])|([A-Za-z_]\w*)|(/\\|\\/|[=!<>]=|&&|\|\||.))", re.S
)


class Cursor:
    """Reads tokens of `source.text[start:end]` one by one; errors carry the place of the next token."""

    def __init__(self, source: Source, start: int, end: int) -> None:
        self.source, self._end = source, end
        self._tokens: list[tuple[str, int]] = []
        offset = start
        while offset < end:
            match = _TOKEN.match(source.text, offset, end)
            if match is None or not match.group().strip():
                break
            self._tokens.append((match.group().strip(), match.end() - len(match.group().lstrip())))
            offset = match.end()
        self._next = 0

    @property
    def offset(self) -> int:
        """Offset of the next token, or of the end."""
        return self._tokens[self._next][1] if self._next < len(self._tokens) else self._end

    def peek(self, ahead: int = 0) -> str:
        """A coming token; empty at the end."""
        at = self._next + ahead
        return self._tokens[at][0] if at < len(self._tokens) else ""

    def take(self) -> str:
        """The next token; empty at the end."""
        token = self.peek()
        self._next += 1
        return token

    def accept(self, *tokens: str) -> bool:
        """Take the next token if it is one of these."""
        if self.peek() and self.peek() in tokens:
            self._next += 1
            return True
        return False

    def expect(self, token: str) -> None:
        """Take the next token, which must be this one."""
        if not self.accept(token):
            self.fail(f"expected {token!r}, found {self.found()}")

    def end(self) -> None:
        """Raise LitmusError unless everything is read."""
        if self.peek():
            self.fail(f"unexpected {self.found()}")

    def found(self) -> str:
        """The next token as an error shows it."""
        return repr(self.peek()) if self.peek() else "the end"

    def word(self, what: str) -> str:
        """The next token, which must be an identifier."""
        token = self.peek()
        if not re.fullmatch(r"[A-Za-z_]\w*", token):
            self.fail(f"expected {what}, found {self.found()}")
        return self.take()

    def integer(self, what: str = "an integer") -> int:
        """The next token or two as an integer modulo 2**64."""
        negative = self.peek() == "-"
        token = self.peek(1 if negative else 0)
        if not re.fullmatch(r"0[xX][0-9a-fA-F]+|\d+", token):
            self.fail(f"expected {what}, found {self.found()}")
        if negative:
            self.take()
        self.take()
        value = int(token, 16 if token[:2].lower() == "0x" else 10)
        return (-value if negative else value) & ((1 << 64) - 1)

    def at_integer(self) -> bool:
        """True if an integer comes next."""
        token = self.peek(1 if self.peek() == "-" else 0)
        return token[:1].isdigit() and not token[:1].isalpha()

    def fail(self, message: str) -> NoReturn:
        """Raise LitmusError at the next token."""
        self.source.fail(self.offset, message)
