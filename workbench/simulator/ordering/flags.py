"""Release and acquire through memory: flags, locks, counters (PTX ISA 8.9).

A location that strong accesses write holds what its writers released, in parts by scope and origin. A later
atomic operation keeps them (a release sequence), an ordinary strong store begins anew. A thread that reads
the location learns the parts whose scopes include it: at once if the read acquires, at its next acquiring
fence if it is relaxed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.ordering.clocks import Clock, Clocks, World
from workbench.simulator.ordering.shadow import CLUSTER, CTA, GPU, SYS, Kind

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort

Array = npt.NDArray[Any]
_MANY = 4096
"""Addresses of one instruction that are still followed one by one."""
_APART = 64
"""Addresses of one CTA in one instruction for which threads are told apart."""
PENDING, LOOSE, NARROW, SEEN = "pending", "loose", "narrow", "seen"
"""Notes of a class: what a fence would let it learn, what it saw from writers that released nothing, what
scopes kept from it, and the versions of locations that it has learned from."""
_CARRIED = frozenset((PENDING, LOOSE, NARROW))


@dataclass(slots=True)
class Part:
    """What writers of one scope and place released."""

    clock: Clock
    origins: set[tuple[int, int, int]]
    """CTA, cluster and rank of the writers."""


@dataclass(slots=True)
class Location:
    """A flag."""

    parts: dict[tuple[int, int], Part] = field(default_factory=dict)
    """By scope and number of the CTA, cluster or rank that the scope means."""
    loose: Clock = field(default_factory=dict)
    """What relaxed stores would have released."""
    version: int = 0


def few(co: Cohort) -> bool:
    """Whether so few lanes of each CTA act that they may be setting flags, not storing data."""
    return co.lanes <= 1024 and co.lanes <= 4 * len(np.unique(co.ctas))


class Flags:
    """The locations of a launch."""

    def __init__(self) -> None:
        self.locations: dict[tuple[int, int], Location] = {}
        """By space (0 global memory, else CTA number + 1) and byte."""
        self.low, self.high = 1 << 62, -1
        self.version = 0

    def _at(self, key: tuple[int, int]) -> Location:
        location = self.locations.get(key)
        if location is None:
            location = self.locations[key] = Location()
            self.low, self.high = min(self.low, key[1]), max(self.high, key[1])
        return location

    # -- writing ---------------------------------------------------------------------------------

    def write(self, kind: Kind, rmw: bool, spaces: Array, at: Array, co: Cohort, clocks: Clocks) -> None:
        """A strong store or an atomic operation.

        Args:
            kind: of the access.
            rmw: it is an atomic operation.
            spaces: of each lane, (lanes,); see `locations`.
            at: byte address of each lane.
            co: the lanes.
            clocks: of their chunk.
        """
        fences = bool(clocks.fence_time.any())
        if not kind.release and not fences and not few(co):
            if not rmw and self.locations and int(at.max()) >= self.low and int(at.min()) <= self.high:
                for gone in set(zip(spaces.tolist(), at.tolist(), strict=True)) & self.locations.keys():
                    del self.locations[gone]
            return
        if len(at) > _MANY:
            self._write_many(kind, co, clocks)
            return
        joint, inverse = np.unique(np.stack([spaces, at]), axis=1, return_inverse=True)
        key: Array = inverse.ravel()
        if joint.shape[1] > _APART * max(1, len(np.unique(co.ctas))):
            self._write_many(kind, co, clocks)
            return
        rows, classes, targets = clocks.groups_by_target(co, key)
        vector = clocks.release(rows, classes) if kind.release else None
        for i, (r, c, t) in enumerate(zip(rows.tolist(), classes.tolist(), targets.tolist(), strict=True)):
            location = self._at((int(joint[0, t]), int(joint[1, t])))
            if not rmw:
                location.parts, location.loose = {}, {}
            location.version = self._next()
            self._add(location, kind, r, c, vector[:, i] if vector is not None else None, clocks)

    def _next(self) -> int:
        self.version += 1
        return self.version

    def _add(
        self, location: Location, kind: Kind, r: int, c: int, vector: Array | None, clocks: Clocks
    ) -> None:
        cta = int(clocks.ctas[r])
        world = clocks.world
        scope = kind.scope
        if vector is not None:
            clock = world.join(clocks.foreign.get((r, c)), {cta: vector.copy()})
        elif clocks.fence_time[r, c] and scope:
            assert clocks.fence_know is not None
            fenced = clocks.fence_know[:, r, c].copy()
            fenced[0, c] = clocks.fence_time[r, c]
            if int(clocks.fence_scope[r, c]) < scope:
                scope = int(clocks.fence_scope[r, c])
            clock = world.join(clocks.fence_foreign.get((r, c)), {cta: fenced})
            clock = _fences_of_others(clock, scope, r, c, clocks)
            location.loose = world.join(location.loose, clocks.peek(r, c))
        else:
            location.loose = world.join(location.loose, clocks.peek(r, c))
            return
        cluster = int(clocks.ctas[r - r % clocks.cluster])
        where = {CTA: cta, CLUSTER: cluster, GPU: clocks.rank, SYS: 0}[scope]
        part = location.parts.get((scope, where))
        if part is None:
            location.parts[scope, where] = Part(clock, {(cta, cluster, clocks.rank)})
        else:
            part.clock = world.join(part.clock, clock)
            part.origins.add((cta, cluster, clocks.rank))

    def _write_many(self, kind: Kind, co: Cohort, clocks: Clocks) -> None:
        """Releases to very many places: one location stands for all, and a class for its threads."""
        rows, classes = clocks.groups(co)
        vector = clocks.release(rows, classes)
        location = self._at((-1, 0))
        self.low, self.high = -1, 1 << 62
        location.version = self._next()
        for i, (r, c) in enumerate(zip(rows.tolist(), classes.tolist(), strict=True)):
            self._add(location, kind, r, c, vector[:, i], clocks)

    # -- reading ---------------------------------------------------------------------------------

    def read(self, kind: Kind, spaces: Array, at: Array, co: Cohort, clocks: Clocks) -> None:
        """A strong load or what an atomic operation returns; see `write`. Red operations do not come here."""
        if not self.locations or int(at.max()) < self.low or int(at.min()) > self.high:
            return
        many = self.locations.get((-1, 0))
        if many is not None:
            rows, classes = clocks.groups(co)
            for r, c in zip(rows.tolist(), classes.tolist(), strict=True):
                self._learn(kind, (-1, 0), many, r, c, clocks)
        keys = list(zip(spaces.tolist(), at.tolist(), strict=True))
        known = set(keys) & self.locations.keys()
        if not known:
            return
        number = {key: k for k, key in enumerate(sorted(known))}
        names = sorted(known)
        targets = np.array([number.get(key, -1) for key in keys])
        if len(known) > _APART * max(1, len(np.unique(co.ctas))):
            rows, classes = clocks.groups(co)
            for key in names:
                for r, c in zip(rows.tolist(), classes.tolist(), strict=True):
                    self._learn(kind, key, self.locations[key], r, c, clocks)
            return
        rows, classes, which = clocks.groups_by_target(co, targets)
        for r, c, t in zip(rows.tolist(), classes.tolist(), which.tolist(), strict=True):
            self._learn(kind, names[t], self.locations[names[t]], r, c, clocks)

    def exchange(
        self, kind: Kind, key: tuple[int, int], thread: int, row: int, clocks: Clocks, wrote: bool
    ) -> None:
        """An atomic operation of one thread that returns the old value: learn, then hand on if it wrote."""
        clocks.isolate(np.array([thread]))
        c = int(clocks.class_of[thread])
        location = self.locations.get(key)
        if location is not None:
            self._learn(kind, key, location, row, c, clocks)
        if not wrote:
            return
        location = self._at(key)
        location.version = self._next()
        vector = clocks.release(np.array([row]), np.array([c]))[:, 0] if kind.release else None
        self._add(location, kind, row, c, vector, clocks)

    def _learn(
        self, kind: Kind, key: tuple[int, int], location: Location, r: int, c: int, clocks: Clocks
    ) -> None:
        notes = clocks.notes.get((r, c), {})
        seen = notes.get(SEEN, {})
        if seen.get((key, kind.acquire, kind.scope)) == location.version:
            return
        world = clocks.world
        notes = dict(notes)
        notes[SEEN] = {**seen, (key, kind.acquire, kind.scope): location.version}
        cta, cluster = int(clocks.ctas[r]), int(clocks.ctas[r - r % clocks.cluster])
        for (scope, where), part in location.parts.items():
            inside = {CTA: cta, CLUSTER: cluster, GPU: clocks.rank, SYS: 0}[scope] == where
            need = scope if inside else SYS + 1
            if inside:
                if all(o[0] == cta for o in part.origins):
                    need = CTA
                elif all(o[1] == cluster for o in part.origins):
                    need = CLUSTER
                elif all(o[2] == clocks.rank for o in part.origins):
                    need = GPU
            if need > kind.scope:
                notes[NARROW] = world.join(notes.get(NARROW), part.clock)
            elif kind.acquire:
                clocks.learn_clock(r, c, part.clock)
            else:
                waiting = dict(notes.get(PENDING, {}))
                waiting[need] = world.join(waiting.get(need), part.clock)
                notes[PENDING] = waiting
        if location.loose:
            notes[LOOSE] = world.join(notes.get(LOOSE), location.loose)
        clocks.notes[r, c] = notes


Notes = dict[Any, Any]


def hand_over(
    held: dict[int, Notes], targets: Array, rows: Array, classes: Array, clocks: Clocks, *, take: bool
) -> None:
    """Carry through barriers what threads have read of flags and not yet acquired.

    One thread reads a flag, a barrier follows, and all threads execute an acquiring fence: that orders each
    of them, and where the fence is missing, the finding names the flag.

    Args:
        held: by barrier, what those that arrived have noted.
        targets: barrier of each class.
        rows: of the classes.
        classes: who arrives, or goes on.
        clocks: of the chunk.
        take: they go on.
    """
    if not (held if take else clocks.notes):
        return
    for t, r, c in zip(targets.tolist(), rows.tolist(), classes.tolist(), strict=True):
        mine, theirs = clocks.notes.get((r, c), {}), held.get(t, {})
        if take and theirs:
            clocks.notes[r, c] = _noted(mine, theirs, clocks.world)
        elif not take and not _CARRIED.isdisjoint(mine):
            held[t] = _noted(theirs, mine, clocks.world)


def _noted(notes: Notes, more: Notes, world: World) -> Notes:
    out = dict(notes)
    for key in (LOOSE, NARROW):
        if key in more:
            out[key] = world.join(notes.get(key), more[key])
    if PENDING in more:
        waiting = dict(notes.get(PENDING, {}))
        for need, clock in more[PENDING].items():
            waiting[need] = world.join(waiting.get(need), clock)
        out[PENDING] = waiting
    return out


def _fences_of_others(clock: Clock, scope: int, r: int, c: int, clocks: Clocks) -> Clock:
    """Add what other threads of the CTA have fenced, at `scope` or wider, before a barrier that c passed.

    PTX ISA 8.8 credits a fence to the strong write of its own thread only. Every thread executing
    `__threadfence()` before a barrier and one thread counting after it is nevertheless how kernels sum up
    over CTAs, and MEMBAR does not return before the thread's stores are visible: it is no race here.
    """
    assert clocks.fence_know is not None
    times = clocks.fence_time[r]
    met = (times > 0) & (clocks.fence_scope[r] >= scope) & (clocks.know[0, r, c] >= times)
    met[c] = False
    at = np.flatnonzero(met)
    if not len(at):
        return clock
    cta = int(clocks.ctas[r])
    vector = np.maximum(clock[cta], clocks.fence_know[:, r, at].max(axis=1))
    vector[0, at] = np.maximum(vector[0, at], times[at])
    clock = {**clock, cta: vector}
    for b in at.tolist():
        clock = clocks.world.join(clock, clocks.fence_foreign.get((r, b)))
    return clock


def fence(clocks: Clocks, co: Cohort, scope: int, *, release: bool, acquire: bool, sc: bool = False) -> None:
    """fence and membar of the threads of a cohort.

    Two fence.sc whose scopes include each other are ordered one way or the other (ISA, Fence-SC order); in a
    run that is the way in which they were executed. membar is a fence.sc.
    """
    rows, classes = clocks.groups(co)
    sc = sc and scope >= GPU
    if sc:
        for r, c in zip(rows.tolist(), classes.tolist(), strict=True):
            clocks.learn_clock(r, c, clocks.world.fenced.get(clocks.rank))
    if acquire and clocks.notes:
        for r, c in zip(rows.tolist(), classes.tolist(), strict=True):
            notes = clocks.notes.get((r, c))
            if not notes or PENDING not in notes:
                continue
            notes = dict(notes)
            left = {}
            for need, clock in notes.pop(PENDING).items():
                if need <= scope:
                    clocks.learn_clock(r, c, clock)
                else:
                    left[need] = clock
                    notes[NARROW] = clocks.world.join(notes.get(NARROW), clock)
            if left:
                notes[PENDING] = left
            clocks.notes[r, c] = notes
    if release:
        vector = clocks.release(rows, classes)
        if clocks.fence_know is None:
            clocks.fence_know = np.zeros_like(clocks.know)
        # Each thread hands over what it did itself, not what others of its class did.
        clocks.fence_know[:, rows, classes] = clocks.know[:, rows, classes]
        clocks.fence_time[rows, classes] = clocks.world.time.now
        clocks.fence_scope[rows, classes] = scope
        if clocks.foreign:
            for r, c in zip(rows.tolist(), classes.tolist(), strict=True):
                far = clocks.foreign.get((r, c))
                if far:
                    clocks.fence_foreign[r, c] = far
        if sc:
            world = clocks.world
            known = world.fenced.get(clocks.rank, {})
            for i, (r, c) in enumerate(zip(rows.tolist(), classes.tolist(), strict=True)):
                known = world.join(known, {int(clocks.ctas[r]): vector[:, i].copy()})
                known = world.join(known, clocks.foreign.get((r, c)))
            world.fenced[clocks.rank] = known or {}
