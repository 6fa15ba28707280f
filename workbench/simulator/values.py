"""What a register holds while a block is being translated, and the Python statements that compute it.

A 32-bit value may exist as several typed views of one array, a 64-bit or 32-bit value as two halves that
are joined only if someone looks at the whole, a 16-bit value as half of a 32-bit one. Keeping these apart
avoids most of the packing and unpacking that PTX spells out.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

TEMPORARY = re.compile(r"\bt\d+\b")
INTEGERS = {8: "u8", 16: "u16", 32: "u32", 64: "u64"}
FLOATS = {32: "f32", 64: "f64"}
BITS = {
    "b": 1,
    "u8": 8,
    "s8": 8,
    "u16": 16,
    "s16": 16,
    "u32": 32,
    "s32": 32,
    "f32": 32,
    "u64": 64,
    "s64": 64,
    "f64": 64,
}
NUMPY = {
    "b": "bool", "u8": "uint8", "s8": "int8", "u16": "uint16", "s16": "int16", "u32": "uint32",
    "s32": "int32",
    "u64": "uint64", "s64": "int64", "f32": "float32", "f64": "float64",
}  # fmt: skip
SHORT = {name: short for short, name in NUMPY.items()}
F32_BITS = 24
F16_BITS = 11
BF16_BITS = 8


@dataclass(slots=True)
class Value:
    """The content of a register (or of half of one).

    `views` has the names of arrays by dtype. Exactly one of `views`, `pair` and `half` is the source of the
    value, the others may be there too.
    """

    width: int
    views: dict[str, str] = field(default_factory=dict)
    pair: tuple[Value, Value] | None = None
    """Low and high half."""
    half: tuple[Value, int] | None = None
    """The wider value this is a part of, and which part: 0 low, 1 high."""
    dirty: bool = False
    """A NaN in the float view may have bits that are not PTX's."""
    number: bool = False
    """Read as f32 it is no NaN (or PTX's own): canonicalising cannot change it."""
    bits: int = F32_BITS
    """Significand bits that suffice for the value read as f32, the hidden bit included."""
    bits16: int = F16_BITS
    """The same for the f16 numbers in it."""
    finite16: bool = False
    """The f16 numbers in it are neither infinite nor NaN nor subnormal."""
    bits_bf16: int = BF16_BITS
    """Significand bits of the bf16 numbers in it: 1 for powers of two."""
    memo: dict[str, str] = field(default_factory=dict)
    """Derived arrays, for instance the f32 value of a bf16 half."""


class Fact(NamedTuple):
    """What is known of a register wherever it is read: joined over all places that write it."""

    dirty: bool = False
    raw: bool = False
    """Some writer puts bits there that must not be canonicalised as if they were a float result."""
    bits: int = 1
    bits16: int = 1
    finite16: bool = True

    @property
    def floating(self) -> bool:
        """Whether the register can be stored as floats whose NaNs are canonicalised only when someone
        looks.
        """
        return self.dirty and not self.raw

    def join(self, other: Fact) -> Fact:
        """Return what holds if either may be the case."""
        if self == other:
            return self
        return Fact(
            self.dirty or other.dirty,
            self.raw or other.raw,
            max(self.bits, other.bits),
            max(self.bits16, other.bits16),
            self.finite16 and other.finite16,
        )

    @staticmethod
    def of(value: Value) -> Fact:
        """Return the facts of a value; of a 64-bit value in halves those that hold for both."""
        if value.pair is not None and value.half is None and not value.views:
            halves = Fact.of(value.pair[0]).join(Fact.of(value.pair[1]))
            return (
                halves if value.width == 64 else Fact(False, True, F32_BITS, halves.bits16, halves.finite16)
            )
        return Fact(
            value.dirty, not value.dirty and not value.number, value.bits, value.bits16, value.finite16
        )


def product_bits(x: int, y: int) -> int:
    """Return the significand bits that hold the product of any two numbers of `x` and `y` such bits."""
    return max(x, y) if min(x, y) == 1 else x + y


def significand_bits(pattern: int) -> int:
    """Return the significand bits that the f32 with these bits needs (at least 1)."""
    fraction = pattern & 0x7FFFFF
    return 1 if fraction == 0 else F32_BITS - ((fraction & -fraction).bit_length() - 1)


def f32_of_f64(pattern: int) -> int:
    """Return the f32 bits of the f64 number with bits `pattern`."""
    number = struct.unpack("<d", pattern.to_bytes(8, "little"))[0]
    try:
        return int.from_bytes(struct.pack("<f", number), "little")
    except OverflowError:
        return 0x7F800000 | (0x80000000 if number < 0 else 0)


class Statements:
    """Python statements over temporaries `t0`, `t1`, ...; each temporary is deleted after its last use."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def new(self) -> str:
        """Return a fresh temporary."""
        self._count += 1
        return f"t{self._count}"

    def let(self, expression: str) -> str:
        """Append `t = expression` and return the temporary."""
        name = self.new()
        self.lines.append(f"{name} = {expression}")
        return name

    def let_many(self, count: int, expression: str) -> list[str]:
        """Append `t, u, ... = expression` and return the temporaries."""
        names = [self.new() for _ in range(count)]
        self.lines.append(f"{', '.join(names)}{',' if count == 1 else ''} = {expression}")
        return names

    def do(self, statement: str) -> None:
        """Append a statement."""
        self.lines.append(statement)

    def finished(self) -> list[str]:
        """Return the lines with `del` after last uses.

        Freeing early lets the allocator hand out arrays that are still in the cache; it is worth a factor
        of two.
        """
        last: dict[str, int] = {}
        for k, line in enumerate(self.lines):
            for name in TEMPORARY.findall(line):
                last[name] = k
        dead: dict[int, list[str]] = {}
        for name, k in last.items():
            dead.setdefault(k, []).append(name)
        out: list[str] = []
        for k, line in enumerate(self.lines):
            out.append(line)
            if k in dead and not line.startswith("return"):
                out.append("del " + ", ".join(dead[k]))
        return out
