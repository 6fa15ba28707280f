"""Thread block clusters: whose shared memory an address names, and barrier.cluster (PTX ISA 4.1, 9.7.14.5).

A chunk holds whole clusters, CTA after CTA in order of rank. A shared::cluster address has the rank of its
CTA plus one in bits 24 and up; an address without is one of the executing CTA, as shared::cta addresses are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.errors import WorkbenchError
from workbench.isa.ptx.model import Instruction
from workbench.simulator.access import SHARED_BASE, SHARED_WINDOW, BankedSpace, Site
from workbench.simulator.program import Block

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
RULE = "cluster-barrier"


class _Remote(BankedSpace):
    """The shared memory of a chunk, each lane looking at the CTA it names."""

    def __init__(self, space: BankedSpace) -> None:
        self.size, self.kind, self.stride, self.banks = space.size, space.kind, space.stride, space.banks
        self.data, self.shadow, self.base = space.data, space.shadow, space.base
        self.order, self.good = space.order, space.good
        self.unsettled = space.unsettled
        self.rows: Array = np.zeros((1, 1), np.int64)

    def place(self, i: Array, co: Cohort) -> Array:
        """Return offsets in the chunk's array."""
        return i + self.rows * np.int64(self.stride)


class Clusters:
    """The clusters of a chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        x, y, z = chunk.launch.cluster
        self.size = x * y * z
        rows = len(chunk.ctas)
        self.count = -(-rows // self.size)
        self.arrived = np.zeros(self.count, np.int64)
        """Threads that have arrived in the current phase."""
        self.total = np.full(self.count, self.size * chunk.launch.threads, np.int64)
        """Threads that have not exited."""
        self.phase = np.zeros(self.count, np.int64)
        self._own: Array | None = None
        """For each thread the number of times it has arrived."""
        self._waited: Array | None = None
        self.waiting: list[tuple[Cohort, Block]] = []
        self._touched = np.zeros(rows, bool)
        """CTAs whose shared memory others have accessed with no synchronisation since."""
        self._toucher: dict[int, tuple[Instruction, Cohort]] = {}
        self._space: _Remote | None = None

    # -- addresses -------------------------------------------------------------------------------

    def resolve(self, address: Array, co: Cohort) -> tuple[Array, Array, Array | None]:
        """Return CTA row, offset in its shared memory, and lanes whose rank does not exist.

        `address` is a shared::cluster address (int64) that broadcasts with the cohort's CTAs.
        """
        rows = co.rows()
        high = address >> RANK_SHIFT
        if not high.any():
            return rows, address - SHARED_BASE, None
        wrong = (high < 0) | (high > self.size)
        named = (high > 0) & ~wrong
        rows = np.where(named, rows - rows % self.size + high - 1, rows)
        return rows, (address & OFFSET_MASK) - SHARED_BASE, wrong if wrong.any() else None

    def locate(self, site: Site, address: Array, co: Cohort) -> tuple[Array, Array, Array | None]:
        """Like `resolve` with the site's offset added; reports what is out of bounds or misaligned.

        Returns:
            Row, offset (multiple of the site's size where it is good), lanes that fault or None.
        """
        ck = self.chunk
        a = address + site.k
        if site.space == "generic":
            a = a - SHARED_WINDOW
        rows, offset, wrong = self.resolve(a, co)
        outside = (offset < 0) | (offset + site.size > ck.space_shared.size)
        if wrong is not None:
            outside = outside | wrong
        misaligned = ~outside & ((offset & site.mask) != 0)
        bad = outside | misaligned
        if not bad.any():
            return rows, offset, None
        place = site.at_shared()
        if outside.any():
            ck.fault("out-of-bounds", place, co, outside, a)
        if misaligned.any():
            ck.fault("misaligned", place, co, misaligned, a)
        return rows, offset, bad

    def remote(self, site: Site, address: Array, co: Cohort) -> tuple[BankedSpace, Site, Array]:
        """Return the space, site and addresses with which a shared::cluster access is made."""
        ck = self.chunk
        a = address + site.k
        if site.space == "generic":
            a = a - SHARED_WINDOW
        near = site.at_shared()
        high = a >> RANK_SHIFT
        if not high.any():
            return ck.space_shared, near, a
        rows, offset, wrong = self.resolve(a, co)
        if wrong is not None:
            offset = np.where(wrong, -SHARED_BASE, offset)
        self._touch(site.instruction, rows, co)
        if self._space is None:
            self._space = _Remote(ck.space_shared)
        self._space.rows = rows
        return self._space, near, offset + SHARED_BASE

    def _touch(self, item: Instruction, rows: Array, co: Cohort) -> None:
        rows = np.broadcast_to(rows, np.broadcast_shapes(rows.shape, co.rows().shape))
        away = rows != co.rows()
        if not away.any():
            return
        self.check_present(item, rows, co)
        which = np.unique(rows[away])
        self._touched[which] = True
        for row in which:
            self._toucher[int(row)] = item, co

    def check_present(self, item: Instruction, rows: Array, co: Cohort) -> None:
        """Report an access to shared memory of CTAs `rows` of which one has exited."""
        if not self.chunk.exited:
            return
        present: Array = np.logical_or.reduce(self.chunk.alive, axis=1)
        gone = (rows != co.rows()) & ~present[rows]
        if gone.any():
            self.chunk.report(RULE, item, "accesses shared memory of a CTA that has exited", co, gone)

    def signalled(self, rows: Array) -> None:
        """Take note that mbarriers of CTAs `rows` received an arrival, which may order remote accesses."""
        if self._toucher:
            for row in np.unique(rows):
                self._touched[row] = False
                self._toucher.pop(int(row), None)

    # -- barrier.cluster -------------------------------------------------------------------------

    def _lanes(self, co: Cohort) -> Array:
        return co.rows() * self.chunk.launch.threads + co.columns()

    def _counts(self) -> tuple[Array, Array]:
        if self._own is None or self._waited is None:
            total = len(self.chunk.ctas) * self.chunk.launch.threads
            self._own, self._waited = np.zeros(total, np.int64), np.zeros(total, np.int64)
        return self._own, self._waited

    def arrive(self, co: Cohort, item: Instruction) -> None:
        """barrier.cluster.arrive."""
        own, waited = self._counts()
        lanes = self._lanes(co)
        twice = own[lanes] > waited[lanes]
        if twice.any():
            text = "arrives at the cluster barrier again without having waited"
            self.chunk.report(RULE, item, text, co, twice)
            lanes = lanes[~twice]
        if self.chunk.order is not None:
            self.chunk.order.cluster_arrive(co, "relaxed" in item.modifiers)
        own[lanes] += 1
        groups = np.broadcast_to(co.rows() // self.size, twice.shape)[~twice]
        self.arrived += np.bincount(groups, minlength=self.count)
        self.chunk.progress += 1
        if self.waiting:
            self.chunk.resume(self.release())

    def wait(self, co: Cohort, block: Block) -> list[tuple[Cohort, int]]:
        """barrier.cluster.wait: return cohorts that may go on."""
        own, waited = self._counts()
        lanes = self._lanes(co)
        item = block.instruction
        assert item is not None
        early = own[lanes] <= waited[lanes]
        if early.any():
            text = "waits at the cluster barrier without having arrived"
            self.chunk.report(RULE, item, text, co, early)
        waited[lanes] = own[lanes]
        self.waiting.append((co, block))
        return self.release()

    def release(self) -> list[tuple[Cohort, int]]:
        """Begin a new phase in clusters where all threads have arrived; return who may go on."""
        done = (self.arrived >= self.total) & (self.arrived > 0)
        if done.any():
            self.phase[done] += 1
            self.arrived[done] = 0
            if self.chunk.order is not None:
                self.chunk.order.cluster_complete(np.flatnonzero(done))
            rows = np.repeat(done, self.size)[: len(self._touched)]
            self._touched[rows] = False
            self._toucher = {r: v for r, v in self._toucher.items() if not rows[r]}
            self.chunk.progress += 1
        own, _ = self._counts()
        out: list[tuple[Cohort, int]] = []
        held: list[tuple[Cohort, Block]] = []
        for co, block in self.waiting:
            go = self.phase[co.rows() // self.size] >= own[self._lanes(co)]
            live = frozenset(co.registers)
            free, stay = co.split(go, live, live)
            if free is not None:
                out.append((free, block.following))
            if stay is not None:
                held.append((stay, block))
        self.waiting = held
        if out and self.chunk.order is not None:
            self.chunk.order.cluster_pass([co for co, _ in out])
        return out

    def retire(self, co: Cohort) -> list[tuple[Cohort, int]]:
        """Take exited threads out of the count; call after `alive` is up to date."""
        rows = np.broadcast_to(co.rows(), co.shape).ravel()
        self.total -= np.bincount(rows // self.size, minlength=self.count)
        if self._own is not None:
            lanes = self._lanes(co).ravel()
            ahead = self._own[lanes] > self.phase[rows // self.size]
            if ahead.any():
                self.arrived -= np.bincount(rows[ahead] // self.size, minlength=self.count)
        if self._toucher:
            ctas = np.unique(co.ctas)
            self._leave(ctas[~self.chunk.alive[ctas].any(axis=1)])
        return self.release() if self.waiting else []

    def end(self) -> None:
        """All threads of the chunk exit together."""
        if self._toucher:
            self._leave(np.arange(len(self._touched)))

    def _leave(self, rows: Array) -> None:
        if self.chunk.launch.program.spins:  # some flag may order the accesses
            return
        for row in rows:
            if self._touched[row] and row in self._toucher:
                item, who = self._toucher.pop(int(row))
                text = (
                    "accesses shared memory of another CTA of the cluster, which exits with no cluster "
                    "barrier or other synchronisation after the access"
                )
                self.chunk.report(RULE, item, text, who, np.ones((1, 1), bool))

    def stuck(self) -> list[tuple[Cohort, Instruction, str]]:
        """Describe who waits for cluster barriers that will never be complete."""
        out = []
        for co, block in self.waiting:
            assert block.instruction is not None
            c = int(co.ctas[0]) // self.size
            text = (
                f"the cluster barrier has {int(self.arrived[c])} of {int(self.total[c])} threads and no one "
                "else can come"
            )
            out.append((co, block.instruction, text))
        return out


def map_address(address: Array, rank: Array) -> Array:
    """Mapa: the address of the same variable in the CTA of rank `rank`; uint32 or uint64 as `address`."""
    kind = address.dtype.type
    low: Array = (address & kind(OFFSET_MASK)) | ((rank.astype(address.dtype) + kind(1)) << kind(RANK_SHIFT))
    if address.dtype.itemsize == 4:
        return low
    wide: Array = low | (address & kind(~0xFFFFFFFF & 0xFFFFFFFFFFFFFFFF))
    return wide


def rank_of(address: Array, co: Cohort) -> Array:
    """getctarank: the rank of the CTA that a shared address belongs to."""
    high = ((address & address.dtype.type(0xFFFFFFFF)) >> address.dtype.type(RANK_SHIFT)).astype(np.uint32)
    own = co.special("%cluster_ctarank")
    return np.where(high > 0, high - np.uint32(1), own)


def order_of_ctas(grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> Array:
    """Return all CTA numbers, cluster after cluster, by rank within each.

    Raises:
        WorkbenchError: if the grid is no multiple of the cluster.
    """
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise WorkbenchError(f"a grid of {grid} CTAs cannot be divided into clusters of {cluster}")
    index = np.arange(grid[0] * grid[1] * grid[2])
    if cluster[1] == cluster[2] == 1:
        return index
    x, y, z = index % grid[0], index // grid[0] % grid[1], index // (grid[0] * grid[1])
    cx, cy, cz = cluster
    rank = x % cx + cx * (y % cy + cy * (z % cz))
    which = x // cx + (grid[0] // cx) * (y // cy + (grid[1] // cy) * (z // cz))
    return np.lexsort((rank, which))
