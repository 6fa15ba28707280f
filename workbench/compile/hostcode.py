"""The host function that CuTe DSL emits, as text of MLIR's LLVM dialect, read into a small program.

One operation stands on one line. Only what host code of launches is made of is read; anything else is an
error that names it, so that a launch list is never a guess. `workbench.compile.launches` interprets it.

Values: integers, floats and pointers are Python integers (their bits, unsigned); structs and arrays are
tuples; `POISON` is an undefined scalar.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any


class HostCodeError(Exception):
    """Host code that cannot be read or run; the message names the operation."""


POISON = None
Value = Any


# Types


@dataclass(frozen=True)
class Scalar:
    """Integer, float or pointer; `kind` is one of i, f, p."""

    kind: str
    bits: int
    name: str

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return max(1, (self.bits + 7) // 8)

    @property
    def align(self) -> int:
        """Natural alignment, as in the x86-64 and AArch64 data layouts."""
        return min(16, 1 << (self.size - 1).bit_length())


@dataclass(frozen=True)
class Struct:
    """A struct in C layout (or packed)."""

    fields: tuple[Type, ...]
    packed: bool = False

    @property
    def align(self) -> int:
        """Largest alignment of a field."""
        return 1 if self.packed else max((f.align for f in self.fields), default=1)

    def offset(self, index: int) -> int:
        """Byte offset of a field."""
        at = 0
        for i, f in enumerate(self.fields):
            at = at if self.packed else -(-at // f.align) * f.align
            if i == index:
                return at
            at += f.size
        raise HostCodeError(f"struct has no field {index}")

    @property
    def size(self) -> int:
        """Bytes in memory with tail padding."""
        if not self.fields:
            return 0
        end = self.offset(len(self.fields) - 1) + self.fields[-1].size
        return -(-end // self.align) * self.align


@dataclass(frozen=True)
class Array:
    """`count` elements in a row."""

    count: int
    element: Type

    @property
    def align(self) -> int:
        """Alignment of the element."""
        return self.element.align

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self.count * self.element.size


Type = Scalar | Struct | Array

_FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_TYPE_TOKEN = re.compile(
    r"\s*(?:!llvm\.)?(ptr(?:<\d+>)?|struct<|array<|vector<|i\d+|bf16|f16|f32|f64|index|\(|\)|>|,|x|\d+|\w+)"
)
_MAX_DEPTH = 40


@cache
def parse_type(text: str) -> Type:
    """Read a type such as `!llvm.struct<(ptr<1>, i32)>`; raises HostCodeError."""
    type_, end = _type(text, 0, 0)
    if text[end:].strip():
        raise HostCodeError(f"type {text!r} is not understood")
    return type_


def _type(text: str, at: int, depth: int) -> tuple[Type, int]:
    m = _TYPE_TOKEN.match(text, at)
    if m is None or depth > _MAX_DEPTH:
        raise HostCodeError(f"type {text!r} is not understood")
    word, at = m.group(1), m.end()
    if word.startswith("ptr"):
        return Scalar("p", 64, word), at
    if word[0] == "i" and word[1:].isdigit():
        return Scalar("i", int(word[1:]), word), at
    if word in _FLOATS:
        return Scalar("f", _FLOATS[word], word), at
    if word == "struct<":
        packed = re.compile(r"\s*packed\s*").match(text, at)
        at = packed.end() if packed else at
        if text[at : at + 1] != "(":
            raise HostCodeError(f"type {text!r} is not understood")
        at += 1
        fields: list[Type] = []
        while True:
            rest = re.compile(r"\s*").match(text, at)
            at = rest.end() if rest else at
            if text[at : at + 2] == ")>":
                return Struct(tuple(fields), packed is not None), at + 2
            if fields:
                if text[at : at + 1] != ",":
                    raise HostCodeError(f"type {text!r} is not understood")
                at += 1
            field, at = _type(text, at, depth + 1)
            fields.append(field)
    if word in ("array<", "vector<"):
        count = re.compile(r"\s*(\d+)\s*x\s*").match(text, at)
        if count is None:
            raise HostCodeError(f"type {text!r} is not understood")
        element, at = _type(text, count.end(), depth + 1)
        if text[at : at + 1] != ">":
            raise HostCodeError(f"type {text!r} is not understood")
        return Array(int(count.group(1)), element), at + 1
    raise HostCodeError(f"type {text!r} is not understood")


def zero(type_: Type) -> Value:
    """The all-zero value of a type."""
    return fill(type_, 0)


def fill(type_: Type, leaf: Value) -> Value:
    """A value of `type_` whose scalars are all `leaf`."""
    if isinstance(type_, Scalar):
        return leaf
    if isinstance(type_, Struct):
        return tuple(fill(f, leaf) for f in type_.fields)
    return (fill(type_.element, leaf),) * type_.count


def encode(type_: Type, value: Value) -> bytes:
    """Bytes of a value in memory; padding and undefined scalars are zero."""
    if isinstance(type_, Scalar):
        return int(value or 0).to_bytes(type_.size, "little")
    if isinstance(type_, Array):
        return b"".join(encode(type_.element, v) for v in value)
    out = bytearray(type_.size)
    for i, f in enumerate(type_.fields):
        at = type_.offset(i)
        out[at : at + f.size] = encode(f, value[i])
    return bytes(out)


def decode(type_: Type, data: bytes) -> Value:
    """The inverse of `encode`."""
    if isinstance(type_, Scalar):
        return int.from_bytes(data[: type_.size], "little") & ((1 << type_.bits) - 1)
    if isinstance(type_, Array):
        n = type_.element.size
        return tuple(decode(type_.element, data[i * n : (i + 1) * n]) for i in range(type_.count))
    return tuple(
        decode(f, data[type_.offset(i) : type_.offset(i) + f.size]) for i, f in enumerate(type_.fields)
    )


# Operations


@dataclass(frozen=True)
class Op:
    """One operation. `name` without the dialect; what the other fields hold depends on it (see `_read`).

    Indices of a `getelementptr` are integers or pairs of a value's name and its width in bits.
    """

    name: str
    result: str | None
    operands: tuple[str, ...] = ()
    type: Type | None = None
    """Type of the result, or of what is stored."""
    source_type: Type | None = None
    """Type converted from, indexed into, or compared."""
    data: Any = None
    """Constant's value, indices, predicate, symbol, or branch targets."""
    text: str = ""


