"""PTX kernels as event programs (ISA ch. 8, 9.7.13: barriers, mbarrier, griddepcontrol, fences)."""

from __future__ import annotations

import numpy as np

from workbench.isa.flow import ControlFlowGraph
from workbench.isa.ptx.cfg import ENDS, is_branch
from workbench.isa.ptx.dataflow import register_names, writes
from workbench.isa.ptx.model import (
    Address,
    Imm,
    Instruction,
    Operand,
    Symbol,
    TensorAddress,
    Vector,
)
from workbench.isa.ptx.values import PARAM_BASE, PtxValues
from workbench.isa.ptx.variables import TYPE_BYTES
from workbench.isa.values import Lanes, RootKind
from workbench.verify.ordering.program import Access, Condition, Event, Kind, Mode, Place, Program
from workbench.verify.ordering.quorum import Mbarriers, Name
from workbench.verify.ordering.solver import RELAXED
from workbench.verify.ordering.sums import Sums

_STRONG = frozenset(("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"))
_NOT_GLOBAL = frozenset(("shared", "shared::cta", "shared::cluster", "local", "param", "const"))
_RELEASES = frozenset(("release", "acq_rel", "sc"))
_ACQUIRES = frozenset(("acquire", "acq_rel", "sc"))
_HARMLESS_CALLS = frozenset(("vprintf", "__assertfail", "__assert_fail"))


def ptx_program(graph: ControlFlowGraph[Instruction], values: PtxValues) -> Program:
    """Build the event program of a kernel from its graph and the values of its registers."""
    translator = _Translator(graph, values)
    edges: dict[tuple[int, int], Lanes] = {}
    leaving: dict[int, Lanes] = {}
    conditions: dict[tuple[int, int], Condition] = {}
    events: list[tuple[Event, ...]] = []
    for block in graph.blocks:
        found: list[Event] = []
        for at in values.walk(block.index):
            found += translator.events(at, graph.instructions[at])
            if at == block.end - 1:
                _block_edges(graph, values, block.index, edges, leaving, conditions)
        events.append(tuple(found))
    return Program(
        threads=values.threads,
        events=tuple(events),
        successors=graph.successors,
        leaves=_ends(graph),
        places=tuple(Place(ptx_line=i.line, loc=i.loc, text=i.text) for i in graph.instructions),
        edges=edges,
        leaving=leaving,
        conditions=conditions,
        mbarriers=translator.mbarriers(),
    )


def _ends(graph: ControlFlowGraph[Instruction]) -> tuple[bool, ...]:
    """Blocks that a thread may end in; a trap ends the grid with an error, and nothing matters then."""
    last = [graph.instructions[b.end - 1].opcode if b.end > b.start else "" for b in graph.blocks]
    return tuple(leaves and opcode != "trap" for leaves, opcode in zip(graph.leaves, last, strict=True))


def _guard(values: PtxValues, i: Instruction) -> Lanes | None:
    if i.predicate is None:
        return None
    known = values.operand(i.predicate).known
    return None if known is None else known ^ np.uint64(1) if i.negated else known


def _block_edges(
    graph: ControlFlowGraph[Instruction],
    values: PtxValues,
    b: int,
    edges: dict[tuple[int, int], Lanes],
    leaving: dict[int, Lanes],
    conditions: dict[tuple[int, int], Condition],
) -> None:
    block = graph.blocks[b]
    last = graph.instructions[block.end - 1]
    if last.predicate is None:
        return
    taken = _guard(values, last)
    following = next((x.index for x in graph.blocks[b + 1 : b + 2]), None)
    if taken is None:
        for s in graph.successors[b] if len(graph.successors[b]) <= 2 else ():
            conditions[b, s] = (last.predicate.name, (s == following) == last.negated)
        return
    if last.opcode in ENDS:
        leaving[b] = taken
        if following is not None:
            edges[b, following] = taken ^ np.uint64(1)
    elif last.opcode == "bra":
        targets = [s for s in graph.successors[b] if s != following]
        if targets and following in graph.successors[b]:
            edges[b, targets[0]] = taken
            edges[b, following] = taken ^ np.uint64(1)
        if graph.leaves[b]:
            leaving[b] = taken if following is not None else taken ^ np.uint64(1)


