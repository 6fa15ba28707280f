"""Asynchronous operations as happens-before sees them: copies, tensor-core work, cp.async.

Each is an access of an agent, a thread number of its own, which nobody knows before a wait says that
it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.access import Site
from workbench.simulator.ordering.clocks import Clocks, TooFineError
from workbench.simulator.ordering.objects import Objects
from workbench.simulator.ordering.records import CLUSTER, SYS, Kind, Record, Spans
from workbench.simulator.ordering.rules import MESSAGE
from workbench.simulator.ordering.shadow import Region
from workbench.simulator.ordering.world import FOREVER

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.ordering.order import LaunchOrder
    from workbench.simulator.pending import Operation
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]


class Asynchronous:
    """The part of `ChunkOrder` that follows asynchronous operations."""

    chunk: Chunk
    launch: LaunchOrder
    clocks: Clocks
    shared: Region | None
    off: bool
    _kinds: dict[tuple[int, bool, str], Kind]
    _agents: dict[Any, int]
    _side: dict[tuple[str, int], dict[int, Array]]

    def _access(
        self, region: Region, r: Record, unchanged: Callable[[], Array] | None, *, keep: bool = True,
        layer: int = 0,
    ) -> None:  # fmt: skip
        """Compare an access with earlier ones; see `ChunkOrder`."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """Compare nothing from now on, and say so; see `ChunkOrder`."""
        raise NotImplementedError

    def _phases(self) -> tuple[Objects, Objects]:
        """Return what the current and the last phase of each mbarrier hand over; see `ChunkOrder`."""
        raise NotImplementedError

    # -- asynchronous operations -------------------------------------------------------------------

    def agent(self, key: Any) -> int:
        """Return the thread number of an asynchronous agent, the same in every CTA."""
        if key not in self._agents:
            self._agents[key] = self.clocks.agent()
        return self._agents[key]

    def spans(
        self, item: Instruction, write: bool, space: str, operation: Operation, what: str,
        home: Array, granules: tuple[Array, Array], interval: tuple[int, int], region: Region | None,
        *, scope: int = 0,
    ) -> None:  # fmt: skip
        """An asynchronous operation is issued: what it will read or write.

        Args:
            item: the instruction.
            write: it writes.
            space: `shared` or `global`.
            operation: whose completion ends it; its elements are the record's.
            what: `copy` or `mma`.
            home: CTA row of the agent of each element.
            granules: granules and the element of each.
            interval: granules between which they lie.
            region: the memory.
        """
        if self.off or region is None or not len(home):
            return
        rows, threads = np.divmod(operation.lanes, self.chunk.launch.threads)
        try:
            if operation.slots is not None:
                columns = operation.slots // self.chunk.mbarriers.banks
                agents = np.empty(len(home), np.int64)
                for column in np.unique(columns).tolist():
                    agents[columns == column] = self.agent(("slot", column))
                home = operation.slots % self.chunk.mbarriers.banks
            else:
                agents = np.empty(len(home), np.int64)
                for t in np.unique(threads).tolist():
                    agents[threads == t] = self.agent(("write" if write else "read", t))
        except TooFineError:
            self._give_up()
            return
        kind = Kind(item, write, scope, agent=what, space=space)
        r = Spans(kind, self.clocks, (rows, threads), (home, agents), granules, *interval)
        r.note = operation.slots
        operation.records.append(r)
        layer = 0
        if self.clocks.base > 1 and item.opcode != "st":  # st.async writes through the generic proxy
            layer = 1 if space == "shared" else 2
        self._access(region, r, None, layer=layer)

    def extents(
        self, operation: Operation, write: bool, shared: bool, starts: Array, sizes: Array,
        elements: Array | None = None, *, atomic: bool = False,
    ) -> None:  # fmt: skip
        """An operation is issued whose elements read or write pieces of memory.

        Args:
            operation: the operation.
            write: it writes the pieces.
            shared: they are in the chunk's shared memory, otherwise in global memory.
            starts: first byte, in the chunk's shared memory or in the arena.
            sizes: bytes.
            elements: element of each piece; None: one each.
            atomic: the writes are atomic additions and the like.
        """
        if self.off or not len(starts) or not bool((sizes > 0).any()):
            return
        base, region = 0, self.shared
        if not shared:
            a = self.chunk.launch.memory.find(int(starts[0]))
            region = self.launch.region(a) if a is not None else None
            if region is None or a is None or int((starts + sizes).max()) > a.end:
                return
            base = a.start
        assert region is not None
        bits = int(np.bitwise_or.reduce((starts - base) | sizes))
        region.refine(bits & -bits)
        unit = region.unit
        first = (starts - base) // unit
        count = -(-(starts - base + sizes) // unit) - first
        which = np.repeat(np.arange(len(starts)), count)
        at = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        granules = first[which] + at
        self._pieces(
            operation, write, shared, granules, which if elements is None else elements[which], region, atomic
        )

    def items(self, operation: Operation, write: bool, items: Sequence[tuple[Array, int]]) -> None:
        """Like `extents`, for elements that are items of the chunk's shared memory: numbers and size."""
        if self.off or self.shared is None or not items:
            return
        parts, owners = [], []
        self.shared.refine(min(size for _, size in items))
        for k, (index, size) in enumerate(items):
            per = size // self.shared.unit
            at = (index.ravel()[:, None] * per + np.arange(per)).ravel()
            parts.append(at)
            owners.append(np.full(len(at), k))
        self._pieces(
            operation, write, True, np.concatenate(parts), np.concatenate(owners), self.shared, False
        )

    def _pieces(
        self, operation: Operation, write: bool, shared: bool, granules: Array, elements: Array,
        region: Region,
        atomic: bool,
    ) -> None:  # fmt: skip
        if not len(granules):
            return
        low, high = int(granules.min()), int(granules.max()) + 1
        if shared:
            inside = granules % (self.shared.width if self.shared is not None else 1)
            low, high = int(inside.min()), int(inside.max()) + 1
        home = operation.lanes // self.chunk.launch.threads
        space = "shared" if shared else "global"
        scope = 0 if not atomic else SYS if not shared else CLUSTER
        self.spans(
            operation.item, write, space, operation, "copy", home, (granules, elements), (low, high), region,
            scope=scope,
        )  # fmt: skip

    def message(self, operation: Operation) -> None:
        """st.async is issued: whoever waits for the mbarrier follows the loads that the data came from."""
        if self.off or operation.slots is None:
            return
        rows, threads = np.divmod(operation.lanes, self.chunk.launch.threads)
        classes = self.clocks.class_of[threads]
        senders = np.unique(np.stack([operation.slots, rows, classes]), axis=1)
        pairs = senders[:2, senders[0] >= 0]
        for t, r in np.unique(pairs, axis=1).T.tolist():
            mine = senders[2, (senders[0] == t) & (senders[1] == r)]
            clock = self.clocks.peek(r, mine)
            self._side[MESSAGE, t] = self.clocks.world.join(self._side.get((MESSAGE, t)), clock)

    def operands(self, item: Instruction, lanes: Array, key: str, index: Sequence[Array]) -> list[Spans]:
        """Matrix instructions are issued that read 16-byte items of the chunk's shared memory.

        Args:
            item: the instruction.
            lanes: issuing thread of each element.
            key: names the kind of agent.
            index: numbers of the items that each element reads.

        Returns:
            Records for `operands_read`.
        """
        if self.off or self.shared is None or not len(lanes):
            return []
        rows, threads = np.divmod(lanes, self.chunk.launch.threads)
        try:
            agents = np.array([self.agent((key, t)) for t in threads.tolist()], np.int64)
        except TooFineError:
            self._give_up()
            return []
        per = 16 // self.shared.unit
        parts = [(at.ravel()[:, None] * per + np.arange(per)).ravel() for at in index]
        granules = np.concatenate(parts)
        elements = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
        inside = granules % (self.shared.width if self.shared is not None else 1)
        r = Spans(
            Kind(item, False, agent="mma"), self.clocks, (rows, threads), (rows, agents),
            (granules, elements),
            int(inside.min()), int(inside.max()) + 1,
        )  # fmt: skip
        self._access(self.shared, r, None, layer=1 if self.clocks.base > 1 else 0)
        return [r]

    def operands_read(self, records: Sequence[Spans], chosen: Array | None = None) -> int:
        """Elements have read their operands; return the time up to which that is known by who waits now."""
        now = self.clocks.world.time.tick()
        for r in records:
            assert r.stamps is not None
            r.stamps[slice(None) if chosen is None else chosen] = now - 1
        return now

    def committed(self, lane: int, slot: int) -> None:
        """An mbarrier gets the arrival of a tcgen05.commit of thread `lane`."""
        if self.off or slot < 0:
            return
        row, thread = divmod(lane, self.chunk.launch.threads)
        if ("mma", thread) not in self._agents:
            return
        sent = self.clocks.peek(row, int(self.clocks.class_of[thread]))
        self._side[MESSAGE, slot] = self.clocks.world.join(self._side.get((MESSAGE, slot)), sent)
        filling, _ = self._phases()
        c = self.clocks.class_of[self._agents["mma", thread]]
        vector = np.zeros((self.clocks.layers, self.clocks.count), np.int64)
        vector[: self.clocks.base, c] = self.clocks.world.time.tick()
        filling.add(slot, slot % self.chunk.mbarriers.banks, {int(self.clocks.ctas[row]): vector})

    def warpgroups_wait(self, rows: Array, first: Array) -> None:
        """wgmma.wait_group: warp groups (their first threads) know that their operands have been read."""
        if self.off:
            return
        now = self.clocks.world.time.tick()
        for r, t in zip(rows.tolist(), first.tolist(), strict=True):
            if ("wgmma", t) in self._agents:
                c = np.unique(self.clocks.class_of[t : t + 128])
                a = self.clocks.class_of[self._agents["wgmma", t]]
                self.clocks.know[: self.clocks.base, r, c, a] = now

    def completed(self, operation: Operation, chosen: Array, *, reads: bool = False) -> None:
        """Elements of an operation take effect (`reads`: have taken their sources); before it signals."""
        if self.off or not operation.records:
            return
        if operation.slots is None:
            for r in operation.records:
                if r.kind.write != reads:
                    self._stamp(r, chosen)
            return
        if reads:
            return
        filling, _ = self._phases()
        slots = operation.slots[chosen]
        now = self.clocks.world.time.tick()
        for r in operation.records:
            assert r.stamps is not None
            r.stamps[chosen] = now - 1
        banks = self.chunk.mbarriers.banks
        for slot in np.unique(slots[slots >= 0]).tolist():
            column = slot // banks
            c = self.clocks.class_of[self.agent(("slot", column))]
            filling.local[: self.clocks.base, slot, c] = now

    def _stamp(self, r: Spans, chosen: Array) -> None:
        assert r.stamps is not None
        r.stamps[chosen] = self.clocks.world.time.tick() - 1

    def group_wait(self, co: Cohort, read: bool) -> None:
        """cp.async.bulk.wait_group: the threads learn of what their own groups have done."""
        if self.off:
            return
        now = self.clocks.world.time.now + 1
        try:
            for which in ("read",) if read else ("read", "write"):
                threads = [t for t in np.unique(co.threads).tolist() if (which, t) in self._agents]
                if not threads:
                    continue
                self.clocks.isolate(np.array(threads))
                self.clocks.groups(co)
                for t in threads:
                    rows = co.ctas if co.rectangular else co.ctas[co.threads == t]
                    c, a = self.clocks.class_of[t], self.clocks.class_of[self._agents[which, t]]
                    self.clocks.know[: self.clocks.base, rows, c, a] = now
            self.clocks.world.time.tick()
        except TooFineError:
            self._give_up()

    # -- cp.async ----------------------------------------------------------------------------------

    def copy_issued(self, site: Site, place: Array, co: Cohort) -> Record | None:
        """cp.async is issued; `place` are offsets in the chunk's shared memory (lanes,)."""
        region = self.shared
        if self.off or region is None:
            return None
        key = (id(site.instruction), True, "copy")
        if key not in self._kinds:
            self._kinds[key] = Kind(site.instruction, True, agent="cp.async")
        region.refine(site.size)
        unit = region.unit
        rows = np.broadcast_to(co.rows(), co.shape).ravel()
        offset = place - rows * self.chunk.space_shared.stride
        low, high = int(offset.min()), int(offset.max()) + site.size
        r = Record(
            self._kinds[key], self.clocks, co, (place // unit).reshape(co.shape), max(1, site.size // unit),
            low // unit, -(-high // unit), 0,
        )  # fmt: skip
        stamps = np.full(co.lanes, FOREVER, np.int64)
        self._access(region, r, None)
        r.stamps = stamps
        return r

    def copy_done(self, r: Record | None, which: Array, stamp: int | None = None) -> None:
        """The copies of lanes `which` of a record are visible to their threads (or since `stamp`)."""
        if r is None or self.off or r.stamps is None:
            return
        rows, threads = r.lanes()
        rows, threads = rows[which], threads[which]
        now = self.clocks.last[rows, self.clocks.class_of[threads]]
        r.stamps[which] = now if stamp is None else np.minimum(now, stamp)