@dataclass(frozen=True)
class Block:
    """A basic block: names of its arguments and its operations, the last of which leaves it."""

    arguments: tuple[str, ...]
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Function:
    """A function; `blocks["^bb0"]` is the entry."""

    name: str
    arguments: tuple[tuple[str, Type], ...]
    blocks: dict[str, Block]


@dataclass(frozen=True)
class HostModule:
    """The functions' text by name and the string globals; functions are read when asked for."""

    functions: dict[str, tuple[int, int]]
    lines: tuple[str, ...]
    strings: dict[str, str]

    def function(self, name: str) -> Function:
        """Read one function; raises HostCodeError."""
        if name not in self.functions:
            raise HostCodeError(f"there is no host function {name!r}")
        start, end = self.functions[name]
        return _function(name, self.lines[start:end])


_SYMBOL = r'@(?:"(?P<quoted>[^"]*)"|(?P<plain>[\w$.\-]+))'
_FUNC = re.compile(rf"  llvm\.func (?:\w+ )*?{_SYMBOL}\((?P<args>.*)$")
_GLOBAL_STRING = re.compile(rf'  llvm\.mlir\.global (?:\w+ )*?{_SYMBOL}\("(?P<text>(?:[^"\\]|\\.)*)"\)')
_LABEL = re.compile(r"  (\^\w+)(?:\((.*)\))?:")
_ARGUMENT = re.compile(r"(%\w+):\s*(.*)")
_V = r"%[\w#]+"


def read_module(text: str) -> HostModule:
    """Index a module's text; raises HostCodeError if it holds no function."""
    lines = tuple(text.splitlines())
    functions: dict[str, tuple[int, int]] = {}
    strings: dict[str, str] = {}
    start: tuple[str, int] | None = None
    for i, line in enumerate(lines):
        if start is not None:
            if line == "  }":
                functions[start[0]] = (start[1], i)
                start = None
        elif line.startswith("  llvm.func") and line.endswith("{"):
            m = _FUNC.match(line)
            if m is None:
                raise HostCodeError(f"function header is not understood: {line.strip()[:120]}")
            start = (m["quoted"] or m["plain"], i)
        elif line.startswith("  llvm.mlir.global") and len(line) < 4096 and (m := _GLOBAL_STRING.match(line)):
            strings[m["quoted"] or m["plain"]] = _unescape(m["text"])
    if not functions:
        raise HostCodeError("the host module holds no function")
    return HostModule(functions, lines, strings)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-9A-Fa-f]{2})", lambda m: chr(int(m.group(1), 16)), text).rstrip("\0")


