"""cp.async: copies that take place at the last legal moment, when their thread waits for them.

A copy done at once would hide a missing wait; here the bytes stay unwritten until `cp.async.wait_group` or
`wait_all`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.access import Site

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.ordering.records import Record
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]


@dataclass(slots=True)
class _Copy:
    """Copies of several lanes by one instruction; all arrays are (lanes,)."""

    site: Site
    lane: Array
    group: Array
    source: Array
    target: Array
    """Offset in the chunk's shared memory."""
    amount: Array | None
    """Bytes taken from the source; the rest is zero. None: all of it."""
    serial: int
    """Number of copy instructions issued before."""
    record: Record | None = None
    index: Array | None = None
    """Lane of each copy in `record`."""


class AsyncCopies:
    """Pending copies of a chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self._group = np.zeros(len(chunk.ctas) * chunk.launch.threads, np.int64)
        """Number of groups each thread has committed."""
        self._pending: list[_Copy] = []
        self.serial = 0
        """Number of copy instructions issued."""

    def _lanes(self, co: Cohort) -> Array:
        lanes = np.broadcast_to(co.rows() * self.chunk.launch.threads + co.columns(), co.shape)
        return lanes.ravel()

    def issue(
        self, co: Cohort, write: Site, target: Array, read: Site, source: Array, amount: Array | None
    ) -> None:
        """Check a copy's addresses and remember it."""
        ck = self.chunk
        if ck.watched:
            ck.watch(read, source, co)
            ck.watch(write, target, co)
        if amount is not None:
            nothing = amount == 0
            if nothing.all():
                read_at = np.zeros((1, 1), np.int64)
            elif nothing.any():
                some = co.select(~np.broadcast_to(nothing, co.shape), frozenset())
                keep = ~np.broadcast_to(nothing, co.shape)
                part = np.broadcast_to(source, co.shape)[keep].reshape(some.shape)
                read_at = np.zeros(co.shape, np.int64)
                read_at[keep] = ck.space_global.locate(read, part, some, ck).ravel()
            else:
                read_at = ck.space_global.locate(read, source, co, ck)
        else:
            read_at = ck.space_global.locate(read, source, co, ck)
        write_at = ck.space_shared.prepare(write, target, co, ck, write=True, fresh=True)
        lanes = self._lanes(co)
        record = self._record(co, write, read, read_at, write_at, amount)

        def flat(value: Array) -> Array:
            return np.broadcast_to(value, co.shape).ravel()

        self._pending.append(
            _Copy(
                write, lanes, self._group[lanes], flat(read_at), flat(write_at),
                None if amount is None else flat(amount), self.serial, record, np.arange(len(lanes)),
            )
        )  # fmt: skip
        self.serial += 1

    def complete(self, lanes: Array, before: int, stamp: int | None = None) -> None:
        """Complete the copies of the threads `lanes` among the first `before` instructions.

        `stamp` is theirs for happens-before, if not that of the moment.
        """
        remaining = []
        for copy in self._pending:
            done = np.isin(copy.lane, lanes) if copy.serial < before else np.zeros(len(copy.lane), bool)
            if done.any():
                self._perform(_part(copy, done), stamp)
            if not done.all():
                remaining.append(_part(copy, ~done) if done.any() else copy)
        self._pending = remaining

    def commit(self, co: Cohort) -> None:
        """cp.async.commit_group."""
        self._group[self._lanes(co)] += 1

    def wait(self, co: Cohort, keep: int) -> None:
        """Complete the copies of the cohort's threads but for the last `keep` groups; -1 completes all."""
        if not self._pending:
            return
        limit = np.full(len(self._group), -1, np.int64)
        lanes = self._lanes(co)
        limit[lanes] = np.iinfo(np.int64).max if keep < 0 else self._group[lanes] - keep
        remaining = []
        for copy in self._pending:
            done = copy.group < limit[copy.lane]
            if done.all():
                self._perform(copy)
                continue
            if done.any():
                self._perform(_part(copy, done))
                copy = _part(copy, ~done)
            remaining.append(copy)
        self._pending = remaining

    def _perform(self, copy: _Copy, stamp: int | None = None) -> None:
        ck = self.chunk
        size, shift = copy.site.size, copy.site.shift
        data = ck.space_global.data[size].take(copy.source >> shift, mode="clip")
        if copy.amount is not None and bool((copy.amount < size).any()):
            octets = data.view(np.uint8).reshape(-1, size)
            octets = np.where(np.arange(size) < copy.amount[:, None], octets, np.uint8(0))
            data = np.ascontiguousarray(octets).view(data.dtype)[:, 0]
        index = copy.target >> shift
        shared = ck.space_shared
        if ck.order is not None and copy.index is not None:
            ck.order.copy_done(copy.record, copy.index, stamp)
        shared.data[size][index] = data
        shared.shadow[1].reshape(-1)[(copy.target[:, None] + np.arange(size)).ravel()] = 1
        ck.progress += 1

    def _record(
        self, co: Cohort, write: Site, read: Site, source: Array, target: Array, amount: Array | None
    ) -> Record | None:
        """Show a copy to happens-before, as one that its thread has under way."""
        ck = self.chunk
        if ck.order is None:
            return None
        if not read.quiet and (amount is None or bool((amount > 0).all())):
            ck.order.far(read, False, source, None, co)
        space = ck.space_shared
        if int(target.max()) >= space.banks * space.stride:  # lanes that faulted write past the banks
            return None
        return ck.order.copy_issued(write, np.broadcast_to(target, co.shape).ravel(), co)


def _part(copy: _Copy, keep: Array) -> _Copy:
    return _Copy(
        copy.site, copy.lane[keep], copy.group[keep], copy.source[keep], copy.target[keep],
        None if copy.amount is None else copy.amount[keep], copy.serial,
        copy.record, None if copy.index is None else copy.index[keep],
    )  # fmt: skip
