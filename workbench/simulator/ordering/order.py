"""What a chunk tells of its accesses and its synchronization, and the findings that come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.findings import Severity
from workbench.simulator.access import Site
from workbench.simulator.ordering.clocks import Clocks, TooFineError
from workbench.simulator.ordering.flags import Flags, few
from workbench.simulator.ordering.launches import Launches
from workbench.simulator.ordering.layers import Layout
from workbench.simulator.ordering.objects import Objects
from workbench.simulator.ordering.records import Kind, Record, Spans, kind_of
from workbench.simulator.ordering.rules import excused, judge, sentence
from workbench.simulator.ordering.shadow import Clash, Region
from workbench.simulator.ordering.synchronisation import Synchronisation
from workbench.simulator.ordering.world import FOREVER, World

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.launch import LaunchState
    from workbench.simulator.memory import Allocation
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
Touched = dict[int, tuple[Array, Array]]
"""By buffer: bytes written and bytes read, see `Region.touched`."""
_UNIT = 16
"""Bytes of a granule before a smaller access is met."""


class LaunchOrder:
    """Happens-before of one launch; of several that overlap if they share one."""

    def __init__(self) -> None:
        self.world = World()
        self.flags = Flags()
        self.unit = _UNIT
        """Bytes of a granule of the shared memory of the chunks so far."""
        self.launches: Launches | None = None
        """Of launches that overlap: what they tell each other."""
        self._regions: dict[int, Region | None] = {}

    def close(self) -> None:
        """Forget all accesses: the launch is over."""
        self._regions.clear()
        self.flags = Flags()

    def regions(self) -> list[Region]:
        """Return the buffers that kernels may write and have touched."""
        return [region for region in self._regions.values() if region is not None]

    def touched(self) -> Touched:
        """Return what was written and read of each buffer that kernels may write."""
        return {start: region.touched() for start, region in self._regions.items() if region is not None}

    def region(self, a: Allocation) -> Region | None:
        """Return the region of a buffer; None if no kernel may write it."""
        if a.start not in self._regions:
            count = -(-a.size // _UNIT) + 32
            self._regions[a.start] = Region(count, _UNIT, a.name) if a.writable else None
        return self._regions[a.start]


class ChunkOrder(Synchronisation):
    """Happens-before of one chunk.

    Args:
        chunk: the chunk; its shared memory and its threads.
        launch: what the chunks of a launch share.
        layout: the layers of the clocks.
    """

    def __init__(self, chunk: Chunk, launch: LaunchOrder, layout: Layout) -> None:
        self.chunk, self.launch = chunk, launch
        x, y, z = chunk.launch.cluster
        self.clocks = Clocks(
            launch.world, chunk.ctas + chunk.launch.first_cta, chunk.launch.threads, layout, x * y * z,
            chunk.launch.rank,
        )  # fmt: skip
        if launch.launches is not None:
            begun = launch.launches.begun(self.clocks.number)
            for row in range(len(chunk.ctas) if begun else 0):
                self.clocks.learn_clock(row, 0, begun)
        space = chunk.space_shared
        self.shared: Region | None = None
        if space.size:
            width = space.stride // launch.unit
            self.shared = Region(space.banks * width, launch.unit, None, width)
        self.off = False
        """The threads differ too much to be followed."""
        self.early = False
        """The last load came before an asynchronous write was complete, and a finding says so."""
        self._kinds: dict[tuple[int, bool, str], Kind] = {}
        self._barriers: Objects | None = None
        self._cluster: tuple[Objects, Objects] | None = None
        """What the current and the last phase of the cluster barriers hand over."""
        self._relaxed: dict[int, dict[int, Array]] = {}
        self._filling: Objects | None = None
        self._done: Objects | None = None
        self._side: dict[tuple[str, int], dict[int, Array]] = {}
        """By kind and mbarrier: what arrivals of too narrow a scope, and senders of st.async, know."""
        self._side_done: dict[tuple[str, int], dict[int, Array]] = {}
        self._agents: dict[Any, int] = {}
        self._waited: dict[int, set[int]] = {}

    def close(self) -> None:
        """The chunk is over: nobody else sees its shared memory."""
        for region in (self.shared, *self.launch.regions()):
            if region is not None and region.forgot:
                name = region.name or "shared memory"
                self.chunk.launch.log.add(
                    "undecided", None, f"{name} is read in too many places to follow: later writes were not "
                    "compared with the first reads",
                    fix="look at a smaller grid or fewer rounds", severity=Severity.INFO,
                )  # fmt: skip
        self.shared = None

    # -- accesses --------------------------------------------------------------------------------

    def _kind(self, site: Site, write: bool, space: str) -> Kind:
        key = (id(site.instruction), write, space)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = kind_of(site.instruction, write, space)
        return kind

    def near(
        self, site: Site, write: bool, i: Array, value: Array | None, low: int, high: int, co: Cohort,
        rows: Array | None = None, kind: Kind | None = None,
    ) -> Record | None:  # fmt: skip
        """A load or store of shared memory, before it takes place.

        Args:
            site: the instruction.
            write: it is a store.
            i: offsets in the banks.
            value: what is stored, None if that is not to be looked at.
            low: first byte of the banks touched.
            high: byte after the last.
            co: the lanes.
            rows: bank of each lane if it is not its own CTA's.
            kind: of the access, if the instruction does not tell.
        """
        region = self.shared
        if self.off or region is None:
            return None
        kind = kind or self._kind(site, write, "shared")
        self.early = False
        if site.size < region.unit:
            region.refine(site.size)
            self.launch.unit = min(self.launch.unit, site.size)
        unit, stride = region.unit, region.width
        place = i // unit if unit > 1 else i
        if rows is not None:
            place, stride = place + rows * stride, 0
        r = Record(
            kind, self.clocks, co, place, max(1, site.size // unit), low // unit, -(-high // unit), stride
        )
        r.remote = rows is not None

        def unchanged() -> Array:
            space = self.chunk.space_shared
            at = np.broadcast_to(place + (co.rows() * stride if stride else 0), co.shape).ravel() * unit
            return _same(space.data[site.size], at >> site.shift, value, co)

        self._follow_fence(r)
        self._access(region, r, unchanged if value is not None else None)
        if kind.scope:
            bank = rows if rows is not None else co.rows()
            spaces = np.broadcast_to(self.clocks.ctas[bank] + 1, co.shape).ravel()
            self._strong(kind, spaces, np.broadcast_to(i, co.shape).ravel(), co)
        return r

    def far(self, site: Site, write: bool, i: Array, value: Array | None, co: Cohort) -> None:
        """A load or store of global memory at arena offsets `i`, before it takes place."""
        if self.off:
            return
        low, high = int(i.min()), int(i.max())
        memory = self.chunk.launch.memory
        a = memory.find(low)
        if a is None or high + site.size > a.end:
            self._several(site, write, i, value, co)
            return
        region = self.launch.region(a)
        if region is None:
            if site.low <= site.high:
                site.quiet = True
            return
        if site.size < region.unit:
            region.refine(site.size)
        unit = region.unit
        kind = self._kind(site, write, "global")
        place = (i - a.start) // unit if unit > 1 else i - a.start
        r = Record(
            kind, self.clocks, co, place, max(1, site.size // unit), (low - a.start) // unit,
            -(-(high + site.size - a.start) // unit), 0,
        )  # fmt: skip

        def unchanged() -> Array:
            space = self.chunk.space_global
            at = np.broadcast_to(i, co.shape).ravel()
            return _same(space.data[site.size], at >> site.shift, value, co)

        self._follow_fence(r)
        self._access(region, r, unchanged if value is not None else None)
        if write and not kind.scope and self.chunk.launch.program.communicates and few(co):
            spaces = np.zeros(co.lanes, np.int64)
            self._strong(kind, spaces, np.broadcast_to(i, co.shape).ravel(), co)
        if kind.scope:
            spaces = np.zeros(co.lanes, np.int64)
            self._strong(kind, spaces, np.broadcast_to(i, co.shape).ravel(), co)

    def _several(self, site: Site, write: bool, i: Array, value: Array | None, co: Cohort) -> None:
        """An access to several buffers; lanes that faulted are at offset 0."""
        lanes = np.broadcast_to(i, co.shape)
        values = np.broadcast_to(value, co.shape) if value is not None else None
        for a in self.chunk.launch.memory.allocations:
            inside = (lanes >= a.start) & (lanes + site.size <= a.end)
            if not inside.any():
                continue
            some = co.select(inside, frozenset()) if not inside.all() else co
            self.far(
                site, write, lanes[inside].reshape(some.shape),
                values[inside].reshape(some.shape) if values is not None else None, some,
            )  # fmt: skip
            site.quiet = False

    def _access(
        self, region: Region, r: Record, unchanged: Callable[[], Array] | None, *, keep: bool = True,
        layer: int = 0,
    ) -> None:  # fmt: skip
        for clash in region.access(r, keep=keep, unchanged=unchanged, layer=layer):
            self._report(clash, region)
        if r.kind.write:
            region.wrote(r)

    def _follow_fence(self, r: Record) -> None:
        """Have a relaxed strong store count as done at its thread's last fence, which releases with it.

        Who reads it and acquires is ordered after the store itself, too.
        """
        kind, clocks = r.kind, self.clocks
        if not kind.scope or not kind.write or kind.release or not clocks.fences:
            return
        rows, threads = r.lanes()
        classes = clocks.class_of[threads]
        first = clocks.layout.released(0)
        fenced = clocks.fenced[first : first + len(clocks.layout.scopes), rows, classes].max(axis=0)
        last = clocks.last[rows, classes]
        r.stamps = np.where(fenced > 0, np.minimum(last, fenced - 1), last)

    def _strong(self, kind: Kind, spaces: Array, at: Array, co: Cohort) -> None:
        try:
            if kind.atomic:
                return
            if kind.write:
                self.launch.flags.write(kind, False, spaces, at, co, self.clocks)
            else:
                self.launch.flags.read(kind, spaces, at, co, self.clocks)
        except TooFineError:
            self._give_up()

    def atomic(
        self, site: Site, space: str, at: Array, wrote: Array, wanted: bool, co: Cohort, rows: Array | None
    ) -> None:
        """An atomic operation, after its effect.

        Args:
            site: the instruction.
            space: `shared` or `global`.
            at: byte offsets: in the banks, or in the arena.
            wrote: which lanes have written: not those of a compare-and-swap that failed.
            wanted: the old value is returned.
            co: the lanes.
            rows: bank of each lane, see `near`.
        """
        if self.off:
            return
        kind = self._kind(site, True, space)
        at = np.broadcast_to(at, co.shape)
        flags, clocks = self.launch.flags, self.clocks
        flat = at.ravel()
        spaces = np.zeros(co.lanes, np.int64)
        if space == "shared":
            bank = rows if rows is not None else co.rows()
            spaces = np.broadcast_to(clocks.ctas[bank] + 1, co.shape).ravel()
        busy = kind.release or clocks.fences
        try:
            if kind.acquire and wanted:  # what it writes comes after what it acquires
                flags.read(kind, spaces, flat, co, clocks)
            if space == "shared":
                self.near(site, True, at, None, int(at.min()), int(at.max()) + site.size, co, rows)
            else:
                self.far(site, True, at, None, co)
            if not busy and not few(co) and not (wanted and flags.locations):
                return
            if not wanted:
                flags.write(kind, True, spaces, flat, co, clocks)
            elif co.lanes > 1024:
                flags.read(kind, spaces, flat, co, clocks)
                flags.write(kind, True, spaces, flat, co, clocks)
            else:
                threads = np.broadcast_to(co.columns(), co.shape).ravel().tolist()
                banks = np.broadcast_to(co.rows(), co.shape).ravel().tolist()
                for s, a, t, r, w in zip(
                    spaces.tolist(), flat.tolist(), threads, banks, wrote.ravel().tolist(), strict=True
                ):
                    flags.exchange(kind, (s, a), t, r, clocks, w)
        except TooFineError:
            self._give_up()

    def _give_up(self) -> None:
        self.off = True
        self.chunk.launch.log.add(
            "undecided", None, "the threads act in more different ways than happens-before can follow: later "
            "accesses of these CTAs were not compared",
            fix="look at a smaller grid or block", severity=Severity.INFO,
        )  # fmt: skip

    def _report(self, clash: Clash, region: Region) -> None:
        if _in_part(clash):
            return
        spared = excused(clash)
        if spared.any():
            if spared.all():
                return
            clash.lanes, clash.others = clash.lanes[~spared], clash.others[~spared]
            clash.granules = clash.granules[~spared]
        n = clash.later
        if clash.ahead is not None and self.launch.launches is not None:
            self.launch.launches.report(clash, region)
            return
        verdict = judge(clash, region)
        if bool((clash.earlier.stamp(clash.others[:1]) == FOREVER).all()) and not n.kind.write:
            unwritten = region.name is None and self.chunk.options.check_memory
            if verdict.rule == "race" and unwritten and not n.kind.agent:
                return  # what is under way counts as unwritten, and a finding about that follows
            self.early = True
        rows, threads = n.by if isinstance(n, Spans) else n.lanes()
        lanes = np.unique(clash.lanes)
        from workbench.simulator.cohort import Cohort

        one = Cohort(self.chunk, rows[lanes], threads[lanes], False, {})
        self.chunk.report(
            verdict.rule, n.kind.item, sentence(clash, region, verdict, self.chunk), one,
            np.ones((1, 1), bool), other=clash.earlier.kind.item, fix=verdict.fix, buffer=region.name,
            severity=verdict.severity,
        )  # fmt: skip


def _in_part(clash: Clash) -> bool:
    """Whether a tcgen05.cp meets a store at less than half of the bytes that it copies.

    It moves scale factors of several K blocks and of rows that do not exist along with those that are used.
    """
    for r in (clash.later, clash.earlier):
        item = r.kind.item
        if item.opcode == "tcgen05" and item.modifiers[0] == "cp":
            return 2 * len(np.unique(clash.granules)) < len(r.granules()[0])
    return False


def _same(view: Array, index: Array, value: Array | None, co: Cohort) -> Array:
    """Return which lanes store what is there already, as when all warps set one flag: no harm is done."""
    assert value is not None
    there = view.take(index, mode="clip")
    new = np.ascontiguousarray(np.broadcast_to(value, co.shape)).reshape(-1)
    same = there.view(np.uint8).reshape(len(index), -1) == new.view(np.uint8).reshape(len(index), -1)
    result: Array = same.all(axis=1)
    return result


def share(states: Sequence[LaunchState], *, programmatic: bool) -> None:
    """Have launches that run side by side follow happens-before together; see `Launches`."""
    order = LaunchOrder()
    order.world.layout = Layout.of_all(s.program.layers for s in states)
    order.launches = Launches(order.world, states, programmatic=programmatic)
    for state in states:
        state.order = order


def order_of(chunk: Chunk, state: LaunchState) -> ChunkOrder | None:
    """Return the order of a new chunk; None if it is not asked for."""
    if not state.options.check_races:
        return None
    if state.order is None:
        state.order = LaunchOrder()
    return ChunkOrder(chunk, state.order, state.program.layers)
