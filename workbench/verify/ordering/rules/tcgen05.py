"""Rule tcgen05-order: what stands between tcgen05 operations that touch the same tensor memory.

PTX ISA, "Memory Consistency Model for 5th generation of TensorCore operations": mma, cp, shift, ld and st
are asynchronous and unordered but for the listed pipelines. An mma is complete after tcgen05.commit and a
wait on its mbarrier; a load or store after wait::ld or wait::st in its own thread. Between threads,
fence::before_thread_sync stands before the synchronisation (commit implies it), fence::after_thread_sync
after it. A true register dependency on a tcgen05.ld needs no wait in the same thread.

A kernel of the DSL's or CUTLASS's pipelines, which has no tcgen05 fence at all and relies on acquiring waits,
is only told of the missing fences (`info`); where a kernel follows the ISA's protocol, one that is missing is
an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from workbench.findings import Finding, Severity
from workbench.isa.ptx.dataflow import reads, writes
from workbench.isa.ptx.model import Address, Imm, Reg
from workbench.isa.values import Lanes
from workbench.verify.ordering.paths import MEETINGS, Change, Marks, after, change
from workbench.verify.ordering.program import Event, Kind
from workbench.verify.ordering.rules.mbarrier_names import MbarrierNames
from workbench.verify.ordering.rules.participants import threads_text
from workbench.verify.ordering.rules.tmem_address import Extent, TensorAddresses, width
from workbench.verify.ordering.solver import VARIES, arrivals_before
from workbench.verify.ordering.view import PtxView, Step, finding

RULE = "tcgen05-order"
DSL_TIMEOUT = 10000000
"""Time limit that the DSL's own mbarrier wait names."""
_MANY = 20
_BRINGS = frozenset((Kind.BARRIER, Kind.BARRIER_ARRIVE, Kind.MBARRIER_ARRIVE, Kind.CLUSTER_ARRIVE))
_FLIGHT, _UNREAD, _COMPLETE = 1, 2, 4
"""Of a load: not waited for; with registers that nothing read yet; waited for since."""
_DONE, _LOADED, _STORED = 1, 2, 4
_WHAT = {_DONE: "an mma has completed", _LOADED: "a load has completed", _STORED: "a store has completed"}


def tcgen05_order(view: PtxView) -> Iterator[Finding]:
    """Decide the rule on the PTX of a kernel."""
    steps = list(view.steps("tcgen05"))
    if steps:
        yield from Order(view, steps).findings()


@dataclass(frozen=True, eq=False)
class Op:
    """An asynchronous tcgen05 instruction and the tensor memory it touches."""

    step: Step
    kind: str
    extents: tuple[Extent, ...]
    """The accumulator or the address first, other operands in tensor memory after it."""

    @property
    def index(self) -> int:
        """Its place in the kernel."""
        return self.step.index

    @property
    def line(self) -> str:
        """Its line, in words."""
        return f"line {self.step.instruction.line}"

    @property
    def name(self) -> str:
        """The instruction, shortened."""
        return f"tcgen05.{self.kind}"

    def may_overlap(self, other: Op) -> bool:
        """Whether the two can touch the same columns."""
        return any(a.may_overlap(b) for a in self.extents for b in other.extents)

    def surely_overlaps(self, other: Op) -> bool:
        """Whether the two certainly touch a common column."""
        return any(a.surely_overlaps(b) for a in self.extents for b in other.extents)


