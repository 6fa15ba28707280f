"""What every thread of a chunk knows of the others: vector clocks, one for all threads that act alike.

Time counts releases: barrier arrivals, flag stores, fences. What a thread did bears the time of its last
release (its *stamp*), and another thread that knows it up to a later time is ordered after. Threads that have
taken part in the same releases and acquires so far form a *class*; `know[l, r, a, b]` is the time up to which
a thread of class a in CTA row r knows the (other) threads of class b of its CTA. An operation by part of a
class splits it. What is known of other CTAs is kept in dictionaries that are shared and never changed.

What a clock tells comes in layers, of which the first is happens-before; see `layers`.

Asynchronous agents (the writes that an mbarrier announces, the bulk groups of a thread) are classes too, of
one thread that releases when its work completes; their thread numbers follow those of the CTA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.ordering.layers import Layout
from workbench.simulator.ordering.world import FOREVER, Clock, World, launch_of

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort

Array = npt.NDArray[Any]
MOST_CLASSES = 512
MOST_CELLS = 1 << 26
FENCED = "fenced"
"""Note of a class: what those knew and did whose fence.sc came before one of its own."""
RELEASED = "released"
"""Note of a class: what its own last wide fence has released; kept where a dependent launch may follow."""


class TooFineError(Exception):
    """Threads act in so many different ways that their clocks would not fit."""


class Clocks:
    """The clocks of the threads of one chunk.

    Args:
        world: the launch's.
        ctas: CTA number of each row; a number of its own for every CTA of every rank.
        threads: threads of a CTA.
        layout: the layers.
        cluster: rows that form a cluster.
        rank: rank of the launch.
    """

    def __init__(
        self, world: World, ctas: Array, threads: int, layout: Layout, cluster: int = 1, rank: int = 0
    ) -> None:
        self.world, self.ctas, self.threads = world, ctas, threads
        self.layout = world.layout = world.layout or layout
        self.layers = layers = self.layout.count
        self.base = self.layout.base
        self.cluster, self.rank = cluster, rank
        self.number = launch_of(int(ctas[0]))
        """Of the launch."""
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
        """Time of each class's own last fence that counts in a layer."""
        self.fences = self.waits = False
        """Some class has executed a fence; some class has read what a fence would make known."""
        self.foreign: dict[tuple[int, int], Clock] = {}
        """What classes (row, class) know of other CTAs."""
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
        self.last, self.fenced = self.last[:, index], self.fenced[:, :, index]
        if agents.any():
            self.know[:, :, agents] = 0
            self.know[:, :, :, agents] = 0
            for table in (self.last, self.fenced):
                table[..., agents] = 0
        for k, p in enumerate(parents):
            if p < 0:
                continue
            for notes in (self.foreign, self.notes):
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
        if self.layers > 1:
            vector[1:, at, classes] = np.maximum(vector[1:, at, classes], self.fenced[1:, rows, classes])

    def peek(self, row: int, c: int | Array) -> Clock:
        """Return all that one class, or several of a CTA, would hand over on a release, without one."""
        classes = np.atleast_1d(c)
        rows = np.full(len(classes), row)
        vector = self.know[:, rows, classes].copy()
        self._own(vector, rows, classes, self.world.time.now + 1)
        clock: Clock = {int(self.ctas[row]): vector.max(axis=1)}
        if self.foreign:
            for k in classes.tolist():
                clock = self.world.join(self.foreign.get((row, k)), clock)
        return clock

    def remember_release(self, rows: Array, classes: Array, k: int) -> None:
        """Note what a fence of `scopes[k]` or wider has just released, for `released_alone`.

        Of a class of several threads it is what each of them has released: its mates only as far as it knows
        them.
        """
        for r, c in zip(rows.tolist(), classes.tolist(), strict=True):
            clock = {**self.foreign.get((r, c), {}), int(self.ctas[r]): self.know[:, r, c].copy()}
            self.notes[r, c] = {**self.notes.get((r, c), {}), RELEASED: self.published(clock, k)}

    def released_alone(self, row: int, classes: Array, k: int) -> Clock:
        """Return what the last fence of any thread of some classes of a CTA released, whichever it is."""
        world, layer, cta = self.world, self.layout.released(k), int(self.ctas[row])
        every: list[Clock] = []
        for c in classes.tolist():
            clock: Clock = self.notes.get((row, c), {}).get(RELEASED, {})
            if clock and self._size[c] == 1:
                own, fenced = np.zeros((self.layers, self.count), np.int64), self.fenced[:, row, c]
                own[: self.base, c] = np.minimum(fenced[: self.base], fenced[layer])
                own[0, c] = own[layer, c] = fenced[layer]
                clock = world.join(clock, {cta: own})
            every.append(clock)
        return reduce(world.meet, every)

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
            # Its own CTA stays in: what everybody learns is then one dictionary that all share.
            self.foreign[row, c] = self.world.join(self.foreign.get((row, c)), clock)

    def complete(self, rows: Array, agent: int) -> int:
        """Have the agent `agent` of CTA rows release; return the time, at which only it is known."""
        now = self.world.time.tick()
        self.last = self.last.copy()
        self.last[rows, self.class_of[agent]] = now
        return now

    def proxy_fence(self, co: Cohort, layers: Iterable[int]) -> None:
        """fence.proxy.async: what the threads know and did is handed to the async proxy."""
        rows, classes = self.groups(co)
        self._hand(rows, classes, tuple(layers))

    def _hand(self, rows: Array, classes: Array, layers: tuple[int, ...]) -> int:
        """Have classes' knowledge and deeds count in `layers` too; return the time."""
        now = self.world.time.tick()
        self.last = self.last.copy()
        self.last[rows, classes] = now
        known = self.know[0, rows, classes]
        for layer in layers:
            self.know[layer, rows, classes] = np.maximum(self.know[layer, rows, classes], known)
            self.fenced[layer, rows, classes] = now

        def up(vector: Array) -> Array:
            if all((vector[layer] >= vector[0]).all() for layer in layers):
                return vector
            vector = vector.copy()
            for layer in layers:
                vector[layer] = np.maximum(vector[layer], vector[0])
            return vector

        if layers:
            self._change_foreign(rows, classes, layers, up)
        return now

    def _change_foreign(self, rows: Array, classes: Array, what: Any, how: Callable[[Array], Array]) -> None:
        done: dict[int, Clock] = {}
        if not self.foreign:
            return
        for r, c in zip(rows.tolist(), classes.tolist(), strict=True):
            far = self.foreign.get((r, c))
            if far:
                if id(far) not in done:
                    done[id(far)] = self.world.change(far, what, how)
                self.foreign[r, c] = done[id(far)]

    def fence(self, co: Cohort, scope: int, *, release: bool, acquire: bool, sc: bool = False) -> None:
        """Fence and membar of the threads of a cohort.

        Two fence.sc whose scopes include each other are ordered one way or the other (ISA, Fence-SC order);
        in a run that is the way in which they were executed. membar is a fence.sc. Such an order is noted
        beside the clocks: it holds for strong accesses, but another run may have the opposite one, so that
        ordinary accesses must not rest on it.
        """
        rows, classes = self.groups(co)
        layout, world = self.layout, self.world
        within = [k for k, s in enumerate(layout.scopes) if s <= scope]
        if sc:
            before = world.fenced.get(self.rank)
            for pair in zip(rows.tolist(), classes.tolist(), strict=True) if before else ():
                notes = self.notes.get(pair, {})
                self.notes[pair] = {**notes, FENCED: world.join(notes.get(FENCED), before)}
        if acquire and self.waits:
            self._acquire(rows, classes, within)
        if not release:
            return
        self.fences = True
        now = self._hand(rows, classes, tuple(layout.released(k) for k in within))
        if sc:
            vector = self.know[:, rows, classes].copy()
            self._own(vector, rows, classes, now)
            known: Clock = world.fenced.get(self.rank, {})
            for i, (r, c) in enumerate(zip(rows.tolist(), classes.tolist(), strict=True)):
                known = world.join(known, {int(self.ctas[r]): vector[:, i].copy()})
                known = world.join(known, self.foreign.get((r, c)))
            world.fenced[self.rank] = known

    def _acquire(self, rows: Array, classes: Array, within: list[int]) -> None:
        layout, base = self.layout, self.base

        def known(vector: Array) -> Array:
            out = vector.copy()
            for k in within:
                out[:base] = np.maximum(out[:base], vector[layout.pending(k)])
            # What it has not made known, its scope kept back.
            out[layout.narrow] = np.maximum(out[layout.narrow], vector[layout.unfenced])
            return vector if (out == vector).all() else out

        self.know[:, rows, classes] = known(self.know[:, rows, classes])
        self._change_foreign(rows, classes, ("acquire", len(within)), known)

    def published(self, clock: Clock, k: int) -> Clock:
        """Return what of a clock fences of `scopes[k]` have released."""
        layout, base = self.layout, self.base
        layer, first = layout.released(k), layout.released(0)
        last = first + len(layout.scopes)

        def part(vector: Array) -> Array:
            out = np.zeros_like(vector)
            out[0] = vector[layer]
            out[1:base] = np.minimum(vector[1:base], vector[layer])
            out[first:last] = np.minimum(vector[first:last], vector[layer])
            return out

        return self.world.change(clock, ("published", k), part)

    def missing(self, clock: Clock, layer: int) -> Clock:
        """Return a clock that tells in one of the last three layers what `clock` tells of happens-before."""

        def part(vector: Array) -> Array:
            out = np.zeros_like(vector)
            out[layer] = vector[0]
            return out

        return self.world.change(clock, ("missing", layer), part)

    def pending(self, clock: Clock, need: int) -> Clock:
        """Return what of a clock a fence of scope `need` or wider will make known."""
        layout, base = self.layout, self.base
        self.waits = True

        def part(vector: Array) -> Array:
            out = np.zeros_like(vector)
            for k, scope in enumerate(layout.scopes):
                if scope >= need:
                    out[layout.pending(k)] = vector[:base]
            out[layout.unfenced] = vector[0]
            return out

        return self.world.change(clock, ("pending", need), part)

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
        order = np.argsort(inverse, kind="stable")
        starts = np.searchsorted(inverse[order], np.arange(len(unique)))
        joined = np.maximum.reduceat(vector[:, order], starts, axis=1)
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
        know = self.know[: min(2, self.base)][:, :, real].copy()
        own = np.flatnonzero(real)
        single = np.flatnonzero(self._size[real] == 1)
        know[0][:, single, own[single]] = FOREVER
        if self.base > 1:
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
                    known = self.world.told(self.foreign.get((r, c)), cta)
                    if known is None:
                        continue
                    at = far[inverse == k]
                    classes = self.world.owners[cta].class_of[others[at]]
                    out[at] = known[layer][classes] > stamps[at]
        return out
