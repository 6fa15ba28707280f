"""Predicates known in part: of one elected lane a warp, or false in some lanes whatever the rest is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from workbench.isa.ptx.dataflow import register_names
from workbench.isa.ptx.model import Instruction, Negated, Operand, Pair, Reg
from workbench.verify.ordering.program import Program
from workbench.verify.ordering.rules.participants import Who
from workbench.verify.ordering.view import PtxView

_DEPTH = 12


@dataclass(frozen=True, eq=False)
class Partly:
    """What is known of a predicate."""

    true: Who
    """Threads in which it may be true."""
    false: Who
    """Threads in which it may be false."""
    one_true: bool = False
    """At most one lane of a warp has it true (`elect.sync`)."""
    one_false: bool = False
    """At most one lane of a warp has it false."""

    def negated(self) -> Partly:
        """Its complement."""
        return Partly(self.false, self.true, self.one_false, self.one_true)


class Predicates:
    """Partial knowledge of the predicates of a kernel that one instruction writes."""

    def __init__(self, view: PtxView) -> None:
        self._view = view
        self._writers: Counter[str] = Counter()
        self._definition: dict[str, Instruction] = {}
        for i, names in zip(view.graph.instructions, register_names(view.graph).writes, strict=True):
            for name in names:
                self._writers[name] += 1
                self._definition[name] = i
        self._all = np.ones(view.threads.count, np.bool_)
        self._found: dict[str, Partly] = {}

    def of(self, name: str, depth: int = 0) -> Partly:
        """What is known of a predicate register."""
        if name not in self._found:
            self._found[name] = self._evaluate(name, depth)
        return self._found[name]

    def _evaluate(self, name: str, depth: int) -> Partly:
        anything = Partly(self._all, self._all)
        if self._writers[name] != 1 or depth > _DEPTH:
            return anything
        i = self._definition[name]
        if i.predicate is not None:
            return anything
        if i.opcode == "elect" and isinstance(i.operands[0], Pair) and i.operands[0].second == Reg(name):
            return replace(anything, one_true=True)
        known = self._view.values.operand(Reg(name)).known
        if known is not None:
            return Partly(known != 0, known == 0)
        if i.modifiers[-1:] != ("pred",) or i.opcode not in ("and", "or", "not", "mov"):
            return anything
        parts = [self._operand(o, depth + 1) for o in i.operands[1:]]
        if i.opcode == "not":
            return parts[0].negated()
        if i.opcode == "mov":
            return parts[0]
        a, b = parts
        if i.opcode == "and":
            return Partly(a.true & b.true, a.false | b.false, a.one_true or b.one_true)
        return Partly(a.true | b.true, a.false & b.false, False, a.one_false or b.one_false)

    def _operand(self, operand: Operand, depth: int) -> Partly:
        if isinstance(operand, Negated):
            return self._operand(operand.operand, depth).negated()
        if isinstance(operand, Reg):
            return self.of(operand.name, depth)
        known = self._view.values.operand(operand).known
        return Partly(self._all, self._all) if known is None else Partly(known != 0, known == 0)

    def holds(self, name: str, truth: bool) -> Partly:
        """The condition that a predicate has a truth value."""
        found = self.of(name)
        return found if truth else found.negated()


def refined(view: PtxView) -> Program:
    """The kernel's program with edges and guards narrowed to the threads that can take them at all."""
    program = view.analysis.program
    predicates = Predicates(view)
    edges = dict(program.edges)
    for edge, (name, truth) in program.conditions.items():
        who = predicates.holds(name, truth).true
        if edge not in edges and not who.all():
            edges[edge] = who.astype(np.uint64)
    events = []
    for block in program.events:
        found = []
        for e in block:
            if e.guard is None and e.guarded and e.condition is not None:
                who = predicates.holds(*e.condition).true
                e = replace(e, guard=who.astype(np.uint64)) if not who.all() else e
            found.append(e)
        events.append(tuple(found))
    return replace(program, edges=edges, events=tuple(events))


def elected_blocks(view: PtxView) -> dict[int, str]:
    """Blocks that at most one lane of a warp enters, with the predicate that elects it."""
    program, graph = view.analysis.program, view.graph
    predicates = Predicates(view)
    found: dict[int, str] = {}
    for (b, s), (name, truth) in program.conditions.items():
        if graph.predecessors[s] != (b,) or not predicates.holds(name, truth).one_true:
            continue
        for other in range(len(graph.blocks)):
            if graph.dominates(s, other):
                found.setdefault(other, name)
    return found
