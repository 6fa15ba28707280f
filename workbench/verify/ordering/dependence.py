"""What becomes of a loaded value: which instructions read it, and what decides whether a loop goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from workbench.isa.ptx.dataflow import register_names
from workbench.isa.ptx.model import Instruction
from workbench.isa.sass.dataflow import reads as sass_reads
from workbench.isa.sass.dataflow import shapes
from workbench.isa.sass.model import SassInstruction
from workbench.isa.values import Value
from workbench.verify.ordering.binding import immutable
from workbench.verify.ordering.memory import Space, Touch, stored, touches
from workbench.verify.ordering.program import Mode
from workbench.verify.ordering.view import PtxView, SassView

_COMPARES = frozenset(("setp", "set", "testp", "ISETP", "UISETP", "FSETP", "HSETP2", "DSETP"))
_FLOATING = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64", "tf32"))
_SASS_FLOATING_NAMES = """
FFMA FADD FMUL FMNMX FFMA2 FADD2 FMUL2 MUFU HFMA2 HADD2 HMUL2 HMNMX2 FHFMA FHADD DADD DMUL DFMA F2FP F2F
HMMA QMMA OMMA IMMA HGMMA QGMMA
"""
_SASS_FLOATING = frozenset(_SASS_FLOATING_NAMES.split())


class Registers:
    """Register names that the instructions of a kernel read and write; `of` keeps it with the view."""

    def __init__(self, view: PtxView | SassView) -> None:
        self.reads: tuple[tuple[str, ...], ...]
        """Names each instruction reads, the guard among them."""
        self.writes: tuple[tuple[str, ...], ...]
        """Names each instruction writes."""
        self._types: Mapping[str, str] = view.kernel.registers if isinstance(view, PtxView) else {}
        instructions: tuple[Instruction | SassInstruction, ...] = view.graph.instructions
        if isinstance(view, PtxView):
            names = register_names(view.graph)
            self.reads, self.writes = names.reads, names.writes
        else:
            self.reads = tuple(sass_reads(i) for i in view.graph.instructions)
            self.writes = tuple(s.writes for s in shapes(view.graph))
        self.sure = tuple(i.predicate is None for i in instructions)
        """Whether each instruction has no guard."""
        self.position = {b: n for n, b in enumerate(view.graph.reverse_postorder)}
        """Place of each block in reverse postorder."""

    @staticmethod
    def of(view: PtxView | SassView) -> Registers:
        """The registers of a view, found once."""
        found: Registers | None = view.__dict__.get("_registers")
        if found is None:
            found = view.__dict__["_registers"] = Registers(view)
        return found

    def is_predicate(self, name: str) -> bool:
        """Whether a name is a predicate register."""
        if self._types:
            return self._types.get(name) == "pred"
        return name.startswith(("P", "UP"))


@dataclass(frozen=True)
class Flow:
    """Where values flow: for each instruction that reads one, the registers that hold it."""

    reads: Mapping[int, frozenset[str]]

    def __contains__(self, index: int) -> bool:
        return index in self.reads


def flow(
    view: PtxView | SassView,
    seeds: Mapping[int, Collection[str]],
    *,
    predicates: bool = True,
    within: Collection[int] | None = None,
    through_shared: bool = False,
) -> Flow:
    """Follow the values that some instructions write.

    Args:
        view: the kernel.
        seeds: by instruction index, the registers whose new values are followed.
        predicates: follow comparisons too; otherwise only values computed from values.
        within: blocks to stay in; all of them by default.
        through_shared: follow a value that is stored to shared memory and loaded again at the same address.
    """
    registers = Registers.of(view)
    found = dict(_follow(view, registers, seeds, predicates, within))
    if not through_shared:
        return Flow(found)
    shared = [t for t in touches(view) if t.space is Space.SHARED and not t.asynchronous]
    more = dict(seeds)
    while True:
        held = {a for t in shared if t.writes and found.get(t.index, frozenset()) & set(stored(t))
                if (a := one_address(t.address)) is not None}  # fmt: skip
        new = {t.index: t.results for t in shared if t.mode is Mode.LOAD and one_address(t.address) in held}
        if new.keys() <= more.keys():
            return Flow(found)
        more |= new
        found = dict(_follow(view, registers, more, predicates, within))


def one_address(value: Value) -> int | None:
    """The address of an access by one thread or by all to one place; None if it varies or is not known."""
    return value.constant()


def _follow(
    view: PtxView | SassView,
    registers: Registers,
    seeds: Mapping[int, Collection[str]],
    predicates: bool,
    within: Collection[int] | None,
) -> Mapping[int, frozenset[str]]:
    graph = view.graph
    blocks = set(range(len(graph.blocks))) if within is None else set(within)
    entry: dict[int, frozenset[str]] = {}
    found: dict[int, frozenset[str]] = {}
    reads, writes, sure = registers.reads, registers.writes, registers.sure
    position = registers.position
    todo: list[tuple[int, int]] = []
    for b in {graph.block_of[at] for at in seeds} & blocks:
        entry[b] = frozenset()
        heappush(todo, (position.get(b, len(position) + b), b))
    waiting = set(entry)
    while todo:
        b = heappop(todo)[1]
        waiting.discard(b)
        held = set(entry[b])
        for at in range(graph.blocks[b].start, graph.blocks[b].end):
            if held:
                new = writes[at]
                if held.isdisjoint(reads[at]):
                    if sure[at] and new:
                        held.difference_update(new)
                else:
                    used = held.intersection(reads[at])
                    before = found.get(at)
                    if before is None or not used <= before:
                        found[at] = frozenset(used) if before is None else before | used
                    if predicates:
                        held.update(new)
                    elif any(not registers.is_predicate(r) for r in used):
                        held.update(r for r in new if not registers.is_predicate(r))
                    elif sure[at]:
                        held.difference_update(new)
            if at in seeds:
                held.update(seeds[at])
        for s in graph.successors[b]:
            if s not in blocks:
                continue
            old = entry.get(s)
            if old is None or not held <= old:
                entry[s] = frozenset(held) if old is None else old | held
                if s not in waiting:
                    waiting.add(s)
                    heappush(todo, (position.get(s, len(position) + s), s))
    return found


def parts_by_cta(view: PtxView | SassView) -> bool:
    """Whether a branch depends on the number of the CTA or cluster."""
    instructions: tuple[Instruction | SassInstruction, ...] = view.graph.instructions
    seeds = {
        at: names for at, i in enumerate(instructions)
        if any(name in i.text.lower() for name in _NUMBERS) and (names := Registers.of(view).writes[at])
    }  # fmt: skip
    ends = {b.end - 1 for b in view.graph.blocks}
    return any(at in ends for at in flow(view, seeds).reads)


_NUMBERS = ("%ctaid", "%clusterid", "%cluster_cta", "sr_ctaid", "sr_clusterid", "sr_cgactaid")


def used_as_data(view: PtxView | SassView, touch: Touch) -> bool:
    """Whether loaded words are more than a flag: computed with as numbers, or stored elsewhere."""
    return bool(_data_uses(view, touch.index, touch.results, touch))


def data_registers(view: PtxView | SassView, touch: Touch) -> tuple[str, ...]:
    """Those of the loaded registers whose words are used as data."""
    return tuple(r for r in touch.results if _data_uses(view, touch.index, (r,), touch))


def _data_uses(view: PtxView | SassView, at: int, names: tuple[str, ...], source: Touch) -> list[int]:
    where = {t.index: t for t in touches(view)}
    found = []
    for index, used in flow(view, {at: names}, predicates=False).reads.items():
        i = view.graph.instructions[index]
        t = where.get(index)
        if t is not None:
            same = t.space is source.space and bool(t.names & source.names)
            values = set(stored(t))
            if used - values or (t.writes and used & values and not same):  # as an address, or stored
                found.append(index)
        elif _computes(i):
            found.append(index)
    return found


def _computes(i: Instruction | SassInstruction) -> bool:
    """Whether an instruction treats its operands as numbers of a kind that flags are not."""
    if i.opcode in _COMPARES:
        return False
    if isinstance(i, SassInstruction):
        return i.opcode in _SASS_FLOATING
    if i.opcode in ("mma", "wgmma", "stmatrix"):
        return True
    return bool(_FLOATING & set(i.modifiers)) and i.opcode not in ("mov", "ld", "shfl", "selp")


# -- polls -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Poll:
    """A load or atomic that is repeated until its value is as wanted."""

    touch: Touch
    loop: frozenset[int]
    """Blocks of the loop; empty for a first look before it."""
    data: bool
    """The words are themselves the data that is waited for (Lamport); they need no other order."""
    ends_at_zero: bool
    """The loop ends when the value is zero (a lock, or a counter that counts down)."""


def polls(view: PtxView | SassView) -> tuple[Poll, ...]:
    """All polls, in program order, and the looks at the same flag that stand before a polling loop."""
    found: tuple[Poll, ...] | None = view.__dict__.get("_polls")
    if found is None:
        found = view.__dict__["_polls"] = tuple(_polls(view))
    return found


def _polls(view: PtxView | SassView) -> list[Poll]:
    found: list[Poll] = []
    loops = [_Loop(view, body) for body in sorted(view.graph.loops.values(), key=len)]
    for t in touches(view):
        if not t.reads or not t.results or t.asynchronous or t.read_only or t.space is Space.OTHER:
            continue
        for loop in loops:
            if view.graph.block_of[t.index] not in loop.body or not loop.deciding.intersection(t.results):
                continue
            if not loop.invariant(t):
                break
            decides = flow(view, {t.index: t.results}, within=loop.body)
            if any(at in decides for at in loop.exits):
                if not t.strong and _settled(view, t):
                    break
                found.append(Poll(t, loop.body, used_as_data(view, t), _at_zero(view, t, loop.body)))
                break
    flags = [p for p in found if not p.data]
    looped = {p.touch.index for p in found}
    for t in touches(view):
        if t.index in looped or not t.strong or t.mode is not Mode.LOAD or t.asynchronous:
            continue
        before = [p for p in flags if p.touch.names & t.names and _same_place(p.touch, t)]
        if before and not used_as_data(view, t):
            found.append(Poll(t, frozenset(), False, before[0].ends_at_zero))
    return sorted(found, key=lambda p: p.touch.index)


def _settled(view: PtxView | SassView, t: Touch) -> bool:
    """Whether an access is of buffers that nothing writes while the kernel runs: no flag is among them."""
    return bool(t.names) and all(immutable(view.launch.roles.get(n)) for n in t.names)


def _same_place(a: Touch, b: Touch) -> bool:
    """Whether two accesses are written with the same address."""
    return a.step.instruction.operands[-1:] == b.step.instruction.operands[-1:]


_VARYING = frozenset(("ld", "LDG", "LDS", "LD", "atom", "ATOMG", "ATOM", "ATOMS", "LDL"))


class _Loop:
    """A natural loop: where it ends, what decides that, and which registers its rounds do not change."""

    def __init__(self, view: PtxView | SassView, body: frozenset[int]) -> None:
        self.body, self._view, self._registers = body, view, Registers.of(view)
        graph = view.graph
        leaving = [b for b in body if any(s not in body for s in graph.successors[b])]
        self.exits = [graph.blocks[b].end - 1 for b in leaving]
        self._definitions: dict[str, list[int]] = {}
        for b in body:
            for at in range(graph.blocks[b].start, graph.blocks[b].end):
                for name in self._registers.writes[at]:
                    self._definitions.setdefault(name, []).append(at)
        self.deciding: set[str] = set()
        """Registers that the way out of the loop may depend on."""
        todo = [n for at in self.exits for n in self._registers.reads[at]]
        while todo:
            name = todo.pop()
            if name not in self.deciding:
                self.deciding.add(name)
                todo += [n for at in self._definitions.get(name, ()) for n in self._registers.reads[at]]

    def invariant(self, touch: Touch) -> bool:
        """Whether an address is the same in every round."""
        i = touch.step.instruction
        names = set(self._registers.reads[touch.index]) - set(stored(touch))
        if i.predicate is not None:
            names.discard(i.predicate if isinstance(i.predicate, str) else i.predicate.name)
        return all(self._fixed(n, frozenset()) for n in names)

    def _fixed(self, name: str, visiting: frozenset[str]) -> bool:
        here = self._definitions.get(name)
        if not here:
            return True
        if name in visiting or len(here) > 1:
            return False
        i = self._view.graph.instructions[here[0]]
        if i.opcode in _VARYING and "param" not in i.modifiers:
            return False
        return all(self._fixed(n, visiting | {name}) for n in self._registers.reads[here[0]])


def _at_zero(view: PtxView | SassView, touch: Touch, body: frozenset[int]) -> bool:
    """Whether a poll goes on while the value is not zero; also an atomic that swaps in place of a zero."""
    i = touch.step.instruction
    if touch.mode is Mode.ATOMIC:
        if "cas" in i.modifiers or "CAS" in i.modifiers:
            compare = touch.step.values[-2] if len(touch.step.values) >= 4 else None
            return compare is not None and compare.constant() == 0
        return "exch" in i.modifiers or "EXCH" in i.modifiers
    graph = view.graph
    for index in flow(view, {touch.index: touch.results}, within=body).reads:
        c = graph.instructions[index]
        if not isinstance(c, Instruction) or c.opcode != "setp" or c.modifiers[0] not in ("eq", "ne"):
            continue
        step = view.step(index) if isinstance(view, PtxView) else None
        if step is None or not any(v.constant() == 0 for v in step.values[1:3]):
            continue
        branch = graph.instructions[graph.blocks[graph.block_of[index]].end - 1]
        if not isinstance(branch, Instruction) or branch.opcode != "bra" or branch.predicate is None:
            continue
        following = graph.block_of[index] + 1
        stays = [s for s in graph.successors[graph.block_of[index]] if s in body]
        jumps_on = bool(stays) and stays[0] != following
        while_true = jumps_on != branch.negated  # the loop goes on when the predicate is true
        return (c.modifiers[0] == "ne") == while_true
    return False
