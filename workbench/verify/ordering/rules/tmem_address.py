"""Where in tensor memory an instruction reaches: the allocation its address came from, and columns in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from workbench.isa.ptx.dataflow import writes
from workbench.isa.ptx.model import Address, Imm, Instruction, Operand, Reg
from workbench.simulator.tmem import SHAPES
from workbench.verify.ordering.view import PtxView

_DEPTH = 24
COLUMNS = 512
_ADDS = frozenset(("add", "or", "sub"))
_COPIES = frozenset(("mov", "cvt"))


@dataclass(frozen=True, slots=True)
class Extent:
    """Columns that an instruction touches."""

    base: object | None
    """The shared-memory slot that holds the allocation's address, or "absolute"; None if not known."""
    column: int | None = None
    """First column from the base; None if not known."""
    columns: int | None = None
    """Number of columns; None if not known."""

    def may_overlap(self, other: Extent) -> bool:
        """False only if both lie in one allocation and are known to be apart."""
        if self.base is None or self.base != other.base or self.column is None or other.column is None:
            return True
        mine = COLUMNS if self.columns is None else self.column + self.columns
        theirs = COLUMNS if other.columns is None else other.column + other.columns
        return self.column < theirs and other.column < mine

    def surely_overlaps(self, other: Extent) -> bool:
        """True if both are known and share a column."""
        if self.base is None or self.base != other.base or self.column is None or other.column is None:
            return False
        mine, theirs = self.column + (self.columns or 1), other.column + (other.columns or 1)
        return self.column < theirs and other.column < mine


class TensorAddresses:
    """Resolves tensor-memory addresses through the instructions that compute them."""

    def __init__(self, view: PtxView) -> None:
        self._view = view
        writers: Counter[str] = Counter()
        self._definition: dict[str, tuple[int, Instruction]] = {}
        for at, i in enumerate(view.graph.instructions):
            for r in writes(i):
                writers[r.name] += 1
                self._definition[r.name] = (at, i)
        self._single = frozenset(n for n, count in writers.items() if count == 1)
        self._found: dict[str, Extent] = {}

    def of(self, operand: Operand) -> Extent:
        """Base and column of an address operand (`[reg+offset]` or a register)."""
        match operand:
            case Address(base, offset) if isinstance(base, Reg):
                return _moved(self._register(base.name, 0), offset)
            case Reg(name):
                return self._register(name, 0)
            case Imm(value, _):
                return Extent("absolute", value & 0xFFFF)
            case _:
                return Extent(None)

    def slot(self, register: str) -> tuple[int, Instruction] | None:
        """The shared load that a register is a copy of, if there is one."""
        for _ in range(_DEPTH):
            if register not in self._single:
                return None
            at, i = self._definition[register]
            if i.opcode == "ld":
                return at, i
            source = i.operands[1] if len(i.operands) > 1 else None
            if i.opcode not in _COPIES | _ADDS or not isinstance(source, Reg):
                return None
            register = source.name
        return None

    def _register(self, name: str, depth: int) -> Extent:
        if name not in self._found:
            self._found[name] = Extent(None)  # a loop of copies has no base
            self._found[name] = self._resolve(name, depth)
        return self._found[name]

    def _resolve(self, name: str, depth: int) -> Extent:
        if name not in self._single or depth > _DEPTH:
            return Extent(None)
        known = self._view.values.operand(Reg(name)).known
        if known is not None:
            return Extent("absolute", self._column(known))
        _, i = self._definition[name]
        if i.predicate is not None:
            return Extent(None)
        if i.opcode == "ld" and any(m.startswith("shared") for m in i.modifiers):
            return self._loaded(i)
        if i.opcode in _COPIES and isinstance(i.operands[1], Reg):
            return self._register(i.operands[1].name, depth + 1)
        if i.opcode in _ADDS:
            a, b = i.operands[1], i.operands[2]
            for pointer, step in ((a, b), (b, a)):
                if not isinstance(pointer, Reg) or (i.opcode == "sub" and pointer is b):
                    continue
                found = self._register(pointer.name, depth + 1)
                if found.base is None or found.base == "absolute":
                    continue
                amount = self._view.values.operand(step).known
                column = None if amount is None else self._column(amount)
                if column is None:
                    return Extent(found.base)
                return _moved(found, -column if i.opcode == "sub" else column)
        return Extent(None)

    def _loaded(self, i: Instruction) -> Extent:
        address = i.operands[1] if len(i.operands) > 1 else None
        if not isinstance(address, Address) or not isinstance(i.operands[0], Reg):
            return Extent(None)
        at = self._view.values.operand(address).constant()
        return Extent(None) if at is None else Extent(("slot", at), 0)

    @staticmethod
    def _column(known: object) -> int | None:
        columns = np.asarray(known, dtype=np.uint64) & np.uint64(0xFFFF)
        first = int(columns[0])
        return first if (columns == first).all() else None


def _moved(extent: Extent, offset: int) -> Extent:
    if extent.column is None:
        return extent
    return Extent(extent.base, extent.column + (offset & 0xFFFF if offset >= 0 else offset))


def width(i: Instruction) -> int | None:
    """Columns that a tcgen05.ld or .st touches from its address on."""
    shape = next((m for m in i.modifiers if m in SHAPES), None)
    repeat = next((int(m[1:]) for m in i.modifiers if m[:1] == "x" and m[1:].isdigit()), None)
    if shape is None or repeat is None:
        return None
    if shape == "16x32bx2":
        split = i.operands[-1]
        return repeat + split.value if isinstance(split, Imm) else None
    return repeat * {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8}[shape]
