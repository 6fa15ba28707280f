"""Fences, barriers, cluster barriers and mbarriers as happens-before sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.barriers import BARRIERS
from workbench.simulator.ordering.asynchronous import Asynchronous
from workbench.simulator.ordering.clocks import TooFineError
from workbench.simulator.ordering.layers import fence_scope
from workbench.simulator.ordering.objects import Objects
from workbench.simulator.ordering.records import CLUSTER, CTA, GPU, scope_of
from workbench.simulator.ordering.rules import FREED, MESSAGE, RELAXED_CLUSTER, WAITED

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort

Array = npt.NDArray[Any]


class Synchronisation(Asynchronous):
    """The part of `ChunkOrder` that follows what threads synchronise with."""

    _barriers: Objects | None
    _cluster: tuple[Objects, Objects] | None
    _relaxed: dict[int, dict[int, Array]]
    _filling: Objects | None
    _done: Objects | None
    _side_done: dict[tuple[str, int], dict[int, Array]]
    _waited: dict[int, set[int]]

    # -- fences and barriers -----------------------------------------------------------------------

    def fence(self, co: Cohort, item: Instruction) -> None:
        """fence and membar."""
        if self.off:
            return
        m, scope = item.modifiers, fence_scope(item)
        if not scope:
            return
        try:
            self.clocks.fence(
                co, scope, release="acquire" not in m, acquire="release" not in m,
                sc=item.opcode == "membar" or "sc" in m,
            )  # fmt: skip
            if self.launch.launches is not None and scope >= GPU and "acquire" not in m:
                self.clocks.remember_release(*self.clocks.groups(co), self.clocks.layout.wide(GPU)[0])
        except TooFineError:
            self._give_up()

    def proxy_fence(self, co: Cohort, layers: tuple[int, ...]) -> None:
        """fence.proxy.async of shared memory (1), global memory (2)."""
        if self.off or self.clocks.base == 1:
            return
        try:
            self.clocks.proxy_fence(co, layers)
        except TooFineError:
            self._give_up()

    def warp_barrier(self, co: Cohort, mask: Array | None) -> None:
        """bar.warp.sync."""
        if self.off:
            return
        members = None
        if mask is not None:
            members = np.broadcast_to(mask, co.shape).ravel().astype(np.int64)
        try:
            self.clocks.warp_barrier(co, members)
        except TooFineError:
            self._give_up()

    def arrive(self, co: Cohort, number: int) -> None:
        """Threads arrive at a named barrier of their CTA."""
        if self.off:
            return
        if self._barriers is None:
            self._barriers = Objects(self.clocks, len(self.clocks.ctas) * BARRIERS)
        try:
            rows, classes = self.clocks.groups(co)
        except TooFineError:
            self._give_up()
            return
        vector = self.clocks.release(rows, classes)
        self._barriers.put(rows * BARRIERS + number, rows, rows, classes, vector)

    def pass_barrier(self, number: int, complete: Array, free: list[Cohort]) -> None:
        """The barrier is complete in some CTAs (bool, one a row): the cohorts `free` go on."""
        if self.off or self._barriers is None:
            return
        try:
            for co in free:
                rows, classes = self.clocks.groups(co)
                self._barriers.take(rows * BARRIERS + number, rows, rows, classes)
        except TooFineError:
            self._give_up()
            return
        self._barriers.clear(np.flatnonzero(complete) * BARRIERS + number)
        self._settle(free)

    def _settle(self, free: list[Cohort]) -> None:
        if self.shared is not None and sum(c.lanes for c in free) == int(self.chunk.alive.sum()):
            self.shared.settle(self.clocks)

    # -- dependent launches ------------------------------------------------------------------------

    def trigger(self, co: Cohort) -> None:
        """griddepcontrol.launch_dependents, before it counts.

        If it is its CTA's first one, what its thread's fences of gpu or sys scope have released is handed to
        the dependent launch. Which lane comes first is open: only what all of them would hand over is.
        """
        launches, layout = self.launch.launches, self.clocks.layout
        wide = layout.wide(GPU)
        if self.off or launches is None or not wide or not self.clocks.fences:
            return
        try:
            rows, classes = self.clocks.groups(co)
        except TooFineError:
            self._give_up()
            return
        open_ = self.chunk.launch.open[self.chunk.ctas[rows]]
        for row in np.unique(rows[~open_]).tolist():
            clock = self.clocks.released_alone(row, classes[rows == row], wide[0])
            launches.triggered(self.clocks.number, clock)

    def grid_wait(self, co: Cohort) -> None:
        """griddepcontrol.wait returns: the launch before has completed."""
        launches = self.launch.launches
        ended = launches.ended(self.clocks.number) if launches is not None else None
        if self.off or not ended:
            return
        try:
            rows, classes = self.clocks.groups(co)
        except TooFineError:
            self._give_up()
            return
        for row, c in zip(rows.tolist(), classes.tolist(), strict=True):
            self.clocks.learn_clock(row, c, ended)

    # -- clusters ----------------------------------------------------------------------------------

    def cluster_arrive(self, co: Cohort, relaxed: bool) -> None:
        """barrier.cluster.arrive."""
        if self.off:
            return
        size = self.clocks.cluster
        if self._cluster is None:
            count = -(-len(self.clocks.ctas) // size)
            self._cluster = Objects(self.clocks, count), Objects(self.clocks, count)
        filling, _ = self._cluster
        try:
            rows, classes = self.clocks.groups(co)
        except TooFineError:
            self._give_up()
            return
        targets = rows // size
        if relaxed:
            for r, c, t in zip(rows.tolist(), classes.tolist(), targets.tolist(), strict=True):
                clock = self.clocks.peek(r, c)
                self._relaxed[t] = self.clocks.world.join(self._relaxed.get(t), clock)
                self._publish(filling, t, t * size, clock, CLUSTER)
            return
        vector = self.clocks.release(rows, classes)
        filling.put(targets, targets * size, rows, classes, vector)

    def _publish(self, to: Objects, target: int, home: int, clock: dict[int, Array], scope: int) -> None:
        """Have a relaxed arrival hand over what fences of `scope` or wider have released."""
        layout = self.clocks.layout
        wide = layout.wide(scope)
        if wide and self.clocks.fences:
            to.add(target, home, self.clocks.published(clock, wide[0]))

    def cluster_complete(self, done: Array) -> None:
        """The phase of the cluster barrier is complete in the clusters numbered `done`."""
        if self._cluster is not None:
            filling, last = self._cluster
            filling.move(done, last)

    def cluster_pass(self, free: list[Cohort]) -> None:
        """The cohorts `free` go on: the phase of the cluster barrier that they wait for is complete."""
        if self.off or self._cluster is None:
            return
        size = self.clocks.cluster
        _, last = self._cluster
        try:
            for co in free:
                rows, classes = self.clocks.groups(co)
                last.take(rows // size, rows // size * size, rows, classes)
                for r, c in zip(rows.tolist(), classes.tolist(), strict=True):
                    clock = self._relaxed.get(r // size)
                    if clock:
                        self.note(r, c, RELAXED_CLUSTER, clock)
        except TooFineError:
            self._give_up()
            return
        self._settle(free)

    def note(self, row: int, c: int, key: str, clock: dict[int, Array]) -> None:
        """Remember a clock that a class would know had the synchronization been in order."""
        notes = dict(self.clocks.notes.get((row, c), {}))
        notes[key] = self.clocks.world.join(notes.get(key), clock)
        self.clocks.notes[row, c] = notes

    # -- mbarriers ---------------------------------------------------------------------------------

    def _phases(self) -> tuple[Objects, Objects]:
        count = len(self.chunk.mbarriers.live)
        if self._filling is None or self._done is None:
            self._filling, self._done = Objects(self.clocks, count), Objects(self.clocks, count)
        self._filling.extend(count)
        self._done.extend(count)
        return self._filling, self._done

    def copies_arrive(self, item: Instruction, slots: Array, co: Cohort) -> int:
        """cp.async.mbarrier.arrive; return the stamp of the copies it waits for.

        It counts as a release of its thread when it is issued: its phase cannot complete before the copies.
        """
        self.mbarrier_arrive(item, slots, co)
        return self.clocks.world.time.now - 1

    def mbarrier_arrive(self, item: Instruction, slots: Array, co: Cohort) -> None:
        """Threads arrive at mbarriers; `slots` is (lanes,), -1 for none."""
        if self.off or ("relaxed" in item.modifiers and not self.clocks.fences):
            return
        filling, _ = self._phases()
        banks = self.chunk.mbarriers.banks
        try:
            rows, classes, targets = self.clocks.groups_by_target(co, slots)
        except TooFineError:
            self._give_up()
            return
        if not len(rows):
            return
        homes = targets % banks
        if "relaxed" in item.modifiers:
            for r, c, t, h in zip(*(x.tolist() for x in (rows, classes, targets, homes)), strict=True):
                self._publish(filling, t, h, self.clocks.peek(r, c), CTA if r == h else CLUSTER)
            return
        vector = self.clocks.release(rows, classes)
        near = homes == rows
        if scope_of(item, CTA) >= CLUSTER or near.all():
            filling.put(targets, homes, rows, classes, vector)
            return
        filling.put(targets[near], homes[near], rows[near], classes[near], vector[:, near])
        world = self.clocks.world
        for k in np.flatnonzero(~near).tolist():
            clock = {int(self.clocks.ctas[rows[k]]): vector[:, k].copy()}
            clock = world.join(self.clocks.foreign.get((int(rows[k]), int(classes[k]))), clock)
            t = int(targets[k])
            self._side[FREED, t] = world.join(self._side.get((FREED, t)), clock)

    def mbarrier_reset(self, slots: Array) -> None:
        """mbarriers are set up anew."""
        if self.off:
            return
        filling, done = self._phases()
        filling.clear(slots)
        done.clear(slots)
        for t in slots.tolist():
            for kind in (FREED, MESSAGE):
                self._side.pop((kind, t), None)
                self._side_done.pop((kind, t), None)

    def mbarrier_complete(self, slots: Array) -> None:
        """A phase is complete."""
        if self.off:
            return
        filling, done = self._phases()
        filling.move(slots, done)
        if self._side or self._side_done:
            for t in slots.tolist():
                for kind in (FREED, MESSAGE):
                    self._side_done[kind, t] = self._side.pop((kind, t), {})

    def mbarrier_wait(self, item: Instruction, slots: Array, passed: Array, co: Cohort) -> None:
        """Threads find a phase complete."""
        if self.off or not passed.any():
            return
        relaxed = "relaxed" in item.modifiers
        if relaxed and not self.clocks.layout.flags:
            return
        _, done = self._phases()
        banks = self.chunk.mbarriers.banks
        where = np.broadcast_to(np.where(passed, slots, -1), co.shape).ravel()
        try:
            rows, classes, targets = self.clocks.groups_by_target(co, where)
        except TooFineError:
            self._give_up()
            return
        if not len(rows):
            return
        if relaxed:
            for r, c, t in zip(rows.tolist(), classes.tolist(), targets.tolist(), strict=True):
                need = CTA if t % banks == r and not done.foreign.get(t) else CLUSTER
                self.clocks.learn_clock(r, c, self.clocks.pending(done.whole(t, t % banks), need))
            return
        wide = scope_of(item, CTA) >= CLUSTER
        if wide or not done.foreign:
            done.take(targets, targets % banks, rows, classes)
        else:
            done.take(targets, targets % banks, rows, classes, near=True)
        notes = self.clocks.notes
        for r, c, t in zip(rows.tolist(), classes.tolist(), targets.tolist(), strict=True):
            mine = notes.get((r, c), {})
            waited = mine.get(WAITED, frozenset())
            if t not in waited:
                notes[r, c] = {**mine, WAITED: waited | {t}}
            for kind in (FREED, MESSAGE):
                clock = self._side_done.get((kind, t))
                if clock:
                    self.note(r, c, kind, clock)
            if not wide and done.foreign.get(t):
                self.note(r, c, FREED, done.foreign[t])