def _function(name: str, lines: tuple[str, ...]) -> Function:
    header = _FUNC.match(lines[0])
    assert header is not None
    arguments = []
    for part in split(_inside(header["args"])):
        m = _ARGUMENT.fullmatch(part)
        if m is None:
            raise HostCodeError(f"argument {part!r} of {name} is not understood")
        type_text = m.group(2).split(" {", 1)[0].strip()
        arguments.append((m.group(1), parse_type(type_text)))
    blocks: dict[str, Block] = {}
    label, names, ops = "^bb0", tuple(n for n, _ in arguments), list[Op]()
    for line in lines[1:]:
        if not line.strip():
            continue
        if m := _LABEL.match(line):
            blocks[label] = Block(names, tuple(ops))
            label, ops = m.group(1), []
            names = tuple(p.split(":", 1)[0] for p in split(m.group(2) or ""))
        else:
            ops.append(_read(line.strip()))
    blocks[label] = Block(names, tuple(ops))
    return Function(name, tuple(arguments), blocks)


def _inside(text: str) -> str:
    """Text up to the parenthesis that closes the one before it."""
    depth = 1
    for i, c in enumerate(text):
        depth += (c in "(<[{") - (c in ")>]}" and text[i - 1 : i + 1] != "->")
        if depth == 0:
            return text[:i]
    raise HostCodeError("parentheses of a function header do not match")


def split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        if c in "(<[{":
            depth += 1
        elif c in ")>]}" and text[i - 1 : i + 1] != "->":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[last:i].strip())
            last = i + 1
    tail = text[last:].strip()
    return [*parts, tail] if tail else parts


_OP = re.compile(rf"(?:(?P<result>{_V}) = )?llvm\.(?P<name>[\w.]+)(?P<rest>.*)")
_CONSTANT = re.compile(r"\((?P<value>.*?)(?: : (?P<inner>[^()]+))?\) : (?P<type>.+)")
_STRING = re.compile(r'\("(?P<text>(?:[^"\\]|\\.)*)"\) : (?P<type>.+)')
_BINARY = re.compile(rf" (?P<a>{_V}), (?P<b>{_V})(?: overflow<[^>]*>| exact)?(?: \{{.*\}})? : (?P<type>.+)")
_FLAGS_BINARY = re.compile(
    rf"(?: exact| disjoint)? (?P<a>{_V}), (?P<b>{_V})(?: overflow<[^>]*>)?(?: \{{.*\}})? : (?P<type>.+)"
)
_CAST = re.compile(rf"(?: nneg)? (?P<a>{_V})(?: overflow<[^>]*>)?(?: nneg)? : (?P<from>.+) to (?P<type>.+)")
_ICMP = re.compile(rf' "(?P<predicate>\w+)" (?P<a>{_V}), (?P<b>{_V}) : (?P<type>.+)')
_SELECT = re.compile(rf" (?P<c>{_V}), (?P<a>{_V}), (?P<b>{_V}) : i1, (?P<type>.+)")
_GEP = re.compile(
    rf"(?: inbounds)?(?:\|?\w+)* (?P<base>{_V})\[(?P<indices>[^\]]*)\] : \((?P<types>[^)]*)\)"
    r" -> (?:!llvm\.ptr(?:<\d+>)?), (?P<type>.+)"
)
_LOAD = re.compile(rf" (?P<a>{_V})(?: \{{.*\}})? : !llvm\.ptr(?:<\d+>)? -> (?P<type>.+)")
_STORE = re.compile(rf" (?P<v>{_V}), (?P<a>{_V})(?: \{{.*\}})? : (?P<type>.+), !llvm\.ptr(?:<\d+>)?")
_ALLOCA = re.compile(
    rf"(?: inalloca)? (?P<n>{_V}) x (?P<type>.+?)(?: \{{.*\}})? : \(i\d+\) -> !llvm\.ptr(?:<\d+>)?"
)
_EXTRACT = re.compile(rf" (?P<a>{_V})\[(?P<indices>[\d, ]*)\] : (?P<type>.+)")
_INSERT = re.compile(rf" (?P<v>{_V}), (?P<a>{_V})\[(?P<indices>[\d, ]*)\] : (?P<type>.+)")
_CALL = re.compile(rf" {_SYMBOL}\((?P<args>[^)]*)\)(?P<rest>.*)")
_BRANCH = re.compile(r" (?P<target>\^\w+)(?:\((?P<args>.*)\))?(?: \{.*\})?")
_CONDITION = re.compile(rf" (?P<c>{_V})(?: weights\([^)]*\))?, (?P<rest>.*)")
_TARGET = re.compile(r"(?P<target>\^\w+)(?:\((?P<args>[^()]*) : .*\))?")
_SYMBOL_OF = re.compile(rf" {_SYMBOL} : ")
_TYPED = re.compile(r" : (?P<type>.+)")

