"""Constant expressions of PTX (ISA 4.6): C operators over 64-bit integers."""

from __future__ import annotations

from collections.abc import Callable

from workbench.isa.ptx.lexer import PtxSyntaxError, Tokens, is_number, literal
from workbench.isa.ptx.model import Imm

_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a) or bool(b))},
    {"&&": lambda a, b: int(bool(a) and bool(b))},
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<": lambda a, b: int(a < b),
        ">": lambda a, b: int(a > b),
        "<=": lambda a, b: int(a <= b),
        ">=": lambda a, b: int(a >= b),
    },
    {"<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63)},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": lambda a, b: a * b, "/": lambda a, b: _divide(a, b), "%": lambda a, b: a - b * _divide(a, b)},
)
OPERATORS = frozenset(op for level in _LEVELS for op in level) | {"?"}
_DEEPEST = 64


def _divide(a: int, b: int) -> int:
    if b == 0:
        raise ZeroDivisionError
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _wrap(value: int) -> int:
    """Keep a value that fits signed or unsigned 64 bits, wrap any other to signed 64 bits."""
    if -(1 << 63) <= value < 1 << 64:
        return value
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


class ConstantParser:
    """Reads one constant expression that starts at a token.

    Floating literals may be negated and nothing else.
    """

    def __init__(self, tokens: Tokens, at: int) -> None:
        self.tokens, self.at = tokens, at

    def parse(self) -> Imm:
        """Return the value; `at` is then the first token after it.

        Raises:
            PtxSyntaxError: if there is no constant expression, or it divides by zero.
        """
        return self._ternary(0)

    def _fail(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(self.tokens.line(self.at), message)

    def _integer(self, value: Imm) -> int:
        if value.kind != "i":
            raise self._fail("floating-point values cannot be used in a constant expression")
        return value.value

    def _ternary(self, depth: int) -> Imm:
        if depth > _DEEPEST:
            raise self._fail("constant expression is nested too deeply")
        condition = self._binary(0, depth)
        if self.tokens.text[self.at] != "?":
            return condition
        self.at += 1
        yes = self._ternary(depth + 1)
        if self.tokens.text[self.at] != ":":
            raise self._fail("expected ':' in a constant expression")
        self.at += 1
        no = self._ternary(depth + 1)
        return yes if self._integer(condition) else no

    def _binary(self, level: int, depth: int) -> Imm:
        if level == len(_LEVELS):
            return self._unary(depth)
        left = self._binary(level + 1, depth)
        while (op := self.tokens.text[self.at]) in _LEVELS[level]:
            if op in ("<", ">") and depth == 0:
                break  # `<N>` of a register range, not a comparison
            self.at += 1
            right = self._binary(level + 1, depth)
            try:
                left = Imm(_wrap(_LEVELS[level][op](self._integer(left), self._integer(right))))
            except ZeroDivisionError:
                raise self._fail("division by zero in a constant expression") from None
        return left

    def _unary(self, depth: int) -> Imm:
        token = self.tokens.text[self.at]
        if depth > _DEEPEST:
            raise self._fail("constant expression is nested too deeply")
        if token in ("-", "+", "!", "~"):
            self.at += 1
            value = self._unary(depth + 1)
            if token == "+":
                return value
            if token == "-" and value.kind != "i":
                return Imm(value.value ^ (1 << (31 if value.kind == "f32" else 63)), value.kind)
            number = self._integer(value)
            return Imm(_wrap({"-": -number, "~": ~number, "!": int(not number)}[token]))
        if token == "(":
            self.at += 1
            if self.tokens.text[self.at] in (".s64", ".u64"):  # a cast: (.s64) x
                signed = self.tokens.text[self.at] == ".s64"
                self.at += 1
                self._close()
                bits = self._integer(self._unary(depth + 1)) & ((1 << 64) - 1)
                return Imm(bits - (1 << 64) if signed and bits >> 63 else bits)
            inner = self._ternary(depth + 1)
            self._close()
            return inner
        if token == "WARP_SZ":
            self.at += 1
            return Imm(32)
        if not token or not is_number(token):
            raise self._fail(f"expected a number, found {token or 'the end of the text'!r}")
        try:
            value = literal(token)
        except ValueError as error:
            raise self._fail(f"bad number {token[:40]!r}: {error}") from None
        self.at += 1
        return value

    def _close(self) -> None:
        if self.tokens.text[self.at] != ")":
            raise self._fail("expected ')' in a constant expression")
        self.at += 1