class _Translator:
    def __init__(self, graph: ControlFlowGraph[Instruction], values: PtxValues) -> None:
        self.graph, self.values = graph, values
        self._sums = Sums(graph, values)
        self._names: dict[int, Name] = {}
        self._arrivals: dict[int, int] = {}
        self._expected: dict[Name, int] = {}

    def mbarriers(self) -> Mbarriers:
        """What was seen of mbarriers, when all events have been asked for."""
        return Mbarriers(self._names, self._arrivals, self._expected)

    def _named(self, at: int, i: Instruction) -> None:
        """Remember which mbarrier an instruction is about, and how many arrivals it makes or expects."""
        place = next((n for n, o in enumerate(i.operands) if isinstance(o, Address)), None)
        address = None if place is None else i.operands[place]
        if place is None or not isinstance(address, Address):
            return
        known = self._key(address)
        part = None if known is not None else self._sums.part(address.base)
        name: Name | None = (False, known) if known is not None else None
        if part is not None:
            name = (True, part + address.offset)
        what = i.modifiers[0] if i.opcode == "mbarrier" else ""
        rest = i.operands[place + 1 :]
        if what == "init":
            if name is not None:
                count = self._constant(rest[0]) if rest else None
                old = self._expected.get(name)
                same = count is not None and old in (None, count)
                self._expected[name] = count if same and count is not None else -1
            return
        if name is not None:
            self._names[at] = name
        if what in ("arrive", "arrive_drop") and rest and "expect_tx" not in i.modifiers:
            count = self._constant(rest[0])
            self._arrivals[at] = -1 if count is None else count
        if i.opcode == "cp" and "noinc" not in i.modifiers:
            self._arrivals[at] = -1

    def events(self, at: int, i: Instruction) -> list[Event]:
        """Events of one instruction; the values must stand before it."""
        changes = [
            Event(Kind.REDEFINE, at, condition=(name, True))
            for name in register_names(self.graph).writes[at]
            if self.values.kernel.registers.get(name) == "pred"
        ]
        found = self._kind(i)
        if i.opcode == "mbarrier" or (found is not None and found[0] is Kind.MBARRIER_ARRIVE):
            self._named(at, i)
        if found is None:
            return changes
        kind, access, key, count = found
        guard = _guard(self.values, i)
        branch = is_branch(i) or i.opcode in ENDS
        guarded = i.predicate is not None and guard is None and not branch
        condition = (i.predicate.name, not i.negated) if i.predicate is not None and guarded else None
        return [Event(kind, at, guard, guarded, access, key, count, condition=condition), *changes]

    def _kind(self, i: Instruction) -> tuple[Kind, Access | None, int | None, int | None] | None:
        m = i.modifiers
        match i.opcode:
            case "griddepcontrol":
                return (Kind.WAIT if m == ("wait",) else Kind.TRIGGER), None, None, None
            case "bar" | "barrier":
                return self._barrier(i)
            case "mbarrier":
                return self._mbarrier(i)
            case "fence" | "membar":
                if set(m) & {"proxy", "mbarrier_init"} or m[:1] == ("proxy",):
                    return None
                if i.opcode == "membar" or not m or set(m) & _RELEASES or not set(m) & _ACQUIRES:
                    return Kind.RELEASE, None, None, None
                return Kind.ACQUIRE, None, None, None
            case "tcgen05" if m[:1] == ("commit",):
                return Kind.MBARRIER_ARRIVE, None, self._key(i.operands[0]), None
            case "call":
                name = next((o.name for o in i.operands if isinstance(o, Symbol)), "")
                return None if name in _HARMLESS_CALLS else (Kind.CALL, None, None, None)
        access = self._access(i)
        if access is not None:
            if access.mode is Mode.LOAD and set(m) & _ACQUIRES:
                return Kind.ACQUIRE, access, None, None
            if access.mode is not Mode.LOAD and set(m) & _RELEASES:
                return Kind.RELEASE, access, None, None
            return Kind.ACCESS, access, None, None
        if i.opcode == "cp" and "mbarrier" in m and "arrive" in m:
            return Kind.MBARRIER_ARRIVE, None, self._key(i.operands[0]), None
        return None

    def _constant(self, operand: Operand) -> int | None:
        return operand.value if isinstance(operand, Imm) else self.values.operand(operand).constant()

    def _key(self, operand: Operand) -> int | None:
        return self.values.operand(operand).constant()

    def _barrier(self, i: Instruction) -> tuple[Kind, None, int | None, int | None] | None:
        m = i.modifiers
        if m[:1] == ("warp",):
            mask = self._constant(i.operands[0]) if i.operands else None
            return Kind.WARP_BARRIER, None, None if mask is None else mask & 0xFFFFFFFF, None
        if m[:1] == ("cluster",):
            if "arrive" in m:
                return Kind.CLUSTER_ARRIVE, None, None, RELAXED if "relaxed" in m else None
            return Kind.CLUSTER_WAIT, None, None, None
        operands = i.operands[1:] if "red" in m else i.operands
        key = self._constant(operands[0]) if operands else None
        count: int | None = None
        plain = len(operands) - (1 if "red" in m else 0)  # the predicate of a reduction comes last
        if plain >= 2:
            number = self._constant(operands[1])
            count = -1 if number is None else number
        kind = Kind.BARRIER_ARRIVE if "arrive" in m else Kind.BARRIER
        return kind, None, key, count

    def _mbarrier(self, i: Instruction) -> tuple[Kind, None, int | None, None] | None:
        what = i.modifiers[0] if i.modifiers else ""
        address = next((o for o in i.operands if isinstance(o, Address)), None)
        key = None if address is None else self._key(address)
        if what in ("arrive", "arrive_drop"):
            return Kind.MBARRIER_ARRIVE, None, key, None
        if what in ("try_wait", "test_wait"):
            return Kind.MBARRIER_WAIT, None, key, None
        return None

    # -- accesses --------------------------------------------------------------------------------

    def _access(self, i: Instruction) -> Access | None:
        m = set(i.modifiers)
        match i.opcode:
            case "ld" | "ldu" | "st" | "atom" | "red":
                return self._plain(i)
            case "multimem":
                mode = Mode.LOAD if "ld_reduce" in m else Mode.STORE if "st" in m else Mode.ATOMIC
                return self._make(i, mode, self._address(i), strong=True)
            case "cp":
                return self._copy(i)
            case "discard":
                return self._make(i, Mode.STORE, self._address(i))
            case "tensormap" if "global" in m:
                return self._make(i, Mode.STORE, self._address(i))
        return None

    @staticmethod
    def _address(i: Instruction, n: int = 0) -> Address | TensorAddress | None:
        found = [o for o in i.operands if isinstance(o, (Address, TensorAddress))]
        return found[n] if n < len(found) else None

    def _plain(self, i: Instruction) -> Access | None:
        m = set(i.modifiers)
        if m & _NOT_GLOBAL or "async" in m:
            return None
        address = self._address(i)
        if address is None:
            return None
        if "global" not in m and self._elsewhere(address):
            return None
        mode = {"ld": Mode.LOAD, "ldu": Mode.LOAD, "st": Mode.STORE}.get(i.opcode, Mode.ATOMIC)
        read_only = i.opcode == "ldu" or "nc" in m or "proxy::readonly" in m
        return self._make(
            i, mode, address, read_only=read_only, strong=mode is Mode.ATOMIC or bool(m & _STRONG)
        )

    def _elsewhere(self, address: Operand) -> bool:
        """True if a generic address is certain to be shared, local or parameter memory."""
        roots = self.values.operand(address).roots
        spaces = {self.values.spaces.get(r.name) for r in roots if r.kind is RootKind.SYMBOL}
        if RootKind.PARAM_ADDRESS in {r.kind for r in roots}:
            return True
        pointers = any(r.kind is RootKind.PARAM for r in roots)
        return bool(spaces) and not pointers and spaces <= {"shared", "local", "const", "param"}

    def _copy(self, i: Instruction) -> Access | None:
        m = i.modifiers
        names = set(m)
        if m[:1] == ("reduce",):
            return self._bulk(i, "global" in names and _before(m, "global", "shared::cta"), Mode.ATOMIC)
        if "prefetch" in names:
            return None  # a prefetch into L2 returns no data; L2 is coherent
        if m[:2] == ("async", "bulk"):
            if {"commit_group", "wait_group"} & names:
                return None
            if _before(m, "global", "shared::cta") or _before(m, "global", "shared::cluster"):
                return self._bulk(i, True, Mode.STORE)
            if "global" in names:
                return self._bulk(i, False, Mode.LOAD)
            return None  # shared to distributed shared memory
        if m[:1] == ("async",) and "global" in names:
            return self._make(i, Mode.LOAD, self._address(i, 1))
        return None

    def _bulk(self, i: Instruction, to_global: bool, mode: Mode) -> Access | None:
        addresses = [o for o in i.operands if isinstance(o, (Address, TensorAddress))]
        at = addresses[0 if to_global else 1] if len(addresses) > (0 if to_global else 1) else None
        return self._make(i, mode, at)

    def _make(
        self,
        i: Instruction,
        mode: Mode,
        address: Operand | None,
        *,
        read_only: bool = False,
        strong: bool = False,
    ) -> Access:
        roots = self.values.operand(address).roots if address is not None else frozenset()
        if not isinstance(address, TensorAddress):
            return Access(mode, roots, _bytes(i), read_only, strong)
        at = self.values.operand(address).constant()
        offset = at - PARAM_BASE if at is not None and at >= PARAM_BASE else None
        return Access(mode, roots, _bytes(i), read_only, strong, True, offset)


def _before(modifiers: tuple[str, ...], first: str, second: str) -> bool:
    """True if both qualifiers are there in this order (destination, then source)."""
    return first in modifiers and second in modifiers and modifiers.index(first) < modifiers.index(second)


def _bytes(i: Instruction) -> int:
    if i.opcode == "cp":
        size = i.operands[2] if len(i.operands) > 2 and i.modifiers[:2] != ("async", "bulk") else None
        return size.value if isinstance(size, Imm) else 0
    element = next((TYPE_BYTES[m] for m in reversed(i.modifiers) if m in TYPE_BYTES), 0)
    width = next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)
    if i.opcode == "ld" and i.operands and isinstance(i.operands[0], Vector) and not writes(i):
        return 0
    return element * width
