"""Waits in the first round of a loop: `if (k == 0) griddepcontrol.wait` is a wait for every round.

Edges that no thread takes the first time round its loops lead past a wait only to those that came by it in
an earlier round. The loops of such edges are taken twice: once for the first round, without those edges, and
once for the later ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from workbench.isa.flow import ControlFlowGraph
from workbench.isa.ptx.first import FirstValues
from workbench.isa.ptx.model import Instruction
from workbench.isa.values import Lanes
from workbench.verify.ordering.program import Condition, Event, Kind, Program

_MOST_LOOPS = 3


def waits_in_loops(program: Program, graph: ControlFlowGraph[Instruction]) -> bool:
    """Whether there is anything to look for."""
    inside = {b for body in graph.loops.values() for b in body}
    at = {b: n for n, b in enumerate(graph.reverse_postorder)}
    retreating = {(b, s) for b in at for s in graph.successors[b] if at[s] <= at[b]}
    if retreating != graph.back_edges:  # a loop with two entries
        return False
    return any(e.kind is Kind.WAIT for b in inside for e in program.events[b])


def with_first_rounds(program: Program, graph: ControlFlowGraph[Instruction], values: FirstValues) -> Program:
    """The program with the edges that some threads do not take in the first round of the loops around."""
    found: dict[tuple[int, int], Lanes] = {}
    loops = graph.loops
    around: set[int] = set()
    for b in graph.reverse_postorder:
        mine = {h for h, body in loops.items() if b in body}
        last = graph.instructions[graph.blocks[b].end - 1]
        if not mine or last.opcode != "bra" or last.predicate is None or len(graph.successors[b]) != 2:
            continue
        if (b, graph.successors[b][0]) in program.edges:
            continue
        known: Lanes | None = None
        for at in values.walk(b):
            if at == graph.blocks[b].end - 1:
                known = values.operand(last.predicate).known
        if known is None:
            continue
        taken = known ^ np.uint64(1) if last.negated else known
        following = b + 1
        for s in graph.successors[b]:
            mask = taken if s != following else taken ^ np.uint64(1)
            if not (mask != 0).all():
                found[b, s] = mask
                around |= mine
    if not found or len(around) > _MOST_LOOPS:
        return program
    return replace(program, first=found, loops={h: loops[h] for h in around})


def unrolled(program: Program) -> Program:
    """The program with each block once for every set of loops that are past their first round there."""
    if not program.first:
        return program
    loops = program.loops
    start: tuple[int, frozenset[int]] = (0, frozenset())
    number = {start: 0}
    todo = [start]
    successors: list[tuple[int, ...]] = []
    edges: dict[tuple[int, int], Lanes] = {}
    conditions: dict[tuple[int, int], Condition] = {}
    order: list[tuple[int, frozenset[int]]] = []
    while todo:
        node = todo.pop(0)
        order.append(node)
        b, later = node
        following = []
        for s in program.successors[b]:
            past = {h for h in later if s in loops[h]}
            if s in loops and b in loops[s]:
                past.add(s)
            target = (s, frozenset(past))
            if target not in number:
                number[target] = len(number)
                todo.append(target)
            n = number[target]
            following.append(n)
            masks = [m for m in (program.edges.get((b, s)),) if m is not None]
            if (b, s) in program.first and not any(b in loops[h] for h in later):
                masks.append(program.first[b, s])
            if masks:
                both = masks[0]
                for m in masks[1:]:
                    both = both & m
                edges[number[node], n] = both
            if (b, s) in program.conditions:
                conditions[number[node], n] = program.conditions[b, s]
        successors.append(tuple(following))
    events: tuple[tuple[Event, ...], ...] = tuple(program.events[b] for b, _ in order)
    leaving: Mapping[int, Lanes] = {
        n: program.leaving[b] for n, (b, _) in enumerate(order) if b in program.leaving
    }
    return replace(
        program,
        events=events,
        successors=tuple(successors),
        leaves=tuple(program.leaves[b] for b, _ in order),
        edges=edges,
        leaving=leaving,
        conditions=conditions,
        first={},
    )
