"""SASS functions as event programs (ORDERING: the PTX to SASS table of the documentation)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from workbench.isa.flow import ControlFlowGraph
from workbench.isa.sass.dataflow import shapes, span
from workbench.isa.sass.model import (
    SassAddress,
    SassFunction,
    SassImm,
    SassInstruction,
    SassLabel,
    SassOperand,
    SassReg,
)
from workbench.isa.sass.values import Registers, SassValues
from workbench.isa.values import MAPPED, Lanes, Root
from workbench.verify.ordering.program import Access, Condition, Event, Kind, Mode, Place, Program

_ACCESSES: Mapping[str, Mode] = {
    "LDG": Mode.LOAD,
    "LD": Mode.LOAD,
    "LDGSTS": Mode.LOAD,
    "LDGMC": Mode.LOAD,
    "STG": Mode.STORE,
    "ST": Mode.STORE,
    "ATOMG": Mode.ATOMIC,
    "ATOM": Mode.ATOMIC,
    "RED": Mode.ATOMIC,
    "REDG": Mode.ATOMIC,
    "UTMALDG": Mode.LOAD,
    "UTMASTG": Mode.STORE,
    "UTMAREDG": Mode.ATOMIC,
    "UBLKCP": Mode.LOAD,
    "UBLKRED": Mode.ATOMIC,
}
_Make = Callable[..., list[Event]]
_TENSOR = frozenset(("UTMALDG", "UTMASTG", "UTMAREDG"))
_PREDICATES = [f"P{n}" for n in range(7)] + [f"UP{n}" for n in range(7)]
_EXITS = frozenset(("EXIT", "KILL"))
_WARP_MEETS = frozenset(("WARPSYNC", "BSYNC"))


def sass_program(
    graph: ControlFlowGraph[SassInstruction], values: SassValues, function: SassFunction
) -> Program:
    """Build the event program of a SASS function.

    A wait with a guard holds its whole warp, and lanes of a warp meet at WARPSYNC and BSYNC: a warp's
    instructions issue in order. Whether the source asked for that is decided on the PTX.
    """
    edges: dict[tuple[int, int], Lanes] = {}
    leaving: dict[int, Lanes] = {}
    conditions: dict[tuple[int, int], Condition] = {}
    events: list[tuple[Event, ...]] = []
    for block in graph.blocks:
        found: list[Event] = []
        for at, state in values.walk(block.index):
            i = graph.instructions[at]
            found += _event(values, state, at, i)
            if i.opcode == "CALL" and not any(
                isinstance(o, SassLabel) and o.name in function.labels for o in i.operands
            ):
                found.append(Event(Kind.CALL, at))
            changed = _PREDICATES
            if i.opcode != "CALL":
                changed = [n for n in shapes(graph)[at].writes if n.startswith(("P", "UP"))]
            found += [Event(Kind.REDEFINE, at, condition=(n, True)) for n in changed]
            if at == block.end - 1:
                _block_edges(graph, values, state, block.index, edges, leaving, conditions)
        events.append(tuple(found))
    return Program(
        threads=values.threads,
        events=tuple(events),
        successors=graph.successors,
        leaves=graph.leaves,
        places=tuple(Place(sass_offset=i.offset, loc=i.loc, text=i.text) for i in graph.instructions),
        edges=edges,
        leaving=leaving,
        conditions=conditions,
    )


def _guard(values: SassValues, state: Registers, i: SassInstruction) -> Lanes | None:
    return None if i.predicate is None else values.predicate(i.predicate, i.negated, state)


def _taken(values: SassValues, state: Registers, i: SassInstruction) -> Lanes | None:
    """Threads for which a jump is taken: its guard and its condition operand."""
    known: Lanes | None = values.threads.full(1)
    if i.predicate is not None:
        known = _guard(values, state, i)
    if "DIV" in i.modifiers or i.opcode != "BRA":
        return known if i.opcode != "BRA" else None
    for o in i.operands:
        if isinstance(o, SassReg) and o.predicate:
            condition = values.operand(o, state).known
            known = None if condition is None or known is None else known & condition
    return known


def _block_edges(
    graph: ControlFlowGraph[SassInstruction],
    values: SassValues,
    state: Registers,
    b: int,
    edges: dict[tuple[int, int], Lanes],
    leaving: dict[int, Lanes],
    conditions: dict[tuple[int, int], Condition],
) -> None:
    last = graph.instructions[graph.blocks[b].end - 1]
    if last.opcode not in ("BRA", "EXIT", "KILL"):
        return
    taken = _taken(values, state, last)
    following = b + 1 if b + 1 < len(graph.blocks) else None
    if taken is None:
        only = _only_condition(last)
        if only is not None:
            for s in graph.successors[b]:
                conditions[b, s] = (only[0], only[1] == (s != following))
        return
    if last.opcode in _EXITS:
        leaving[b] = taken
        if following in graph.successors[b] and following is not None:
            edges[b, following] = taken ^ np.uint64(1)
        return
    targets = [s for s in graph.successors[b] if s != following]
    if targets:
        edges[b, targets[0]] = taken
        if following is not None and following in graph.successors[b]:
            edges[b, following] = taken ^ np.uint64(1)


def _only_condition(i: SassInstruction) -> Condition | None:
    """The single predicate a jump hangs on: its guard, or its condition operand."""
    operands = [o for o in i.operands if isinstance(o, SassReg)]
    if "DIV" in i.modifiers or any(not o.predicate for o in operands):
        return None
    found = [(o.name, not o.negated) for o in operands if not o.constant]
    if i.predicate is not None:
        found.append((i.predicate, not i.negated))
    return found[0] if len(found) == 1 else None


def _event(values: SassValues, state: Registers, at: int, i: SassInstruction) -> list[Event]:
    guard = _guard(values, state, i)
    guarded = i.predicate is not None and guard is None

    def make(
        kind: Kind, access: Access | None = None, key: int | None = None, count: int | None = None
    ) -> list[Event]:
        condition = (i.predicate, not i.negated) if i.predicate is not None and guarded else None
        held = kind is Kind.WAIT
        return [Event(kind, at, guard, guarded, access, key, count, held, condition)]

    m = i.modifiers
    if i.opcode in _ACCESSES:
        if i.opcode in ("LD", "ST", "ATOM") and _elsewhere(values, state, i):
            return []
        return make(Kind.ACCESS, _access(values, state, i))
    match i.opcode:
        case "ACQBULK":
            return make(Kind.WAIT)
        case "PREEXIT":
            return make(Kind.TRIGGER)
        case "BAR":
            return _barrier(values, state, i, make)
        case "UCGABAR_ARV":
            return make(Kind.CLUSTER_ARRIVE)
        case "UCGABAR_WAIT":
            return make(Kind.CLUSTER_WAIT)
        case "SYNCS":
            return _mbarrier(values, state, i, make)
        case "ARRIVES" | "UTCBAR":
            return make(Kind.MBARRIER_ARRIVE, None, _key(values, state, i))
        case "MEMBAR":
            return make(Kind.RELEASE)
        case "CCTL" if "IVALL" in m:
            return make(Kind.ACQUIRE)
        case "BRA" if "DIV" in m:
            return make(Kind.WARP_BARRIER, None, 0xFFFFFFFF)
        case opcode if opcode in _WARP_MEETS:
            return make(Kind.WARP_BARRIER, None, 0xFFFFFFFF)
    return []


def _constant(values: SassValues, state: Registers, operand: SassOperand) -> int | None:
    if isinstance(operand, SassImm):
        return operand.value
    return values.operand(operand, state).constant()


def _barrier(values: SassValues, state: Registers, i: SassInstruction, make: _Make) -> list[Event]:
    operands = [o for o in i.operands if not (isinstance(o, SassReg) and o.predicate)]
    key = _constant(values, state, operands[0]) if operands else None
    count: int | None = None
    if len(operands) > 1:
        number = _constant(values, state, operands[1])
        count = -1 if number is None else number
    kind = Kind.BARRIER_ARRIVE if i.modifiers[:1] == ("ARV",) else Kind.BARRIER
    if not {"SYNC", "ARV", "RED"} & set(i.modifiers):
        return []
    return make(kind, None, key, count)


def _key(values: SassValues, state: Registers, i: SassInstruction) -> int | None:
    address = next((o for o in i.operands if isinstance(o, SassAddress)), None)
    return None if address is None else values.operand(address, state).constant()


def _mbarrier(values: SassValues, state: Registers, i: SassInstruction, make: _Make) -> list[Event]:
    if "PHASECHK" in i.modifiers:
        return make(Kind.MBARRIER_WAIT, None, _key(values, state, i))
    if "ARRIVE" in i.modifiers:
        return make(Kind.MBARRIER_ARRIVE, None, _key(values, state, i))
    return []


def _elsewhere(values: SassValues, state: Registers, i: SassInstruction) -> bool:
    """True if a generic access cannot be global: nothing in its address came from a parameter or memory."""
    address = next((o for o in i.operands if isinstance(o, SassAddress)), None)
    return address is not None and not values.operand(address, state).roots - {MAPPED}


def _access(values: SassValues, state: Registers, i: SassInstruction) -> Access:
    m = i.modifiers
    mode = _ACCESSES[i.opcode]
    addresses = [o for o in i.operands if isinstance(o, SassAddress)]
    at: SassAddress | None = addresses[0] if addresses else None
    if i.opcode == "LDGSTS" and len(addresses) > 1:
        at = addresses[1]
    roots: frozenset[Root] = frozenset() if at is None else values.operand(at, state).roots
    offset: int | None = None
    if i.opcode in ("UBLKCP", "UBLKRED") or i.opcode in _TENSOR:
        mode, roots, offset = _bulk(values, state, i, mode)
    if i.opcode == "LDGSTS":
        nbytes = 16 if "128" in m else 8 if "64" in m else 4
    else:
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
        nbytes = next((sizes[x] for x in m if x in sizes), 4)
    strong = mode is Mode.ATOMIC or "STRONG" in m or "MMIO" in m
    return Access(mode, roots, nbytes, "CONSTANT" in m, strong, i.opcode in _TENSOR, offset)


def _bulk(
    values: SassValues, state: Registers, i: SassInstruction, mode: Mode
) -> tuple[Mode, frozenset[Root], int | None]:
    """Mode, roots and, for a tensor map among the parameters, its offset there.

    `UBLKCP.S.G [shared], [global], size` loads, `.G.S` with the sides exchanged stores.

    `UTMALDG [shared, coordinates], [tensor map]` and `UTMASTG` alike have the map second.
    """
    addresses = [o for o in i.operands if isinstance(o, SassAddress)]
    store = [x for x in i.modifiers if x in ("S", "G")][:1] == ["G"]
    if i.opcode == "UBLKCP":
        mode = Mode.STORE if store else Mode.LOAD
    at = 0 if store and i.opcode not in _TENSOR else 1
    if at >= len(addresses):
        return mode, frozenset(), None
    offset = values.operand(addresses[at], state).constant() if i.opcode in _TENSOR else None
    found: frozenset[Root] = frozenset()
    for r in addresses[at].registers:
        for name in span(r.name, 2):
            if (value := state.get(name)) is not None:
                found = found | value.roots
    return mode, found, offset
