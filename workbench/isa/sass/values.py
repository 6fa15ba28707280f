"""What each thread's SASS registers hold, where its place and the scalar parameters decide that.

SASS uses a register again and again, so the values are found for each point of the program (forward over the
control-flow graph), not for each register.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.isa.flow import ControlFlowGraph
from workbench.isa.sass.dataflow import shapes, span
from workbench.isa.sass.model import (
    SassAddress,
    SassConst,
    SassImm,
    SassInstruction,
    SassLabel,
    SassOperand,
    SassReg,
    SassSpecial,
)
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
)

Registers = dict[str, Value]
_LOADS = frozenset(("LDG", "LDS", "LD", "LDL", "LDSM", "LDTM", "LDGMC", "ATOM", "ATOMG", "ATOMS"))
_FROM_MEMORY = Value(None, frozenset((LOADED,)))
# Floating-point results are neither addresses nor roles.
_FLOATING_NAMES = """
FFMA FADD FMUL FSEL FMNMX FSETP FSET FFMA2 FADD2 FMUL2 MUFU FCHK HFMA2 HADD2 HMUL2 HSETP2 HMNMX2 FHFMA FHADD
DADD DMUL DFMA DSETP F2FP F2F I2F I2FP HMMA QMMA OMMA DMMA HGMMA QGMMA
"""
_FLOATING = frozenset(_FLOATING_NAMES.split())
_CALL_CLOBBERS = tuple(f"R{n}" for n in range(24))
# blockDim in constant bank 0: since sm_100 at 0x360, before that at 0.
_BLOCK_DIM = {0x380: 0x360, 0x210: 0x0, 0x160: 0x0}
# Where bank 0 holds the generic address of the parameter block (kernels take tensor maps' addresses from it).
_BLOCK_ADDRESS = {0x380: 0x348, 0x210: 0x198}
# Where bank 0 says whether the grid was launched in clusters (read before each cluster barrier).
_CLUSTERED = {0x380: 0x36C, 0x210: 0x140}
_WIDTH = 32
_MOST_PLACES = 32
"""Different offsets of one indexed constant load that are told apart."""
_MAP = 0x654
"""Selector of the PRMT that mapa becomes: three bytes of the address, one of the rank."""


class SassValues:
    """Register contents at the entry of each block; `walk` replays a block from there."""

    def __init__(
        self,
        graph: ControlFlowGraph[SassInstruction],
        threads: Threads,
        parameters: ParameterBlock,
        parameter_base: int,
        clustered: bool = False,
    ) -> None:
        """Solve a function.

        Args:
            graph: its control flow.
            threads: of one CTA.
            parameters: what is known of the kernel's parameters.
            parameter_base: where they start in constant bank 0.
            clustered: the grid is known to be launched in clusters of several CTAs.
        """
        self._clustered = clustered
        self.graph, self.threads, self.parameters, self.base = graph, threads, parameters, parameter_base
        self._clobbers: dict[int, tuple[str, ...]] = {}
        self._shapes = shapes(graph)
        self._entry: list[Registers | None] = [None] * len(graph.blocks)
        if graph.blocks:
            self._solve()

    def _solve(self) -> None:
        order = {b: n for n, b in enumerate(self.graph.reverse_postorder)}
        self._entry[0] = {}
        todo = {0}
        while todo:
            b = min(todo, key=order.__getitem__)
            todo.discard(b)
            state = dict(self._entry[b] or {})
            block = self.graph.blocks[b]
            for at in range(block.start, block.end):
                self._step(at, state)
            for s in self.graph.successors[b]:
                if self._merge(s, state):
                    todo.add(s)

    def _merge(self, block: int, state: Registers) -> bool:
        old = self._entry[block]
        if old is None:
            self._entry[block] = dict(state)
            return True
        changed = False
        for name in old.keys() | state.keys():
            mine = old.get(name)
            new = state.get(name, UNKNOWN)
            if mine is new or (mine is not None and mine.same(new)):
                continue
            value = join(mine if mine is not None else UNKNOWN, new)
            if mine is None or not mine.same(value):
                old[name] = value
                changed = True
        return changed

    def walk(self, block: int) -> Iterator[tuple[int, Registers]]:
        """Each instruction index of a block with the registers before it; nothing if it is unreachable.

        The mapping is reused: read it before taking the next.
        """
        entry = self._entry[block]
        if entry is None:
            return
        state = dict(entry)
        for at in range(self.graph.blocks[block].start, self.graph.blocks[block].end):
            yield at, state
            self._step(at, state)

    # -- operands --------------------------------------------------------------------------------

    def predicate(self, name: str, negated: bool, state: Registers) -> Lanes | None:
        """Truth of a guard a thread, or None."""
        if name in ("PT", "UPT"):
            return self.threads.full(0 if negated else 1)
        known = state.get(name, UNKNOWN).known
        return None if known is None else known ^ np.uint64(1) if negated else known

    def operand(self, operand: SassOperand, state: Registers) -> Value:
        """Value of a source operand; of an address, its sum. Only the low half of a pair can be known."""
        match operand:
            case SassReg():
                return self._register(operand, state)
            case SassImm(value):
                return Value(self.threads.full(value & 0xFFFFFFFF))
            case SassSpecial(name):
                return self._special(name)
            case SassConst():
                return self._constant(operand, state)
            case SassAddress(registers, offset):
                values = [self._register(r, state) for r in registers]
                known = [v.known for v in values if v.known is not None]
                total = None
                if len(known) == len(values):
                    total = self.threads.full(offset)
                    for k in known:
                        total = total + k
                    total = masked(total, _WIDTH)
                return Value(total, union(values))
            case _:
                return UNKNOWN

    def _register(self, r: SassReg, state: Registers) -> Value:
        if r.name in ("PT", "UPT"):
            return Value(self.threads.full(0 if r.negated else 1))
        if r.constant:
            return Value(self.threads.full(0))
        names = span(r.name, 2 if r.wide else 1)
        values = [state.get(n, UNKNOWN) for n in names]
        known = values[0].known if values else None
        if known is not None and r.negated:
            known = known ^ np.uint64(1) if r.predicate else masked(~known + np.uint64(1), _WIDTH)
        return Value(known, union(values))

    def _special(self, name: str) -> Value:
        match name:
            case "SR_TID.X" | "SR_TID.Y" | "SR_TID.Z":
                return Value(self.threads.special("tid." + name[-1].lower()))
            case "SR_LANEID":
                return Value(self.threads.special("laneid"))
            case "SR_CgaCtaId":  # which CTA of the cluster: this one is the first
                return Value(self.threads.full(0))
            case _:
                return UNKNOWN

    def _constant(self, c: SassConst, state: Registers) -> Value:
        if c.bank == 4:  # addresses of the module's variables
            return Value(None, frozenset((Root(RootKind.SYMBOL, f"c[0x4][{c.offset:#x}]"),)))
        if c.bank != 0:
            return UNKNOWN
        if c.index is not None:
            lanes = self._register(c.index, state).known
            places = () if lanes is None else tuple(int(x) for x in np.unique(lanes))
            if not places or len(places) > _MOST_PLACES:
                return Value(None, frozenset((Root(RootKind.PARAM, "", None),)))
            if len(places) > 1:
                return Value(None, union(self._bank(c.offset + at, 4) for at in places))
            return self._bank(c.offset + places[0], 4)
        value = self._bank(c.offset, 4)
        if c.negated and value.known is not None:
            return Value(masked(~value.known + np.uint64(1), _WIDTH), value.roots)
        return value

    def _bank(self, offset: int, size: int) -> Value:
        """Constant bank 0: block extents, then at `base` the kernel's parameters."""
        if offset >= self.base:
            at = offset - self.base
            number = self.parameters.read(at, size)
            known = None if number is None else self.threads.full(number)
            return Value(known, frozenset((Root(RootKind.PARAM, "", at),)))
        address = _BLOCK_ADDRESS.get(self.base, -8)
        if address <= offset < address + 8:  # known to be 0 here, so that sums give offsets in the block
            return Value(self.threads.full(0), frozenset((Root(RootKind.PARAM_ADDRESS),)))
        extents = _BLOCK_DIM.get(self.base)
        if extents is not None and offset - extents in (0, 4, 8):
            return Value(self.threads.full(self.threads.block[(offset - extents) // 4]))
        if self._clustered and offset == _CLUSTERED.get(self.base):
            return Value(self.threads.full(1))
        return UNKNOWN

    # -- results ---------------------------------------------------------------------------------

    def _step(self, at: int, state: Registers) -> None:
        i = self.graph.instructions[at]
        if i.opcode == "CALL":
            for name in self._callee_writes(at):
                state[name] = UNKNOWN
            return
        shape = self._shapes[at]
        names = shape.writes
        if not names:
            return
        results = (
            {} if i.opcode in _FLOATING else self._results(i, names, shape.sources, shape.results, state)
        )
        guard = None
        if i.predicate is not None:
            guard = self.predicate(i.predicate, i.negated, state)
            if guard is not None and not guard.any():
                return
        for name in names:
            value = results.get(name)
            if value is None:
                value = UNKNOWN
            if i.predicate is not None and (guard is None or not guard.all()):
                value = self._under(guard, value, state.get(name, UNKNOWN))
            state[name] = value

    @staticmethod
    def _under(guard: Lanes | None, new: Value, old: Value) -> Value:
        known = None
        if guard is not None and new.known is not None and old.known is not None:
            known = np.where(guard != 0, new.known, old.known)
        return Value(known, new.roots | old.roots)

    def _callee_writes(self, at: int) -> tuple[str, ...]:
        if at in self._clobbers:
            return self._clobbers[at]
        call = self.graph.instructions[at]
        names: dict[str, None] = {}
        if not any(isinstance(o, SassLabel) for o in call.operands):
            names = dict.fromkeys(_CALL_CLOBBERS)
        else:
            block = self.graph.block_of[at]
            todo = list(self.graph.successors[block][:1])
            seen = set(todo)
            while todo:
                b = todo.pop()
                for n in range(self.graph.blocks[b].start, self.graph.blocks[b].end):
                    names.update(dict.fromkeys(self._shapes[n].writes))
                for s in self.graph.successors[b]:
                    if s not in seen:
                        seen.add(s)
                        todo.append(s)
        self._clobbers[at] = tuple(names)
        return self._clobbers[at]

    def _results(
        self,
        i: SassInstruction,
        names: tuple[str, ...],
        read: tuple[SassOperand, ...],
        count: int,
        state: Registers,
    ) -> dict[str, Value]:
        targets = [o for o in i.operands[:count] if isinstance(o, SassReg)]
        if i.opcode in _LOADS:
            address = next((o for o in read if isinstance(o, SassAddress)), None)
            if i.opcode not in ("LDG", "LD") or address is None:
                return dict.fromkeys(names, _FROM_MEMORY)
            return dict.fromkeys(names, Value(None, loaded(self.operand(address, state).roots)))
        if i.opcode in ("LDC", "LDCU", "ULDC"):
            return self._load_constant(i, names, read, state)
        values = [self.operand(o, state) for o in read]
        if i.opcode == "R2P":
            return self._unpack(i, names, state)
        if i.opcode in ("PRMT", "UPRMT") and len(values) == 3 and values[1].constant() == _MAP:
            return dict.fromkeys(names, Value(values[2].known, values[2].roots | {MAPPED}))
        if targets and targets[0].predicate:
            return self._predicate_results(i, targets, read, values)
        roots = union(
            v for o, v in zip(read, values, strict=True) if not (isinstance(o, SassReg) and o.predicate)
        )
        pairs: tuple[SassOperand, ...] = ()  # written as their low register
        if "64" in i.modifiers:
            pairs = read
        elif "WIDE" in i.modifiers:  # of a * b + c only c is a pair
            pairs = read[2:3]
        for o in pairs:
            if isinstance(o, SassReg) and not o.predicate:
                roots = roots | union(state.get(n, UNKNOWN) for n in span(o.name, 2)[1:])
        found = dict.fromkeys(names, Value(None, roots))
        for t in targets[1:]:
            if t.predicate and not t.constant:
                found[t.name] = UNKNOWN
        main = targets[0].name if targets else ""
        if main in found:
            found[main] = Value(self._compute(i, read, [v.known for v in values]), roots)
        return found

    def _load_constant(
        self,
        i: SassInstruction,
        names: tuple[str, ...],
        read: tuple[SassOperand, ...],
        state: Registers,
    ) -> dict[str, Value]:
        source = read[0] if read else None
        if not isinstance(source, SassConst):
            return {}
        if source.index is not None or source.bank != 0:
            return dict.fromkeys(names, self.operand(source, state))
        if i.modifiers and i.modifiers[0] in ("U8", "S8", "U16", "S16"):
            size = int(i.modifiers[0][1:]) // 8
            value = self._bank(source.offset, size)
            if i.modifiers[0][0] == "S" and value.known is not None:
                value = Value(masked(signed(value.known, 8 * size).view(np.uint64), 32), value.roots)
            return dict.fromkeys(names, value)
        return {name: self._bank(source.offset + 4 * n, 4) for n, name in enumerate(names)}

    def _predicate_results(
        self,
        i: SassInstruction,
        targets: list[SassReg],
        read: tuple[SassOperand, ...],
        values: list[Value],
    ) -> dict[str, Value]:
        found: dict[str, Value] = {}
        first = targets[0].name
        known = [v.known for v in values]
        if i.opcode == "ELECT":
            found[first] = Value((self.threads.linear % np.uint64(32) == 0).astype(np.uint64))
        elif i.opcode in ("ISETP", "UISETP") and "EX" not in i.modifiers and len(known) >= 3:
            a, b, c = known[0], known[1], known[2]
            if a is not None and b is not None:
                result = compare(i.modifiers[0].lower(), a, b, _WIDTH, "U32" not in i.modifiers)
                operator = next((m.lower() for m in i.modifiers if m in ("AND", "OR", "XOR")), "and")
                if result is not None and c is not None:
                    found[first] = Value(combine(operator, result, c))
        elif i.opcode in ("PLOP3", "UPLOP3") and len(known) >= 4:
            table = read[3]
            if isinstance(table, SassImm):
                found[first] = Value(_lut(known[:3], table.value, 1, self.threads))
        elif i.opcode in ("LOP3", "ULOP3") and len(known) >= 4:
            table = read[3]
            if isinstance(table, SassImm):
                result = _lut(known[:3], table.value, _WIDTH, self.threads)
                if result is not None:
                    found[first] = Value((result != 0).astype(np.uint64))
        elif i.opcode in ("VOTE", "VOTEU") and known and known[-1] is not None:
            mode = i.modifiers[0] if i.modifiers else ""
            found[first] = Value(self._vote(mode, known[-1]))
        elif i.opcode == "SHFL" and len(targets) == 2 and not targets[1].constant:
            result = None
            if i.modifiers[:1] == ("IDX",) and known[0] is not None and known[1] is not None:
                lane = known[1]
                if (lane == lane[0]).all():
                    result = self.threads.first_lane(known[0], int(lane[0]) % 32)
            found[targets[1].name] = Value(result, values[0].roots)
        elif i.opcode == "R2UR" and len(targets) == 2:
            result = None if known[0] is None else self.threads.first_lane(known[0])
            found[targets[1].name] = Value(result, values[0].roots)
        return found

    def _unpack(self, i: SassInstruction, names: tuple[str, ...], state: Registers) -> dict[str, Value]:
        """R2P: predicate n gets bit n of a register's byte."""
        source = i.operands[1] if len(i.operands) == 3 else None
        if not isinstance(source, SassReg):
            return {}
        known = self.operand(source, state).known
        if known is None:
            return {}
        moved = known >> np.uint64(8 * source.byte)
        return {name: Value((moved >> np.uint64(int(name[1:]))) & np.uint64(1)) for name in names}

    def _vote(self, mode: str, votes: Lanes) -> Lanes | None:
        warps = (self.threads.linear // np.uint64(32)).astype(np.intp)
        total = np.bincount(warps, weights=(votes != 0).astype(np.float64))
        size = np.bincount(warps)
        if mode == "ALL":
            return np.asarray((total == size)[warps], dtype=np.uint64)
        if mode == "ANY":
            return np.asarray((total > 0)[warps], dtype=np.uint64)
        return None

    def _compute(
        self, i: SassInstruction, read: tuple[SassOperand, ...], v: list[Lanes | None]
    ) -> Lanes | None:
        opcode, m = i.opcode, i.modifiers
        if opcode in ("SEL", "USEL") and len(v) == 3:
            a, b, p = v
            if p is None:
                return None
            if a is not None and b is not None:
                return np.asarray(np.where(p != 0, a, b))
            return a if (p != 0).all() else b if (p == 0).all() else None
        if opcode in ("LOP3", "ULOP3") and len(v) >= 4:
            table = read[3]
            return _lut(v[:3], table.value, _WIDTH, self.threads) if isinstance(table, SassImm) else None
        known = [x for x in v if x is not None]
        if not v or v[0] is None:
            return None
        if opcode in ("MOV", "UMOV", "S2R", "S2UR"):
            return v[0]
        if opcode == "R2UR":
            return self.threads.first_lane(v[0])
        if opcode in ("IADD3", "UIADD3", "IADD", "UIADD", "VIADD") and "X" not in m and "64" not in m:
            terms = v[:3] if opcode.endswith("3") else v[:2]
            return _sum(terms)
        if opcode in ("IMAD", "UIMAD") and not {"WIDE", "HI", "X"} & set(m) and len(known) == len(v) >= 3:
            return masked(known[0] * known[1] + known[2], _WIDTH)
        if opcode in ("LEA", "ULEA") and not {"HI", "X"} & set(m) and len(known) >= 3:
            return _sum([shift(known[0], known[2], _WIDTH, "left"), v[1]])
        if opcode in ("SHF", "USHF") and len(known) >= 3:
            if m[0] == "L" and "HI" not in m and _zero(known[2]):
                return shift(known[0], known[1], _WIDTH, "left")
            if m[0] == "R" and "HI" in m and (_zero(known[0]) or "S32" in m):
                return shift(known[2], known[1], _WIDTH, "right", "S32" in m)
        return None


def _zero(values: Lanes) -> bool:
    return not values.any()


def _sum(terms: list[Lanes | None]) -> Lanes | None:
    total: Lanes | None = None
    for t in terms:
        if t is None:
            return None
        total = t if total is None else total + t
    return None if total is None else masked(total, _WIDTH)


def _lut(inputs: list[Lanes | None], table: int, width: int, threads: Threads) -> Lanes | None:
    """The bitwise function of three inputs; inputs that do not matter may be unknown."""
    a, b, c = inputs
    mask = np.uint64((1 << width) - 1)
    missing = [n for n, x in enumerate((a, b, c)) if x is None]
    for n in missing:
        bit = 4 >> n
        if any((table >> code & 1) != (table >> (code ^ bit) & 1) for code in range(8)):
            return None
    filled = [threads.full(0) if x is None else x for x in (a, b, c)]
    result = threads.full(0)
    for code in range(8):
        if table >> code & 1:
            term = threads.full(int(mask))
            for n, x in enumerate(filled):
                term = term & (x if code & (4 >> n) else ~x)
            result = result | term
    return result & mask
