"""What every thread of a chunk knows of the others: vector clocks, one for all threads that act alike.

Time counts releases: barrier arrivals, flag stores, fences. What a thread did bears the time of its last
release (its *stamp*), and another thread that knows it up to a later time is ordered after. Threads that have
taken part in the same releases and acquires so far form a *class*; `know[l, r, a, b]` is the time up to which
a thread of class a in CTA row r knows the (other) threads of class b of its CTA. An operation by part of a
class splits it. What is known of other CTAs is kept in dictionaries that are shared and never changed.

Layer 0 is happens-before. Layers 1 and 2 are the same, counting only what a `fence.proxy.async` on the way
has handed to the async proxy: of shared memory (1) and of global memory (2).

Asynchronous agents (the writes that an mbarrier announces, the bulk groups of a thread) are classes too, of
one thread that releases when its work completes; their thread numbers follow those of the CTA.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort

Array = npt.NDArray[Any]
Clock = dict[int, Array]
"""By CTA number: time up to which each of its classes is known, (layers, classes)."""
FOREVER = np.iinfo(np.int64).max
"""Stamp of what is not complete: nobody can know it."""
MOST_CLASSES = 512
MOST_CELLS = 1 << 26


class TooFineError(Exception):
    """Threads act in so many different ways that their clocks would not fit."""


class Time:
    """Counts releases of a launch."""

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> int:
        """Begin the next moment."""
        self.now += 1
        return self.now


class World:
    """The clocks of all chunks of a launch."""

    def __init__(self, time: Time | None = None) -> None:
        self.time = time or Time()
        self.owners: dict[int, Clocks] = {}
        """Clocks that hold each CTA."""
        self.fenced: dict[int, Clock] = {}
        """What the threads that executed fence.sc at gpu or sys scope knew then, by rank."""

    def fit(self, cta: int, vector: Array) -> Array:
        """Return a clock of a CTA with an entry for each of today's classes."""
        return self.owners[cta].fit(vector)

    def join(self, a: Clock | None, b: Clock | None) -> Clock:
        """Return the later of both for every class."""
        if not b or a is b:
            return a or {}
        if not a:
            return b
        out = a
        for cta, new in b.items():
            old = a.get(cta)
            if old is new:
                continue
            if old is None:
                merged = new
            else:
                old, new = self.fit(cta, old), self.fit(cta, new)
                if (new <= old).all():
                    continue
                merged = np.maximum(old, new)
            if out is a:
                out = dict(a)
            out[cta] = merged
        return out


