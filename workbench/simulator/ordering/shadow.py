"""Who touched which bytes: memory as the accesses so far left it, and which pairs of them nothing orders.

Memory is followed in granules, as large as its accesses allow. A write is kept as a record of its own until
some other access comes near it; then it goes into an array that names the last writer of each granule. Reads
stay records, because all readers since a write matter to the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.ordering.clocks import Clocks
from workbench.simulator.ordering.records import CLUSTER, GPU, SYS, Record, Spans, finer

Array = npt.NDArray[Any]
_MOST_READS = 1 << 15
_MOST_PENDING = 128
_MOST_BYTES = 1 << 27
"""Bytes of addresses that the reads of a region may keep."""
_SHORT = 256
"""Pairs of lanes that are not worth shortening."""
_MOST_PAIRS = 1 << 18
"""Pairs of an access and an earlier load of the same place that are looked at one by one."""


def _runs(granules: list[Array], unit: int) -> Array:
    if not granules:
        return np.zeros((0, 2), np.int64)
    low, high = min(int(g.min()) for g in granules), max(int(g.max()) for g in granules) + 1
    present = np.zeros(high - low, bool)
    for g in granules:
        present[g - low] = True
    at = np.flatnonzero(present) + low
    breaks = np.flatnonzero(np.diff(at) > 1)
    starts, ends = at[np.append(0, breaks + 1)], at[np.append(breaks, len(at) - 1)] + 1
    result: Array = np.stack([starts, ends], axis=1) * unit
    return result


def meet(a: Array, b: Array) -> bool:
    """Whether two lists of runs (start, end), each in ascending order, share a byte."""
    if not len(a) or not len(b):
        return False
    k = np.searchsorted(b[:, 1], a[:, 0], side="right")
    inside = k < len(b)
    return bool((b[k[inside], 0] < a[inside, 1]).any())


@dataclass(slots=True)
class Clash:
    """Accesses that nothing orders: lanes of the later record against lanes of an earlier one."""

    later: Record
    earlier: Record
    lanes: Array
    others: Array
    granules: Array
    unfenced: bool = False
    """They are ordered, but not for the async proxy."""

    @property
    def ahead(self) -> Record | None:
        """The access of the later launch, if they are of two launches of one rank."""
        n, e = self.later, self.earlier
        if n.clocks.number == e.clocks.number or n.clocks.rank != e.clocks.rank:
            return None
        return n if n.clocks.number < e.clocks.number else e  # launches count downwards, see `launch_of`


class Region:
    """A buffer, or the shared memory of a chunk.

    Args:
        count: granules.
        unit: bytes of a granule.
        name: of a buffer.
        width: granules of a bank.
    """

    def __init__(self, count: int, unit: int, name: str | None = None, width: int = 0) -> None:
        self.count, self.unit, self.name = count, unit, name
        self.width = width or count
        self._filled = np.zeros(self.width + 32, bool)
        self.records: list[Record | None] = [None]
        """Writes in the arrays; the first is nobody."""
        self.pending: list[Record] = []
        self.reads: list[Record] = []
        self._index: dict[tuple[int, int, int, int], int] = {}
        self._writer: Array | None = None
        self._lane: Array | None = None
        self._scratch: Array | None = None
        self._low, self._high = count, 0
        self._polled: Array | None = None
        """Granules that strong loads read: mailboxes whose data are their own flag."""
        self._dead = 0
        self._limit = 64
        self._bytes = 0
        self.forgot = False
        """There were too many reads to keep them all: later writes were not compared with the oldest."""
        self.refilled: set[int] = set()
        """Lines of instructions that have written here before."""

    def refine(self, unit: int) -> None:
        """Make the granule smaller: `unit` bytes, a power of two."""
        if unit >= self.unit:
            return
        k = self.unit // unit
        self.unit, self.count, self.width = unit, self.count * k, self.width * k
        self._filled = np.repeat(self._filled, k)
        if self._writer is not None and self._lane is not None:
            writer, lane = np.zeros(self.count, np.int32), np.zeros(self.count, np.int32)
            old = slice(self._low, self._high) if self.width == self.count else slice(None)
            new = slice(self._low * k, self._high * k) if self.width == self.count else slice(None)
            writer[new], lane[new] = np.repeat(self._writer[old], k), np.repeat(self._lane[old], k)
            self._writer, self._lane = writer, lane
        if self._high:
            self._low, self._high = self._low * k, self._high * k
        else:
            self._low = self.count
        self._scratch = None
        if self._polled is not None:
            self._polled = np.repeat(self._polled, k)
        for r in (*self.pending, *self.reads):
            r.refine(k)
        for e in self.records:
            if e is not None and e.shared is not None:
                e.shared = finer(e.shared, k)
        self._keep(self.reads)

    def filled(self, granule: int) -> bool:
        """Whether something was written there, in some bank, before the last access."""
        return bool(self._filled[granule % self.width])

    def wrote(self, r: Record) -> None:
        """Take note of a write whose clashes have been looked at."""
        self._filled[r.low : r.high] = True
        self.refilled.add(r.kind.item.line)

    def _arrays(self) -> tuple[Array, Array]:
        if self._writer is None or self._lane is None:
            self._writer, self._lane = np.zeros(self.count, np.int32), np.zeros(self.count, np.int32)
        return self._writer, self._lane

    def _flush(self) -> None:
        writer, lane = self._arrays()
        for r in self.pending:
            granules, lanes = r.granules()
            self.records.append(r)
            writer[granules] = len(self.records) - 1
            lane[granules] = lanes
            if not r.kind.agent and bool((lane[granules] != lanes).any()):
                r.shared = granules, lanes
            self._low, self._high = min(self._low, r.low), max(self._high, r.high)
            r._granules = None
            if r.place is not None:
                r.place = None
        self.pending.clear()

    def access(
        self, r: Record, *, keep: bool = True, layer: int = 0, unchanged: Callable[[], Array] | None = None
    ) -> list[Clash]:
        """Compare an access with earlier ones, and remember it if `keep`; return what nothing orders.

        Args:
            r: the access.
            keep: later accesses will be compared with it.
            layer: what ordinary writes before must be known in, besides happens-before, by an asynchronous
                read.
            unchanged: which lanes store what is there already.
        """
        out: list[Clash] = []
        low, high = r.low, r.high
        for p in self.pending:
            if p.low < high and low < p.high:
                self._flush()
                break
        if r.kind.scope and not r.kind.write and not r.kind.atomic:
            self._polls(r)
        if self._low < high and low < self._high:
            out += self._against_writes(r, layer, unchanged)
        if r.kind.write and self.reads:
            out += self._against_reads(r)
        if out and self._polled is not None:
            out = [c for c in map(self._unpolled, out) if c is not None]
        if not keep:
            return out
        if r.kind.write:
            self.pending.append(r)
            if len(self.pending) > _MOST_PENDING:
                self._flush()
        else:
            self._remember(r)
        return out

    def _against_writes(self, r: Record, layer: int, unchanged: Callable[[], Array] | None) -> list[Clash]:
        assert self._writer is not None and self._lane is not None
        granules, lanes = r.granules()
        wrote = self._writer.take(granules)
        at = np.flatnonzero(wrote > (self._dead if not r.kind.readonly else 0))
        if not len(at):
            return []
        wrote, granules, lanes = wrote[at], granules[at], lanes[at]
        other = self._lane.take(granules)
        out = []
        if (wrote == wrote[0]).all():
            pieces = [(int(wrote[0]), slice(None))]
        else:
            order = np.argsort(wrote, kind="stable")
            wrote, granules, lanes, other = wrote[order], granules[order], lanes[order], other[order]
            ids, starts = np.unique(wrote, return_index=True)
            ends = [*starts[1:].tolist(), len(wrote)]
            pieces = [(int(i), slice(a, b)) for i, a, b in zip(ids, starts.tolist(), ends, strict=True)]
        for number, piece in pieces:
            earlier = self.records[number]
            assert earlier is not None
            clash = compare(r, earlier, lanes[piece], other[piece], granules[piece], layer)
            if clash is not None and r.kind.write and unchanged is not None and not clash.unfenced:
                same = unchanged()[clash.lanes]
                if same.all():
                    clash = None
                elif same.any():
                    clash.lanes, clash.others = clash.lanes[~same], clash.others[~same]
                    clash.granules = clash.granules[~same]
            if clash is not None and earlier.kind.scope and not clash.unfenced and not r.kind.agent:
                clash = self._unobserved(r, clash)
            if clash is not None:
                out.append(clash)
        return out

    def _polls(self, r: Record) -> None:
        if self._polled is None:
            self._polled = np.zeros(self.count, bool)
        self._polled[r.granules()[0]] = True

    def _unpolled(self, clash: Clash) -> Clash | None:
        """Leave out ordinary stores to places that strong loads read, as far as those loads and stores go.

        Data that are their own flag are stored by ordinary vector stores in kernels that work; what such
        stores are to order shows at the data that are read with ordinary loads.
        """
        n, e = clash.later.kind, clash.earlier.kind
        assert self._polled is not None
        if clash.ahead is not None and not clash.ahead.kind.scope:
            return clash
        if n.agent or e.agent or clash.unfenced or n.readonly or e.readonly or self.name is None:
            return clash
        if not (n.write or n.scope) or not (e.write or e.scope) or (n.scope and e.scope):
            return clash
        bad = ~self._polled[clash.granules]
        if not bad.any():
            return None
        return Clash(clash.later, clash.earlier, clash.lanes[bad], clash.others[bad], clash.granules[bad])

    def _unobserved(self, r: Record, clash: Clash) -> Clash | None:
        """Leave out lanes that are ordered after a strong load of what the strong store wrote.

        Causality holds from the store to what follows such a load, acquiring or not (PTX ISA 8.9.5).
        """
        rows, threads = r.lanes()
        bad = np.ones(len(clash.lanes), bool)
        for e in self.reads:
            if not e.kind.scope or e.number < clash.earlier.number or e.low >= r.high or r.low >= e.high:
                continue
            at, lanes = e.granules()
            order = np.argsort(at, kind="stable")
            at, lanes = at[order], lanes[order]
            left = np.flatnonzero(bad)
            first = np.searchsorted(at, clash.granules[left], side="left")
            count = np.searchsorted(at, clash.granules[left], side="right") - first
            total = int(count.sum())
            if not total or total > _MOST_PAIRS:
                continue
            mine = np.repeat(left, count)
            which = np.arange(total) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
            who = clash.lanes[mine]
            far, others = e.lanes()
            far, others, stamps = far[lanes[which]], others[lanes[which]], e.stamp(lanes[which])
            seen = r.clocks.knows(rows[who], threads[who], e.clocks.ctas[far], others, stamps)
            bad[mine[seen]] = False
            if not bad.any():
                return None
        return Clash(r, clash.earlier, clash.lanes[bad], clash.others[bad], clash.granules[bad])

    def _against_reads(self, r: Record) -> list[Clash]:
        near = [e for e in self.reads if e.low < r.high and r.low < e.high and not _both_strong(r, e)]
        if not near:
            return []
        if self._scratch is None:
            self._scratch = np.zeros(self.count, np.int32)
        mine, lanes = r.granules()
        self._scratch[mine] = lanes + 1
        out = []
        for e in near:
            granules, others = e.granules()
            met = self._scratch.take(granules)
            at = np.flatnonzero(met)
            if len(at):
                clash = compare(r, e, met[at] - 1, others[at], granules[at], 0)
                if clash is not None:
                    out.append(clash)
            if e.place is not None:
                e._granules = None
        self._scratch[mine] = 0
        return out

    def _remember(self, r: Record) -> None:
        key = _key(r)
        k = self._index.get(key, -1)
        if k >= 0 and self.reads[k].same_place(r):
            self.reads[k] = r
            return
        if r.place is not None:
            self._bytes += r.place.nbytes
        self._index[key] = len(self.reads)
        self.reads.append(r)
        if len(self.reads) > self._limit or self._bytes > _MOST_BYTES:
            self._trim()

    def _trim(self) -> None:
        """Forget reads that all threads know of, and if that does not help the oldest ones."""
        floors: dict[int, Array] = {}
        kept = []
        for e in self.reads:
            # Of a buffer, other CTAs have to know too.
            if self.name is None and (e.stride or e.place is None):
                if id(e.clocks) not in floors:
                    floors[id(e.clocks)] = e.clocks.floor()
                if e.covered(floors[id(e.clocks)]):
                    continue
            kept.append(e)
        self.forgot = self.forgot or len(kept) > _MOST_READS
        kept = kept[-_MOST_READS:]
        self._keep(kept)
        while self._bytes > _MOST_BYTES and self.reads:
            self.forgot = True
            self._keep(self.reads[len(self.reads) // 2 + 1 :])
        self._limit = max(64, 2 * len(self.reads))

    def _keep(self, reads: list[Record]) -> None:
        self.reads = reads
        self._index = {_key(e): k for k, e in enumerate(reads)}
        self._bytes = sum(e.place.nbytes for e in reads if e.place is not None)

    def touched(self) -> tuple[Array, Array]:
        """Return the bytes written and the bytes read, each as rows of start and end in ascending order."""
        wrote = [r.granules()[0] for r in self.pending]
        if self._writer is not None and self._low < self._high:
            wrote.append(np.flatnonzero(self._writer[self._low : self._high]) + self._low)
        read = [r.granules()[0] for r in self.reads]
        return _runs(wrote, self.unit), _runs(read, self.unit)

    def settle(self, clocks: Clocks) -> None:
        """Forget what every thread of the chunk knows of; called when all have met."""
        if not self.reads and not self.pending and len(self.records) - 1 == self._dead:
            return
        floor = clocks.floor()
        if self.reads:
            self._keep([e for e in self.reads if not e.covered(floor)])
        self.pending = [e for e in self.pending if not e.covered(floor)]
        while self._dead < len(self.records) - 1:
            e = self.records[self._dead + 1]
            if e is not None and not e.covered(floor):
                break
            self.records[self._dead + 1] = None
            self._dead += 1


def _key(r: Record) -> tuple[int, int, int, int]:
    first = int(r.lanes()[0][0]) if isinstance(r, Spans) else 0
    return id(r.kind.item), r.low, r.high, first


def compare(r: Record, e: Record, lanes: Array, others: Array, granules: Array, layer: int) -> Clash | None:
    """Return the lanes of `r` that are not ordered after lanes of `e` on the same granules, if any."""
    which: Array | None = None
    few, theirs, at = lanes, others, granules
    if len(lanes) > _SHORT and e.shared is None:
        # Granules of one access follow each other: what holds of one holds of the others.
        new = np.ones(len(lanes), bool)
        new[1:] = (lanes[1:] != lanes[:-1]) | (others[1:] != others[:-1])
        first = np.flatnonzero(new)
        if 2 * len(first) <= len(lanes):
            which = np.cumsum(new) - 1
            few, theirs, at = lanes[first], others[first], granules[first]
    bad, unfenced = _unordered(r, e, few, theirs, at, layer)
    if bad is None:
        return None
    keep = np.flatnonzero(bad if which is None else bad[which])
    return Clash(r, e, lanes[keep], others[keep], granules[keep], unfenced)


def _unordered(
    r: Record, e: Record, lanes: Array, others: Array, granules: Array, layer: int
) -> tuple[Array | None, bool]:
    """Which accesses are not ordered, None for none; and whether they are but for the async proxy."""
    rows, threads = r.by if isinstance(r, Spans) else r.lanes()
    rows, threads = rows[lanes], threads[lanes]
    far, them = e.lanes()
    ctas = e.clocks.ctas[far[others]]
    them = them[others]
    if (r.kind.readonly or e.kind.readonly) and r.clocks.number == e.clocks.number:
        bad = (r.clocks.ctas[rows] != ctas) | (threads != them)
    else:
        apart = _apart(r, e, rows, far[others], ctas) if r.kind.scope and e.kind.scope else None
        if apart is not None and not apart.any():
            return None, False
        own = (r.clocks.ctas[rows] == ctas) & (threads == them)
        if e.stamps is None and not layer and own.all():
            return None, False
        stamps = e.stamp(others)
        bad = ~r.clocks.knows(rows, threads, ctas, them, stamps)
        if e.shared is not None and bad.any():
            bad &= ~_took_part(e, far[others], ctas, r.clocks.ctas[rows], threads, granules)
        if apart is not None:
            bad &= apart
        if layer and not e.kind.agent and not bad.any():
            fenced = r.clocks.knows(rows, threads, ctas, them, stamps, layer)
            return (None, False) if fenced.all() else (~fenced, True)
    return (bad, False) if bad.any() else (None, False)


def _both_strong(r: Record, e: Record) -> bool:
    """Whether two accesses are morally strong whoever makes them."""
    scope = min(r.kind.scope, e.kind.scope)
    return scope == SYS or (scope == GPU and r.clocks.rank == e.clocks.rank)


def _took_part(e: Record, far: Array, ctas: Array, mine: Array, threads: Array, granules: Array) -> Array:
    """Whether threads themselves took part in a store by which several lanes wrote the same granules."""
    assert e.shared is not None
    at, lanes = e.shared
    rows, others = e.lanes()
    known = set(zip(at.tolist(), e.clocks.ctas[rows[lanes]].tolist(), others[lanes].tolist(), strict=True))
    asked = zip(granules.tolist(), mine.tolist(), threads.tolist(), strict=True)
    return np.array([key in known for key in asked], bool)


def _apart(r: Record, e: Record, rows: Array, far: Array, ctas: Array) -> Array:
    """Whether two strong accesses are not morally strong: a scope leaves the other one out."""
    scope = min(r.kind.scope, e.kind.scope)
    if _both_strong(r, e):
        return np.zeros(len(rows), bool)
    if scope == GPU or (scope == CLUSTER and r.clocks is not e.clocks):
        return np.ones(len(rows), bool)
    if scope == CLUSTER:
        return np.asarray(rows // r.clocks.cluster != far // r.clocks.cluster)
    return np.asarray(r.clocks.ctas[rows] != ctas)
