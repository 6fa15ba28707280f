"""Rule wgmma-order: registers of asynchronous warpgroup MMAs (PTX ISA 9.7.15, sm_90a).

Accumulators, and the registers that hold A, belong to the tensor cores from wgmma.mma_async until a
wgmma.wait_group that covers its group. wgmma.fence stands between other accesses to them and the first MMA.
Copies between registers (`mov`, which compilers put around inline assembly) carry a register's state along.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from workbench.findings import Finding, Severity
from workbench.isa.ptx.dataflow import reads, writes
from workbench.isa.ptx.model import Imm, Instruction, Operand, Reg, Vector
from workbench.verify.ordering.view import PtxView, finding

RULE = "wgmma-order"
_OLDEST = 9
"""More commits than any wait_group counts."""
_FENCED_LATER = "\0entry"
"""Stands among the unfenced registers for there having been no fence at all."""


@dataclass
class _State:
    """What may hold before an instruction."""

    pending: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    """Register to the MMA that owns it, the groups committed since (0: not even its own), and whether it "
    "holds
    A, which may be read."""
    unfenced: dict[str, int] = field(default_factory=dict)
    """Registers written since the last wgmma.fence, with the instruction that wrote them."""

    seen: dict[str, int] = field(default_factory=dict)
    """Registers read since the last wgmma.fence, with the first instruction that read them."""

    def copy(self) -> _State:
        return _State(dict(self.pending), dict(self.unfenced), dict(self.seen))

    def join(self, other: _State) -> bool:
        """Add what holds on another path; the younger group counts. True if anything is new."""
        changed = False
        for r, mine in other.pending.items():
            old = self.pending.get(r)
            if old is None or mine[1] < old[1]:
                self.pending[r] = mine
                changed = True
        for r, at in other.unfenced.items():
            if r not in self.unfenced:
                self.unfenced[r] = at
                changed = True
        for r, at in other.seen.items():
            if r not in self.seen:
                self.seen[r] = at
                changed = True
        return changed


def wgmma_order(view: PtxView) -> Iterator[Finding]:
    """Decide the rule on the PTX of a kernel."""
    if any(i.opcode == "wgmma" and i.modifiers[:1] == ("mma_async",) for i in view.graph.instructions):
        yield from _Registers(view).findings()


class _Registers:
    def __init__(self, view: PtxView) -> None:
        self.view, self.graph = view, view.graph
        self.found: dict[tuple[str, int], Finding] = {}

    def findings(self) -> Iterator[Finding]:
        entry: dict[int, _State] = {0: _State(unfenced={_FENCED_LATER: 0})}
        todo = [0]
        while todo:
            b = todo.pop()
            state = entry[b].copy()
            for at in range(self.graph.blocks[b].start, self.graph.blocks[b].end):
                self._step(at, self.graph.instructions[at], state)
            for s in self.graph.successors[b]:
                if s not in entry:
                    entry[s] = state.copy()
                    todo.append(s)
                elif entry[s].join(state):
                    todo.append(s)
        yield from list(self.found.values())[:3]

    def _line(self, at: int) -> str:
        return f"line {self.graph.instructions[at].line}"

    def _say(self, what: str, at: int, message: str, fix: str) -> None:
        key = (what, at if what != "touch" else -1)
        if key not in self.found:
            self.found[key] = finding(RULE, Severity.ERROR, self.view, at, message, fix)

    # -- one instruction -------------------------------------------------------------------------

    def _step(self, at: int, i: Instruction, state: _State) -> None:
        if i.opcode == "wgmma":
            match i.modifiers[0]:
                case "fence":
                    state.unfenced.clear()
                    state.seen.clear()
                case "mma_async":
                    self._mma(at, i, state)
                case "commit_group":
                    state.pending = {
                        r: (m, min(age + 1, _OLDEST), a) for r, (m, age, a) in state.pending.items()
                    }
                case "wait_group":
                    left = i.operands[0].value if i.operands and isinstance(i.operands[0], Imm) else 0
                    state.pending = {r: p for r, p in state.pending.items() if p[1] == 0 or p[1] <= left}
            return
        if i.opcode == "mov" and self._copied(i, state):
            return
        self._touched(at, i, state)

    def _copied(self, i: Instruction, state: _State) -> bool:
        """A copy of one register takes its state along; false if it is no such copy."""
        target, source = (i.operands[0], i.operands[1]) if len(i.operands) == 2 else (None, None)
        if not isinstance(target, Reg) or not isinstance(source, Reg) or i.predicate is not None:
            return False
        state.pending.pop(target.name, None)
        state.unfenced.pop(target.name, None)
        if source.name in state.pending:
            state.pending[target.name] = state.pending[source.name]
        if source.name in state.unfenced:
            state.unfenced[target.name] = state.unfenced[source.name]
        return True

    def _touched(self, at: int, i: Instruction, state: _State) -> None:
        written, used = {r.name for r in writes(i)}, {r.name for r in reads(i)}
        for r in (*reads(i), *writes(i)):
            owner = state.pending.get(r.name)
            if owner is None or (owner[2] and r.name not in written):
                continue
            mma, age, holds_a = owner
            verb = "read" if r.name in used else "overwritten"
            what = "holds A of" if holds_a else "is an accumulator of"
            if age == 0 and self._waited(mma, at):
                why = "its group was never committed, so that no wgmma.wait_group covers it"
                fix = "execute wgmma.commit_group after the MMAs, before wgmma.wait_group"
            else:
                why = "no wgmma.wait_group that covers its group stands between"
                fix = "execute wgmma.wait_group with a count that leaves no group of these registers pending"
            self._say(
                "touch",
                at,
                f"{r.name} is {verb} here while it {what} wgmma.mma_async ({self._line(mma)}): {why}, so its "
                "value is undefined",
                fix,
            )
            break
        for r in reads(i):
            state.seen.setdefault(r.name, at)
        for r in writes(i):
            state.unfenced[r.name] = at
            state.pending.pop(r.name, None)

    def _folded(self, at: int) -> bool:
        """Whether a compiler put a constant into a register where it needs it: ptxas makes it an operand."""
        i = self.graph.instructions[at]
        constant = i.opcode == "mov" and i.predicate is None and isinstance(i.operands[-1], Imm)
        return constant and self.view.module.compiled

    def _waited(self, mma: int, at: int) -> bool:
        """Whether some wgmma.wait_group stands after the MMA in the kernel's text."""
        return any(
            i.opcode == "wgmma" and i.modifiers[0] == "wait_group"
            for i in self.graph.instructions[min(mma, at) : max(mma, at)]
        )

    def _mma(self, at: int, i: Instruction, state: _State) -> None:
        accumulators = _registers(i.operands[0])
        a = _registers(i.operands[1]) if len(i.operands) > 1 else ()
        if _FENCED_LATER in state.unfenced:
            self._say(
                "fence",
                at,
                "there is no wgmma.fence before this first wgmma.mma_async: its registers are not ordered "
                "after "
                "what was done with them before, so its result is undefined",
                "execute wgmma.fence.sync.aligned before the first MMA",
            )
            state.unfenced.pop(_FENCED_LATER)
        else:
            for r in (*accumulators, *a):
                if r in state.unfenced and not self._folded(state.unfenced[r]):
                    self._say(
                        "fence",
                        at,
                        f"{r} is written at {self._line(state.unfenced[r])} and used by this "
                        "wgmma.mma_async with "
                        "no wgmma.fence between: the MMA may use the old value",
                        "execute wgmma.fence.sync.aligned between the last write and the MMA",
                    )
                    break
            else:
                used = next((r for r in accumulators if r in state.seen), None)
                if used is not None:
                    self._say(
                        "fence",
                        at,
                        f"{used} is read at {self._line(state.seen[used])} and is an accumulator of this "
                        "wgmma.mma_async with no wgmma.fence between: the MMA may write it before it is read",
                        "execute wgmma.fence.sync.aligned between the last read and the MMA",
                    )
        for r in accumulators:
            owner = state.pending.get(r)
            if owner is None:
                continue
            other = self.graph.instructions[owner[0]]
            if owner[2] or _shape(other) != _shape(i):
                self._say(
                    "shape",
                    at,
                    f"this wgmma.mma_async takes {r} as accumulator while that of another shape at "
                    f"{self._line(owner[0])} is pending: only MMAs of one shape are ordered on their "
                    "accumulators",
                    "execute wgmma.wait_group and wgmma.fence between the two",
                )
                break
        for r in a:
            if r not in state.pending:
                state.pending[r] = (at, 0, True)
        for r in accumulators:
            state.pending[r] = (at, 0, False)


def _registers(operand: Operand) -> tuple[str, ...]:
    match operand:
        case Vector(elements):
            return tuple(e.name for e in elements if isinstance(e, Reg))
        case _:
            return ()


def _shape(i: Instruction) -> str:
    return next((m for m in i.modifiers if m.startswith("m64n")), "")
