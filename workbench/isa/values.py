"""Abstract values of registers: what each thread of a CTA holds, where known, and where pointers come from.

Both instruction sets are evaluated in this domain, for one CTA whose shape and scalar parameters are given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from workbench.errors import WorkbenchError

MAX_THREADS = 1024
"""Most threads a CTA may have, on every architecture."""
_SHARED_ARRAYS = 4096
"""Most constants that are kept as arrays."""
Lanes = NDArray[np.uint64]
"""One value a thread of the CTA, unsigned, masked to the register's width."""


class RootKind(StrEnum):
    """Where a value was first obtained."""

    PARAM = "param"
    """Loaded from the kernel's parameters, at a byte offset of the parameter block."""
    PARAM_ADDRESS = "param-address"
    """The address of the parameter block plus an offset (tensor maps, indexed parameters)."""
    SYMBOL = "symbol"
    """The address of a shared, global, constant or local variable."""
    LOADED = "loaded"
    """Loaded from memory; `offset` is that of the parameter the address came from, None if there is none."""
    MAPPED = "mapped"
    """Made by mapa: shared memory of a CTA of the cluster, perhaps another one."""


@dataclass(frozen=True, slots=True)
class Root:
    """One origin. `offset` is a byte offset in the parameter block, or None if it varies."""

    kind: RootKind
    name: str = ""
    offset: int | None = None


LOADED = Root(RootKind.LOADED)
MAPPED = Root(RootKind.MAPPED)
NO_ROOTS: frozenset[Root] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An abstract value: `known` per thread or None, and every root it may derive from."""

    known: Lanes | None = None
    roots: frozenset[Root] = NO_ROOTS

    def same(self, other: Value) -> bool:
        """True if both say the same."""
        if self.roots != other.roots:
            return False
        if self.known is None or other.known is None:
            return self.known is other.known
        return self.known is other.known or bool(np.array_equal(self.known, other.known))

    def constant(self) -> int | None:
        """The value, if it is known and the same in every thread."""
        if self.known is None or not self.known.size or (self.known != self.known[0]).any():
            return None
        return int(self.known[0])


UNKNOWN = Value()


def join(a: Value | None, b: Value) -> Value:
    """The value on either of two paths."""
    if a is None or a.same(b):
        return b
    same = a.known is not None and b.known is not None and np.array_equal(a.known, b.known)
    return Value(a.known if same else None, a.roots | b.roots)


def loaded(roots: frozenset[Root]) -> frozenset[Root]:
    """Roots of what is loaded through an address with these roots."""
    places = {r.offset & ~7 for r in roots if r.kind is RootKind.PARAM and r.offset is not None}  # halves
    return frozenset((Root(RootKind.LOADED, "", places.pop()),)) if len(places) == 1 else frozenset((LOADED,))


def union(values: Iterable[Value]) -> frozenset[Root]:
    """Roots of a value computed from others."""
    found: frozenset[Root] = NO_ROOTS
    for v in values:
        if v.roots:
            found = found | v.roots if found else v.roots
    return found


@dataclass(frozen=True)
class Threads:
    """The threads of one CTA, in linear order.

    Raises:
        WorkbenchError: if there are none, or more than a CTA may have.
    """

    block: tuple[int, int, int]
    _arrays: dict[str | int, Lanes] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.block) < 1 or self.count > MAX_THREADS:
            shape = "x".join(map(str, self.block))
            raise WorkbenchError(f"a CTA of {shape} threads is not possible; it has 1 to {MAX_THREADS}")

    @property
    def count(self) -> int:
        """Threads in the CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def linear(self) -> Lanes:
        """Linear thread number."""
        if "linear" not in self._arrays:
            self._arrays["linear"] = np.arange(self.count, dtype=np.uint64)
        return self._arrays["linear"]

    def full(self, value: int) -> Lanes:
        """A constant in every thread; the array is shared and cannot be written to."""
        value &= (1 << 64) - 1
        found = self._arrays.get(value)
        if found is None:
            found = np.full(self.count, value, dtype=np.uint64)
            found.flags.writeable = False
            if len(self._arrays) < _SHARED_ARRAYS:
                self._arrays[value] = found
        return found

    def special(self, name: str) -> Lanes | None:
        """`tid.x`, `ntid.y`, `laneid`, `warpid` and the like; None for what a CTA does not decide."""
        x, y, z = self.block
        linear = self.linear
        match name:
            case "tid.x":
                return linear % np.uint64(x)
            case "tid.y":
                return linear // np.uint64(x) % np.uint64(y)
            case "tid.z":
                return linear // np.uint64(x * y)
            case "ntid.x" | "ntid.y" | "ntid.z":
                return self.full({"x": x, "y": y, "z": z}[name[-1]])
            case "laneid":
                return linear % np.uint64(32)
            case "warpid":
                return linear // np.uint64(32)
            case _:
                return None

    def first_lane(self, values: Lanes, lane: int = 0) -> Lanes:
        """The value of one lane of each warp, in all lanes of the warp."""
        source = self.linear // np.uint64(32) * np.uint64(32) + np.uint64(lane)
        return np.asarray(values[np.minimum(source, np.uint64(self.count - 1)).astype(np.intp)])