class Clocks:
    """The clocks of the threads of one chunk.

    Args:
        world: the launch's.
        ctas: CTA number of each row; a number of its own for every CTA of every rank.
        threads: threads of a CTA.
        layers: 1, or 3 where the async proxy is of interest.
        cluster: rows that form a cluster.
        rank: rank of the launch.
    """

    def __init__(
        self, world: World, ctas: Array, threads: int, layers: int = 1, cluster: int = 1, rank: int = 0
    ) -> None:
        self.world, self.ctas, self.threads, self.layers = world, ctas, threads, layers
        self.cluster, self.rank = cluster, rank
        rows = len(ctas)
        self.row_of = {int(c): r for r, c in enumerate(ctas)}
        for c in ctas.tolist():
            world.owners[c] = self
        self.class_of = np.zeros(threads, np.int64)
        """Class of each thread, asynchronous agents after the threads."""
        self._size = np.array([threads], np.int64)
        self._parent = [-1]
        self._lines: dict[int, Array] = {}
        self.know = np.zeros((layers, rows, 1, 1), np.int64)
        self.last = np.zeros((rows, 1), np.int64)
        """Time of the last release of each class; replaced, never changed."""
        self.fenced = np.zeros((layers, rows, 1), np.int64)
        """Time of each class's own last proxy fence."""
        self.fence_time = np.zeros((rows, 1), np.int64)
        """Time of each class's last release fence, 0: none."""
        self.fence_scope = np.zeros((rows, 1), np.int64)
        self.fence_know: Array | None = None
        self.foreign: dict[tuple[int, int], Clock] = {}
        """What classes (row, class) know of other CTAs."""
        self.fence_foreign: dict[tuple[int, int], Clock] = {}
        self.notes: dict[tuple[int, int], dict[Any, Any]] = {}
        """What else is remembered of a class; inherited, values are never changed in place."""
        self.version = 0
        """Counts splits."""

    @property
    def count(self) -> int:
        """Number of classes."""
        return len(self._parent)

    # -- classes ---------------------------------------------------------------------------------

    def fit(self, vector: Array) -> Array:
        """Return an array with the last axis of an earlier number of classes as one of today's."""
        n, count = vector.shape[-1], self.count
        if n == count:
            return vector
        line = self._line(n)
        out = vector[..., line]
        if (line < 0).any():
            out = np.where(line < 0, 0, out)
        return out

    def _line(self, n: int) -> Array:
        """Return for each class its ancestor when there were `n` classes, -1 for later agents."""
        if n not in self._lines:
            line = np.arange(self.count)
            for c in range(n, self.count):
                p = self._parent[c]
                line[c] = line[p] if p >= 0 else -1
            self._lines[n] = line
        return self._lines[n]

    def _grow(self, parents: list[int]) -> None:
        before = self.count
        if before + len(parents) > MOST_CLASSES or (
            len(self.ctas) * (before + len(parents)) ** 2 * self.layers > MOST_CELLS
        ):
            raise TooFineError
        self._parent.extend(parents)
        self._lines.clear()
        self.version += 1
        index = np.array([*range(before), *(max(p, 0) for p in parents)])
        agents = np.array([False] * before + [p < 0 for p in parents])
        self.know = self.know[:, :, index][:, :, :, index]
        self.last, self.fence_time = self.last[:, index], self.fence_time[:, index]
        self.fence_scope, self.fenced = self.fence_scope[:, index], self.fenced[:, :, index]
        if self.fence_know is not None:
            self.fence_know = self.fence_know[:, :, index][:, :, :, index]
        if agents.any():
            for table in (self.know, self.fence_know):
                if table is not None:
                    table[:, :, agents] = 0
                    table[:, :, :, agents] = 0
            for table in (self.last, self.fence_time, self.fence_scope, self.fenced):
                table[..., agents] = 0
        for k, p in enumerate(parents):
            if p < 0:
                continue
            for notes in (self.foreign, self.fence_foreign, self.notes):
                for row, c in [key for key in notes if key[1] == p]:
                    notes[row, before + k] = notes[row, c]

    def agent(self) -> int:
        """Add an asynchronous agent to every CTA and return its thread number."""
        self._grow([-1])
        self.class_of = np.append(self.class_of, self.count - 1)
        self._size = np.append(self._size, 1 << 40)
        return len(self.class_of) - 1

    def split(self, mask: Array) -> None:
        """Make sure that no class has threads both in and out of `mask`, (threads,)."""
        inside = np.bincount(self.class_of[: self.threads][mask], minlength=self.count)
        parts = np.flatnonzero((inside > 0) & (inside < self._size))
        if not len(parts):
            return
        new = self.class_of.copy()
        sizes = list(self._size)
        for k, c in enumerate(parts.tolist()):
            new[: self.threads][mask & (self.class_of[: self.threads] == c)] = self.count + k
            sizes[c] -= inside[c]
            sizes.append(int(inside[c]))
        self._grow(parts.tolist())
        self.class_of, self._size = new, np.array(sizes, np.int64)

    def isolate(self, threads: Array) -> None:
        """Make each of `threads` a class of its own."""
        threads = threads[self._size[self.class_of[threads]] > 1]
        new, sizes = self.class_of.copy(), list(self._size)
        parents: list[int] = []
        for t in threads.tolist():
            c = int(new[t])
            if sizes[c] > 1:
                sizes[c] -= 1
                sizes.append(1)
                new[t] = self.count + len(parents)
                parents.append(int(self.class_of[t]))
        if parents:
            self._grow(parents)
            self.class_of, self._size = new, np.array(sizes, np.int64)

    def warps(self) -> None:
        """Let no class have threads of several warps."""
        for first in range(32, self.threads, 32):
            mask = np.zeros(self.threads, bool)
            mask[first : first + 32] = True
            self.split(mask)

    def groups(self, co: Cohort) -> tuple[Array, Array]:
        """Return row and class of the threads of a cohort, each pair once, after splitting classes."""
        key = ("classes", id(self))
        known = co._cache.get(key)
        if known is not None and known[0] == self.version:
            pair: tuple[Array, Array] = known[1]
            return pair
        if co.rectangular:
            mask = np.zeros(self.threads, bool)
            mask[co.threads] = True
            self.split(mask)
            classes = np.unique(self.class_of[co.threads])
            pair = (np.repeat(co.ctas, len(classes)), np.tile(classes, len(co.ctas)))
        else:
            pair = self._flat_groups(co)
        co._cache[key] = (self.version, pair)
        return pair

    def _flat_groups(self, co: Cohort) -> tuple[Array, Array]:
        rows, where = np.unique(co.ctas, return_inverse=True)
        seen = set()
        while True:
            counts = np.bincount(
                where * self.count + self.class_of[co.threads], minlength=len(rows) * self.count
            ).reshape(len(rows), self.count)
            partial = ((counts > 0) & (counts < self._size)).any(axis=1)
            if not partial.any():
                break
            for r in np.flatnonzero(partial).tolist():
                mask = np.zeros(self.threads, bool)
                mask[co.threads[where == r]] = True
                raw = mask.tobytes()
                if raw not in seen:
                    seen.add(raw)
                    self.split(mask)
        at, classes = np.nonzero(counts)
        return rows[at], classes

    def groups_by_target(self, co: Cohort, targets: Array) -> tuple[Array, Array, Array]:
        """Like `groups`, with the target of each; `targets` is (lanes,), negative where there is none.

        Lanes without a target are left out. A class whose threads of one CTA have several targets is taken
        apart.
        """
        keep = targets >= 0
        if not keep.all():
            from workbench.simulator.cohort import Cohort as _Cohort

            rows = np.broadcast_to(co.rows(), co.shape).ravel()[keep]
            threads = np.broadcast_to(co.columns(), co.shape).ravel()[keep]
            co, targets = _Cohort(co.chunk, rows, threads, False, {}), targets[keep]
            if not len(rows):
                empty = np.zeros(0, np.int64)
                return empty, empty, empty
        self.groups(co)
        rows = np.broadcast_to(co.rows(), co.shape).ravel()
        threads = np.broadcast_to(co.columns(), co.shape).ravel()
        while True:
            key = rows * self.count + self.class_of[threads]
            unique, first, inverse = np.unique(key, return_index=True, return_inverse=True)
            mixed = targets != targets[first][inverse]
            if not mixed.any():
                return unique // self.count, unique % self.count, targets[first]
            self.isolate(np.unique(threads[np.isin(inverse, inverse[mixed])]))

    # -- time ------------------------------------------------------------------------------------

    def release(self, rows: Array, classes: Array) -> Array:
        """Have classes release; return what they hand over of their own CTA, (layers, pairs, classes)."""
        now = self.world.time.tick()
        vector = self.know[:, rows, classes].copy()
        self._own(vector, rows, classes, now)
        self.last = self.last.copy()
        self.last[rows, classes] = now
        return vector

    def _own(self, vector: Array, rows: Array, classes: Array, now: int | Array) -> None:
        at = np.arange(len(rows))
        vector[0, at, classes] = now
        for layer in range(1, self.layers):
            vector[layer, at, classes] = np.maximum(
                vector[layer, at, classes], self.fenced[layer, rows, classes]
            )

    def peek(self, row: int, c: int) -> Clock:
        """Return all that one class would hand over if it released now, without a release."""
        rows, classes = np.array([row]), np.array([c])
        vector = self.know[:, rows, classes].copy()
        self._own(vector, rows, classes, self.world.time.now + 1)
        own = {int(self.ctas[row]): vector[:, 0]}
        return self.world.join(self.foreign.get((row, c)), own)

    def learn(self, rows: Array, classes: Array, vector: Array) -> None:
        """Have classes know what is in `vector` (layers, pairs, classes) of their CTA; pairs are distinct."""
        self.know[:, rows, classes] = np.maximum(self.know[:, rows, classes], vector)

    def learn_clock(self, row: int, c: int, clock: Clock | None) -> None:
        """Have one class know what is in `clock`."""
        if not clock:
            return
        own = int(self.ctas[row])
        if own in clock:
            vector = self.fit(clock[own])
            self.know[:, row, c] = np.maximum(self.know[:, row, c], vector)
        if len(clock) > (own in clock):
            rest = {k: v for k, v in clock.items() if k != own} if own in clock else clock
            self.foreign[row, c] = self.world.join(self.foreign.get((row, c)), rest)

    def complete(self, rows: Array, agent: int) -> int:
        """Have the agent `agent` of CTA rows release; return the time, at which only it is known."""
        now = self.world.time.tick()
        self.last = self.last.copy()
        self.last[rows, self.class_of[agent]] = now
        return now

    def proxy_fence(self, co: Cohort, layers: Iterable[int]) -> None:
        """fence.proxy.async: what the threads know and did is handed to the async proxy."""
        rows, classes = self.groups(co)
        now = self.world.time.tick()
        self.last = self.last.copy()
        self.last[rows, classes] = now
        for layer in layers:
            self.know[layer, rows, classes] = np.maximum(
                self.know[layer, rows, classes], self.know[0, rows, classes]
            )
            self.fenced[layer, rows, classes] = now
            for r, c in zip(rows.tolist(), classes.tolist(), strict=True):
                far = self.foreign.get((r, c))
                if far:
                    out = {}
                    for cta, v in far.items():
                        v = v.copy()
                        v[layer] = np.maximum(v[layer], v[0])
                        out[cta] = v
                    self.foreign[r, c] = out

    def warp_barrier(self, co: Cohort, members: Array | None) -> None:
        """bar.warp.sync: order the threads of each warp; `members` are their masks (lanes,), None: all."""
        self.warps()
        rows, classes = self.groups(co)
        if members is not None:
            threads = np.broadcast_to(co.columns(), co.shape).ravel()
            for m in np.unique(members).tolist():
                mask = np.zeros(self.threads, bool)
                mask[threads[members == m]] = True
                self.split(mask)
            rows, classes = self.groups(co)
        vector = self.release(rows, classes)
        warp = self._warp_of_class()[classes]
        key = rows * (self.threads // 32 + 1) + warp
        if members is not None:
            flat_rows = np.broadcast_to(co.rows(), co.shape).ravel()
            threads = np.broadcast_to(co.columns(), co.shape).ravel()
            table = {}
            for r, c, m in zip(
                flat_rows.tolist(), self.class_of[threads].tolist(), members.tolist(), strict=True
            ):
                table[r, c] = m
            masks = np.array([table[r, c] for r, c in zip(rows.tolist(), classes.tolist(), strict=True)])
            _, key = np.unique(np.stack([key, masks]), axis=1, return_inverse=True)
        unique, inverse = np.unique(key, return_inverse=True)
        joined = np.zeros((self.layers, len(unique), self.count), np.int64)
        for layer in range(self.layers):
            np.maximum.at(joined[layer], inverse, vector[layer])
        self.learn(rows, classes, joined[:, inverse])
        if self.foreign:
            far: dict[int, Clock] = {}
            pairs = list(zip(rows.tolist(), classes.tolist(), inverse.tolist(), strict=True))
            for r, c, k in pairs:
                far[k] = self.world.join(far.get(k), self.foreign.get((r, c)))
            for r, c, k in pairs:
                if far[k]:
                    self.foreign[r, c] = self.world.join(self.foreign.get((r, c)), far[k])

    def _warp_of_class(self) -> Array:
        warp = np.zeros(self.count, np.int64)
        warp[self.class_of[: self.threads]] = np.arange(self.threads) >> 5
        return warp

    # -- questions -------------------------------------------------------------------------------

    def floor(self) -> Array:
        """Return the time up to which every thread of a CTA knows each class.

        Returns:
            (2, rows, classes) or (1, ...): happens-before, and what is known to the async proxy as well.
        """
        real = np.zeros(self.count, bool)
        real[self.class_of[: self.threads]] = True
        know = self.know[:2][:, :, real].copy()
        own = np.flatnonzero(real)
        single = np.flatnonzero(self._size[real] == 1)
        know[0][:, single, own[single]] = FOREVER
        if self.layers > 1:
            know[1][:, single, own[single]] = self.fenced[1][:, own[single]]
        result: Array = know.min(axis=2)
        return result

    def knows(
        self, rows: Array, threads: Array, ctas: Array, others: Array, stamps: Array, layer: int = 0
    ) -> Array:
        """Whether threads are ordered after what `others` of `ctas` did at `stamps`; all (n,)."""
        mine = self.ctas[rows]
        same = mine == ctas
        a = self.class_of[threads]
        out = np.zeros(len(rows), bool)
        if same.any():
            b = self.class_of[others[same]]
            out[same] = self.know[layer, rows[same], a[same], b] > stamps[same]
            me = same & (threads == others)
            if me.any():
                own = FOREVER if layer == 0 else self.fenced[layer, rows[me], a[me]]
                out[me] |= own > stamps[me]
        if not same.all():
            far = np.flatnonzero(~same)
            if self.foreign:
                key = np.stack([rows[far], a[far], ctas[far]])
                unique, inverse = np.unique(key, axis=1, return_inverse=True)
                inverse = inverse.ravel()
                for k, (r, c, cta) in enumerate(unique.T.tolist()):
                    known = self.foreign.get((r, c))
                    if known is None or cta not in known:
                        continue
                    at = far[inverse == k]
                    owner = self.world.owners[cta]
                    vector = owner.fit(known[cta])[layer]
                    out[at] = vector[owner.class_of[others[at]]] > stamps[at]
        return out


def covers(world: World, clock: Clock | None, cta: int, thread: int, stamp: int, layer: int = 0) -> bool:
    """Whether a clock knows what a thread did at `stamp`."""
    if not clock or cta not in clock:
        return False
    owner = world.owners[cta]
    return int(owner.fit(clock[cta])[layer, owner.class_of[thread]]) > stamp


class Objects:
    """Clocks of things that order threads: barriers, phases of mbarriers. Each belongs to a CTA, its home."""

    def __init__(self, clocks: Clocks, count: int) -> None:
        self.clocks = clocks
        self._local = np.zeros((clocks.layers, count, clocks.count), np.int64)
        self.foreign: dict[int, Clock] = {}

    @property
    def local(self) -> Array:
        """What each knows of its home, (layers, objects, classes)."""
        if self._local.shape[-1] != self.clocks.count:
            self._local = self.clocks.fit(self._local)
        return self._local

    def extend(self, count: int) -> None:
        """Have at least `count` objects."""
        have = self._local.shape[1]
        if count > have:
            more = np.zeros((self.clocks.layers, count - have, self._local.shape[-1]), np.int64)
            self._local = np.concatenate([self._local, more], axis=1)

    def put(self, targets: Array, homes: Array, rows: Array, classes: Array, vector: Array) -> None:
        """Add what classes release, see `Clocks.release`; all (pairs,)."""
        clocks, local = self.clocks, self.local
        near = homes == rows
        for layer in range(clocks.layers):
            np.maximum.at(local[layer], targets[near], vector[layer][near])
        foreign = clocks.foreign
        if near.all() and not foreign:
            return
        for i, (t, h, r, c) in enumerate(
            zip(targets.tolist(), homes.tolist(), rows.tolist(), classes.tolist(), strict=True)
        ):
            clock = foreign.get((r, c))
            if h != r:
                clock = clocks.world.join(clock, {int(clocks.ctas[r]): vector[:, i].copy()})
            if clock:
                self.add(t, h, clock)

    def add(self, target: int, home: int, clock: Clock) -> None:
        """Add a clock to one object."""
        clocks = self.clocks
        own = int(clocks.ctas[home])
        if own in clock:
            local = self.local
            local[:, target] = np.maximum(local[:, target], clocks.fit(clock[own]))
            clock = {k: v for k, v in clock.items() if k != own}
        if clock:
            self.foreign[target] = clocks.world.join(self.foreign.get(target), clock)

    def take(self, targets: Array, homes: Array, rows: Array, classes: Array, *, near: bool = False) -> None:
        """Have classes know what the objects do (with `near` of their own CTA only); pairs are distinct."""
        clocks, local = self.clocks, self.local
        home = homes == rows
        if home.any():
            clocks.learn(rows[home], classes[home], local[:, targets[home]])
        if near or (home.all() and not self.foreign):
            return
        for t, h, r, c in zip(targets.tolist(), homes.tolist(), rows.tolist(), classes.tolist(), strict=True):
            if h != r:
                clocks.learn_clock(r, c, {int(clocks.ctas[h]): local[:, t].copy()})
            clocks.learn_clock(r, c, self.foreign.get(t))

    def whole(self, target: int, home: int) -> Clock:
        """Return all that one object knows."""
        own = {int(self.clocks.ctas[home]): self.local[:, target].copy()}
        return self.clocks.world.join(self.foreign.get(target), own)

    def clear(self, targets: Array) -> None:
        """Forget what objects know."""
        self.local[:, targets] = 0
        if self.foreign:
            for t in targets.tolist():
                self.foreign.pop(t, None)

    def move(self, targets: Array, to: Objects) -> None:
        """Hand what objects know to the same objects of `to`, whose knowledge ends, and forget it here."""
        to.local[:, targets] = self.local[:, targets]
        if self.foreign or to.foreign:
            for t in targets.tolist():
                clock = self.foreign.get(t)
                if clock:
                    to.foreign[t] = clock
                else:
                    to.foreign.pop(t, None)
        self.clear(targets)