BINARY = frozenset({
    "add", "sub", "mul", "udiv", "sdiv", "urem", "srem", "and", "or", "xor", "shl", "lshr", "ashr",
    "intr.umin", "intr.umax", "intr.smin", "intr.smax",
})  # fmt: skip
CASTS = frozenset({"sext", "zext", "trunc", "ptrtoint", "inttoptr", "bitcast", "addrspacecast"})


def _read(line: str) -> Op:
    m = _OP.fullmatch(line)
    if m is None:
        raise HostCodeError(f"host operation is not understood: {line[:160]}")
    name, result, rest = m["name"], m["result"], m["rest"]

    def need(pattern: re.Pattern[str], text: str = rest) -> re.Match[str]:
        found = pattern.fullmatch(text.rstrip())
        if found is None:
            raise HostCodeError(f"host operation llvm.{name} is not understood: {line[:160]}")
        return found

    if name == "mlir.constant":
        if s := _STRING.fullmatch(rest.rstrip()):
            type_ = parse_type(s["type"])
            return Op(name, result, (), type_, data=tuple(_unescape_bytes(s["text"])), text=line)
        c = need(_CONSTANT)
        type_ = parse_type(c["type"])
        return Op(name, result, (), type_, data=_constant(c["value"].strip(), type_, line), text=line)
    if name in ("mlir.zero", "mlir.poison", "mlir.undef"):
        type_ = parse_type(need(_TYPED)["type"])
        return Op(
            "mlir.constant",
            result,
            (),
            type_,
            data=fill(type_, 0 if name == "mlir.zero" else POISON),
            text=line,
        )
    if name == "mlir.addressof":
        s = _SYMBOL_OF.match(rest)
        if s is None:
            raise HostCodeError(f"host operation llvm.{name} is not understood: {line[:160]}")
        return Op(name, result, data=s["quoted"] or s["plain"], text=line)
    if name in BINARY:
        if name.startswith("intr."):
            b = re.compile(rf"\((?P<a>{_V}), (?P<b>{_V})\) : \((?P<type>[^,]+), .*").fullmatch(rest)
            if b is None:
                raise HostCodeError(f"host operation llvm.{name} is not understood: {line[:160]}")
        else:
            b = _BINARY.fullmatch(rest.rstrip()) or need(_FLAGS_BINARY)
        return Op(name, result, (b["a"], b["b"]), parse_type(b["type"]), text=line)
    if name in CASTS:
        c = need(_CAST)
        return Op(name, result, (c["a"],), parse_type(c["type"]), parse_type(c["from"]), text=line)
    if name == "icmp":
        c = need(_ICMP)
        return Op(
            name, result, (c["a"], c["b"]), Scalar("i", 1, "i1"), parse_type(c["type"]), c["predicate"], line
        )
    if name == "select":
        c = need(_SELECT)
        return Op(name, result, (c["c"], c["a"], c["b"]), parse_type(c["type"]), text=line)
    if name == "getelementptr":
        g = need(_GEP)
        widths = [t.removeprefix("i") for t in split(g["types"])[1:]]
        parts = split(g["indices"])
        if sum(i.startswith("%") for i in parts) != len(widths) or not all(w.isdigit() for w in widths):
            raise HostCodeError(f"host operation llvm.{name} is not understood: {line[:160]}")
        indices = tuple((i, int(widths.pop(0))) if i.startswith("%") else int(i) for i in parts)
        return Op(name, result, (g["base"],), Scalar("p", 64, "ptr"), parse_type(g["type"]), indices, line)
    if name == "load":
        c = need(_LOAD)
        return Op(name, result, (c["a"],), parse_type(c["type"]), text=line)
    if name == "store":
        c = need(_STORE)
        return Op(name, result, (c["v"], c["a"]), parse_type(c["type"]), text=line)
    if name == "alloca":
        c = need(_ALLOCA)
        return Op(name, result, (c["n"],), parse_type(c["type"]), text=line)
    if name == "extractvalue":
        c = need(_EXTRACT)
        return Op(name, result, (c["a"],), None, parse_type(c["type"]), _path(c["indices"]), line)
    if name == "insertvalue":
        c = need(_INSERT)
        return Op(name, result, (c["v"], c["a"]), parse_type(c["type"]), data=_path(c["indices"]), text=line)
    if name == "call":
        c = need(_CALL)
        return Op(name, result, tuple(split(c["args"])), data=c["quoted"] or c["plain"], text=line)
    if name == "br":
        c = need(_BRANCH)
        arguments = c["args"].split(" : ", 1)[0] if c["args"] else ""
        return Op(name, result, data=((c["target"], tuple(split(arguments))),), text=line)
    if name == "cond_br":
        c = need(_CONDITION)
        targets = []
        for part in split(c["rest"]):
            t = _TARGET.fullmatch(part)
            if t is None:
                raise HostCodeError(f"host operation llvm.{name} is not understood: {line[:160]}")
            targets.append((t["target"], tuple(split(t["args"] or ""))))
        if len(targets) != 2:
            raise HostCodeError(f"host operation llvm.{name} is not understood: {line[:160]}")
        return Op(name, result, (c["c"],), data=tuple(targets), text=line)
    if name == "return":
        r = re.compile(rf"(?: (?P<a>{_V}) : .+)?").fullmatch(rest)
        if r is None:
            raise HostCodeError(f"host operation llvm.{name} is not understood: {line[:160]}")
        return Op(name, None, (r["a"],) if r["a"] else (), text=line)
    if name in ("intr.trap", "unreachable"):
        return Op(name, None, text=line)
    raise HostCodeError(f"host operation llvm.{name} is not known: {line[:160]}")