@dataclass(frozen=True)
class ParameterBlock:
    """The kernel's parameters as bytes; only some are literal, the others are pointers or unknown."""

    data: bytes = b""
    literal: frozenset[int] = frozenset()
    """Offsets of the bytes of `data` that are known."""

    def read(self, offset: int, size: int) -> int | None:
        """The unsigned little-endian value at an offset, if all of its bytes are known."""
        if not all(at in self.literal for at in range(offset, offset + size)):
            return None
        return int.from_bytes(self.data[offset : offset + size], "little")


def masked(values: Lanes, width: int) -> Lanes:
    """Keep the low `width` bits."""
    return values if width >= 64 else values & np.uint64((1 << width) - 1)


def signed(values: Lanes, width: int) -> NDArray[np.int64]:
    """Sign-extend from `width` bits."""
    shift = np.uint64(64 - width)
    return (values << shift).view(np.int64) >> np.int64(64 - width)


def unsigned(values: NDArray[np.int64], width: int) -> Lanes:
    """Back to the unsigned form."""
    return masked(values.view(np.uint64), width)


_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def compare(operator: str, a: Lanes, b: Lanes, width: int, is_signed: bool) -> Lanes | None:
    """0 or 1 a thread; None for an operator that is not an integer comparison."""
    function = _COMPARISONS.get(operator)
    if function is None:
        return None
    if is_signed:
        return np.asarray(function(signed(a, width), signed(b, width)), dtype=np.uint64)
    return np.asarray(function(masked(a, width), masked(b, width)), dtype=np.uint64)


def combine(operator: str, a: Lanes, b: Lanes) -> Lanes | None:
    """Boolean and, or, xor of predicates."""
    match operator:
        case "and":
            return a & b
        case "or":
            return a | b
        case "xor":
            return a ^ b
        case _:
            return None


def shift(values: Lanes, amount: Lanes, width: int, direction: str, is_signed: bool = False) -> Lanes:
    """Shift with PTX's clamping: amounts of `width` or more give zero, or the sign."""
    amount = np.minimum(amount & np.uint64(0xFFFFFFFF), np.uint64(width))
    over = amount >= width
    within = np.where(over, np.uint64(0), amount)
    if direction == "left":
        return masked(np.where(over, np.uint64(0), masked(values, width) << within), width)
    if is_signed:
        wide = signed(values, width)
        moved = np.where(over, wide >> np.int64(63), wide >> within.astype(np.int64))
        return unsigned(moved.astype(np.int64), width)
    return np.where(over, np.uint64(0), masked(values, width) >> within)
