"""Variable declarations of PTX with their initial values (ISA 5.4)."""

from __future__ import annotations

import struct

from workbench.isa.ptx.constants import ConstantParser
from workbench.isa.ptx.lexer import PtxSyntaxError, Tokens, is_number
from workbench.isa.ptx.model import Imm, Variable

TYPE_BYTES = {
    **{f"{k}{n}": n // 8 for k in "bus" for n in (8, 16, 32, 64)},
    **{f"f{n}": n // 8 for n in (16, 32, 64)},
    "b128": 16,
    "f16x2": 4,
    "bf16": 2,
    "bf16x2": 4,
    "tf32": 4,
    "e4m3": 1,
    "e5m2": 1,
    "texref": 8,
    "samplerref": 8,
    "surfref": 8,
}
"""Size in bytes of a PTX type."""
_LARGEST_INITIAL = 1 << 28


def parse_variables(tokens: Tokens, at: int, *, extern: bool) -> tuple[list[tuple[Variable, int]], int]:
    """Read `.space [.align n] .type name[dims] [= value], ...;` from the space token on.

    Returns:
        The variables, each with the index of its name token, and the index after the `;`.
    """
    return _Declaration(tokens, at, extern).parse()


class _Declaration:
    def __init__(self, tokens: Tokens, at: int, extern: bool) -> None:
        self.tokens, self.at, self.extern = tokens, at, extern

    def _fail(self, expected: str) -> PtxSyntaxError:
        found = self.tokens.text[self.at] or "the end of the text"
        return PtxSyntaxError(self.tokens.line(self.at), f"expected {expected}, found {found[:60]!r}")

    def _constant(self) -> Imm:
        parser = ConstantParser(self.tokens, self.at)
        value = parser.parse()
        self.at = parser.at
        return value

    def parse(self) -> tuple[list[tuple[Variable, int]], int]:
        text = self.tokens.text
        space = text[self.at][1:].partition("::")[0]
        self.at += 1
        align: int | None = None
        type_: str | None = None
        width = 1
        while text[self.at].startswith(".") and not is_number(text[self.at]):
            token = text[self.at]
            self.at += 1
            if token == ".align":
                value = self._constant().value
                if value <= 0 or value & (value - 1) or value > 1 << 20:
                    self.at -= 1
                    raise self._fail("an alignment that is a power of two")
                align = value
            elif token in (".v2", ".v4", ".v8"):
                width = int(token[2])
            elif token == ".attribute":
                while text[self.at] not in (")", ""):
                    self.at += 1
                self.at += bool(text[self.at])
            elif token[1:] in TYPE_BYTES:
                type_ = token[1:]
            else:
                self.at -= 1
                raise self._fail("a type such as .b8 or .f32")
        if type_ is None:
            raise self._fail("a type such as .b8 or .f32")
        if align is None:
            align = TYPE_BYTES[type_] * width
        found: list[tuple[Variable, int]] = []
        while True:
            found.append(self._one(space, type_, align, width))
            if text[self.at] != ",":
                break
            self.at += 1
        if text[self.at] != ";":
            raise self._fail("',' or ';' after a variable")
        return found, self.at + 1

    def _one(self, space: str, type_: str, align: int, width: int) -> tuple[Variable, int]:
        text = self.tokens.text
        name_at = self.at
        name = text[self.at]
        if not name or not (name[0].isalpha() or name[0] in "_$%") or "." in name:
            raise self._fail("a variable name")
        self.at += 1
        elements: int | None = width
        while text[self.at] == "[":
            self.at += 1
            if text[self.at] == "]":
                elements = None
            else:
                extent = self._constant()
                if extent.kind != "i" or not 0 <= extent.value < 1 << 48:
                    self.at -= 1
                    raise self._fail("an array length")
                elements = elements * extent.value if elements is not None else None
            if text[self.at] != "]":
                raise self._fail("']'")
            self.at += 1
        initial: bytes | None = None
        pointers: list[tuple[int, str, int]] = []
        if text[self.at] == "=":
            self.at += 1
            data = bytearray()
            self._value(type_, data, pointers, 0)
            size = TYPE_BYTES[type_]
            if elements is None:
                elements = len(data) // size
            if len(data) > elements * size:
                raise self._fail(f"at most {elements} initial values for {name!r}")
            if elements * size > _LARGEST_INITIAL:
                raise self._fail(f"an initialised variable of at most {_LARGEST_INITIAL} bytes")
            initial = bytes(data).ljust(elements * size, b"\0")
        variable = Variable(name, space, type_, align, elements, initial, self.extern, tuple(pointers))
        return variable, name_at

    def _value(self, type_: str, data: bytearray, pointers: list[tuple[int, str, int]], depth: int) -> None:
        text = self.tokens.text
        if text[self.at] == "{":
            if depth > 16:
                raise self._fail("fewer nested initialisers")
            self.at += 1
            while text[self.at] != "}":
                self._value(type_, data, pointers, depth + 1)
                if text[self.at] == ",":
                    self.at += 1
                elif text[self.at] != "}":
                    raise self._fail("',' or '}' in an initialiser")
            self.at += 1
            return
        token = text[self.at]
        size = TYPE_BYTES[type_]
        if token and (token[0].isalpha() or token[0] in "_$%") and token != "WARP_SZ":
            self._pointer(size, data, pointers)
            return
        value = self._constant()
        data += _encode(value, type_, self.tokens.line(self.at))

    def _pointer(self, size: int, data: bytearray, pointers: list[tuple[int, str, int]]) -> None:
        text = self.tokens.text
        if size not in (4, 8):
            raise self._fail("a number (an address needs a 32- or 64-bit element)")
        name = text[self.at]
        self.at += 1
        if name == "generic" and text[self.at] == "(":
            self.at += 1
            name = text[self.at]
            if not name or not (name[0].isalpha() or name[0] in "_$%") or "." in name:
                raise self._fail("a symbol in 'generic( )'")
            self.at += 1
            if text[self.at] != ")":
                raise self._fail("')' after 'generic('")
            self.at += 1
        addend = 0
        if text[self.at] in ("+", "-"):
            addend = self._constant().value
        pointers.append((len(data), name, addend))
        data += bytes(size)


def _encode(value: Imm, type_: str, line: int) -> bytes:
    size = TYPE_BYTES[type_]
    if type_ in ("f32", "f64", "f16") and value.kind == "i":
        value = Imm(struct.unpack("<Q", struct.pack("<d", float(value.value)))[0], "f64")
    if value.kind == "i":
        return (value.value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    if value.kind == "f32" and size == 4:
        return value.value.to_bytes(4, "little")
    if value.kind == "f64" and type_ == "f32":
        number = struct.unpack("<d", value.value.to_bytes(8, "little"))[0]
        try:
            return struct.pack("<f", number)
        except OverflowError:
            return struct.pack("<f", float("inf") if number > 0 else float("-inf"))
    if value.kind == "f64" and size == 8:
        return value.value.to_bytes(8, "little")
    if value.kind == "f32" and type_ == "f64":
        return struct.pack("<d", struct.unpack("<f", value.value.to_bytes(4, "little"))[0])
    raise PtxSyntaxError(line, f"a floating-point value cannot initialise .{type_}")
