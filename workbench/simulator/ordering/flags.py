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

from workbench.simulator.ordering.clocks import Clocks
from workbench.simulator.ordering.records import CLUSTER, CTA, GPU, SYS, Kind
from workbench.simulator.ordering.world import Clock, World

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort

Array = npt.NDArray[Any]
_MANY = 4096
"""Addresses of one instruction that are still followed one by one."""
_APART = 64
"""Addresses of one CTA in one instruction for which threads are told apart."""
SEEN, OWN = "seen", "own"
"""Notes of a class: the versions of locations that it has learned from, and what it has itself released at
locations, by key: later strong stores of the thread there hand it on (ISA 8.8)."""
_MOST_OWN = 32


@dataclass(slots=True)
class Part:
    """What writers of one scope and place released."""

    clock: Clock
    origin: tuple[int, int, int]
    """CTA, cluster and rank of the writers; -1 where they differ."""

    def add(self, clock: Clock, origin: tuple[int, int, int], world: World) -> None:
        """Take in what one more writer released."""
        self.clock = world.join(self.clock, clock)
        if origin != self.origin:
            a, b, c = (x if x == y else -1 for x, y in zip(self.origin, origin, strict=True))
            self.origin = a, b, c


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
        if not kind.release and not clocks.fences and not few(co):
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
            key_of = int(joint[0, t]), int(joint[1, t])
            self._add(location, key_of, kind, r, c, vector[:, i] if vector is not None else None, clocks)

    def _next(self) -> int:
        self.version += 1
        return self.version

    def _add(
        self, location: Location, key: tuple[int, int], kind: Kind, r: int, c: int, vector: Array | None,
        clocks: Clocks,
    ) -> None:  # fmt: skip
        cta = int(clocks.ctas[r])
        world, layout = clocks.world, clocks.layout
        if not layout.flags:
            return
        own = clocks.notes.get((r, c), {}).get(OWN, {})
        if vector is not None:
            clock = world.join(clocks.foreign.get((r, c)), {cta: vector.copy()})
            self._put(location, kind.scope, r, clock, clocks)
            notes = dict(clocks.notes.get((r, c), {}))
            kept = list(own.items())[1 - _MOST_OWN :] if key not in own else list(own.items())
            notes[OWN] = {**dict(kept), key: (kind.scope, clock)}
            clocks.notes[r, c] = notes
            return
        peeked = clocks.peek(r, c)
        if kind.scope:
            if key in own:
                scope, clock = own[key]
                self._put(location, min(scope, kind.scope), r, clock, clocks)
            if clocks.fences:
                before: Clock = {}
                for k in range(len(layout.scopes) - 1, -1, -1):
                    clock = clocks.published(peeked, k)
                    if not _same(clock, before):
                        self._put(location, min(layout.scopes[k], kind.scope), r, clock, clocks)
                    before = clock
        location.loose = world.join(location.loose, clocks.missing(peeked, layout.loose))

    def _put(self, location: Location, scope: int, r: int, clock: Clock, clocks: Clocks) -> None:
        cta, cluster = int(clocks.ctas[r]), int(clocks.ctas[r - r % clocks.cluster])
        where = {CTA: cta, CLUSTER: cluster, GPU: clocks.rank, SYS: 0}[scope]
        part = location.parts.get((scope, where))
        if part is None:
            location.parts[scope, where] = Part(clock, (cta, cluster, clocks.rank))
        else:
            part.add(clock, (cta, cluster, clocks.rank), clocks.world)

    def _write_many(self, kind: Kind, co: Cohort, clocks: Clocks) -> None:
        """Releases to very many places: one location stands for all, and a class for its threads."""
        rows, classes = clocks.groups(co)
        vector = clocks.release(rows, classes)
        location = self._at((-1, 0))
        self.low, self.high = -1, 1 << 62
        location.version = self._next()
        for i, (r, c) in enumerate(zip(rows.tolist(), classes.tolist(), strict=True)):
            self._add(location, (-1, 0), kind, r, c, vector[:, i], clocks)

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
        self._add(location, key, kind, row, c, vector, clocks)

    def _learn(
        self, kind: Kind, key: tuple[int, int], location: Location, r: int, c: int, clocks: Clocks
    ) -> None:
        notes = clocks.notes.get((r, c), {})
        seen = notes.get(SEEN, {})
        if seen.get((key, kind.acquire, kind.scope)) == location.version:
            return
        layout = clocks.layout
        clocks.world.work += 4
        notes = dict(notes)
        notes[SEEN] = {**seen, (key, kind.acquire, kind.scope): location.version}
        cta, cluster = int(clocks.ctas[r]), int(clocks.ctas[r - r % clocks.cluster])
        for (scope, where), part in location.parts.items():
            inside = {CTA: cta, CLUSTER: cluster, GPU: clocks.rank, SYS: 0}[scope] == where
            need = scope if inside else SYS + 1
            if inside:
                same = [a == b for a, b in zip(part.origin, (cta, cluster, clocks.rank), strict=True)]
                need = CTA if same[0] else CLUSTER if same[1] else GPU if same[2] else need
            if need > kind.scope:
                clocks.learn_clock(r, c, clocks.missing(part.clock, layout.narrow))
            elif kind.acquire:
                clocks.learn_clock(r, c, part.clock)
            else:
                clocks.learn_clock(r, c, clocks.pending(part.clock, need))
        clocks.learn_clock(r, c, location.loose)
        clocks.notes[r, c] = notes


def _same(a: Clock, b: Clock) -> bool:
    """Whether two clocks tell the same of happens-before."""
    return a.keys() == b.keys() and all(
        v is b[cta] or np.array_equal(v[0], b[cta][0]) for cta, v in a.items()
    )
