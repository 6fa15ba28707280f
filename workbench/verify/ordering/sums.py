"""The part of an address that is the same for every stage: the known terms of a sum with a computed index."""

from __future__ import annotations

from collections import Counter

from workbench.isa.flow import ControlFlowGraph
from workbench.isa.ptx.dataflow import register_names
from workbench.isa.ptx.model import Imm, Instruction, Operand, Reg, Symbol
from workbench.isa.ptx.values import PtxValues

_DEPTH = 16
_COPIES = frozenset(("mov", "cvt", "cvta", "mapa"))


class Sums:
    """Takes sums apart, by the instructions that write their terms."""

    def __init__(self, graph: ControlFlowGraph[Instruction], values: PtxValues) -> None:
        self._values = values
        self._writers: Counter[str] = Counter()
        self._definition: dict[str, Instruction] = {}
        for i, names in zip(graph.instructions, register_names(graph).writes, strict=True):
            for name in names:
                self._writers[name] += 1
                self._definition[name] = i

    def part(self, operand: Operand | None) -> int | None:
        """The known part of a sum that has a variable's address in it; None if it cannot be taken apart."""
        found = self._sum(operand, 0)
        return None if found is None or not found[1] else found[0]

    def _sum(self, operand: Operand | None, depth: int) -> tuple[int, bool] | None:
        """The known part, and whether a variable is in it."""
        if operand is None or depth > _DEPTH:
            return None
        value = self._values.operand(operand)
        known = value.constant()
        if known is not None:
            return known, bool(value.roots) or isinstance(operand, Symbol)
        if isinstance(operand, Imm) or not isinstance(operand, Reg) or self._writers[operand.name] != 1:
            return 0, False
        i = self._definition[operand.name]
        if i.opcode in _COPIES and len(i.operands) > 1:
            return self._sum(i.operands[1], depth + 1)
        if i.opcode == "add":
            a, b = self._sum(i.operands[1], depth + 1), self._sum(i.operands[2], depth + 1)
            return None if a is None or b is None else (a[0] + b[0], a[1] or b[1])
        if i.opcode == "mad" and len(i.operands) == 4:
            return self._sum(i.operands[3], depth + 1)
        return 0, False