class Order:
    """The tcgen05 operations of a kernel and what orders them."""

    def __init__(self, view: PtxView, steps: list[Step]) -> None:
        self.view, self.graph = view, view.graph
        self.program = view.analysis.program
        addresses = TensorAddresses(view)
        self.ops: list[Op] = []
        self.waits: dict[str, list[Step]] = {"ld": [], "st": []}
        self.fences: dict[str, list[Step]] = {"before": [], "after": []}
        self.commits: list[Step] = []
        self.deallocs: list[Op] = []
        for s in steps:
            m = s.instruction.modifiers[0]
            if m in ("ld", "st", "mma", "cp", "shift"):
                self.ops.append(_operation(s, m, addresses, view))
            elif m == "dealloc":
                self.deallocs.append(Op(s, m, (Extent(None),)))
            elif m in ("wait::ld", "wait::st"):
                self.waits[m[-2:]].append(s)
            elif m.startswith("fence::"):
                self.fences["before" if "before" in m else "after"].append(s)
            elif m == "commit":
                self.commits.append(s)
        self.events: dict[int, Event] = {e.index: e for e in self.program.all_events(*MEETINGS)}
        self.mbarriers = MbarrierNames(view)
        self.phases = arrivals_before(self.program)
        self._afters: dict[int, frozenset[int]] = {}

    def of(self, *kinds: str) -> list[Op]:
        """Operations of some kinds."""
        return [o for o in self.ops if o.kind in kinds]

    @property
    def strict(self) -> bool:
        """Whether the kernel follows the ISA's fences, or has waits that order nothing by themselves."""
        if self.fences["before"] or self.fences["after"]:
            return True
        waits = [i for i in self.graph.instructions if i.opcode == "mbarrier" and "try_wait" in i.modifiers]
        if any("relaxed" in i.modifiers for i in waits):
            return True
        return not any(isinstance(i.operands[-1], Imm) and i.operands[-1].value == DSL_TIMEOUT for i in waits)

    def say(self, op: Op, message: str, fix: str, severity: Severity = Severity.ERROR) -> Finding:
        """A finding at an operation."""
        return finding(RULE, severity, self.view, op.index, message, fix)

    def executing(self, step: Step) -> Lanes:
        """Threads that may execute a step, as booleans."""
        return np.asarray(self.view.executing(step) != 0)

    def findings(self) -> Iterator[Finding]:
        """All that is found."""
        done = list(self._completion())
        yield from done
        loads = list(self.unfinished_loads())
        yield from loads
        stores = list(self._unfinished_stores())
        yield from stores
        if not done and not loads and not stores:
            yield from self._fences()

    # -- an mma's result is read before it is complete --------------------------------------------

    def _committed(self, mmas: Iterable[Op]) -> tuple[set[int | None], bool]:
        """Keys of the mbarriers that follow some of the mmas by a commit; whether there is any."""
        indices = {s.index for s in self.commits}
        followed = {c for m in mmas for c in after(self.graph, m.index) & indices}
        return {self.events[c].key for c in followed if c in self.events}, bool(followed)

    def _signals(self, keys: set[int | None]) -> list[Event]:
        """Waits on mbarriers that may be among the keys."""
        waits = self.program.all_events(Kind.MBARRIER_WAIT)
        return [w for w in waits if w.key is None or w.key in keys or None in keys]

    def _done_marks(self, mmas: Iterable[Op]) -> tuple[Marks, bool]:
        keys, any_commit = self._committed(mmas)
        changes = (
            {w.index: Change(gives=_DONE, who=w.guard) for w in self._signals(keys)} if any_commit else {}
        )
        return Marks(self.view, changes), any_commit

    def _completion(self) -> Iterator[Finding]:
        mmas = self.of("mma", "cp", "shift")
        others = self.of("st")
        solved: dict[tuple[int, ...], tuple[Marks, bool]] = {}
        for load in self.of("ld"):
            writing = [m for m in mmas if m.extents[0].may_overlap(load.extents[0])]
            sure = [m for m in writing if m.surely_overlaps(load)]
            if not writing or (not sure and any(s.may_overlap(load) for s in others)):
                continue
            chosen = sure or writing
            key = tuple(m.index for m in chosen)
            if key not in solved:
                solved[key] = self._done_marks(chosen)
            marks, any_commit = solved[key]
            who = self.executing(load.step)
            late = who & (marks.before(load.index) & np.uint64(_DONE) == 0)
            if not late.any():
                continue
            m = chosen[0]
            if not any_commit:
                missing = (
                    f"no tcgen05.commit follows {m.name} ({m.line}), so no mbarrier says when it is done"
                )
            else:
                missing = "these threads neither wait on the committed mbarrier nor meet one that does"
            yield self.say(
                load,
                f"{threads_text(late)} read tensor memory that {m.name} ({m.line}) may still be writing: "
                f"{missing}",
                "after the last mma execute tcgen05.commit on an mbarrier, and before the load wait on it "
                "and "
                "execute tcgen05.fence::after_thread_sync",
            )
            return

    # -- loads and stores without their wait -------------------------------------------------------

    def _consumed(self, load: Op) -> int | None:
        """The instruction of the load's block by which all registers it brings have been read."""
        left = {r.name for r in writes(load.step.instruction)}
        block = self.graph.blocks[self.graph.block_of[load.index]]
        for at in range(load.index + 1, block.end):
            left -= {r.name for r in reads(self.graph.instructions[at])}
            if not left:
                return at
        return None

    def unfinished_loads(self) -> Iterator[Finding]:
        """Tensor memory overwritten, handed back or freed while a load from it may be in flight."""
        loads = self.of("ld")[:_MANY]
        if not loads:
            return
        changes: dict[int, Change] = {}
        for n, load in enumerate(loads):
            changes[load.index] = change(
                self.view, load.step, gives=(_FLIGHT | _UNREAD) << 3 * n, clears=_COMPLETE << 3 * n
            )
        for n, load in enumerate(loads):
            used = self._consumed(load)
            if used is not None:
                old = changes.get(used, Change())
                changes[used] = Change(old.takes, old.gives, old.clears | _UNREAD << 3 * n, old.who, old.sure)
        each = sum(1 << 3 * n for n in range(len(loads)))
        for w in self.waits["ld"]:
            changes[w.index] = change(self.view, w, gives=_COMPLETE * each, clears=(_FLIGHT | _UNREAD) * each)
        here = Marks(self.view, changes, ())
        handed = Marks(self.view, self._handed(here, each))
        for op in (*self.of("mma", "st", "cp"), *self.deallocs):
            who = self.executing(op.step)
            mine, theirs = here.before(op.index), handed.before(op.index)
            for n, load in enumerate(loads):
                flight, unread, complete = (np.uint64(b << 3 * n) for b in (_FLIGHT, _UNREAD, _COMPLETE))
                if not (load.may_overlap(op) if op.kind != "st" else load.surely_overlaps(op)):
                    continue
                if (who & (mine & unread != 0)).any():
                    yield self._overwritten(load, op)
                    return
                early = who & (theirs & flight != 0) & (theirs & complete == 0)
                pending = bool((early & (theirs & unread != 0)).any())
                if early.any() and (pending or op.kind != "dealloc"):
                    yield self._handed_back(load, op, pending)
                    return

    def _handed(self, here: Marks, each: int) -> dict[int, Change]:
        """What those who arrive tell those who wait: loads in flight, and loads that are complete."""
        arrivals = {}
        for at, e in self.events.items():
            if e.kind in _BRINGS:
                state = here.before(at) if e.guard is None else np.where(e.guard != 0, here.before(at), 0)
                bits = int(np.bitwise_or.reduce(state.astype(np.uint64), initial=np.uint64(0)))
                if bits & each * 7:
                    arrivals[at] = bits & each * 7
        found: dict[int, Change] = {}
        for at, e in self.events.items():
            if e.kind in (Kind.BARRIER, Kind.MBARRIER_WAIT, Kind.CLUSTER_WAIT):
                bits = 0
                for b, brought in arrivals.items():
                    if self._meet(e, self.events[b]):
                        bits |= brought
                if bits:
                    found[at] = Change(gives=bits, who=e.guard)
        return found

    def _overwritten(self, load: Op, op: Op) -> Finding:
        what = "frees" if op.kind == "dealloc" else "may overwrite"
        return self.say(
            load,
            f"{op.name} ({op.line}) {what} the columns that this tcgen05.ld reads, in the same thread and "
            "with "
            "no tcgen05.wait::ld between: the two are not ordered, so the load may return the new values",
            "execute tcgen05.wait::ld after the load, before the columns are overwritten or freed",
        )

    def _handed_back(self, load: Op, op: Op, pending: bool) -> Finding:
        stops = {w.index for w in self.waits["ld"]}
        way = after(self.graph, load.index, lambda at: at in stops)
        meets = [e for at, e in sorted(self.events.items()) if at in way and e.kind in _BRINGS]
        at = f" at line {self.view.place(meets[0].index).ptx_line}" if meets else ""
        name = self.graph.instructions[meets[0].index].name if meets else "a barrier"
        does = "frees it" if op.kind == "dealloc" else "lets it be overwritten"
        more = (
            ""
            if pending
            else "; its registers are read before, but the ISA says that such a dependency orders no more"
        )
        return self.say(
            load,
            f"this tcgen05.ld may still be in flight when {name}{at} hands the tensor memory on: there is no "
            f"tcgen05.wait::ld between, and {op.name} ({op.line}), which comes after it, {does}{more}",
            "execute tcgen05.wait::ld (and tcgen05.fence::before_thread_sync) between the load and the "
            "arrival",
            Severity.ERROR if pending else Severity.WARNING,
        )

    def _unfinished_stores(self) -> Iterator[Finding]:
        stores = self.of("st")[: 3 * _MANY]
        if not stores:
            return
        changes = {s.index: change(self.view, s.step, gives=1 << n) for n, s in enumerate(stores)}
        for w in self.waits["st"]:
            changes[w.index] = change(self.view, w, clears=(1 << len(stores)) - 1)
        here, everywhere = Marks(self.view, changes, ()), Marks(self.view, changes)
        for op in (*self.of("mma", "ld", "cp"), *self.deallocs):
            who = self.executing(op.step)
            for n, store in enumerate(stores):
                bit = np.uint64(1 << n)
                same = who & (here.before(op.index) & bit != 0)
                other = who & (everywhere.before(op.index) & bit != 0)
                if not other.any() or not store.may_overlap(op):
                    continue
                if op.kind == "ld" and not store.surely_overlaps(op):
                    continue
                between = "in the same thread" if same.any() else "in a thread that it synchronises with"
                verb = {"ld": "reads", "dealloc": "frees"}.get(op.kind, "uses")
                yield self.say(
                    store,
                    f"{op.name} ({op.line}) {verb}, {between}, columns that this tcgen05.st may still be "
                    "writing: no tcgen05.wait::st stands between, so it can see the old contents",
                    "execute tcgen05.wait::st after the store, before the columns are used or announced",
                )
                return

    # -- fences around synchronisation between threads ---------------------------------------------

    def _fences(self) -> Iterator[Finding]:
        mmas = self.of("mma", "cp", "shift")
        commits = {c.index for c in self.commits}
        followed = {c for m in mmas for c in after(self.graph, m.index) & commits}
        names = {self.mbarriers.name(c) for c in followed} - {None}
        waits = self.program.all_events(Kind.MBARRIER_WAIT)
        signals = {w.index for w in waits if self.mbarriers.name(w.index) in names}
        gives = {w.index: _LOADED for w in self.waits["ld"]} | {w.index: _STORED for w in self.waits["st"]}
        gives |= dict.fromkeys(signals, _DONE)
        plain = {at: Change(gives=bits, who=self._guard(at)) for at, bits in gives.items()}
        own, known = Marks(self.view, plain, ()), Marks(self.view, plain)
        yield from self._after(signals, own, known)
        yield from self._before()

    def _guard(self, index: int) -> Lanes | None:
        step = self.view.step(index)
        return None if step is None else step.guard

    def _after(self, signals: set[int], own: Marks, known: Marks) -> Iterator[Finding]:
        """Operations that may come before fence::after_thread_sync of the wait that orders them."""
        brought: list[tuple[Event, int]] = []
        for at, e in self.events.items():
            if e.kind in _BRINGS:
                state = known.before(at) if e.guard is None else np.where(e.guard != 0, known.before(at), 0)
                brought.append((e, int(np.bitwise_or.reduce(state.astype(np.uint64), initial=np.uint64(0)))))
        changes: dict[int, Change] = {}
        whence: dict[int, list[int]] = {_DONE: [], _LOADED: [], _STORED: []}
        for at, e in self.events.items():
            if e.kind not in (Kind.BARRIER, Kind.MBARRIER_WAIT, Kind.CLUSTER_WAIT):
                continue
            bits = _DONE if at in signals else 0
            for b, carried in brought:
                if carried and self._meet(e, b):
                    bits |= carried
            if not bits:
                continue
            mine = own.before(at)
            for bit in whence:
                if bits & bit and (at in signals or (mine & np.uint64(bit) == 0).any()):
                    whence[bit].append(at)
            if e.kind is Kind.BARRIER:  # what a thread completed itself needs no fence
                bits &= ~int(np.bitwise_and.reduce(mine, initial=np.uint64(7)))
            changes[at] = Change(gives=bits, who=e.guard)
        for f in self.fences["after"]:
            changes[f.index] = change(self.view, f, clears=7)
        marks = Marks(self.view, changes, ())
        wants = {"ld": _DONE | _STORED, "mma": _LOADED | _STORED, "st": _DONE | _LOADED, "cp": _LOADED}
        for op in self.of("ld", "mma", "st", "cp"):
            need = marks.carried(op.step) & wants[op.kind]
            conflict = [o for o in self._conflicting(op, need) if o.may_overlap(op)]
            if not need or not conflict:
                continue
            bit = next(b for b in (_DONE, _LOADED, _STORED) if need & b)
            near = [w for w in whence[bit] if op.index in after(self.graph, w, self._is_after_fence)]
            wait = self.view.place(near[-1]) if near else None
            text = f"{wait.text.split(' ')[0]} at line {wait.ptx_line}" if wait is not None else "the wait"
            severity = Severity.ERROR if self.strict else Severity.INFO
            yield self.say(
                op,
                f"{op.name} can be moved above {text}, which says that {_WHAT[bit]} ({conflict[0].name}, "
                f"{conflict[0].line}): there is no tcgen05.fence::after_thread_sync between",
                "execute tcgen05.fence::after_thread_sync after the wait, before the operation",
                severity,
            )
            return

    def _after_of(self, index: int) -> frozenset[int]:
        if index not in self._afters:
            self._afters[index] = after(self.graph, index)
        return self._afters[index]

    def _meet(self, wait: Event, arrival: Event) -> bool:
        """Whether an arrival is certain to be at the barrier of a wait, as far as names and counts say."""
        if wait.kind is Kind.MBARRIER_WAIT:
            name = self.mbarriers.name(wait.index)
            same = name is not None and name == self.mbarriers.name(arrival.index)
            if arrival.kind is not Kind.MBARRIER_ARRIVE or not same:
                return False
            later = arrival.index in self._after_of(wait.index)
            return not later or wait.index in self._after_of(arrival.index)
        if wait.kind is Kind.CLUSTER_WAIT:
            return arrival.kind is Kind.CLUSTER_ARRIVE
        if arrival.kind not in (Kind.BARRIER, Kind.BARRIER_ARRIVE) or wait.key != arrival.key:
            return False
        mine, theirs = (set(self.phases[e.index].tolist()) - {-1} for e in (wait, arrival))
        return VARIES in mine | theirs or bool(mine & theirs)

    def _is_after_fence(self, at: int) -> bool:
        return any(f.index == at for f in self.fences["after"])

    def _conflicting(self, op: Op, need: int) -> list[Op]:
        kinds: list[str] = []
        kinds += ["mma", "cp", "shift"] if need & _DONE else []
        kinds += ["ld"] if need & _LOADED else []
        kinds += ["st"] if need & _STORED else []
        return [o for o in self.of(*kinds) if o is not op]

    def _before(self) -> Iterator[Finding]:
        """Completed loads and stores that reach another thread without fence::before_thread_sync.

        A load that was waited for has its data, so that there only the ISA's letter is missed: a warning.
        """
        if not self.strict:
            return
        changes = {w.index: change(self.view, w, gives=_LOADED) for w in self.waits["ld"]}
        changes |= {w.index: change(self.view, w, gives=_STORED) for w in self.waits["st"]}
        for f in self.fences["before"]:
            changes[f.index] = change(self.view, f, clears=7)
        own, known = Marks(self.view, changes, ()), Marks(self.view, changes)
        for op in self.of("mma", "cp", "ld"):
            who = self.executing(op.step)
            for bit, kind in ((_LOADED, "ld"), (_STORED, "st")):
                if op.kind == kind:
                    continue
                b = np.uint64(bit)
                handed = who & (known.before(op.index) & b != 0) & (own.before(op.index) & b == 0)
                conflict = [o for o in self.of(kind) if o.may_overlap(op)]
                if not handed.any() or not conflict:
                    continue
                first = conflict[0]
                yield self.say(
                    first,
                    f"nothing orders this {first.name} before the synchronisation that lets {op.name} "
                    f"({op.line}) of another thread use the same columns: there is no "
                    "tcgen05.fence::before_thread_sync between its wait and the arrival",
                    f"execute tcgen05.fence::before_thread_sync after tcgen05.wait::{kind}, before the "
                    "barrier "
                    "or the arrival",
                    Severity.ERROR if bit == _STORED else Severity.WARNING,
                )
                return


def _operation(step: Step, kind: str, addresses: TensorAddresses, view: PtxView) -> Op:
    i = step.instruction
    operands = [o for o in i.operands if isinstance(o, Address)]
    if kind == "cp" or kind == "shift":
        first = addresses.of(operands[0]) if operands else Extent(None)
        return Op(step, kind, (first,))
    if kind in ("ld", "st"):
        first = addresses.of(operands[0]) if operands else Extent(None)
        return Op(step, kind, (Extent(first.base, first.column, width(i)),))
    found = [addresses.of(o) for o in operands]
    if found:
        found[0] = Extent(found[0].base, found[0].column, _result_columns(step))
    return Op(step, kind, tuple(found) or (Extent(None),))


def _result_columns(step: Step) -> int | None:
    """Columns of an mma's accumulator: N of the instruction descriptor, in bits 17 to 22."""
    for operand, value in zip(step.instruction.operands[3:4], step.values[3:4], strict=False):
        number = value.constant()
        if number is not None and isinstance(operand, (Reg, Imm)):
            n = (number >> 17 & 63) * 8
            return n if n else None
    return None
