"""What each thread's PTX registers hold, where its place and the scalar parameters decide that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from workbench.isa.flow import ControlFlowGraph
from workbench.isa.ptx.dataflow import destinations, register_names, sources, writes
from workbench.isa.ptx.model import (
    Address,
    Imm,
    Instruction,
    Kernel,
    Module,
    Negated,
    Operand,
    Pair,
    Reg,
    Special,
    Symbol,
    TensorAddress,
    Vector,
)
from workbench.isa.ptx.variables import TYPE_BYTES
from workbench.isa.values import (
    LOADED,
    MAPPED,
    UNKNOWN,
    Lanes,
    ParameterBlock,
    Root,
    RootKind,
    Threads,
    Value,
    combine,
    compare,
    join,
    loaded,
    masked,
    shift,
    signed,
    union,
    unsigned,
)

PARAM_BASE = 1 << 40
"""Made-up address of the parameter block."""
_SYMBOL_BASE, _SYMBOL_STEP = 1 << 24, 1 << 20
_LOADS = frozenset(("ld", "ldu", "atom", "ldmatrix", "multimem", "tcgen05", "tex"))
_PASS = frozenset(("mov", "cvta", "cvt"))
_MOVES = frozenset(("mov", "selp", "setp", "shfl", "elect"))
_FLOATING = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64", "tf32"))
_ROUNDS = 40


class PtxValues:
    """Abstract values of a kernel's registers.

    A register that one instruction writes has one value. One that several write (joins of loops and branches,
    and hand-written code) has a value for each point: `walk` a block to ask about it.
    """

    def __init__(
        self,
        module: Module,
        kernel: Kernel,
        graph: ControlFlowGraph[Instruction],
        threads: Threads,
        parameters: ParameterBlock,
    ) -> None:
        self.kernel, self.threads, self.parameters = kernel, threads, parameters
        self._graph = graph
        self._params = {p.name: p for p in kernel.params}
        self.spaces = {v.name: v.space for v in (*module.variables, *kernel.variables)}
        self._symbols = {name: _SYMBOL_BASE + n * _SYMBOL_STEP for n, name in enumerate(sorted(self.spaces))}
        self._single: dict[str, Value] = {}
        self._here: dict[str, Value] = {}
        self._entry: dict[int, dict[str, Value]] = {0: {}}
        self._names = register_names(graph)
        writers = Counter(name for names in self._names.writes for name in names)
        self._shared = frozenset(name for name, n in writers.items() if n > 1)
        self._solve()

    def _solve(self) -> None:
        """Rounds over the blocks whose entry, or a register with one writer that they read, has changed."""
        readers = self._readers()
        stale = set(self._graph.reverse_postorder)
        for _ in range(_ROUNDS):
            for b in self._graph.reverse_postorder:
                if b not in stale:
                    continue
                stale.discard(b)
                for at in self.walk(b):
                    for name in self._keep(at):
                        stale.update(readers.get(name, ()))
                stale.update(s for s in self._graph.successors[b] if self._merge(s))
            if not stale:
                return
        self._single = {name: Value(None, v.roots) for name, v in self._single.items()}
        for state in self._entry.values():  # no fixpoint in sight: only the roots are believed
            state.update({name: Value(None, v.roots) for name, v in state.items()})

    def walk(self, block: int) -> Iterator[int]:
        """Instruction indices of a block; meanwhile `operand` answers for the point before each of them."""
        self._here = dict(self._entry.get(block, {}))
        for at in range(self._graph.blocks[block].start, self._graph.blocks[block].end):
            yield at
            if self._shared.isdisjoint(self._names.writes[at]):
                continue
            i = self._graph.instructions[at]
            for reg, value in self._results(i):
                if reg.name in self._shared:
                    self._here[reg.name] = self._guarded(i, reg.name, value)

    def _readers(self) -> dict[str, set[int]]:
        """Blocks that read each register with one writer."""
        found: dict[str, set[int]] = {}
        for block in self._graph.blocks:
            for at in range(block.start, block.end):
                for name in self._names.reads[at]:
                    if name not in self._shared:
                        found.setdefault(name, set()).add(block.index)
        return found

    @cached_property
    def _live(self) -> tuple[tuple[str, ...], ...]:
        """Registers with several writers that are live at the start of each block: the others have no value
        worth keeping there. Sets of registers are bits of one number while they are looked for."""
        names = sorted(self._shared)
        bit = {name: 1 << n for n, name in enumerate(names)}
        graph = self._graph
        uses, kills = [0] * len(graph.blocks), [0] * len(graph.blocks)
        for block in graph.blocks:
            used = killed = 0
            for at in range(block.start, block.end):
                for name in self._names.reads[at]:
                    used |= bit.get(name, 0) & ~killed
                if graph.instructions[at].predicate is None:
                    for name in self._names.writes[at]:
                        killed |= bit.get(name, 0)
            uses[block.index], kills[block.index] = used, killed
        live = list(uses)
        todo = dict.fromkeys(range(len(graph.blocks)))
        while todo:
            b, _ = todo.popitem()
            out = 0
            for s in graph.successors[b]:
                out |= live[s]
            new = uses[b] | (out & ~kills[b])
            if new != live[b]:
                live[b] = new
                todo |= dict.fromkeys(graph.predecessors[b])
        found = {bits: tuple(name for name in names if bits & bit[name]) for bits in set(live)}
        return tuple(found[bits] for bits in live)

    def _guarded(self, i: Instruction, name: str, value: Value) -> Value:
        if i.predicate is None:
            return value
        old = self._here.get(name, UNKNOWN)
        guard = self.operand(i.predicate).known
        known = None
        if guard is not None and value.known is not None and old.known is not None:
            known = np.where((guard != 0) != i.negated, value.known, old.known)
        return Value(known, value.roots | old.roots)

    def _keep(self, at: int) -> list[str]:
        """Remember what an instruction gives to registers that nothing else writes; those that changed."""
        names = self._names.writes[at]
        if not names or self._shared.issuperset(names):
            return []
        changed = []
        for reg, value in self._results(self._graph.instructions[at]):
            if reg.name in self._shared:
                continue
            old = self._single.get(reg.name)
            if old is None or not old.same(value):
                new = join(old, value)
                if old is None or not old.same(new):
                    self._single[reg.name] = new
                    changed.append(reg.name)
        return changed

    def _merge(self, block: int) -> bool:
        old = self._entry.get(block)
        if old is None:
            here = self._here
            self._entry[block] = {name: here.get(name, UNKNOWN) for name in self._live[block]}
            return True
        changed = False
        for name in self._live[block]:
            mine = old.get(name)
            new = self._here.get(name, UNKNOWN)
            if mine is new or (mine is not None and mine.same(new)):
                continue
            value = join(mine if mine is not None else UNKNOWN, new)
            if mine is None or not mine.same(value):
                old[name] = value
                changed = True
        return changed

    # -- operands --------------------------------------------------------------------------------

    def operand(self, operand: Operand) -> Value:
        """Value of a source operand; an address gives the value of its sum."""
        match operand:
            case Reg(name):
                known_here = self._here if name in self._shared else self._single
                return known_here.get(name, UNKNOWN)
            case Imm(value, _):
                return Value(self.threads.full(value))
            case Special(name):
                return Value(self.threads.special(name.removeprefix("%")))
            case Negated(inner):
                v = self.operand(inner)
                return Value(None if v.known is None else v.known ^ np.uint64(1), v.roots)
            case Symbol(name, offset):
                return self._symbol(name, offset)
            case Address(base, offset):
                if base is None:
                    return Value(self.threads.full(offset))
                v = self.operand(base)
                known = None if v.known is None else v.known + np.uint64(offset & ((1 << 64) - 1))
                return Value(known, v.roots)
            case TensorAddress(base, _, _):
                return self.operand(base)
            case Vector(elements):
                return Value(None, union(map(self.operand, elements)))
            case Pair(first, _):
                return self.operand(first)
            case _:
                return UNKNOWN

    def _symbol(self, name: str, offset: int) -> Value:
        param = self._params.get(name)
        if param is not None:
            at = param.offset + offset
            roots = frozenset((Root(RootKind.PARAM_ADDRESS, name, at),))
            return Value(self.threads.full(PARAM_BASE + at), roots)
        roots = frozenset((Root(RootKind.SYMBOL, name),))
        base = self._symbols.get(name)
        return Value(None if base is None else self.threads.full(base + offset), roots)

    # -- results ---------------------------------------------------------------------------------

    def _results(self, i: Instruction) -> list[tuple[Reg, Value]]:
        targets = destinations(i)
        if i.opcode == "ld" and "param" in i.modifiers:
            return self._load_param(i)
        if i.opcode in _LOADS:
            return [(r, self._loaded(i)) for r in writes(i)]
        if i.opcode not in _MOVES and i.modifiers and i.modifiers[-1] in _FLOATING:
            return [(r, UNKNOWN) for r in writes(i)]  # neither an address nor a role
        first = targets[0]
        if i.opcode == "elect" and isinstance(first, Pair):
            found = [(first.second, Value((self.threads.linear % np.uint64(32) == 0).astype(np.uint64)))]
            return [(r, v) for r, v in found if isinstance(r, Reg)]
        if isinstance(first, Reg):
            return [(first, self._one(i))]
        if isinstance(first, Pair) and i.opcode == "setp":
            value = self._setp(i)
            inverse = Value(None if value.known is None else value.known ^ np.uint64(1), value.roots)
            pairs = ((first.first, value), (first.second, inverse if len(i.operands) == 3 else UNKNOWN))
            return [(r, v) for r, v in pairs if isinstance(r, Reg)]
        if isinstance(first, Pair) and isinstance(first.first, Reg) and i.opcode == "shfl":
            rest = [(r, UNKNOWN) for r in writes(i)[1:]]
            return [(first.first, self._one(i)), *rest]
        roots = self._roots(i)
        return [(r, Value(None, roots)) for r in writes(i)]

    def _roots(self, i: Instruction) -> frozenset[Root]:
        return union(self.operand(o) for o in sources(i) if not self._is_predicate(o))

    def _is_predicate(self, operand: Operand) -> bool:
        if isinstance(operand, Negated):
            return True
        return isinstance(operand, Reg) and self.kernel.registers.get(operand.name) == "pred"

    def _loaded(self, i: Instruction) -> Value:
        """A load through the address of a parameter yields parameters, any other memory content."""
        found = union(self.operand(o) for o in sources(i)[:1])
        if any(r.kind is RootKind.PARAM_ADDRESS for r in found):
            return Value(None, frozenset((Root(RootKind.PARAM, "", None),)))
        return Value(None, loaded(found))

    def _load_param(self, i: Instruction) -> list[tuple[Reg, Value]]:
        address = i.operands[1]
        regs: tuple[Operand, ...] = (i.operands[0],)
        if isinstance(i.operands[0], Vector):
            regs = i.operands[0].elements
        found: list[tuple[Reg, Value]] = []
        if not isinstance(address, Address):
            return [(r, UNKNOWN) for r in writes(i)]
        size = TYPE_BYTES.get(i.modifiers[-1], 8)
        param = self._params.get(address.base.name) if isinstance(address.base, Symbol) else None
        for n, reg in enumerate(regs):
            if not isinstance(reg, Reg):
                continue
            if param is not None:
                offset = param.offset + address.offset + n * size
                number = self.parameters.read(offset, size)
                known = None
                if number is not None:
                    known = self.threads.full(number)
                    if i.modifiers[-1].startswith("s"):
                        known = unsigned(signed(known, 8 * size), 64)
                roots = frozenset((Root(RootKind.PARAM, "", offset),))
                found.append((reg, Value(known, roots)))
            elif (at := self._parameter_place(address)) is not None:
                found.append((reg, Value(None, frozenset((Root(RootKind.PARAM, "", at + n * size),)))))
            elif isinstance(address.base, Symbol):  # the return value of a call
                found.append((reg, Value(None, frozenset((LOADED,)))))
            else:
                found.append((reg, Value(None, frozenset((Root(RootKind.PARAM, "", None),)))))
        return found

    def _parameter_place(self, address: Address) -> int | None:
        """Offset in the parameter block of an address in a register, if it is one constant."""
        at = self.operand(address).constant() if isinstance(address.base, Reg) else None
        return at - PARAM_BASE if at is not None and at >= PARAM_BASE else None

    def _one(self, i: Instruction) -> Value:
        if i.opcode in ("setp", "set", "testp", "isspacep", "vote", "match"):
            return self._setp(i) if i.opcode == "setp" else UNKNOWN
        if i.opcode == "mapa":  # the offset stays what it is in this CTA; the rank is no part of it
            address = self.operand(i.operands[1])
            return Value(address.known, address.roots | {MAPPED})
        roots = self._roots(i)
        return Value(self._compute(i), roots)

    def _setp(self, i: Instruction) -> Value:
        type_ = i.modifiers[-1]
        a, b = self.operand(i.operands[1]).known, self.operand(i.operands[2]).known
        if a is None or b is None or type_[0] not in "bus":
            return UNKNOWN
        width = 8 * TYPE_BYTES.get(type_, 8)
        known = compare(i.modifiers[0], a, b, width, type_[0] == "s")
        if len(i.operands) == 4:
            c = self.operand(i.operands[3]).known
            known = None if c is None or known is None else combine(i.modifiers[1], known, c)
        return Value(known)

    def _compute(self, i: Instruction) -> Lanes | None:
        """The result where every operand is known and the operation is one of integers."""
        type_ = i.modifiers[-1] if i.modifiers else ""
        if type_ == "pred":
            width = 1
        elif type_ in TYPE_BYTES and type_[0] in "bus":
            width = 8 * TYPE_BYTES[type_]
        else:
            return None
        if i.opcode == "selp":
            return self._select(i)
        values = [self.operand(o).known for o in sources(i)]
        if not values or any(v is None for v in values):
            return self._absorbing(i, values)
        known = [v for v in values if v is not None]
        is_signed = type_.startswith("s")
        return self._arithmetic(i, known, width, is_signed)

    def _absorbing(self, i: Instruction, values: list[Lanes | None]) -> Lanes | None:
        """`and` with false is false and `or` with true is true, whatever the other predicate."""
        if i.modifiers[-1:] != ("pred",) or i.opcode not in ("and", "or"):
            return None
        decides = np.uint64(0 if i.opcode == "and" else 1)
        for v in values:
            if v is not None and (v == decides).all():
                return v
        return None

    def _select(self, i: Instruction) -> Lanes | None:
        a, b, p = (self.operand(o).known for o in i.operands[1:4])
        if p is None:
            return None
        if a is not None and (p != 0).all():
            return a
        if b is not None and (p == 0).all():
            return b
        return None if a is None or b is None else np.where(p != 0, a, b)

    def _arithmetic(self, i: Instruction, v: list[Lanes], width: int, is_signed: bool) -> Lanes | None:
        opcode, modifiers = i.opcode, i.modifiers
        if opcode in _PASS:
            if opcode == "cvt":
                source = modifiers[-1]
                if len(modifiers) != 2 or source not in TYPE_BYTES or modifiers[0] not in TYPE_BYTES:
                    return None
                if source[0] not in "bus" or modifiers[0][0] not in "bus":
                    return None
                target = 8 * TYPE_BYTES[modifiers[0]]
                narrow = masked(v[0], width)
                return unsigned(signed(narrow, width), target) if is_signed else masked(narrow, target)
            return masked(v[0], width) if opcode == "mov" else v[0]
        if opcode in ("mul", "mad") and modifiers[0] == "wide":
            a = signed(v[0], width) if is_signed else masked(v[0], width).view(np.int64)
            b = signed(v[1], width) if is_signed else masked(v[1], width).view(np.int64)
            product = unsigned(a * b, 2 * width)
            return product if opcode == "mul" else masked(product + v[2], 2 * width)
        if opcode in ("mul", "mad") and modifiers[0] == "lo":
            product = masked(v[0] * v[1], width)
            return product if opcode == "mul" else masked(product + v[2], width)
        match opcode:
            case "add" if modifiers[0] not in ("cc", "sat"):
                return masked(v[0] + v[1], width)
            case "sub" if modifiers[0] not in ("cc", "sat"):
                return masked(v[0] - v[1], width)
            case "neg":
                return masked(~v[0] + np.uint64(1), width)
            case "and" | "or" | "xor":
                return combine(opcode, masked(v[0], width), masked(v[1], width))
            case "not":
                return masked(~v[0], width)
            case "shl":
                return shift(v[0], v[1], width, "left")
            case "shr":
                return shift(v[0], v[1], width, "right", is_signed)
            case "min" | "max":
                choose = np.minimum if opcode == "min" else np.maximum
                if is_signed:
                    return unsigned(choose(signed(v[0], width), signed(v[1], width)), width)
                return np.asarray(choose(masked(v[0], width), masked(v[1], width)))
            case "div" | "rem":
                return _divide(opcode, v[0], v[1], width, is_signed)
            case "bfe" if not is_signed:
                length = np.minimum(v[2] & np.uint64(255), np.uint64(63))
                moved = shift(v[0], v[1] & np.uint64(255), width, "right")
                return np.asarray(moved & ((np.uint64(1) << length) - np.uint64(1)))
            case "shfl" if modifiers[1] == "idx":
                lane = v[1]
                if (lane == lane[0]).all() and (v[2] == 31).all():
                    return self.threads.first_lane(v[0], int(lane[0]) % 32)
                return None
            case _:
                return None


def _divide(opcode: str, a: Lanes, b: Lanes, width: int, is_signed: bool) -> Lanes | None:
    a, b = masked(a, width), masked(b, width)
    if (b == 0).any():
        return None
    if is_signed:
        x, y = signed(a, width), signed(b, width)
        if (x < 0).any() or (y < 0).any():
            return None
    return np.asarray(a // b if opcode == "div" else a % b)
