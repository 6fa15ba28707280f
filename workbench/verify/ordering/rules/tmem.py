"""Rule tmem-lifetime: allocations of tensor memory and their end (PTX ISA, tcgen05.alloc and .dealloc).

Every allocation is freed before the kernel exits, by one warp; sizes are powers of two from 32 to 512 columns
that do not grow; nothing is allocated after the permit was given up; all instructions name one CTA group.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.findings import Finding, Severity
from workbench.isa.ptx.model import Address, Reg
from workbench.verify.ordering.paths import Change, Marks, after, change
from workbench.verify.ordering.rules.elected import refined
from workbench.verify.ordering.rules.participants import Participants, Who, threads_text
from workbench.verify.ordering.rules.tmem_address import COLUMNS, TensorAddresses
from workbench.verify.ordering.view import PtxView, Step, finding

RULE = "tmem-lifetime"
_USES = frozenset(("ld", "st", "mma", "cp", "shift"))
_ALLOCATED = 1
_MANY = 60


def tmem_lifetime(view: PtxView) -> Iterator[Finding]:
    """Decide the rule on the PTX of a kernel."""
    steps = list(view.steps("tcgen05"))
    if steps:
        yield from _Lifetime(view, steps).findings()


class _Lifetime:
    def __init__(self, view: PtxView, steps: list[Step]) -> None:
        self.view, self.steps = view, steps
        self.people = Participants(refined(view))
        self.allocs = self._kind("alloc")
        self.deallocs = self._kind("dealloc")
        self.relinquished = self._kind("relinquish_alloc_permit")
        self.uses = [s for s in steps if s.instruction.modifiers[0] in _USES]

    def _kind(self, name: str) -> list[Step]:
        found = [s for s in self.steps if s.instruction.modifiers[0] == name]
        return [s for s in found if self.may(s).any()]

    def may(self, step: Step) -> Who:
        """Threads that may execute a step."""
        reach = self.people.reach.get(self.view.graph.block_of[step.index])
        if reach is None:
            return self.people.nobody()
        return reach if step.guard is None else reach & (step.guard != 0)

    def surely(self, step: Step) -> Who:
        """Threads that execute a step on every path."""
        if step.guarded:
            return self.people.nobody()
        block = self.view.graph.block_of[step.index]
        return self.may(step) & ~self.people.ending_without(frozenset((block,)))

    def say(self, step: Step, message: str, fix: str) -> Finding:
        return finding(RULE, Severity.ERROR, self.view, step.index, message, fix)

    def line(self, step: Step) -> str:
        return f"line {step.instruction.line}"

    def findings(self) -> Iterator[Finding]:
        yield from self._groups()
        yield from self._sizes()
        yield from self._one_warp()
        yield from self._order()
        yield from self._leaks()
        yield from self._used_after()
        yield from self._freed_in_use()
        yield from self._slot()

    # -- what one instruction says ---------------------------------------------------------------

    def _groups(self) -> Iterator[Finding]:
        groups: dict[str, Step] = {}
        for s in self.steps:
            for m in s.instruction.modifiers:
                if m.startswith("cta_group::"):
                    groups.setdefault(m, s)
        if len(groups) > 1:
            first, second = sorted(groups.values(), key=lambda s: s.index)[:2]
            yield self.say(
                second,
                f"{second.instruction.name} and {first.instruction.name} ({self.line(first)}) name different "
                "CTA groups: all tcgen05 instructions of a kernel must name the same one, else what they do "
                "is "
                "undefined",
                "use one of cta_group::1 and cta_group::2 throughout the kernel",
            )

    def _columns(self, step: Step) -> int | None:
        return step.values[1].constant() if len(step.values) > 1 else None

    def _sizes(self) -> Iterator[Finding]:
        for s in (*self.allocs, *self.deallocs):
            n = self._columns(s)
            if n is not None and (n < 32 or n > COLUMNS or n & (n - 1)):
                yield self.say(
                    s,
                    f"{s.instruction.name} of {n} columns: the number must be a power of two from 32 to 512, "
                    "else the behaviour is undefined",
                    "round the columns up to a power of two of at least 32",
                )
        sizes = {self._columns(s) for s in self.allocs}
        for s in self.deallocs:
            n = self._columns(s)
            if n is not None and None not in sizes and sizes and n not in sizes:
                a = self.allocs[0]
                yield self.say(
                    s,
                    f"{n} columns are freed, but {self._columns(a)} were allocated ({self.line(a)}): part "
                    "of the "
                    "allocation stays taken, or columns of nobody are given back",
                    "free exactly the columns that were allocated",
                )

    def _one_warp(self) -> Iterator[Finding]:
        for s in (*self.allocs, *self.deallocs, *self.relinquished):
            who = self.may(s)
            left_out = self.people.split_warps(who, np.ones_like(who))
            if left_out.any():
                yield self.say(
                    s,
                    f"only {threads_text(who)} can execute {s.instruction.name}, which is .sync.aligned: "
                    "all 32 "
                    "lanes of the warp must execute it together",
                    "let one whole warp execute it",
                )
                continue
            warps = self.people.warp_count(self.surely(s))
            if warps > 1 and s not in self.relinquished:
                what = "allocates" if s in self.allocs else "frees"
                yield self.say(
                    s,
                    f"{warps} warps execute {s.instruction.name}, so each of them {what} the columns anew: "
                    "one "
                    "warp of the CTA must do it",
                    "let one warp execute it (a condition on the warp's number)",
                )

    # -- orders ----------------------------------------------------------------------------------

    def _order(self) -> Iterator[Finding]:
        for a in self.allocs:
            before = [r for r in self.relinquished if a.index in after(self.view.graph, r.index)]
            if before:
                yield self.say(
                    a,
                    f"tensor memory is allocated after {self.line(before[0])} gave up the permit to "
                    "allocate: "
                    "this is illegal from then on for all warps of the CTA",
                    "give up the permit after the last allocation",
                )
            for b in self.allocs:
                x, y = self._columns(a), self._columns(b)
                if a is b or x is None or y is None or b.index not in after(self.view.graph, a.index):
                    continue
                if y > x:
                    yield self.say(
                        b,
                        f"{y} columns are allocated after {x} ({self.line(a)}): the number of columns must "
                        "not "
                        "grow from one allocation to the next in a CTA",
                        "allocate the larger one first",
                    )
        yield from self._too_many()

    def _too_many(self) -> Iterator[Finding]:
        """Allocations that certainly are live together and exceed what there is."""
        live = [s for s in self.allocs if self.surely(s).any() and self._columns(s)]
        total = 0
        for n, s in enumerate(live):
            frees = {d.index for d in self.deallocs}
            reached = n == 0 or s.index in after(
                self.view.graph,
                live[n - 1].index,
                lambda at, frees=frees: at in frees,  # type: ignore[misc]
            )
            total = (total if reached else 0) + (self._columns(s) or 0)
            if total > COLUMNS:
                yield self.say(
                    s,
                    f"with this allocation the CTA holds {total} columns of the {COLUMNS} that there are: it "
                    "waits for ever",
                    "free columns first, or allocate fewer",
                )
                return

    def _leaks(self) -> Iterator[Finding]:
        if not self.allocs:
            return
        if not self.deallocs:
            a = self.allocs[0]
            yield self.say(
                a,
                "the tensor memory allocated here is never freed: the next CTA on this multiprocessor that "
                "allocates can wait for ever",
                "execute tcgen05.dealloc with the same columns on every path before the kernel ends",
            )
            return
        graph = self.view.graph
        freeing = frozenset(graph.block_of[d.index] for d in self.deallocs)
        for a in self.allocs:
            owners = self.may(a)
            if not any((self.may(d) & owners).any() for d in self.deallocs):
                continue  # another warp frees
            home = graph.block_of[a.index]
            if home in freeing:
                continue
            way = self._way_out(home, owners, freeing)
            if way is not None:
                branch = self.view.place(graph.blocks[way].end - 1)
                yield self.say(
                    a,
                    f"the tensor memory allocated here is not freed on the path that line {branch.ptx_line} "
                    f"({branch.text.rstrip(';')}) takes to the end: the next CTA on this multiprocessor that "
                    "allocates can wait for ever",
                    "execute tcgen05.dealloc with the same columns on every path before the kernel ends",
                )

    def _way_out(self, home: int, owners: Who, freeing: frozenset[int]) -> int | None:
        """A block with a branch that leads from the allocation past every free to the end, or None.

        A branch on the predicate that also decides who allocates is no way past the free.
        """
        graph, program = self.view.graph, self.people.program
        control = self._conditions_of(home)
        returns: dict[int, bool] = {b: bool(self.people.downstream(b) & freeing) for b in self.people.reach}
        state = {home: owners}
        todo = [home]
        while todo:
            b = todo.pop()
            if graph.leaves[b] and returns.get(b, False) and self._leaves_here(b, state[b], control):
                return b
            for s in graph.successors[b]:
                if s in freeing:
                    continue
                mask = program.edges.get((b, s))
                coming = state[b] if mask is None else state[b] & (mask != 0)
                condition = program.conditions.get((b, s))
                if not coming.any():
                    continue
                if returns.get(b, False) and not returns.get(s, False):
                    past = condition is None or condition[0] not in control
                    if past and mask is None and not self._freed_elsewhere(s):
                        return b
                    continue
                old = state.get(s)
                new = coming if old is None else old | coming
                if old is None or not np.array_equal(old, new):
                    state[s] = new
                    todo.append(s)
        return None

    def _leaves_here(self, block: int, who: Who, control: frozenset[str]) -> bool:
        """Whether some of these threads may end at a predicated return of a block."""
        last = self.view.graph.instructions[self.view.graph.blocks[block].end - 1]
        mask = self.people.program.leaving.get(block)
        if mask is not None:
            return bool((who & (mask != 0)).any())
        return (
            last.opcode in ("ret", "exit")
            and last.predicate is not None
            and last.predicate.name not in control
        )

    def _freed_elsewhere(self, block: int) -> bool:
        """Whether a path from a block does not end at all (a trap)."""
        graph = self.view.graph
        ends = {block, *self.people.downstream(block)}
        last = [graph.instructions[graph.blocks[b].end - 1].opcode for b in ends if graph.leaves[b]]
        return bool(last) and all(op == "trap" for op in last)

    def _conditions_of(self, block: int) -> frozenset[str]:
        """Predicates of the branches on which it depends whether a block is executed."""
        graph, program = self.view.graph, self.people.program
        found: set[str] = set()
        for (b, s), (name, _) in program.conditions.items():
            if block in {s, *self.people.downstream(s)} and not graph.post_dominates(block, b):
                found.add(name)
        return frozenset(found)

    # -- use after the end, end before the last use -----------------------------------------------

    def _used_after(self) -> Iterator[Finding]:
        if not self.deallocs:
            return
        addresses = TensorAddresses(self.view)
        freed = self.deallocs[:_MANY]
        changes = {d.index: change(self.view, d, gives=1 << n) for n, d in enumerate(freed)}
        every = (1 << len(freed)) - 1
        changes |= {a.index: Change(clears=every, who=a.guard) for a in self.allocs}
        marks = Marks(self.view, changes, ())
        for s in (*self.uses, *self.deallocs):
            carried = marks.carried(s)
            for n, d in enumerate(freed):
                if carried >> n & 1 and self._same_allocation(addresses, s, d):
                    yield self.say(
                        s,
                        f"{s.instruction.name} can come after tensor memory was freed at {self.line(d)} by "
                        "the "
                        "same thread: another CTA may own those columns by then",
                        "free tensor memory once, after its last use",
                    )
                    return

    def _same_allocation(self, addresses: TensorAddresses, use: Step, free: Step) -> bool:
        """Whether a use certainly is of what was freed."""
        if len(self.allocs) == 1:
            return True
        theirs = addresses.of(free.instruction.operands[0])
        bases = [addresses.of(o).base for o in use.instruction.operands[:2] if isinstance(o, (Address, Reg))]
        return theirs.base is not None and theirs.base != "absolute" and theirs.base in bases

    def _freed_in_use(self) -> Iterator[Finding]:
        """Loads of other warps that nothing orders before the free."""
        graph = self.view.graph
        for d in self.deallocs:
            freeing = self.may(d)
            for u in self.uses:
                if u.instruction.modifiers[0] not in ("ld", "st"):
                    continue
                others = self.may(u) & ~freeing
                if not others.any() or u.index in after(graph, d.index):
                    continue
                for warp in _ends(np.unique(self.people.warps[others])):
                    mine = (others & (self.people.warps == warp)).astype(np.uint64)
                    marks = Marks(self.view, {u.index: Change(gives=1, who=mine)})
                    if not marks.carried(d) & 1:
                        yield self.say(
                            d,
                            f"tensor memory is freed here while warp {warp} may still be at "
                            f"{u.instruction.name} ({self.line(u)}): nothing orders that warp before the "
                            "free",
                            "put a barrier between the last use of all warps and the free",
                        )
                        return

    def _slot(self) -> Iterator[Finding]:
        """The address is read from shared memory by warps that nothing orders after the allocation."""
        addresses = TensorAddresses(self.view)
        slots = {s.values[0].constant(): s for s in self.allocs}
        slots.pop(None, None)
        if not slots:
            return
        reads: dict[int, tuple[Step, Step]] = {}
        for u in (*self.uses, *self.deallocs):
            for operand in u.instruction.operands[:2]:
                reg = operand.base if isinstance(operand, Address) else operand
                found = addresses.slot(reg.name) if isinstance(reg, Reg) else None
                step = self.view.step(found[0]) if found is not None else None
                if step is not None and len(step.values) > 1:
                    alloc = slots.get(step.values[1].constant())
                    if alloc is not None:
                        reads[step.index] = (step, alloc)
        for step, alloc in reads.values():
            marks = Marks(self.view, {alloc.index: change(self.view, alloc, gives=_ALLOCATED)})
            late = self.may(step) & (marks.before(step.index) & np.uint64(_ALLOCATED) == 0)
            if late.any():
                yield self.say(
                    step,
                    f"{threads_text(late)} read the tensor-memory address here, and nothing orders them "
                    "after "
                    f"{alloc.instruction.name} ({self.line(alloc)}) stored it: they may use whatever the "
                    "slot "
                    "held before",
                    "put a barrier between the allocation and the first read of its address",
                )
                return


def _ends(warps: object) -> list[int]:
    found = [int(w) for w in np.asarray(warps)]
    return list(dict.fromkeys((found[0], found[-1])))
