"""What stands between two steps of a kernel: marks that threads carry along the control-flow graph.

A rule that asks "can this read come after that write with no fence in between, in the same thread or
through a barrier" gives the write's threads a mark, lets fences take it away, and looks which threads still
have it at the read. Marks are the 64 bits of a number a thread; where paths meet, a thread has what it may
have on either. At barriers, mbarriers and cluster barriers threads hand their marks on to those they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.isa.flow import ControlFlowGraph
from workbench.isa.values import Lanes
from workbench.verify.ordering.program import Event, Kind, Program
from workbench.verify.ordering.solver import VARIES, arrivals_before
from workbench.verify.ordering.view import PtxView, SassStep, SassView, Step

CTA_MEETINGS = frozenset((Kind.BARRIER, Kind.BARRIER_ARRIVE, Kind.WARP_BARRIER))
"""Barriers of a CTA and of a warp."""
MBARRIERS = frozenset((Kind.MBARRIER_ARRIVE, Kind.MBARRIER_WAIT))
CLUSTER = frozenset((Kind.CLUSTER_ARRIVE, Kind.CLUSTER_WAIT))
MEETINGS = CTA_MEETINGS | MBARRIERS | CLUSTER
"""All places where one thread is ordered after another without a word in memory."""
_BRINGS = frozenset((Kind.BARRIER, Kind.BARRIER_ARRIVE, Kind.MBARRIER_ARRIVE, Kind.CLUSTER_ARRIVE))
_FETCHES = frozenset((Kind.BARRIER, Kind.MBARRIER_WAIT, Kind.CLUSTER_WAIT))


@dataclass(frozen=True, eq=False)
class Change:
    """What one instruction does to the marks of the threads that execute it."""

    takes: int = 0
    """Bits removed before the instruction hands marks on (a release fence in an arrival)."""
    gives: int = 0
    """Bits added once it is done."""
    clears: int = 0
    """Bits removed after it has received marks from others (an acquire in a wait)."""
    who: Lanes | None = None
    """Threads that execute it, 0 or 1; None for all that reach it."""
    sure: bool = True
    """False if its guard is not known: it then gives, but takes and clears nothing."""


def change(
    view: PtxView | SassView, step: Step | SassStep, *, takes: int = 0, gives: int = 0, clears: int = 0
) -> Change:
    """A change by the threads that execute a step."""
    return Change(takes, gives, clears, step.guard, not step.guarded)


class Marks:
    """Marks of each thread before each instruction, as they may be on some path.

    Args:
        view: the kernel.
        changes: by instruction index.
        meetings: the kinds of events at which marks are handed on to other threads.
        start: marks that every thread has at the entry.
    """

    def __init__(
        self,
        view: PtxView | SassView,
        changes: Mapping[int, Change],
        meetings: Collection[Kind] = MEETINGS,
        start: int = 0,
    ) -> None:
        self.graph: ControlFlowGraph[Any] = view.graph
        self._program = view.analysis.program
        self._changes = changes
        self._n = view.analysis.program.threads.count
        self._reach = reaching(self._program)
        self._meet, self._pools_of = _meetings(self._program, frozenset(meetings), self._reach, self.graph)
        self._warps = (self._program.threads.linear // np.uint64(32)).astype(np.intp)
        self._pools: dict[object, int] = {}
        self._entry: dict[int, Lanes] = {0: np.full(self._n, start, np.uint64)}
        self._interesting: dict[int, list[int]] = {}
        for at in sorted(self._changes.keys() | self._meet.keys()):
            self._interesting.setdefault(self.graph.block_of[at], []).append(at)
        self._solve()

    def before(self, index: int) -> Lanes:
        """Bits each thread may carry when it comes to an instruction; 0 for threads that never come."""
        b = self.graph.block_of[index]
        state = self._entry.get(b)
        if state is None:
            return np.zeros(self._n, np.uint64)
        state = state.copy()
        for at in self._interesting.get(b, ()):
            if at >= index:
                break
            state = self._apply(at, b, state)
        return state

    def reach(self, index: int) -> Any:
        """Threads (booleans) that may reach an instruction."""
        found = self._reach.get(self.graph.block_of[index])
        return np.zeros(self._n, np.bool_) if found is None else found

    def carried(self, step: Step | SassStep) -> int:
        """All bits that some thread which executes a step may carry before it."""
        state = self.before(step.index)
        if step.guard is not None:
            state = np.where(step.guard != 0, state, np.uint64(0))
        return int(np.bitwise_or.reduce(state, initial=np.uint64(0)))

    def at_end(self) -> Lanes:
        """Bits each thread may carry where it ends."""
        found = np.zeros(self._n, np.uint64)
        for b, leaves in enumerate(self.graph.leaves):
            if not leaves or b not in self._entry:
                continue
            state = self._entry[b].copy()
            for at in self._interesting.get(b, ()):
                state = self._apply(at, b, state)
            mask = self._program.leaving.get(b)
            found |= state if mask is None else np.where(mask != 0, state, np.uint64(0))
        return found

    # -- solving -----------------------------------------------------------------------------------

    def _solve(self) -> None:
        todo = dict.fromkeys(self.graph.reverse_postorder)
        while todo:
            pools = dict(self._pools)
            while todo:
                b = next(iter(todo))
                del todo[b]
                self._block(b, todo)
            if pools != self._pools:
                todo = dict.fromkeys(b for b in self.graph.reverse_postorder if b in self._entry)

    def _block(self, b: int, todo: dict[int, None]) -> None:
        entry = self._entry.get(b)
        if entry is None:
            return
        state = entry.copy()
        for at in self._interesting.get(b, ()):
            state = self._apply(at, b, state)
        for s in self.graph.successors[b]:
            mask = self._program.edges.get((b, s))
            coming = state if mask is None else np.where(mask != 0, state, np.uint64(0))
            old = self._entry.get(s)
            new = coming if old is None else old | coming
            if old is None or not np.array_equal(old, new):
                self._entry[s] = new
                todo[s] = None

    def _apply(self, at: int, b: int, state: Lanes) -> Lanes:
        reach = self._reach.get(b)
        if reach is None:
            return state
        c = self._changes.get(at)
        who = reach
        if c is not None:
            if c.who is not None:
                who = reach & (c.who != 0)
            if c.takes and c.sure:
                state = np.where(who, state & ~np.uint64(c.takes), state)
        event = self._meet.get(at)
        if event is not None:
            state = self._exchange(event, reach, state)
        if c is not None:
            if c.clears and c.sure:
                state = np.where(who, state & ~np.uint64(c.clears), state)
            if c.gives:
                state = np.where(who, state | np.uint64(c.gives), state)
        return state

    def _exchange(self, event: Event, reach: Lanes, state: Lanes) -> Lanes:
        who = reach if event.guard is None else reach & (event.guard != 0)
        if event.kind is Kind.WARP_BARRIER:
            pool = np.zeros(int(self._warps[-1]) + 1, np.uint64)
            inside = who
            if event.key is not None and event.key != 0xFFFFFFFF:
                lane = self._program.threads.linear % np.uint64(32)
                inside = who & ((np.uint64(event.key) >> lane) & np.uint64(1) != 0)
            np.bitwise_or.at(pool, self._warps[inside], state[inside])
            return np.where(inside, state | pool[self._warps], state)
        pools = self._pools_of[event.index]
        if event.kind in _BRINGS and who.any():
            brought = int(np.bitwise_or.reduce(state[who]))
            for p in pools.into:
                self._pools[p] = self._pools.get(p, 0) | brought
        if event.kind in _FETCHES:
            fetched = 0
            for p in pools.out:
                fetched |= self._pools.get(p, 0)
            state = np.where(who, state | np.uint64(fetched), state)
        return state


def reaching(program: Program) -> dict[int, Any]:
    """Threads (booleans) that may reach each block; branches whose takers are known count.

    Found once a program; the arrays cannot be written to.
    """
    found: dict[int, Any] | None = program.__dict__.get("_reaching")
    if found is None:
        found = program.__dict__["_reaching"] = _reaching(program)
    return found


def _reaching(program: Program) -> dict[int, Any]:
    """Sets of threads are bits of one number while they are looked for."""
    n = program.threads.count
    found = {0: (1 << n) - 1}
    edges = {edge: _bits(mask) for edge, mask in program.edges.items()}
    todo = [0]
    while todo:
        b = todo.pop()
        for s in program.successors[b]:
            mask = edges.get((b, s))
            coming = found[b] if mask is None else found[b] & mask
            old = found.get(s)
            new = coming if old is None else old | coming
            if new != old:
                found[s] = new
                todo.append(s)
    arrays = {bits: _threads(bits, n) for bits in set(found.values())}
    return {b: arrays[bits] for b, bits in found.items()}


def _bits(mask: Lanes) -> int:
    return int.from_bytes(np.packbits(mask != 0, bitorder="little").tobytes(), "little")


def _threads(bits: int, n: int) -> Any:
    packed = np.frombuffer(bits.to_bytes((n + 7) // 8, "little"), np.uint8)
    found = np.unpackbits(packed, count=n, bitorder="little").astype(np.bool_)
    found.flags.writeable = False
    return found


def executing(view: PtxView | SassView, step: Step | SassStep) -> Any:
    """Threads (booleans) that may execute a step: they reach it and its guard, where known, lets them."""
    program = view.analysis.program
    reach = reaching(program).get(view.graph.block_of[step.index])
    if reach is None:
        return np.zeros(program.threads.count, np.bool_)
    return reach if step.guard is None else reach & (step.guard != 0)


def after(
    graph: ControlFlowGraph[Any], start: int, stops: Callable[[int], bool] | None = None
) -> frozenset[int]:
    """Instructions that some path from behind `start` comes to; a path ends at an instruction that `stops`.

    The stopping instruction itself is in the result, `start` only if a loop comes back to it.
    """
    first = graph.blocks[graph.block_of[start]]
    if stops is None:
        behind = _behind(graph, first.index)
        rest = range(start + 1, first.end)
        return behind if behind.issuperset(rest) else behind.union(rest)
    found: set[int] = set()
    todo = [(first.index, start + 1)]
    seen: set[int] = set()
    while todo:
        b, begin = todo.pop()
        end = graph.blocks[b].end
        stop = next((at for at in range(begin, end) if stops(at)), None)
        found.update(range(begin, end if stop is None else stop + 1))
        if stop is None:
            for s in graph.successors[b]:
                if s not in seen:
                    seen.add(s)
                    todo.append((s, graph.blocks[s].start))
    return frozenset(found)


def _behind(graph: ControlFlowGraph[Any], block: int) -> frozenset[int]:
    """Instructions of the blocks that some path from the end of one comes to; found once a graph."""
    known: dict[int | frozenset[int], frozenset[int]] = graph.__dict__.setdefault("_behind", {})
    if block not in known:
        seen: set[int] = set()
        todo = list(graph.successors[block])
        while todo:
            b = todo.pop()
            if b not in seen:
                seen.add(b)
                todo.extend(graph.successors[b])
        blocks = frozenset(seen)
        if blocks not in known:
            known[blocks] = frozenset(
                at for b in seen for at in range(graph.blocks[b].start, graph.blocks[b].end)
            )
        known[block] = known[blocks]
    return known[block]


def passes(graph: ControlFlowGraph[Any], start: int, goal: int, through: Callable[[int], bool]) -> bool:
    """True if every path from behind `start` to `goal` executes an instruction of a kind on its way.

    Also true if no path leads there.
    """
    return goal not in after(graph, start, lambda at: at != goal and through(at))


def loops_around(graph: ControlFlowGraph[Any], index: int) -> list[frozenset[int]]:
    """Blocks of the natural loops an instruction stands in, the innermost first."""
    b = graph.block_of[index]
    return sorted((body for body in graph.loops.values() if b in body), key=len)


# -- who meets whom --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pools:
    """Where a meeting leaves the marks of those who arrive, and where it finds those of others."""

    into: tuple[object, ...]
    out: tuple[object, ...]


def _meetings(
    program: Program, kinds: frozenset[Kind], reach: Mapping[int, Any], graph: ControlFlowGraph[Any]
) -> tuple[dict[int, Event], dict[int, _Pools]]:
    """Meetings of these kinds by instruction index, and their pools; found once a program."""
    known: dict[frozenset[Kind], Any] = program.__dict__.setdefault("_meetings", {})
    if kinds not in known:
        meet = {e.index: e for e in program.all_events(*kinds)}
        known[kinds] = meet, _pools(program, meet, reach, graph)
    found: tuple[dict[int, Event], dict[int, _Pools]] = known[kinds]
    return found


def _pools(
    program: Program, meet: Mapping[int, Event], reach: Mapping[int, Any], graph: ControlFlowGraph[Any]
) -> dict[int, _Pools]:
    """The pools of each meeting.

    CTA barriers: those who come to one instruction meet; those at different instructions with the same number
    meet if they are different threads and may have been at it equally often. An mbarrier is its address; one
    whose address is not known may be any. Cluster barriers are counted; one in a loop may be any.
    """
    found: dict[int, _Pools] = {}
    barriers = [e for e in meet.values() if e.kind in (Kind.BARRIER, Kind.BARRIER_ARRIVE)]
    phases = arrivals_before(program)
    for e in meet.values():
        if e.kind in MBARRIERS:
            found[e.index] = _named("mbarrier", (None,) if e.key is None else (e.key,))
        elif e.kind in CLUSTER:
            counts = {int(p) for p in np.unique(phases.get(e.index, np.zeros(0))) if p != -1}
            before = 1 if e.kind is Kind.CLUSTER_WAIT else 0
            varies = VARIES in counts or not counts
            found[e.index] = _named("cluster", (None,) if varies else tuple(c - before for c in counts))
    for e in barriers:
        mine = _takers(e, reach, graph)
        met: list[object] = [("barrier", e.index, e.index)]
        for o in barriers:
            if o is e or not (o.key == e.key or None in (o.key, e.key)):
                continue
            theirs = _takers(o, reach, graph)
            if (mine & ~theirs).any() and (theirs & ~mine).any() and _together(e, mine, o, theirs, phases):
                met.append(("barrier", *sorted((e.index, o.index))))
        found[e.index] = _Pools(tuple(met), tuple(met))
    return found


def _named(what: str, keys: tuple[int | None, ...]) -> _Pools:
    """Pools of a barrier known by its key; None is one that is not known and may be any."""
    every = (what, "every")
    into = (every, *((what, k) for k in keys))
    return _Pools(into, (every,) if None in keys else ((what, None), *((what, k) for k in keys)))


def _takers(event: Event, reach: Mapping[int, Any], graph: ControlFlowGraph[Any]) -> Any:
    threads = reach.get(graph.block_of[event.index])
    if threads is None:
        return np.zeros(next(iter(reach.values())).shape, np.bool_)
    return threads if event.guard is None else threads & (event.guard != 0)


def _together(e: Event, mine: Any, o: Event, theirs: Any, phases: Mapping[int, Any]) -> bool:
    """Whether two barriers may be the same meeting: equally many before them, as far as that is known."""
    if e.index not in phases or o.index not in phases:
        return True
    a, b = phases[e.index][mine], phases[o.index][theirs]
    return bool((a == VARIES).any() or (b == VARIES).any() or np.intersect1d(a, b).size)
