"""Tensor cores and tensor memory of a chunk's CTAs: what the tcgen05 instructions do (PTX ISA 9.7.16).

MMAs and copies into tensor memory wait in a queue of the thread that issued them and take effect when an
mbarrier that a later `tcgen05.commit` of that thread signals is waited for: an accumulator that is read
earlier is a finding, and so are operands that change in shared memory meanwhile. `tcgen05.st` takes effect at
`tcgen05.wait::st`. `tcgen05.ld` delivers at once (a register that depends on it orders by itself), but its
cells must not be overwritten before `tcgen05.wait::ld`. The tcgen05 fences are not checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.access import Site
from workbench.simulator.cohort import Cohort
from workbench.simulator.pending import Operation, cohort_of
from workbench.simulator.tcgen05_work import Copy, Mma, MmaForm, Work, cluster_members, pair_of
from workbench.simulator.tmem import COLUMNS, LANES, POISON, TensorMemory, cells, split_address
from workbench.simulator.warp import lanes_of

if TYPE_CHECKING:
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
ORDER, LIFETIME = "tcgen05-order", "tmem-lifetime"


@dataclass(slots=True)
class _Access:
    """Cells that a warp loads or stores; rows and columns are (registers, 32) or flat."""

    item: Instruction
    lane_mask: int
    low: int
    high: int
    rows: Array
    columns: Array
    values: Array | None = None
    half: Array | None = None
    """Values of the odd columns of an unpacking store."""

    def overlaps(self, mask: int, low: int, high: int) -> bool:
        """Whether a rectangle of cells touches these."""
        return bool(self.lane_mask & mask) and self.low < high and low < self.high


class _Commit(Operation):
    """tcgen05.commit: the tcgen05 operations of the issuing threads so far, then one arrival."""

    def __init__(
        self, item: Instruction, lanes: Array, slots: Array, marks: Array, owner: TensorCores
    ) -> None:
        super().__init__(item, lanes, slots, None, 1)
        self.marks, self.owner = marks, owner

    def apply(self, ck: Chunk, chosen: Array) -> None:
        """Carry out what the threads issued before."""
        for k in chosen.tolist():
            self.owner.complete(int(self.lanes[k]), int(self.marks[k]))
            if ck.order is not None and self.slots is not None:
                ck.order.committed(int(self.lanes[k]), int(self.slots[k]))


class TensorCores:
    """Tensor memories and pending tensor-core work of a chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self._memories: dict[int, TensorMemory] = {}
        self._queues: dict[int, list[Work]] = {}
        """Work under way, by issuing thread (CTA row times threads, plus thread)."""
        self._issued: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._loads: dict[tuple[int, int], list[_Access]] = {}
        self._stores: dict[tuple[int, int], list[_Access]] = {}
        self._group: dict[int, int] = {}

    def memory(self, cta: int) -> TensorMemory:
        """Return the tensor memory of a CTA (row in the chunk)."""
        if cta not in self._memories:
            self._memories[cta] = TensorMemory()
        return self._memories[cta]

    # -- who ---------------------------------------------------------------------------------------

    def _warps(self, co: Cohort) -> Iterator[tuple[int, int, int, Array]]:
        """Yield CTA, warp, row and columns of each warp of a cohort."""
        w = lanes_of(co)
        for g in range(w.groups):
            columns = np.flatnonzero(w.group == g)
            warp = int(co.threads[columns[0]]) >> 5
            if co.rectangular:
                for row in range(co.shape[0]):
                    yield int(co.ctas[row]), warp, row, columns
            else:
                yield int(co.ctas[columns[0]]), warp, 0, columns

    def _lanes(self, co: Cohort) -> Iterator[tuple[int, int, int, int]]:
        """Yield CTA, thread, row and column of each lane."""
        for row in range(co.shape[0]):
            for column in range(co.shape[1]):
                cta = int(co.ctas[row] if co.rectangular else co.ctas[column])
                yield cta, int(co.threads[column]), row, column

    def report(self, rule: str, item: Instruction, text: str, cta: int, thread: int) -> None:
        """Add a finding about one thread."""
        lanes = np.array([cta * self.chunk.launch.threads + thread])
        self.chunk.report(rule, item, text, cohort_of(self.chunk, lanes), np.ones((1, 1), bool))

    # -- allocation --------------------------------------------------------------------------------

    def _same_group(self, item: Instruction, group: int, cta: int, thread: int) -> None:
        if self._group.setdefault(cta, group) != group:
            self.report(LIFETIME, item, "mixes cta_group::1 and cta_group::2 in one kernel", cta, thread)

    def allocate(self, site: Site, address: Array, count: Array, group: int, co: Cohort) -> None:
        """tcgen05.alloc: reserve columns, write their address to shared memory."""
        ck, item = self.chunk, site.instruction
        place = np.broadcast_to(
            ck.space_shared.prepare(site, address, co, ck, write=True, fresh=True), co.shape
        )
        counts = np.broadcast_to(count, co.shape)
        for cta, warp, row, columns in self._warps(co):
            n = int(counts[row, columns[0]])
            self._same_group(item, group, cta, warp * 32)
            if n < 32 or n > COLUMNS or n & (n - 1):
                self.report(
                    LIFETIME, item, f"allocates {n} columns: no power of two from 32 to 512", cta, warp * 32
                )
                continue
            memory = self.memory(cta)
            if not memory.permit:
                text = "allocates tensor memory after tcgen05.relinquish_alloc_permit"
                self.report(LIFETIME, item, text, cta, warp * 32)
            start = memory.allocate(n, item)
            if start is None:
                text = f"waits for {n} columns of tensor memory that the CTA itself holds: it would hang"
                self.report(LIFETIME, item, text, cta, warp * 32)
                continue
            at = int(place[row, columns[0]])
            ck.space_shared.data[4][at >> 2] = start
            ck.space_shared.shadow[1][at : at + 4] = 1
        ck.progress += 1

    def deallocate(self, item: Instruction, address: Array, count: Array, group: int, co: Cohort) -> None:
        """tcgen05.dealloc."""
        places, counts = np.broadcast_to(address, co.shape), np.broadcast_to(count, co.shape)
        for cta, warp, row, columns in self._warps(co):
            _, start = split_address(int(places[row, columns[0]]))
            n = int(counts[row, columns[0]])
            self._same_group(item, group, cta, warp * 32)
            busy = self._under_way(cta, (1 << LANES) - 1, start, start + n)
            if busy is not None:
                text = f"frees tensor memory that line {busy.item.line} ({busy.item.name}) is still to write"
                self.report(ORDER, item, text, cta, warp * 32)
            if not self.memory(cta).free(start, n):
                text = f"frees {n} columns from column {start}, where no such allocation is"
                self.report(LIFETIME, item, text, cta, warp * 32)
        self.chunk.progress += 1

    def relinquish(self, co: Cohort) -> None:
        """tcgen05.relinquish_alloc_permit."""
        for cta, _, _, _ in self._warps(co):
            self.memory(cta).permit = False

    # -- loads and stores --------------------------------------------------------------------------

    def _access(
        self,
        item: Instruction,
        form: tuple[str, int, int, bool],
        address: int,
        cta: int,
        warp: int,
        lane: Array,
    ) -> _Access | None:
        """Check the cells of a load or store of one warp; None if it faults."""
        shape, repeat, split, halves = form
        rows, columns = cells(shape, repeat, 0 if halves else split)
        first, base = split_address(address)
        if halves:
            columns = columns * 2 + split * (np.arange(32) // 16)
        low, high = base + int(columns.min()), base + int(columns.max()) + 1 + halves
        if rows.shape[1] != len(lane):
            rows, columns = rows[:, lane], columns[:, lane]
        height = 32 if shape == "32x32b" else 16
        if first // 32 != warp % 4 or first + height > warp % 4 * 32 + 32:
            text = (
                f"warp {warp} accesses lanes {first} to {first + height - 1} of tensor memory, but may "
                f"access {warp % 4 * 32} to {warp % 4 * 32 + 31}"
            )
            self.report("out-of-bounds", item, text, cta, warp * 32)
            return None
        if not self.memory(cta).allocated(low, high):
            text = f"accesses columns {low} to {high - 1} of tensor memory, which are not all allocated"
            self.report(LIFETIME, item, text, cta, warp * 32)
            return None
        mask = ((1 << height) - 1) << first
        busy = self._under_way(cta, mask, low, high)
        if busy is not None:
            text = (
                f"touches tensor memory that line {busy.item.line} ({busy.item.name}) is still to write: no "
                "wait for an mbarrier that a tcgen05.commit after it signals"
            )
            self.report(ORDER, item, text, cta, warp * 32)
        for (other, _), stores in self._stores.items():
            if other == cta and any(s.overlaps(mask, low, high) for s in stores):
                self.report(
                    ORDER, item, "touches tensor memory stored without tcgen05.wait::st", cta, warp * 32
                )
                break
        return _Access(item, mask, low, high, rows + first, columns + base)

    def load(self, item: Instruction, form: tuple[str, int, int, bool], address: Array, co: Cohort) -> Array:
        """tcgen05.ld: return the registers, uint32 (registers, rows, columns).

        Args:
            item: the instruction.
            form: shape, repetitions, column offset of the second half, whether halves are packed.
            address: tensor memory address of each lane.
            co: the lanes.
        """
        count = len(cells(form[0], form[1], form[2])[0])
        out = np.full((count, *co.shape), POISON, np.uint32)
        addresses = np.broadcast_to(address, co.shape)
        w = lanes_of(co)
        for cta, warp, row, columns in self._warps(co):
            self._whole(item, cta, warp, columns)
            access = self._access(item, form, int(addresses[row, columns[0]]), cta, warp, w.lane[columns])
            if access is None:
                continue
            memory = self.memory(cta)
            values = memory.data[access.rows, access.columns]
            written = memory.written[access.rows, access.columns]
            if form[3]:
                odd = memory.data[access.rows, access.columns + 1]
                values = (values & np.uint32(0xFFFF)) | (odd << np.uint32(16))
                written = written & memory.written[access.rows, access.columns + 1]
            if not written.all() and self._under_way(cta, access.lane_mask, access.low, access.high) is None:
                text = f"reads cells of tensor memory that were never written (columns {access.low} to " \
                    f"{access.high - 1})"  # fmt: skip
                self.report("uninitialized-read", item, text, cta, warp * 32)
            out[:, row, columns] = values
            self._loads.setdefault((cta, warp), []).append(access)
        return out

    def store(
        self,
        item: Instruction,
        form: tuple[str, int, int, bool],
        address: Array,
        values: tuple[Array, ...],
        co: Cohort,
    ) -> None:
        """tcgen05.st; takes effect at the warp's tcgen05.wait::st."""
        addresses = np.broadcast_to(address, co.shape)
        spread = np.stack([np.broadcast_to(v, co.shape) for v in values])
        w = lanes_of(co)
        for cta, warp, row, columns in self._warps(co):
            self._whole(item, cta, warp, columns)
            access = self._access(item, form, int(addresses[row, columns[0]]), cta, warp, w.lane[columns])
            if access is None:
                continue
            self._overwrites(item, cta, warp * 32, access.lane_mask, access.low, access.high, warp)
            access.values = spread[:, row, columns].copy()
            if form[3]:
                access.half = access.values >> np.uint32(16)
                access.values &= np.uint32(0xFFFF)
            self._stores.setdefault((cta, warp), []).append(access)
        self.chunk.progress += 1

    def _whole(self, item: Instruction, cta: int, warp: int, columns: Array) -> None:
        if len(columns) != int(self.chunk.launch.warp_sizes[warp]):
            text = "part of a warp executes an instruction that wants whole warps"
            self.report("warp-divergence", item, text, cta, warp * 32)

    def wait(self, what: str, co: Cohort) -> None:
        """tcgen05.wait::ld or ::st of whole warps."""
        for cta, warp, _, _ in self._warps(co):
            if what == "ld":
                self._loads.pop((cta, warp), None)
                continue
            memory = self.memory(cta)
            for s in self._stores.pop((cta, warp), ()):
                assert s.values is not None
                memory.data[s.rows, s.columns] = s.values
                memory.written[s.rows, s.columns] = True
                if s.half is not None:
                    memory.data[s.rows, s.columns + 1] = s.half
                    memory.written[s.rows, s.columns + 1] = True

    # -- asynchronous work -------------------------------------------------------------------------

    def _under_way(self, cta: int, mask: int, low: int, high: int) -> Work | None:
        """Return pending work that writes into a rectangle of cells."""
        for queue in self._queues.values():
            for work in queue:
                if any(r.overlaps(cta, mask, low, high) for r in work.writes):
                    return work
        return None

    def _overwrites(
        self, item: Instruction, cta: int, thread: int, mask: int, low: int, high: int, warp: int = -1
    ) -> None:
        """Report loads that have not been waited for, of cells that are to be written now."""
        for (other, reader), loads in self._loads.items():
            if other == cta and reader != warp and any(a.overlaps(mask, low, high) for a in loads):
                text = f"overwrites tensor memory that warp {reader} loads without tcgen05.wait::ld"
                self.report(ORDER, item, text, cta, thread)
                return

    def _issue(self, work: Work) -> None:
        lane = work.cta * self.chunk.launch.threads + work.thread
        if not work.prepare(self):
            return
        for r in work.touches:
            for (other, _), stores in self._stores.items():
                if other == r.cta and any(s.overlaps(r.mask, r.low, r.high) for s in stores):
                    text = "touches tensor memory stored without tcgen05.wait::st"
                    self.report(ORDER, work.item, text, work.cta, work.thread)
                    break
        for r in work.writes:
            self._overwrites(work.item, r.cta, work.thread, r.mask, r.low, r.high)
        self._queues.setdefault(lane, []).append(work)
        self._issued[lane] = self._issued.get(lane, 0) + 1
        self.chunk.progress += 1

    def complete(self, lane: int, mark: int) -> None:
        """Carry out the first `mark` pieces of work that thread `lane` issued."""
        queue = self._queues.get(lane)
        while queue and self._done.get(lane, 0) < mark:
            self._done[lane] = self._done.get(lane, 0) + 1
            work = queue.pop(0)
            work.run(self)
            if self.chunk.order is not None and work.records:
                self.chunk.order.operands_read(work.records)
        if not queue:
            self._queues.pop(lane, None)

    def copy(
        self, item: Instruction, form: tuple[str, str, int], address: Array, descriptor: Array, co: Cohort
    ) -> None:
        """tcgen05.cp; `form` is shape, multicast and CTA group."""
        for cta, thread, row, column in self._lanes(co):
            self._issue(
                Copy(
                    item, cta, thread, pair_of(self.chunk, cta, form[2]), form[0], form[1],
                    _pick(address, row, column), _pick(descriptor, row, column),
                )
            )  # fmt: skip

    def mma(self, item: Instruction, form: MmaForm, operands: dict[str, Any], co: Cohort) -> None:
        """tcgen05.mma and tcgen05.mma.ws.

        Args:
            item: the instruction.
            form: what its qualifiers say.
            operands: arrays `d`, `a`, `b`, `descriptor`, `accumulate` and, where present, `scale_a` and
                `scale_b`; `masks`, a tuple of them; `shift`, an int.
            co: the issuing lanes.
        """
        names = ("d", "a", "b", "descriptor", "accumulate", "scale_a", "scale_b")
        spread = {n: operands[n] for n in names if n in operands}
        masks = operands.get("masks", ())
        for cta, thread, row, column in self._lanes(co):
            values = {n: _pick(v, row, column) for n, v in spread.items()}
            disabled = sum(_pick(m, row, column) << (32 * k) for k, m in enumerate(masks))
            self._same_group(item, form.group, cta, thread)
            ctas = pair_of(self.chunk, cta, form.group)
            shift = int(operands.get("shift", 0))
            self._issue(Mma(item, cta, thread, ctas, form, values, disabled, shift))

    def commit(self, site: Site, address: Array, mask: Array | None, co: Cohort) -> None:
        """tcgen05.commit: one arrival, on each CTA of `mask` if given, once the threads' work is done."""
        ck = self.chunk
        threads = ck.launch.threads
        slots = np.broadcast_to(ck.mbarriers.locate(site, address, co), co.shape).ravel()
        lanes = np.broadcast_to(co.rows() * threads + co.columns(), co.shape).ravel()
        if mask is not None:
            lanes, slots = self._multicast(lanes, slots, np.broadcast_to(mask, co.shape).ravel())
        marks = np.array([self._issued.get(int(x), 0) for x in lanes], np.int64)
        ck.asyncs.issue(_Commit(site.instruction, lanes, slots, marks, self))

    def _multicast(self, lanes: Array, slots: Array, mask: Array) -> tuple[Array, Array]:
        """Repeat commits for each destination CTA: the barrier at the same offset in its shared memory."""
        banks = self.chunk.mbarriers.banks
        out: list[tuple[int, int]] = []
        for lane, slot, bits in zip(lanes.tolist(), slots.tolist(), mask.tolist(), strict=True):
            members = cluster_members(self.chunk, lane // self.chunk.launch.threads)
            column = slot // banks
            out.extend((lane, column * banks + row if slot >= 0 else -1)
                       for rank, row in enumerate(members) if bits >> rank & 1)  # fmt: skip
        pairs = np.array(out, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Carry out what is left when all threads have exited; report tensor memory that was not freed."""
        for lane in list(self._queues):
            self.complete(lane, self._issued[lane])
        for cta, memory in sorted(self._memories.items()):
            for start, (columns, item) in sorted(memory.allocations.items()):
                text = f"{columns} columns of tensor memory from column {start} are never freed"
                self.report(LIFETIME, item, text, cta, 0)


def _pick(value: Array, row: int, column: int) -> int:
    """Return a lane's value from an array that broadcasts to its cohort."""
    return int(value[row if value.shape[0] > 1 else 0, column if value.shape[1] > 1 else 0])
