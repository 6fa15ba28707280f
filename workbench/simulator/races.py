"""Races on shared memory: two warps of a CTA touch a byte, one of them writes, and no barrier stands between.

Lockstep execution hides races: a missing barrier leaves every number right. Each CTA therefore has an epoch
that moves at every barrier it passes, and accesses of one epoch are compared. While reads and writes of an
epoch keep to separate address ranges, which is the rule, only the ranges are kept; when they meet, the
epoch's accesses are replayed into records a granule: who wrote last, who read.

Lanes of one warp are taken as ordered among themselves, any barrier as ordering the whole CTA, and atomics
and volatile, relaxed, acquire and release accesses as deliberate: the check errs on the silent side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.access import BankedSpace, Site

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]

_MANY = 63
"""Code of a granule that several warps read; codes 1 to 32 are single warps."""
_STRONG = frozenset(("volatile", "relaxed", "acquire", "release"))


@dataclass(frozen=True, slots=True)
class _Access:
    """An access of some epoch; `place` are offsets in a bank and shaped like the cohort's values."""

    site: Site
    write: bool
    place: Array
    value: Array | None
    co: Cohort
    low: int
    high: int
    epochs: Array


class RaceDetector:
    """The shared memory of one chunk under observation.

    Args:
        granule: smallest size of a shared access of the kernel, bytes.
    """

    def __init__(self, chunk: Chunk, space: BankedSpace, granule: int) -> None:
        self.chunk, self.space, self.granule = chunk, space, granule
        self.epoch = np.ones(len(chunk.ctas), np.int64)
        self._log: list[_Access] = []
        self._reads = self._writes = (0, 0)
        self._writer: Array | None = None
        self._reader: Array | None = None
        self._dense = False

    def pass_barrier(self, rows: Array) -> None:
        """Begin a new epoch for the CTAs where `rows` (bool, one a CTA) is true."""
        self.epoch[rows] += 1
        if rows.all():
            self._log.clear()
        else:
            self._log = [a for a in self._log if bool((a.epochs == self.epoch[a.co.ctas]).any())]
        if not self._log:
            self._reads = self._writes = (0, 0)
            self._dense = False

    def access(
        self, site: Site, write: bool, place: Array, value: Array | None, low: int, high: int, co: Cohort
    ) -> None:
        """Look at one load or store of bytes `low` to `high` of each bank, before it takes place."""
        if not _STRONG.isdisjoint(site.instruction.modifiers):
            return
        now = _Access(site, write, place, value, co, low, high, self.epoch[co.ctas])
        if not self._dense:
            meets = _meet(self._writes, low, high) or (write and _meet(self._reads, low, high))
            if meets:
                self._dense = True
                for earlier in self._log:
                    self._record(earlier, report=False)
        self._log.append(now)
        if self._dense:
            self._record(now, report=True)
        elif write:
            self._writes = _join(self._writes, low, high)
        else:
            self._reads = _join(self._reads, low, high)

    def _record(self, a: _Access, report: bool) -> None:
        if self._writer is None or self._reader is None:
            count = self.space.banks * self.space.stride // self.granule + 32
            self._writer, self._reader = np.zeros(count, np.int64), np.zeros(count, np.int64)
        co = a.co
        epoch = (a.epochs[:, None] if co.rectangular else a.epochs[None, :]) << 6
        code = np.broadcast_to(epoch | ((co.columns() >> 5) + 1), co.shape).ravel()
        first = np.broadcast_to(self.space.place(a.place, co), co.shape).ravel() // self.granule
        bad = np.zeros(co.lanes, bool)
        other = 0
        unchanged = self._unchanged(a) if a.write and report else None
        for k in range(max(1, a.site.size // self.granule)):
            at = first + k
            wrote = _conflict(self._writer.take(at), code)
            if a.write:
                if unchanged is not None:
                    wrote &= ~unchanged
                read = _conflict(self._reader.take(at), code)
                clash = wrote | read
                if report and clash.any():
                    source = self._writer if wrote.any() else self._reader
                    other = int(source[at[int(np.argmax(wrote if wrote.any() else read))]]) & 63
                self._writer[at] = code
            else:
                clash = wrote
                if report and clash.any():
                    other = int(self._writer[at[int(np.argmax(clash))]]) & 63
                before = self._reader.take(at)
                new = np.where(_conflict(before, code), (code & ~63) | _MANY, code)
                self._reader[at] = new
                several = self._reader.take(at) != new
                if several.any():
                    self._reader[at[several]] = (code[several] & ~63) | _MANY
            bad |= clash
        if report and bad.any():
            who = "other warps touch" if other == _MANY else f"warp {other - 1} touches"
            text = (
                f"{'writes' if a.write else 'reads'} shared memory that {who} with no barrier in between, "
                f"bytes {a.low} to {a.high - 1}; at least one of them writes"
            )
            self.chunk.report("race", a.site.instruction, text, co, bad.reshape(co.shape))

    def _unchanged(self, a: _Access) -> Array | None:
        """Lanes that store what is there already, as when all warps set one flag: no harm is done."""
        if a.value is None:
            return None
        shape = a.co.shape
        data = self.space.data[a.site.size]
        at = np.broadcast_to(self.space.place(a.place, a.co), shape).ravel() >> a.site.shift
        there = data.take(at, mode="clip")
        new = np.ascontiguousarray(np.broadcast_to(a.value, shape)).reshape(-1)
        same = there.view(np.uint8).reshape(len(at), -1) == new.view(np.uint8).reshape(len(at), -1)
        result: Array = same.all(axis=1)
        return result


def _conflict(record: Array, code: Array) -> Array:
    """Whether a granule was touched in the same epoch by another warp."""
    result: Array = ((record ^ code) >> 6 == 0) & (record != code)
    return result


def _meet(interval: tuple[int, int], low: int, high: int) -> bool:
    return interval[0] < high and low < interval[1]


def _join(interval: tuple[int, int], low: int, high: int) -> tuple[int, int]:
    if interval[0] == interval[1]:
        return low, high
    return min(interval[0], low), max(interval[1], high)
