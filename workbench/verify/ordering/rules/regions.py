"""Bytes of shared memory an operand points to: the variable and, where known, each thread's offset in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.isa.ptx.model import Address, Instruction, Operand, Symbol, TensorAddress
from workbench.isa.ptx.variables import TYPE_BYTES
from workbench.isa.values import Lanes, RootKind, Value
from workbench.verify.ordering.first import meet
from workbench.verify.ordering.view import PtxView, Step

SHARED = frozenset(("shared", "shared::cta", "shared::cluster"))


@dataclass(frozen=True, eq=False)
class Region:
    """Part of one shared variable. `offsets` is one byte offset a thread, None if not known."""

    symbol: str
    offsets: Lanes | None
    size: int
    """Bytes from each offset."""
    who: Lanes
    """Threads that touch it, 0 or 1."""

    def bounds(self) -> tuple[int, int] | None:
        """First byte and the one after the last, over all threads; None if not known."""
        if self.offsets is None or not (self.who != 0).any():
            return None
        used = self.offsets[self.who != 0]
        return int(used.min()), int(used.max()) + self.size


def is_shared(view: PtxView, value: Value, i: Instruction) -> bool:
    """Whether an address is certain to be in shared memory."""
    if SHARED & set(i.modifiers):
        return True
    if {"global", "local", "param", "const"} & set(i.modifiers):
        return False
    kinds = {r.kind for r in value.roots}
    spaces = {view.values.spaces.get(r.name) for r in value.roots if r.kind is RootKind.SYMBOL}
    return kinds == {RootKind.SYMBOL} and spaces == {"shared"}


def symbol_of(view: PtxView, value: Value) -> str | None:
    """The only shared variable an address may point into; None if there are several or none."""
    names = {
        r.name
        for r in value.roots
        if r.kind is RootKind.SYMBOL and view.values.spaces.get(r.name) == "shared"
    }
    return next(iter(names)) if len(names) == 1 else None


def region(view: PtxView, step: Step, value: Value, size: int) -> Region | None:
    """The bytes of a step's address in shared memory; None if the variable is not known."""
    name = symbol_of(view, value)
    if name is None:
        return None
    offsets = None
    base = view.values.operand(Symbol(name)).known
    if value.known is not None and base is not None:
        offsets = (value.known - base) & np.uint64(0xFFFFFFFF)
        if (offsets >= 1 << 20).any():
            offsets = None
    return Region(name, offsets, max(size, 1), view.executing(step))


def matrix(view: PtxView, step: Step, value: Value) -> Region | None:
    """The first bytes of a matrix that a shared-memory descriptor describes (ISA 9.7.15.5.1, 9.7.16.5.1).

    Bits 0 to 13 of a descriptor are its address divided by 16; variables start at multiples of 2**18 here.
    """
    name = symbol_of(view, value)
    if name is None:
        return None
    offsets = None
    if value.known is not None:
        offsets = (value.known & np.uint64(0x3FFF)) << np.uint64(4)
    return Region(name, offsets, 16, view.executing(step))


def overlaps(a: Region, b: Region) -> bool | None:
    """Whether two regions share bytes; None if that is not known."""
    if a.symbol != b.symbol:
        return False
    if a.offsets is None or b.offsets is None:
        return None
    return meet(a.offsets, a.who, a.size, b.offsets, b.who, b.size)


def width(i: Instruction) -> int:
    """Bytes a load or store moves a thread."""
    if i.opcode == "stmatrix" or i.opcode == "ldmatrix":
        return 16
    element = next((TYPE_BYTES[m] for m in reversed(i.modifiers) if m in TYPE_BYTES), 1)
    return element * next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)


def addresses(step: Step) -> list[tuple[Operand, Value]]:
    """Operands in brackets with their values."""
    pairs = zip(step.instruction.operands, step.values, strict=True)
    return [(o, v) for o, v in pairs if isinstance(o, (Address, TensorAddress))]
