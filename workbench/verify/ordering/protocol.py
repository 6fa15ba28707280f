"""Flag protocols of a kernel: who waits on which flag, who sets it, and what it guards.

A flag is a word in global memory that some thread polls, or that a contract calls one. What a poll guards
is read off both sides: the buffers that are written before the flag is set and read after the poll. Where
only one side is in the kernel, the roles of the buffers say the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from workbench.isa.ptx.model import Imm, Instruction, Reg
from workbench.isa.sass.dataflow import reads as sass_reads
from workbench.isa.sass.model import SassInstruction
from workbench.ops.model import Role
from workbench.verify.ordering.dependence import Flow, Poll, Registers, flow, polls
from workbench.verify.ordering.memory import Scope, Space, Touch, stored, touches
from workbench.verify.ordering.paths import after
from workbench.verify.ordering.program import Mode
from workbench.verify.ordering.view import PtxView, SassView


@dataclass(frozen=True, eq=False)
class Ticket:
    """An atomic whose old value says whether this CTA came last; what follows reads what others left."""

    touch: Touch
    guarded: frozenset[int]
    """Blocks that only a thread enters whose ticket was the wanted one, or that it told so."""


@dataclass(frozen=True)
class Protocols:
    """The flags of one kernel."""

    view: PtxView | SassView

    @staticmethod
    def of(view: PtxView | SassView) -> Protocols:
        """The protocols of a view, found once."""
        found: Protocols | None = view.__dict__.get("_protocols")
        if found is None:
            found = view.__dict__["_protocols"] = Protocols(view)
        return found

    @cached_property
    def global_touches(self) -> tuple[Touch, ...]:
        """Accesses to global memory."""
        return tuple(t for t in touches(self.view) if t.space is Space.GLOBAL)

    @cached_property
    def flag_polls(self) -> tuple[Poll, ...]:
        """Polls of words that are no data themselves."""
        return tuple(p for p in polls(self.view) if not p.data and p.touch.space is Space.GLOBAL)

    @cached_property
    def lamport(self) -> frozenset[str]:
        """Buffers whose words are polled until the data itself is there."""
        return frozenset(n for p in polls(self.view) if p.data for n in p.touch.names)

    @cached_property
    def polled(self) -> frozenset[str]:
        """Buffers with polled flags."""
        return frozenset(n for p in self.flag_polls for n in p.touch.names)

    @cached_property
    def poll_indices(self) -> frozenset[int]:
        """Instructions that poll anything."""
        return frozenset(p.touch.index for p in polls(self.view))

    @staticmethod
    def _is_lock(t: Touch) -> bool:
        return bool({"cas", "CAS", "exch", "EXCH"} & set(t.step.instruction.modifiers))

    @cached_property
    def ticket_indices(self) -> frozenset[int]:
        """Atomics that are tickets."""
        return frozenset(t.touch.index for t in self.tickets)

    @cached_property
    def tickets(self) -> tuple[Ticket, ...]:
        """Atomics outside polling loops whose result is tested for equality."""
        looped = {p.touch.index for p in polls(self.view) if p.loop}
        found = []
        for t in self.global_touches:
            if t.mode is not Mode.ATOMIC or not t.results or t.index in looped or self._is_lock(t):
                continue
            guarded = _guarded(self.view, t)
            if guarded:
                found.append(Ticket(t, guarded))
        return tuple(found)

    # -- setters -----------------------------------------------------------------------------------

    @cached_property
    def setters(self) -> tuple[Touch, ...]:
        """Writes that tell others something: flag stores, counters, unlocks and tickets."""
        return tuple(t for t in self.global_touches if self._sets(t))

    def _sets(self, t: Touch) -> bool:
        if not t.writes or t.asynchronous or t.width > 1 or t.nbytes > 8 or not t.names:
            return False
        if t.index in self.ticket_indices:
            return True
        if t.mode is Mode.ATOMIC and t.results and self._compared(t) and not t.names & self._looked_at:
            return False  # takes a lock, or hands out work
        if t.names & self.lamport and not t.names & self.polled:
            return False
        roles = {self.view.launch.roles.get(n) for n in t.names}
        known = bool(t.names & (self.polled | self._ticketed)) or Role.FLAG in roles
        if not known and Role.MAILBOX in roles:
            known = t.strong and self.is_word(t)
        if not known or not (t.mode is Mode.ATOMIC or self.is_word(t)):
            return False
        return not self._resets(t)

    @cached_property
    def _looked_at(self) -> frozenset[str]:
        """Buffers whose flags are polled with loads."""
        return frozenset(n for p in self.flag_polls if p.touch.mode is Mode.LOAD for n in p.touch.names)

    @cached_property
    def _ticketed(self) -> frozenset[str]:
        return frozenset(n for t in self.tickets for n in t.touch.names)

    def _compared(self, t: Touch) -> bool:
        """Whether anything is done with the old value."""
        return bool(flow(self.view, {t.index: t.results}).reads)

    def is_word(self, t: Touch) -> bool:
        """Whether a store writes a number of the protocol (a constant, a parameter, an epoch), not data."""
        if t.mode is Mode.ATOMIC:  # sums of data are no counters
            return not ({"F32", "F16x2", "BF16_V2", "F64"} | _NUMBERS) & set(t.step.instruction.modifiers)
        i = t.step.instruction
        values = [
            v
            for o, v in zip(i.operands, t.step.values, strict=False)
            if isinstance(o, Imm) or (isinstance(o, Reg) and o.name in stored(t))
        ]
        if isinstance(i, SassInstruction):
            names = stored(t)
            if not names:
                return True  # RZ
            return len(names) == 1 and not self._computed(t)
        return len(values) == 1 and not self._computed(t)

    def _computed(self, t: Touch) -> bool:
        """Whether the stored value is the result of arithmetic on data (floating point, matrices)."""
        return bool(self._numbers.reads.get(t.index, frozenset()) & set(stored(t)))

    @cached_property
    def _numbers(self) -> Flow:
        """Where results of floating-point instructions and loaded vectors flow."""
        registers = Registers.of(self.view)
        seeds: dict[int, tuple[str, ...]] = {}
        instructions: tuple[Instruction | SassInstruction, ...] = self.view.graph.instructions
        for at, i in enumerate(instructions):
            if _is_number(i):
                seeds[at] = registers.writes[at]
        for t in touches(self.view):
            data = t.space is not Space.OTHER and not t.strong and t.index not in self.poll_indices
            if t.reads and t.results and data:
                seeds[t.index] = t.results
        return flow(self.view, seeds, predicates=False)

    def _resets(self, t: Touch) -> bool:
        """A store of zero that makes the flag ready for the next use: nobody waits for it."""
        if t.mode is Mode.ATOMIC:
            return False
        i = t.step.instruction
        zero = False
        for o, v in zip(i.operands, t.step.values, strict=False):
            if isinstance(o, Imm):
                zero = o.value == 0
            elif getattr(o, "name", "") in stored(t):
                zero = v.constant() == 0
        if isinstance(i, SassInstruction) and not stored(t):
            zero = True
        if not zero:
            return False
        waits = [p for p in polls(self.view) if not p.data and p.touch.names & t.names]
        return not any(p.ends_at_zero for p in waits)

    # -- what is guarded ---------------------------------------------------------------------------

    def needed_scope(self, names: Iterable[str]) -> Scope | None:
        """The scope that operations on flags in these buffers need; None if nobody said how many CTAs run.

        Mailboxes cross ranks; so does what one side of the protocol accesses with .sys. Flags of a grid that
        is one cluster need .cluster, of one CTA .cta.
        """
        names = set(names)
        launch = self.view.launch
        if any(launch.roles.get(n) is Role.MAILBOX for n in names):
            return Scope.SYS
        mine = [t for t in self.global_touches if t.names & names]
        if any(t.multimem or (t.scope is Scope.SYS and not _volatile(t)) for t in mine):
            return Scope.SYS
        if launch.grid is None:
            return None
        ctas = launch.grid[0] * launch.grid[1] * launch.grid[2]
        cluster = launch.cluster or (1, 1, 1)
        if ctas == 1:
            return Scope.CTA
        return Scope.CLUSTER if ctas == cluster[0] * cluster[1] * cluster[2] else Scope.GPU

    def published(self, names: frozenset[str]) -> frozenset[str]:
        """Buffers that are written on a path to a setter of a flag in `names`."""
        found: set[str] = set()
        for s in self.setters:
            if not s.names & names:
                continue
            for t in self.global_touches:
                if (
                    t.writes
                    and t.index != s.index
                    and not self.is_setter(t)
                    and s.index in self.behind(t.index)
                ):
                    found |= t.names
        return frozenset(found)

    def is_setter(self, t: Touch) -> bool:
        """Whether a write is one of the setters."""
        return t.index in self._setter_indices

    @cached_property
    def _setter_indices(self) -> frozenset[int]:
        return frozenset(s.index for s in self.setters)

    @cached_property
    def _reach(self) -> dict[int, frozenset[int]]:
        return {}

    def behind(self, index: int) -> frozenset[int]:
        """Instructions that some path behind one comes to."""
        if index not in self._reach:
            self._reach[index] = after(self.view.graph, index)
        return self._reach[index]

    def consumed(self, names: frozenset[str]) -> frozenset[str] | None:
        """Buffers that are read after a poll or ticket on a flag in `names`; None if there is none."""
        waits = [p.touch for p in self.flag_polls if p.touch.names & names]
        found: set[str] = set()
        tickets = [t for t in self.tickets if t.touch.names & names]
        if not waits and not tickets:
            return None
        for t in self.global_touches:
            if not t.reads or t.index in self.poll_indices or t.index in self.ticket_indices:
                continue
            if any(t.index in self.behind(w.index) for w in waits) or any(
                self.view.graph.block_of[t.index] in k.guarded for k in tickets
            ):
                found |= t.names
        return frozenset(found)


def _volatile(t: Touch) -> bool:
    """Volatile is .sys by definition; SASS does not tell it from a relaxed .sys access."""
    i = t.step.instruction
    return isinstance(i, SassInstruction) or "volatile" in i.modifiers


_NUMBERS = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64", "tf32"))
_SASS_NUMBERS = frozenset(
    ("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2", "FFMA2", "FADD2", "F2FP", "I2F", "I2FP", "MUFU")
)


def _is_number(i: Instruction | SassInstruction) -> bool:
    if isinstance(i, SassInstruction):
        number = i.opcode in _SASS_NUMBERS or i.opcode.endswith("MMA")
        return number and bool(sass_reads(i))  # HFMA2 of zeros is how a constant is made
    if i.opcode in ("mma", "wgmma", "tcgen05"):
        return True
    return bool(i.modifiers) and i.modifiers[-1] in _NUMBERS and i.opcode not in ("ld", "st", "setp")


def _guarded(view: PtxView | SassView, t: Touch) -> frozenset[int]:
    """Blocks behind an equality test of an atomic's old value, on the side where it is equal."""
    graph = view.graph
    held = flow(view, {t.index: t.results}, predicates=False, through_shared=True)
    addressed = (o for o in touches(view) if o.space is Space.GLOBAL and o is not t)
    if any(held.reads.get(o.index, frozenset()) - set(stored(o)) for o in addressed):
        return frozenset()  # the number of a piece of work
    tests = {
        at: names
        for at, names in held.reads.items()
        if graph.instructions[at].opcode in ("setp", "ISETP", "UISETP")
        and {"eq", "ne", "EQ", "NE"} & set(graph.instructions[at].modifiers)
    }
    if not tests:
        return frozenset()
    registers = Registers.of(view)
    seeds = {at: registers.writes[at] for at in tests}
    decided = flow(view, seeds, through_shared=True)
    found: set[int] = set()
    for at in decided.reads:
        i = graph.instructions[at]
        b = graph.block_of[at]
        ends = i.opcode in ("ret", "exit", "EXIT")
        if at != graph.blocks[b].end - 1 or not (ends or len(graph.successors[b]) == 2):
            continue
        if not ends and i.opcode not in ("bra", "BRA"):
            continue
        for s in graph.successors[b]:
            if len(graph.predecessors[s]) == 1:
                found |= {x for x in graph.reverse_postorder if graph.dominates(s, x)}
    return frozenset(found)
