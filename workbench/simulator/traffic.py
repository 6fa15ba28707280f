"""Sectors of global memory and bank conflicts of shared memory, counted a warp request at a time."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.access import SHARED_BASE, SHARED_WINDOW, WINDOW, Site
from workbench.simulator.memory import BASE
from workbench.simulator.warp import lanes_of

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort

Array = npt.NDArray[Any]

SECTOR = 32
_BLOCK = 4096
"""Sectors whose marks are looked at together; blocks without a mark are never read."""


@dataclass(slots=True)
class TrafficCounts:
    """Totals of the chunks of one process."""

    load_sectors: int = 0
    store_sectors: int = 0
    bank_conflicts: int = 0

    def __add__(self, other: TrafficCounts) -> TrafficCounts:
        """Return the totals of both."""
        return TrafficCounts(
            self.load_sectors + other.load_sectors,
            self.store_sectors + other.store_sectors,
            self.bank_conflicts + other.bank_conflicts,
        )


class _Marks:
    """Which sectors were touched; in shared pages, so that forked processes add to the same marks."""

    def __init__(self, nbytes: int) -> None:
        sectors = -(-nbytes // SECTOR)
        blocks = sectors // _BLOCK + 1
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._sectors = np.frombuffer(mmap.mmap(-1, blocks * _BLOCK, flags=flags), np.uint8)
        self._blocks = np.frombuffer(mmap.mmap(-1, blocks, flags=flags), np.uint8)

    def add(self, sectors: Array) -> None:
        self._sectors[sectors] = 1
        self._blocks[sectors >> 12] = 1

    def count(self) -> int:
        """Number of distinct sectors."""
        grid = self._sectors.reshape(-1, _BLOCK)
        return sum(int(np.count_nonzero(grid[b])) for b in np.flatnonzero(self._blocks))


class Traffic:
    """Counts the accesses of one launch.

    Args:
        top: end of the part of the arena that is in use, in bytes.
    """

    def __init__(self, top: int) -> None:
        self.counts = TrafficCounts()
        self.loads, self.stores = _Marks(top), _Marks(top)
        self._top = top

    def access(self, site: Site, address: Array, co: Cohort) -> None:
        """Count one load, store or copy; `address` as the instruction has it (int64)."""
        item = site.instruction
        if item.opcode in ("atom", "red"):
            return
        offset = address + site.k
        if site.space == "shared":
            self._shared(site.size, offset + SHARED_BASE, co)
        elif site.space == "global":
            self._global(item.opcode == "st", offset, co)
        elif site.space == "generic":
            low, high = int(offset.min()), int(offset.max())
            if low >= SHARED_WINDOW and high < SHARED_WINDOW + WINDOW:
                self._shared(site.size, offset - SHARED_WINDOW, co)
            elif low >= BASE:
                self._global(item.opcode == "st", offset - BASE, co)

    def _global(self, store: bool, offset: Array, co: Cohort) -> None:
        sectors = np.clip(offset, 0, self._top - 1) >> 5
        requests = _by_warp(sectors, co)
        repeat = co.shape[0] // sectors.shape[0]
        count = repeat * int(np.count_nonzero(_first_of_each(requests)))
        marks = self.stores if store else self.loads
        marks.add(sectors.ravel())
        if store:
            self.counts.store_sectors += count
        else:
            self.counts.load_sectors += count

    def _shared(self, size: int, address: Array, co: Cohort) -> None:
        # 128 bytes a pass: 4-byte accesses go a warp at a time, 8 bytes half a warp, 16 bytes a quarter.
        unit = max(size, 4)
        together = min(32, max(1, 128 // unit))
        items = address >> (unit.bit_length() - 1)
        repeat = co.shape[0] // items.shape[0]
        requests = _by_warp(items, co).reshape(-1, together)
        if bool((requests == requests[:, :1]).all()):
            return
        ordered = np.sort(requests, axis=1)
        first = _first_of_each(ordered)
        rows, _ = np.nonzero(first)
        banks = ordered[first] & (together - 1)
        passes = np.bincount(rows * together + banks, minlength=len(requests) * together)
        self.counts.bank_conflicts += repeat * int((passes.reshape(-1, together).max(axis=1) - 1).sum())


def _by_warp(value: Array, co: Cohort) -> Array:
    """Return (requests, 32): the value of each lane of each warp; absent lanes repeat one that is there."""
    w = lanes_of(co)
    if value.shape[1] == 1:
        return np.broadcast_to(value[:, :, None], (value.shape[0], w.groups, 32)).reshape(-1, 32)
    if w.dense:
        return value.reshape(-1, 32)
    position = np.where(w.position >= 0, w.position, w.position.max(axis=1, keepdims=True))
    return value[:, position].reshape(-1, 32)


def _first_of_each(requests: Array) -> Array:
    """Return which entries of each row, once the row is in order, differ from the one before."""
    steps = requests[:, 1:] - requests[:, :-1]
    if not bool((steps >= 0).all()):
        requests = np.sort(requests, axis=1)
        steps = requests[:, 1:] - requests[:, :-1]
    first = np.ones(requests.shape, bool)
    np.not_equal(steps, 0, out=first[:, 1:])
    return first
