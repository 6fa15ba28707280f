"""Which registers a PTX instruction reads and writes, liveness, and reaching definitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workbench.isa.flow import ControlFlowGraph
from workbench.isa.ptx.model import (
    Address,
    Imm,
    Instruction,
    Negated,
    Operand,
    Pair,
    Reg,
    TensorAddress,
    Vector,
)

# Opcodes whose first operand is a source though it is no address. Where the first operand is an address
# (st, red, prefetch, cp.async, mbarrier.init, tcgen05.mma, ...) there is no register destination either.
_NO_DESTINATION = frozenset(
    ("bra", "brx", "ret", "exit", "trap", "brkpt", "pmevent", "nanosleep", "membar", "fence")
) | frozenset(
    ("griddepcontrol", "setmaxnreg", "stackrestore", "st", "red", "cp", "prefetch", "prefetchu", "stmatrix")
)


def _registers(operand: Operand) -> Iterator[Reg]:
    match operand:
        case Reg():
            yield operand
        case Vector(elements):
            for e in elements:
                yield from _registers(e)
        case Pair(first, second):
            yield from _registers(first)
            yield from _registers(second)
        case Negated(inner):
            yield from _registers(inner)
        case Address(base, _):
            if isinstance(base, Reg):
                yield base
        case TensorAddress(base, coordinates, offsets):
            yield from _registers(base)
            for e in (*coordinates, *offsets):
                yield from _registers(e)
        case _:
            return


def destinations(instruction: Instruction) -> tuple[Operand, ...]:
    """The operands that receive results: none, one, or for `call` the list of return values."""
    operands = instruction.operands
    if not operands or isinstance(operands[0], (Address, TensorAddress)):
        return ()
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode in _NO_DESTINATION:
        return ()
    if opcode in ("bar", "barrier") and "red" not in modifiers:
        return ()
    if opcode == "tcgen05" and modifiers[:1] != ("ld",):
        return ()
    if opcode == "wgmma" and modifiers[:1] != ("mma_async",):
        return ()
    if opcode == "call":
        return operands[:1] if isinstance(operands[0], Vector) else ()
    return operands[:1]


def sources(instruction: Instruction) -> tuple[Operand, ...]:
    """The operands that are read; `wgmma.mma_async` reads its accumulators too."""
    skip = len(destinations(instruction))
    if instruction.opcode == "wgmma":
        skip = 0
    return instruction.operands[skip:]


def writes(instruction: Instruction) -> tuple[Reg, ...]:
    """Registers the instruction writes, in operand order."""
    return tuple(dict.fromkeys(r for o in destinations(instruction) for r in _registers(o)))


def reads(instruction: Instruction) -> tuple[Reg, ...]:
    """Registers the instruction reads, the predicate last."""
    found = [r for o in sources(instruction) for r in _registers(o)]
    if instruction.predicate is not None:
        found.append(instruction.predicate)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class RegisterNames:
    """Names of the registers that each instruction of a kernel reads (its guard last) and writes."""

    reads: tuple[tuple[str, ...], ...]
    writes: tuple[tuple[str, ...], ...]


def register_names(graph: ControlFlowGraph[Instruction]) -> RegisterNames:
    """The names for a graph's instructions, found once a graph."""
    found: RegisterNames | None = graph.__dict__.get("_register_names")
    if found is None:
        taken: list[tuple[str, ...]] = []
        given: list[tuple[str, ...]] = []
        for i in graph.instructions:
            targets = destinations(i)
            used = _names(i.operands if i.opcode == "wgmma" else i.operands[len(targets) :])
            if i.predicate is not None:
                used[i.predicate.name] = None
            taken.append(tuple(used))
            given.append(tuple(_names(targets)))
        found = graph.__dict__["_register_names"] = RegisterNames(tuple(taken), tuple(given))
    return found


def _names(operands: tuple[Operand, ...]) -> dict[str, None]:
    found: dict[str, None] = {}
    for o in operands:
        if type(o) is Reg:
            found[o.name] = None
        elif type(o) is not Imm:
            for r in _registers(o):
                found[r.name] = None
    return found


@dataclass(frozen=True)
class Liveness:
    """Registers live at the start and end of each block."""

    live_in: tuple[frozenset[Reg], ...]
    live_out: tuple[frozenset[Reg], ...]


def liveness(graph: ControlFlowGraph[Instruction]) -> Liveness:
    """Backward liveness; a predicated write does not end a register's life."""
    n = len(graph.blocks)
    uses: list[set[Reg]] = [set() for _ in range(n)]
    kills: list[set[Reg]] = [set() for _ in range(n)]
    for block in graph.blocks:
        for instruction in graph.instructions[block.start : block.end]:
            uses[block.index].update(r for r in reads(instruction) if r not in kills[block.index])
            if instruction.predicate is None:
                kills[block.index].update(writes(instruction))
    live_in = [set(u) for u in uses]
    live_out: list[set[Reg]] = [set() for _ in range(n)]
    todo = list(range(n))
    waiting = set(todo)
    while todo:
        b = todo.pop()
        waiting.discard(b)
        out: set[Reg] = set()
        for s in graph.successors[b]:
            out |= live_in[s]
        live_out[b] = out
        new = uses[b] | (out - kills[b])
        if len(new) != len(live_in[b]):
            live_in[b] = new
            for p in graph.predecessors[b]:
                if p not in waiting:
                    waiting.add(p)
                    todo.append(p)
    return Liveness(tuple(map(frozenset, live_in)), tuple(map(frozenset, live_out)))


def reaching_definitions(
    graph: ControlFlowGraph[Instruction],
) -> tuple[dict[Reg, frozenset[int]], ...]:
    """For each instruction, the definitions (instruction indices) that reach each register it reads.

    A register with no entry, or with an empty set, is read before any write on every path.
    A predicated definition does not hide the ones before it.
    """
    n = len(graph.blocks)
    generated: list[dict[Reg, frozenset[int]]] = [{} for _ in range(n)]
    killed: list[set[Reg]] = [set() for _ in range(n)]
    for block in graph.blocks:
        state = generated[block.index]
        for at in range(block.start, block.end):
            _define(graph.instructions[at], at, state, killed[block.index])
    entering: list[dict[Reg, frozenset[int]]] = [{} for _ in range(n)]
    leaving = [dict(g) for g in generated]
    todo = list(reversed(graph.reverse_postorder))
    waiting = set(todo)
    while todo:
        b = todo.pop()
        waiting.discard(b)
        state = {}
        for p in graph.predecessors[b]:
            for r, where in leaving[p].items():
                state[r] = state[r] | where if r in state else where
        entering[b] = state
        out = dict(generated[b])
        for r, where in state.items():
            if r not in killed[b]:
                out[r] = out[r] | where if r in out else where
        if out != leaving[b]:
            leaving[b] = out
            for s in graph.successors[b]:
                if s not in waiting:
                    waiting.add(s)
                    todo.append(s)
    result: list[dict[Reg, frozenset[int]]] = []
    for block in graph.blocks:
        state = dict(entering[block.index])
        for at in range(block.start, block.end):
            instruction = graph.instructions[at]
            result.append({r: state.get(r, frozenset()) for r in reads(instruction)})
            _define(instruction, at, state, set())
    return tuple(result)


def _define(instruction: Instruction, at: int, state: dict[Reg, frozenset[int]], killed: set[Reg]) -> None:
    for r in writes(instruction):
        if instruction.predicate is None:
            state[r] = frozenset((at,))
            killed.add(r)
        else:
            state[r] = state.get(r, frozenset()) | {at}
