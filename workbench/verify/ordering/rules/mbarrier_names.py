"""Names for mbarriers known only up to a stage: an array, by the constant part of its address."""

from __future__ import annotations

from collections import Counter

from workbench.isa.ptx.dataflow import writes
from workbench.isa.ptx.model import Address, Imm, Instruction, Operand, Reg, Symbol
from workbench.verify.ordering.view import PtxView

_DEPTH = 16
_COPIES = frozenset(("mov", "cvt", "cvta", "mapa"))


class MbarrierNames:
    """Equal names mean one mbarrier or one array of them; no name means that nothing is known."""

    def __init__(self, view: PtxView) -> None:
        self._view = view
        self._writers: Counter[str] = Counter()
        self._definition: dict[str, Instruction] = {}
        for i in view.graph.instructions:
            for r in writes(i):
                self._writers[r.name] += 1
                self._definition[r.name] = i

    def name(self, index: int) -> tuple[str, int] | None:
        """The name of the mbarrier that an instruction arrives at or waits for."""
        i = self._view.graph.instructions[index]
        address = next((o for o in i.operands if isinstance(o, Address)), None)
        if address is None:
            return None
        step = self._view.step(index)
        if step is not None:
            known = step.values[i.operands.index(address)].constant()
            if known is not None:
                return "mbarrier", known
        found = self._sum(address.base, 0)
        return None if found is None or not found[1] else ("array", found[0] + address.offset)

    def _sum(self, operand: Operand | None, depth: int) -> tuple[int, bool] | None:
        """The known part of a sum, and whether a shared variable is in it; None if it cannot be taken "
        "apart."""
        if operand is None or depth > _DEPTH:
            return None
        value = self._view.values.operand(operand)
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
