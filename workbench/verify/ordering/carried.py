"""Writes that threads carry with them until a fence covers them, through barriers to other threads.

A rule marks its writes and its fences; for each write this says of every thread, at every point, whether on
some path the thread comes after the write with no fence since, or with one. Where every path has the first
and none the second, no fence can be there: the rule is certain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.isa.flow import ControlFlowGraph
from workbench.isa.values import Lanes
from workbench.verify.ordering.paths import MBARRIERS, reaching
from workbench.verify.ordering.program import Event, Kind, Program
from workbench.verify.ordering.solver import VARIES, arrivals_before

BEFORE, FRESH, HANDED, FENCED = 1, 2, 4, 8
"""What a thread's past may be: without the write; with it and no fence since, by the thread itself and handed
on to nobody; the same, but others know of it or it is theirs; with it and a fence since."""
BARE = FRESH | HANDED
States = NDArray[np.uint8]
_GOES = frozenset(
    (Kind.BARRIER, Kind.BARRIER_ARRIVE, Kind.CLUSTER_ARRIVE, Kind.MBARRIER_ARRIVE, Kind.RELEASE)
)
_HANDS = _GOES - {Kind.RELEASE}
_COMES = frozenset((Kind.BARRIER, Kind.CLUSTER_WAIT, Kind.MBARRIER_WAIT, Kind.ACQUIRE))
MEETS = _GOES | _COMES | {Kind.WARP_BARRIER}
"""Events at which what a thread carries may go to others."""


@dataclass(frozen=True, eq=False)
class Mark:
    """What one instruction does: writes of these numbers, or a fence."""

    writes: tuple[int, ...] = ()
    fence: bool = False
    who: Lanes | None = None
    """Threads that execute it, 0 or 1; None for all that reach it."""
    sure: bool = True
    """False if its guard is not known."""


class Carried:
    """States of each write and thread, as `[write, thread]` sets of the four above; 0 if unreached.

    Args:
        program: the kernel's events.
        graph: its control flow.
        marks: by instruction index.
        count: number of writes.
        extra: more events, for instance arrivals made by asynchronous stores.
        own: a fence counts only for the thread that executes it.
    """

    def __init__(
        self,
        program: Program,
        graph: ControlFlowGraph[Any],
        marks: Mapping[int, Mark],
        count: int,
        extra: tuple[Event, ...] = (),
        own: bool = False,
    ) -> None:
        self._program, self._graph, self._marks, self._count, self._own = program, graph, marks, count, own
        self._full = reaching(program)
        self._events: dict[int, list[Event]] = {}
        for e in (*program.all_events(*MEETS), *extra):
            self._events.setdefault(e.index, []).append(e)
        self._keep, self._class = self._alike()
        self._reach = {b: reach[self._keep] for b, reach in self._full.items()}
        self._lanes = self._keep % 32
        self._warps = self._keep // 32
        self._edges = {e: mask[self._keep] for e, mask in program.edges.items()}
        self._sources = self._met()
        self._given: dict[Event, States] = {}
        self._points: dict[int, list[int]] = {}
        for at in sorted(self._events.keys() | marks.keys()):
            self._points.setdefault(graph.block_of[at], []).append(at)
        self._entry: dict[int, States] = {0: np.full((count, self._keep.size), BEFORE, np.uint8)}
        self._solve()

    def before(self, index: int) -> States:
        """States before an instruction."""
        b = self._graph.block_of[index]
        if b not in self._entry:
            return np.zeros((self._count, self._program.threads.count), np.uint8)
        state = self._entry[b].copy()
        for at in self._points.get(b, ()):
            if at >= index:
                break
            state = self._step(at, state)
        return np.asarray(state[:, self._class])

    def _alike(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Threads that stand for all: one of those that go the same ways, in one of the warps that are alike.

        Returns:
            Their numbers, and for each thread which of them stands for it.
        """
        n = self._program.threads.count
        events = [e for es in self._events.values() for e in es]
        lanes = self._program.threads.linear % np.uint64(32)
        keys = {e.key for e in events if e.kind is Kind.WARP_BARRIER and e.key is not None}
        masks = [
            *self._program.edges.values(),
            *(m.who for m in self._marks.values()),
            *(e.guard for e in events),
        ]
        rows = {(m != 0).tobytes(): m != 0 for m in masks if m is not None}
        for key in keys:
            inside = ((np.uint64(key) >> lanes) & np.uint64(1)) != 0
            rows[inside.tobytes()] = inside
        if not rows:
            return np.zeros(1, np.intp), np.zeros(n, np.intp)
        _, way = np.unique(np.stack(list(rows.values())), axis=1, return_inverse=True)
        ways = np.full(-(-n // 32) * 32, -1, np.intp)
        ways[:n] = way.reshape(-1)
        _, first, alike = np.unique(ways.reshape(-1, 32), axis=0, return_index=True, return_inverse=True)
        keep: list[int] = []
        place: dict[tuple[int, int], int] = {}
        for w, warp in enumerate(first):
            for t in range(warp * 32, min(warp * 32 + 32, n)):
                if (w, int(ways[t])) not in place:
                    place[w, int(ways[t])] = len(keep)
                    keep.append(t)
        alike = alike.reshape(-1)
        classes = [place[int(alike[t // 32]), int(ways[t])] for t in range(n)]
        return np.array(keep, np.intp), np.array(classes, np.intp)

    def _solve(self) -> None:
        order = {b: n for n, b in enumerate(self._graph.reverse_postorder)}
        todo = set(order)
        receivers: dict[int, set[int]] = {}
        for receiver, sources in self._sources.items():
            for source in sources:
                into = receivers.setdefault(self._graph.block_of[source.index], set())
                into.add(self._graph.block_of[receiver.index])
        for _ in range(60 * len(order)):
            ready = [b for b in todo if b in self._entry]
            if not ready:
                return
            b = min(ready, key=order.__getitem__)
            todo.discard(b)
            given = {e: g for e, g in self._given.items() if self._graph.block_of[e.index] == b}
            state = self._entry[b].copy()
            for at in self._points.get(b, ()):
                state = self._step(at, state)
            mine = [(e, now) for e, now in self._given.items() if self._graph.block_of[e.index] == b]
            if any(e not in given or not np.array_equal(now, given[e]) for e, now in mine):
                todo |= receivers.get(b, set()) & order.keys()
            for s in self._graph.successors[b]:
                mask = self._edges.get((b, s))
                coming = state if mask is None else np.where(mask != 0, state, 0).astype(np.uint8)
                old = self._entry.get(s)
                new = coming if old is None else old | coming
                if old is None or not np.array_equal(old, new):
                    self._entry[s] = new
                    todo.add(s)
        self._entry = {}  # no fixpoint in sight: nothing is said

    def _step(self, at: int, state: States) -> States:
        mark = self._marks.get(at)
        reach = self._reach.get(self._graph.block_of[at])
        if reach is None:
            return state
        if mark is not None:
            who = reach if mark.who is None else reach & (mark.who[self._keep] != 0)
            if mark.fence:
                fenced = np.where(state & BARE, (state & BEFORE) | FENCED, state)
                if not mark.sure:
                    fenced = fenced | state
                state = np.where(who & (state != 0), fenced, state).astype(np.uint8)
            for w in mark.writes:
                state[w] = np.where(who & (state[w] != 0), FRESH, state[w])
        for e in self._events.get(at, ()):
            state = self._meet(e, reach, state)
        return state

    def _meet(self, e: Event, reach: NDArray[np.bool_], state: States) -> States:
        who = reach if e.guard is None else reach & (e.guard[self._keep] != 0)
        if not who.any():
            return state
        if e.kind is Kind.WARP_BARRIER:
            return self._warp(e, who, state)
        mine = _all_of(state, who) if e.kind in _GOES else None
        if mine is not None:
            old = self._given.get(e)
            self._given[e] = mine if old is None else old | mine
        if e.kind in _HANDS:
            handed = (state & ~np.uint8(FRESH)) | HANDED
            state = np.where(who & ((state & FRESH) != 0), handed, state).astype(np.uint8)
        if e.kind not in _COMES:
            return state
        given = [self._given[s] for s in self._sources.get(e, ()) if s is not e and s in self._given]
        others = list({g.tobytes(): g for g in given}.values())
        if e.kind is Kind.BARRIER and mine is not None:
            got = _any_of([_both(mine, o) for o in others]) if others else mine
            return self._receive(who, state, got[:, None])
        if not others:
            return state
        exact = e.kind is Kind.MBARRIER_WAIT and e.key is not None
        exact = exact and all(s.key is not None for s in self._sources.get(e, ()))
        exact = exact or (e.kind is Kind.CLUSTER_WAIT and len(given) == 1)
        if exact:
            got = state
            for o in others:
                got = _both(got, np.broadcast_to(o[:, None], state.shape))
        else:
            got = _any_of([_both(state, np.broadcast_to(o[:, None], state.shape)) for o in others]) | state
        return self._receive(who, state, got)

    def _receive(self, who: NDArray[np.bool_], state: States, got: States) -> States:
        if self._own:
            bare = np.where(got & FENCED, (got & ~np.uint8(FENCED)) | HANDED, got)
            got = np.where(state & FENCED, got | FENCED, bare)
        return np.where(who & (state != 0), got, state).astype(np.uint8)

    def _warp(self, e: Event, who: NDArray[np.bool_], state: States) -> States:
        if e.key is None:
            return state
        inside = who & (((e.key >> self._lanes) & 1) != 0)
        result = state
        for w in np.unique(self._warps[inside]):
            group = inside & (self._warps == w)
            result = self._receive(group, result, _all_of(state, group)[:, None])
        return result

    # -- who meets whom ----------------------------------------------------------------------------

    def _met(self) -> dict[Event, list[Event]]:
        events = [e for es in self._events.values() for e in es]
        phases = arrivals_before(self._program)
        found: dict[Event, list[Event]] = {}
        for e in events:
            if e.kind not in _COMES:
                continue
            match e.kind:
                case Kind.BARRIER:
                    wanted = [o for o in events if o is not e and self._together(e, o, phases)]
                case Kind.MBARRIER_WAIT:
                    arrivals = [o for o in events if o.kind in MBARRIERS and o.kind in _GOES]
                    wanted = [o for o in arrivals if e.key is None or o.key in (None, e.key)]
                case Kind.CLUSTER_WAIT:
                    wanted = [o for o in events if o.kind is Kind.CLUSTER_ARRIVE]
                case _:
                    wanted = [o for o in events if o.kind is Kind.RELEASE]
            found[e] = wanted
        return found

    def _threads(self, e: Event) -> NDArray[np.bool_]:
        reach = self._full.get(self._graph.block_of[e.index])
        if reach is None:
            return np.zeros(self._program.threads.count, np.bool_)
        return np.asarray(reach if e.guard is None else reach & (e.guard != 0))

    def _together(self, e: Event, o: Event, phases: Mapping[int, Any]) -> bool:
        """Whether two CTA barriers may be one meeting of different threads."""
        if o.kind not in (Kind.BARRIER, Kind.BARRIER_ARRIVE):
            return False
        if o.key != e.key and None not in (o.key, e.key):
            return False
        mine, theirs = self._threads(e), self._threads(o)
        if not (mine & ~theirs).any() or not (theirs & ~mine).any():
            return False
        if e.index not in phases or o.index not in phases:
            return True
        a, b = phases[e.index][mine], phases[o.index][theirs]
        return bool((a == VARIES).any() or (b == VARIES).any() or np.intersect1d(a, b).size)


def _all_of(state: States, who: NDArray[np.bool_]) -> States:
    """The past of all these threads together, one set a write."""
    part = state[:, who]
    absent = part == 0

    def some(bits: int) -> NDArray[np.bool_]:
        return np.asarray(((part & bits) != 0).any(axis=1))

    def every(bits: int) -> NDArray[np.bool_]:
        return np.asarray((((part & bits) != 0) | absent).all(axis=1))

    handed = some(FRESH) | (some(HANDED) & every(BEFORE | HANDED))
    fenced = some(FENCED) & every(BEFORE | HANDED | FENCED)
    return np.asarray(handed * HANDED + fenced * FENCED + every(BEFORE) * BEFORE, np.uint8)


def _both(a: States, b: States) -> States:
    either = a | b
    old = BEFORE | HANDED
    handed = ((either & FRESH) != 0) | (((either & HANDED) != 0) & ((a & old) != 0) & ((b & old) != 0))
    clean = ((a & ~np.uint8(FRESH)) != 0) & ((b & ~np.uint8(FRESH)) != 0)
    fenced = ((either & FENCED) != 0) & clean
    met = handed * HANDED + fenced * FENCED + ((a & b & BEFORE) != 0) * BEFORE
    return np.asarray(np.where(a == 0, b, np.where(b == 0, a, met)), np.uint8)


def _any_of(states: list[States]) -> States:
    found = states[0]
    for s in states[1:]:
        found = found | s
    return found
