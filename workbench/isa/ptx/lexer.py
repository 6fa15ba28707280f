"""Tokens of PTX text (PTX ISA, chapter 4): words with their dots, numbers, strings and punctuation."""

from __future__ import annotations

import re
import struct
from bisect import bisect_left

from workbench.errors import WorkbenchError
from workbench.isa.ptx.model import Imm

_TOKEN = re.compile(
    r"""(?:[ \t\r\n\f\v]+|//[^\n]*|/\*(?:[^*]|\*(?!/))*+\*/)*+
    (?:(
      [A-Za-z_$%][A-Za-z0-9_$%]*(?:\.[A-Za-z0-9_$]+(?:::[A-Za-z0-9_$]+)*)*   # name, opcode, %tid.x
      | \.[A-Za-z_][A-Za-z0-9_]*(?:::[A-Za-z0-9_]+)*                         # directive, type
      | 0[fF][0-9a-fA-F]{8}(?![A-Za-z0-9_$])
      | 0[dD][0-9a-fA-F]{16}(?![A-Za-z0-9_$])
      | 0[xX][0-9a-fA-F]+U?(?![A-Za-z0-9_$])
      | 0[bB][01]+U?(?![A-Za-z0-9_$])
      | (?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![A-Za-z0-9_$])
      | [0-9]+[eE][+-]?[0-9]+(?![A-Za-z0-9_$])
      | [0-9]+U?(?![A-Za-z0-9_$])
      | "[^"\n]*"
      | '(?:\\.|[^'\\\n])'
      | @@[^\n]*
      | <<|>>|<=|>=|==|!=|&&|\|\|
      | [-{}()\[\]<>,;:@!|+*/%&^~=?]
    ) | (.))?""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)

_NUMBER_START = frozenset("0123456789'")
_ESCAPES = {"n": 10, "t": 9, "r": 13, "0": 0, "\\": 92, "'": 39, '"': 34}


class PtxSyntaxError(WorkbenchError):
    """PTX text that cannot be read; `line` is 1-based."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        super().__init__(f"PTX line {line}: {message}")


class Tokens:
    """The tokens of a text; `text[i]` starts at byte `start[i]`. The last token is the empty string."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._newlines = [m.start() for m in re.finditer("\n", source)]
        self.text: list[str] = []
        self.start: list[int] = []
        append, place = self.text.append, self.start.append
        for m in _TOKEN.finditer(source):
            which = m.lastindex
            if which == 1:
                append(m[1])
                place(m.start(1))
            elif which == 2:
                raise PtxSyntaxError(self.line_at(m.start(2)), f"unexpected character {m[2]!r}")
        append("")
        place(len(source))

    def line_at(self, position: int) -> int:
        """1-based line of a position in the text."""
        return bisect_left(self._newlines, position) + 1

    def line(self, index: int) -> int:
        """1-based line of a token."""
        return self.line_at(self.start[min(index, len(self.start) - 1)])


def is_number(token: str) -> bool:
    """True for integer, float and character literals."""
    return token[:1] in _NUMBER_START or (len(token) > 1 and token[0] == "." and token[1].isdigit())


def literal(token: str) -> Imm:
    """Value of a literal token (ISA 4.5); floats become bit patterns.

    Raises:
        ValueError: if the token is no literal or does not fit 64 bits.
    """
    if token[0] == "'":
        return Imm(_ESCAPES.get(token[2], ord(token[2])) if token[1] == "\\" else ord(token[1]))
    second = token[1:2]
    if token[0] == "0" and second in ("f", "F"):
        return Imm(int(token[2:], 16), "f32")
    if token[0] == "0" and second in ("d", "D"):
        return Imm(int(token[2:], 16), "f64")
    digits = token.removesuffix("U")
    if second in ("x", "X"):
        value = int(digits, 16)
    elif second in ("b", "B"):
        value = int(digits, 2)
    elif "." in token or "e" in token or "E" in token:
        return Imm(struct.unpack("<Q", struct.pack("<d", float(token)))[0], "f64")
    elif digits[0] == "0" and len(digits) > 1:
        value = int(digits, 8)
    else:
        value = int(digits)
    if value >= 1 << 64:
        raise ValueError("does not fit 64 bits")
    return Imm(value)