def _path(text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in split(text))


def _unescape_bytes(text: str) -> bytes:
    out = re.sub(r'\\([0-9A-Fa-f]{2}|[\\"nt])', lambda m: _escape(m.group(1)), text)
    return out.encode("latin-1", errors="replace")


def _escape(code: str) -> str:
    return {"\\": "\\", '"': '"', "n": "\n", "t": "\t"}.get(code) or chr(int(code, 16))


def _constant(text: str, type_: Type, line: str) -> Value:
    if not isinstance(type_, Scalar):
        dense = re.compile(r"dense<(-?\d+)>").fullmatch(text)
        if (
            dense
            and isinstance(type_, Array)
            and isinstance(type_.element, Scalar)
            and type_.element.kind == "i"
        ):
            return (int(dense.group(1)) & ((1 << type_.element.bits) - 1),) * type_.count
        raise HostCodeError(f"constant is not understood: {line[:160]}")
    if text in ("true", "false"):
        return int(text == "true")
    try:
        if type_.kind == "f":
            return _float_bits(text, type_)
        return int(text, 0) & ((1 << type_.bits) - 1)
    except ValueError:
        raise HostCodeError(f"constant is not understood: {line[:160]}") from None


def _float_bits(text: str, type_: Scalar) -> int:
    if text.startswith("0x"):
        return int(text, 16)
    value = float(text)
    if type_.name == "bf16":  # decimal text of a bf16 is exact enough to round once through f32
        bits = int.from_bytes(struct.pack("<f", value), "little")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    code = {"f16": "<e", "f32": "<f", "f64": "<d"}[type_.name]
    return int.from_bytes(struct.pack(code, value), "little")
