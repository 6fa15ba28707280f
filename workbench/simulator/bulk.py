"""st.async, red.async, cp.async.bulk, cp.reduce.async.bulk and cp.async.mbarrier.arrive (PTX ISA 9.7.9).

A copy to shared memory leaves its destination unwritten from its issue until it completes, so that whoever
reads without waiting reads what was never written. The source of a copy from shared memory is read at the
last moment as well, and compared with what it was at the issue: a difference means that it was overwritten
too early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator import atomics
from workbench.simulator.access import Site
from workbench.simulator.memory import BASE
from workbench.simulator.pending import Operation, cohort_of, lanes_of
from workbench.simulator.traffic import SECTOR

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]


def begin_write(ck: Chunk, rows: Array, offsets: Array, sizes: Array) -> None:
    """Call the destinations of asynchronous writes unwritten while these are under way.

    Args:
        ck: the chunk.
        rows: CTA row of each destination.
        offsets: its offset in the shared memory of that CTA.
        sizes: its length in bytes.
    """
    if not len(rows):
        return
    space = ck.space_shared
    space.unsettle(int(offsets.min()), int((offsets + sizes).max()), ck)
    if not ck.options.check_memory:
        return
    data, shadow = space.data[1], space.shadow[1]
    for start, size in zip((rows * space.stride + offsets).tolist(), sizes.tolist(), strict=True):
        data[start : start + size] = 0xFF
        shadow[start : start + size] = 0


class RemoteStore(Operation):
    """st.async and red.async: values that lanes carry to shared memory."""

    def __init__(
        self, site: Site, lanes: Array, slots: Array, target: Array, values: list[Array], op: str, kind: str
    ) -> None:
        super().__init__(site.instruction, lanes, slots, np.full(len(lanes), site.size, np.int64))
        self.site, self.target, self.values, self.op, self.kind = site, target, values, op, kind

    def apply(self, ck: Chunk, chosen: Array) -> None:
        """Store or combine."""
        space, width = ck.space_shared, self.site.size // len(self.values)
        shift = width.bit_length() - 1
        for k, value in enumerate(self.values):
            index = (self.target[chosen] >> shift) + k
            if self.op:
                atomics._serialised(space.data[width], index, self.op, self.kind, [value[chosen]], False, ck)
            else:
                space.data[width][index] = value[chosen]
                space.shadow[width][index] = int("01" * width, 16)


class BulkCopy(Operation):
    """cp.async.bulk and cp.reduce.async.bulk; one element a lane and destination CTA.

    Args:
        item: the instruction.
        lanes: issuing threads.
        slots: mbarriers; None for a bulk group.
        source: offset in the arena or in the chunk's shared memory, as `from_shared` says.
        target: the same for `to_shared`.
        sizes: bytes.
    """

    def __init__(
        self, item: Instruction, lanes: Array, slots: Array | None, source: Array, target: Array,
        sizes: Array, from_shared: bool, to_shared: bool,
        reduction: tuple[str, str] | None, octets: Array | None,
        ck: Chunk,
    ) -> None:  # fmt: skip
        super().__init__(item, lanes, slots, sizes if slots is not None else None)
        self.source, self.target, self.sizes = source, target, sizes
        self.from_shared, self.to_shared = from_shared, to_shared
        self.reduction, self.octets = reduction, octets
        self._data: dict[int, Array] = {}
        self._early: dict[int, Array] = {}
        if from_shared and ck.options.check_memory:
            data = ck.space_shared.data[1]
            for k, (at, size) in enumerate(zip(source.tolist(), sizes.tolist(), strict=True)):
                self._early[k] = data[at : at + size].copy()

    def read(self, ck: Chunk, chosen: Array) -> None:
        """Take the source bytes."""
        space: Any = ck.space_shared if self.from_shared else ck.space_global
        data = space.data[1]
        bad = []
        for k in chosen.tolist():
            at, size = int(self.source[k]), int(self.sizes[k])
            piece = data[at : at + size]
            early = self._early.pop(k, None)
            if self.from_shared:
                piece = piece.copy()
                if early is not None and not self.records and not np.array_equal(early, piece):
                    bad.append(k)
            self._data[k] = piece
        if bad:
            text = "the source of a bulk copy was overwritten before a wait said that it was read"
            ck.report("buffer-reuse", self.item, text, cohort_of(ck, self.lanes[bad]), np.ones((1, 1), bool))

    def apply(self, ck: Chunk, chosen: Array) -> None:
        """Write the destination bytes."""
        space: Any = ck.space_shared if self.to_shared else ck.space_global
        for k in chosen.tolist():
            at, size = int(self.target[k]), int(self.sizes[k])
            piece = self._data.pop(k)
            if not size:
                continue
            if self.reduction is not None:
                self._reduce(space, at, piece)
            elif self.octets is not None:
                keep = (int(self.octets[k]) >> (np.arange(size) & 15)) & 1 == 1
                space.data[1][at : at + size][keep] = piece[keep]
                space.shadow[1][at : at + size][keep] = 1
                continue
            else:
                space.data[1][at : at + size] = piece
            space.shadow[1][at : at + size] = 1

    def _reduce(self, space: Any, at: int, piece: Array) -> None:
        assert self.reduction is not None
        op, kind = self.reduction
        width = int(kind.lstrip("busf")) // 8
        view = space.data[width][at // width : (at + len(piece)) // width]
        operand = np.ascontiguousarray(piece).view(view.dtype)
        view[:] = atomics.combine(op, kind, view.copy(), [operand])


class CopiesDone(Operation):
    """cp.async.mbarrier.arrive: arrives when the cp.async of its thread issued before are complete."""

    def __init__(self, item: Instruction, lanes: Array, slots: Array, serial: int) -> None:
        super().__init__(item, lanes, slots, arrivals=1)
        self.serial = serial
        self.stamp: int | None = None
        """Stamp of the copies for those who wait for the mbarrier."""

    def apply(self, ck: Chunk, chosen: Array) -> None:
        """Complete the copies."""
        ck.copies.complete(self.lanes[chosen], self.serial, self.stamp)


# -- what generated code calls -------------------------------------------------------------------


def _flat(value: Array, co: Cohort) -> Array:
    return np.broadcast_to(value, co.shape).ravel()


def _shared_spans(
    site: Site, address: Array, sizes: Array, co: Cohort, ck: Chunk
) -> tuple[Array, Array, Array]:
    """Return rows, offsets and which spans of shared memory are good; all (lanes,)."""
    rows, offset, bad = ck.cluster.locate(site, address, co)
    rows, offset = _flat(rows, co), _flat(offset, co)
    good = np.ones(co.lanes, bool) if bad is None else ~_flat(bad, co)
    over = good & (offset + sizes > ck.space_shared.size)
    if over.any():
        k = int(np.argmax(over))
        text = (
            f"{int(sizes[k])} bytes from byte {int(offset[k])} of shared memory, which has "
            f"{ck.space_shared.size}"
        )
        ck.report("out-of-bounds", site.instruction, text, co, over.reshape(co.shape))
    return rows, offset, good & ~over


def _global_spans(
    site: Site, address: Array, sizes: Array, co: Cohort, ck: Chunk, write: bool
) -> tuple[Array, Array]:
    """Return arena offsets and which spans of global memory are good; (lanes,)."""
    start = _flat(address + site.k, co)
    memory = ck.launch.memory
    good = np.ones(co.lanes, bool)
    texts: dict[str, tuple[Array, str]] = {}
    for k, (at, size) in enumerate(zip(start.tolist(), sizes.tolist(), strict=True)):
        a = memory.find(at)
        rule = ""
        if at % 16:
            rule, text = "misaligned", f"a bulk copy at address {at + BASE:#x}, no multiple of 16"
        elif a is None or at + size > a.end:
            near = a or memory.nearest(at)
            name = f" of {near.name!r}, which has {near.size}" if near is not None else ""
            place = f"byte {at - near.start}" if near is not None else f"address {at + BASE:#x}"
            rule, text = "out-of-bounds", f"a bulk copy of {size} bytes at {place}{name}"
        elif write and not a.writable:
            rule, text = "read-only-write", f"a bulk copy writes to {a.name!r}, which is only to be read"
        elif not write and ck.options.check_memory and not a.initialized:
            if not memory.shadow[at : at + size].all():
                who = np.zeros(co.lanes, bool)
                who[k] = True
                text = f"a bulk copy reads bytes of {a.name!r} that were never written"
                ck.report("uninitialized-read", site.instruction, text, co, who.reshape(co.shape))
            continue
        if rule:
            good[k] = False
            who, text = texts.setdefault(rule, (np.zeros(co.lanes, bool), text))
            who[k] = True
    for rule, (who, text) in texts.items():
        ck.report(rule, site.instruction, text, co, who.reshape(co.shape))
    if ck.launch.traffic is not None:
        _count(ck.launch.traffic, start[good], sizes[good], write)
    return start, good


def _count(traffic: Any, start: Array, sizes: Array, write: bool) -> None:
    marks = traffic.stores if write else traffic.loads
    for at, size in zip(start.tolist(), sizes.tolist(), strict=True):
        sectors = np.arange(at // SECTOR, (at + size + SECTOR - 1) // SECTOR)
        marks.add(sectors)
        if write:
            traffic.counts.store_sectors += len(sectors)
        else:
            traffic.counts.load_sectors += len(sectors)


def _sizes(site: Site, size: Array, co: Cohort, ck: Chunk) -> Array:
    sizes = _flat(size.astype(np.int64), co)
    odd = sizes % 16 != 0
    if odd.any():
        text = f"a bulk copy of {int(sizes[odd][0])} bytes, no multiple of 16"
        ck.report("misaligned", site.instruction, text, co, odd.reshape(co.shape))
        sizes = sizes & ~15
    return sizes


def _written(site: Site, start: Array, sizes: Array, good: Array, co: Cohort, ck: Chunk) -> None:
    """Report sources in shared memory that are not written, or by stores that no proxy fence followed."""
    if not ck.options.check_memory:
        return
    shadow = ck.space_shared.shadow[1]
    bad = np.zeros(co.lanes, bool)
    for k in np.flatnonzero(good).tolist():
        at = int(start[k])
        bad[k] = not shadow[at : at + int(sizes[k])].all()
    if bad.any():
        text = "a bulk copy reads bytes of shared memory that were never written"
        ck.report("uninitialized-read", site.instruction, text, co, bad.reshape(co.shape))
    proxies = ck.space_shared.proxies
    if proxies is not None:
        for k in np.flatnonzero(good).tolist():
            pieces = np.arange(int(start[k]) >> 4, int(start[k]) + int(sizes[k]) + 15 >> 4)
            byte = proxies.unfenced(int(start[k]) // ck.space_shared.stride, pieces)
            if byte is not None:
                who = (np.arange(co.lanes) == k).reshape(co.shape)
                ck.report("proxy-fence-missing", site.instruction, proxies.text(byte), co, who)


def _same_cta(site: Site, rows: Array, slots: Array, good: Array, co: Cohort, ck: Chunk) -> Array:
    """Return which lanes have data and mbarrier in one CTA; report the others."""
    good = good & (slots >= 0)
    apart = good & (slots % ck.mbarriers.banks != rows)
    if apart.any():
        text = "data go to one CTA and their mbarrier is in another"
        ck.report("mbarrier-phase", site.instruction, text, co, apart.reshape(co.shape))
    result: Array = good & ~apart
    return result


def bulk_load(
    to: Site, target: Array, origin: Site, source: Array, size: Array, signal: Site, barrier: Array,
    mask: Array | None, reduction: tuple[str, str] | None, co: Cohort, ck: Chunk,
) -> None:  # fmt: skip
    """A bulk copy or reduction into shared memory, from global memory or from the CTA's own.

    Args:
        to: site of the destination `target`.
        origin: site of `source`; its space says whether that is global or shared memory.
        size: bytes.
        signal: site of the mbarrier `barrier`.
        mask: destination CTAs of a multicast by rank; None: the one in the address.
        reduction: operation and type; None copies.
        co: the issuing lanes.
        ck: their chunk.
    """
    sizes = _sizes(to, size, co, ck)
    rows, offsets, good = _shared_spans(to, target, sizes, co, ck)
    slots = _flat(ck.mbarriers.locate(signal, barrier, co), co)
    from_shared = origin.space != "global"
    stride = ck.space_shared.stride
    if from_shared:
        own, begin, fine = _shared_spans(origin, source, sizes, co, ck)
        start = own * stride + begin
        _written(origin, start, sizes, good & fine, co, ck)
    else:
        start, fine = _global_spans(origin, source, sizes, co, ck, write=False)
    good &= fine
    lanes = lanes_of(co)
    if mask is None:
        good = _same_cta(to, rows, slots, good, co, ck)
        chosen = np.flatnonzero(good)
        where = rows[chosen]
    else:
        good &= slots >= 0
        masks = _flat(mask.astype(np.int64), co)
        count = ck.cluster.size
        wrong = good & ((masks >> count != 0) | (masks == 0))
        if wrong.any():
            text = f"a multicast to the CTAs {int(masks[wrong][0]):#x} of a cluster of {count}"
            ck.report("out-of-bounds", to.instruction, text, co, wrong.reshape(co.shape))
        pieces = [np.flatnonzero(good & ((masks >> r & 1) == 1)) for r in range(count)]
        chosen = np.concatenate(pieces)
        ranks = np.repeat(np.arange(count), [len(p) for p in pieces])
        where = rows[chosen] - rows[chosen] % count + ranks
        banks = ck.mbarriers.banks
        slots = slots.copy()
        column = slots // banks
        slots_of = column[chosen] * banks + where
        dead = ~ck.mbarriers.live[slots_of]
        if dead.any():
            text = "a multicast signals an mbarrier that its CTA has not initialised"
            who = np.zeros(co.lanes, bool)
            who[chosen[dead]] = True
            ck.report("mbarrier-phase", to.instruction, text, co, who.reshape(co.shape))
        chosen, where, slots_of = chosen[~dead], where[~dead], slots_of[~dead]
    signals = slots[chosen] if mask is None else slots_of
    if not len(chosen):
        return
    if reduction is None:
        begin_write(ck, where, offsets[chosen], sizes[chosen])
    ck.launch.async_bytes += int(sizes[good].sum())
    operation = BulkCopy(
        to.instruction, lanes[chosen], signals, start[chosen], where * stride + offsets[chosen],
        sizes[chosen], from_shared, True, reduction, None, ck,
    )  # fmt: skip
    if ck.order is not None:
        ck.order.extents(operation, False, from_shared, start[chosen], sizes[chosen])
        ck.order.extents(operation, True, True, operation.target, sizes[chosen], atomic=reduction is not None)
    ck.asyncs.issue(operation)


def bulk_store(
    to: Site, target: Array, origin: Site, source: Array, size: Array, octets: Array | None,
    reduction: tuple[str, str] | None, co: Cohort, ck: Chunk,
) -> None:  # fmt: skip
    """A bulk copy or reduction from shared to global memory; `octets` is the byte mask of `.cp_mask`."""
    sizes = _sizes(to, size, co, ck)
    own, begin, good = _shared_spans(origin, source, sizes, co, ck)
    start = own * ck.space_shared.stride + begin
    _written(origin, start, sizes, good, co, ck)
    end, fine = _global_spans(to, target, sizes, co, ck, write=True)
    chosen = np.flatnonzero(good & fine)
    if not len(chosen):
        return
    ck.launch.async_bytes += int(sizes[chosen].sum())
    marks = None if octets is None else _flat(octets.astype(np.int64), co)[chosen]
    operation = BulkCopy(
        to.instruction, lanes_of(co)[chosen], None, start[chosen], end[chosen], sizes[chosen], True,
        False, reduction, marks, ck,
    )  # fmt: skip
    if ck.order is not None:
        ck.order.extents(operation, False, True, start[chosen], sizes[chosen])
        if octets is None:
            ck.order.extents(operation, True, False, end[chosen], sizes[chosen], atomic=reduction is not None)
    ck.asyncs.issue(operation)


def remote_store(
    to: Site, target: Array, values: tuple[Array, ...], signal: Site, barrier: Array, op: str, kind: str,
    co: Cohort, ck: Chunk,
) -> None:  # fmt: skip
    """st.async, or red.async with an operation `op` on `kind`."""
    rows, offsets, bad = ck.cluster.locate(to, target, co)
    slots = _flat(ck.mbarriers.locate(signal, barrier, co), co)
    rows, offsets = _flat(rows, co), _flat(offsets, co)
    good = np.ones(co.lanes, bool) if bad is None else ~_flat(bad, co)
    chosen = np.flatnonzero(_same_cta(to, rows, slots, good, co, ck))
    if not len(chosen):
        return
    where, place = rows[chosen], offsets[chosen]
    target_at = where * ck.space_shared.stride + place
    if not op:
        ck.space_shared.unsettle(int(place.min()), int(place.max()) + to.size, ck)
        if ck.options.check_memory:
            index = target_at[:, None] + np.arange(to.size)
            ck.space_shared.data[1][index] = 0xFF
            ck.space_shared.shadow[1][index] = 0
    operation = RemoteStore(
        to, lanes_of(co)[chosen], slots[chosen], target_at, [_flat(v, co)[chosen] for v in values], op, kind
    )
    if ck.order is not None:
        whole = np.full(len(chosen), to.size, np.int64)
        ck.order.extents(operation, True, True, target_at, whole, atomic=bool(op))
        ck.order.message(operation)
    ck.asyncs.issue(operation)


def copies_arrive(site: Site, address: Array, increment: bool, co: Cohort, ck: Chunk) -> None:
    """cp.async.mbarrier.arrive; without `.noinc` it announces its own arrival."""
    slots = _flat(ck.mbarriers.locate(site, address, co), co)
    known = slots >= 0
    if increment:
        np.add.at(ck.mbarriers.pending, slots[known], 1)
    if known.any():
        operation = CopiesDone(site.instruction, lanes_of(co)[known], slots[known], ck.copies.serial)
        if ck.order is not None:
            operation.stamp = ck.order.copies_arrive(site.instruction, slots, co)
        ck.asyncs.issue(operation)


class NothingToCancel(Operation):
    """clusterlaunchcontrol.try_cancel: the response says that nothing was canceled."""

    def __init__(self, site: Site, lanes: Array, slots: Array, target: Array) -> None:
        super().__init__(site.instruction, lanes, slots, np.full(len(lanes), 16, np.int64))
        self.target = target

    def apply(self, ck: Chunk, chosen: Array) -> None:
        """Write the responses: zeros."""
        index = (self.target[chosen][:, None] + np.arange(16)).ravel()
        ck.space_shared.data[1][index] = 0
        ck.space_shared.shadow[1][index] = 1


def try_cancel(
    to: Site, target: Array, signal: Site, barrier: Array, every: bool, co: Cohort, ck: Chunk
) -> None:
    """clusterlaunchcontrol.try_cancel; with `every` each CTA of the cluster gets the response."""
    sizes = np.full(co.lanes, 16, np.int64)
    rows, offsets, good = _shared_spans(to, target, sizes, co, ck)
    slots = _flat(ck.mbarriers.locate(signal, barrier, co), co)
    chosen = np.flatnonzero(_same_cta(to, rows, slots, good, co, ck))
    count = ck.cluster.size if every else 1
    banks = ck.mbarriers.banks
    where = rows[chosen]
    if every:
        where = (where - where % count)[:, None] + np.arange(count)
    chosen, where = np.repeat(chosen, count), where.ravel()
    if len(chosen):
        begin_write(ck, where, offsets[chosen], sizes[chosen])
        at = where * ck.space_shared.stride + offsets[chosen]
        signals = slots[chosen] // banks * banks + where
        operation = NothingToCancel(to, lanes_of(co)[chosen], signals, at)
        if ck.order is not None:
            ck.order.extents(operation, True, True, at, sizes[chosen])
        ck.asyncs.issue(operation)


NAMES: dict[str, Any] = {
    "try_cancel": try_cancel,
    "bulk_load": bulk_load,
    "bulk_store": bulk_store,
    "remote_store": remote_store,
    "copies_arrive": copies_arrive,
}
