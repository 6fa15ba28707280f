"""Asynchronous operations under way: bulk and tensor copies, remote stores, commits of tensor-core work.

An operation is issued by some instruction and takes effect later. Here it takes effect at the last legal
moment, so that a missing wait shows: when threads can only go on once the mbarrier it signals has moved, or
when its bulk group is waited for, or at the end of the launch.

A family of instructions subclasses `Operation` and hands an instance to `ck.asyncs.issue(operation)`. An
operation has *elements*, one for each issuing lane and destination; all arrays are (elements,). Elements are
carried out independently of each other, in order of issue for one mbarrier or group. For an element that
signals an mbarrier, `slots` holds what `ck.mbarriers.locate` returned (-1: none, a finding says why), and the
queue itself does `complete_tx(transaction)` and `arrivals` arrivals after `apply`. An operation without
`slots` belongs to the bulk group that its thread commits next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.cohort import Cohort

if TYPE_CHECKING:
    from workbench.simulator.ordering.records import Spans
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]

PATIENCE = 2
"""Rounds in which nothing moved before operations complete that no one waits for by their mbarrier."""


class Operation:
    """One instruction's asynchronous work.

    Args:
        item: the instruction, for findings.
        lanes: issuing thread of each element: CTA row in the chunk times threads a CTA, plus thread.
        slots: mbarrier each element signals; None for members of a bulk group.
        transaction: bytes each element completes on its mbarrier; None: 0.
        arrivals: arrivals each element makes on its mbarrier.
    """

    def __init__(
        self,
        item: Instruction,
        lanes: Array,
        slots: Array | None = None,
        transaction: Array | None = None,
        arrivals: int = 0,
    ) -> None:
        self.item, self.lanes, self.slots = item, lanes, slots
        self.transaction, self.arrivals = transaction, arrivals
        self.records: list[Spans] = []
        """What its elements read and write, for happens-before."""

    def read(self, ck: Chunk, chosen: Array) -> None:
        """Take the sources of the elements `chosen` (indices); called once an element, before `apply`."""

    def apply(self, ck: Chunk, chosen: Array) -> None:
        """Write the destinations of the elements `chosen` (indices); called once an element."""


def lanes_of(co: Cohort) -> Array:
    """Return the number of each lane of a cohort in its chunk, (lanes,): what `Operation.lanes` wants."""
    return np.broadcast_to(co.rows() * co.chunk.launch.threads + co.columns(), co.shape).ravel()


def cohort_of(ck: Chunk, lanes: Array) -> Cohort:
    """Return the threads `lanes` as a flat cohort without registers, to report findings about them."""
    rows, threads = np.divmod(lanes, ck.launch.threads)
    return Cohort(ck, rows, threads, False, {})


class _Entry:
    """An operation in the queue: which of its elements are still to be read and applied."""

    __slots__ = ("group", "operation", "unread", "waiting")

    def __init__(self, operation: Operation, group: Array | None) -> None:
        self.operation, self.group = operation, group
        self.waiting = np.ones(len(operation.lanes), bool)
        self.unread = self.waiting.copy()


class AsyncOperations:
    """The queue of one chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self._queue: list[_Entry] = []
        self._group = np.zeros(len(chunk.ctas) * chunk.launch.threads, np.int64)
        """Number of bulk groups each thread has committed."""

    def __len__(self) -> int:
        """Number of operations with elements still under way."""
        return len(self._queue)

    def issue(self, operation: Operation) -> None:
        """Put an operation into the queue."""
        if len(operation.lanes):
            group = self._group[operation.lanes] if operation.slots is None else None
            self._queue.append(_Entry(operation, group))

    def relieve(self, rounds: int) -> bool:
        """Complete what polling threads wait for; called when a chunk can only poll.

        Args:
            rounds: how often in a row nothing has moved.

        Returns:
            Whether anything was carried out.
        """
        polled = self.chunk.mbarriers.take_polled()
        if not self._queue:
            return False
        moved = False
        for entry in list(self._queue):
            slots = entry.operation.slots
            if slots is not None and len(polled):
                moved |= self._carry_out(entry, entry.waiting & np.isin(slots, polled))
        if not moved and rounds >= PATIENCE:
            for entry in list(self._queue):
                moved |= self._carry_out(entry, entry.waiting)
        return moved

    def commit(self, co: Cohort) -> None:
        """cp.async.bulk.commit_group: what the threads issued before is a group."""
        self._group[lanes_of(co)] += 1

    def wait(self, co: Cohort, keep: int, read: bool) -> None:
        """cp.async.bulk.wait_group: complete all groups of the threads but the last `keep` ones.

        Args:
            co: the threads that wait.
            keep: number of most recent groups that may remain.
            read: `.read`: only have the sources read.
        """
        if not self._queue:
            if self.chunk.order is not None:
                self.chunk.order.group_wait(co, read)
            return
        limit = np.full(len(self._group), -1, np.int64)
        lanes = lanes_of(co)
        limit[lanes] = self._group[lanes] - keep
        for entry in list(self._queue):
            if entry.group is None:
                continue
            due = entry.waiting & (entry.group < limit[entry.operation.lanes])
            if read:
                self._read(entry, due)
            else:
                self._carry_out(entry, due)
        if self.chunk.order is not None:
            self.chunk.order.group_wait(co, read)

    def finish(self) -> None:
        """Complete everything: the launch ends."""
        for entry in list(self._queue):
            self._carry_out(entry, entry.waiting)

    def _read(self, entry: _Entry, mask: Array) -> None:
        chosen = np.flatnonzero(mask & entry.unread)
        if len(chosen):
            entry.unread[chosen] = False
            entry.operation.read(self.chunk, chosen)
            if self.chunk.order is not None and entry.operation.slots is None:
                self.chunk.order.completed(entry.operation, chosen, reads=True)

    def _carry_out(self, entry: _Entry, mask: Array) -> bool:
        chosen = np.flatnonzero(mask)
        if not len(chosen):
            return False
        self._read(entry, mask)
        entry.waiting = entry.waiting & ~mask
        if not entry.waiting.any():
            self._queue.remove(entry)
        operation, ck = entry.operation, self.chunk
        operation.apply(ck, chosen)
        ck.progress += 1
        if operation.slots is not None:
            ck.mbarriers.signal(operation, chosen)
        elif ck.order is not None:
            ck.order.completed(operation, chosen)
        return True
