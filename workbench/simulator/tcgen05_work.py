"""Pieces of asynchronous tensor-core work: MMAs and copies from shared into tensor memory.

A piece is prepared when it is issued (descriptors decoded, operands noted) and run when it completes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator import tcgen05_math as maths
from workbench.simulator.access import SHARED_BASE
from workbench.simulator.proxies import RULE
from workbench.simulator.tcgen05_descriptors import (
    DescriptorError,
    MmaShape,
    Pieces,
    SharedMatrix,
    instruction,
    pieces,
    shared_matrix,
)
from workbench.simulator.tmem import COLUMNS, COPY_SHAPES, LANES, TensorMemory, copy_lanes, split_address

if TYPE_CHECKING:
    from workbench.simulator.ordering.records import Spans
    from workbench.simulator.scheduler import Chunk
    from workbench.simulator.tcgen05 import TensorCores

Array = npt.NDArray[Any]
EVERY_LANE = (1 << LANES) - 1
_WRITTEN = np.uint32(0x01010101)
"""Shadow of four bytes that have been written."""
SOURCE = "the source"
_USED = {"e2m1": 8, "e2m3": 12, "e3m2": 12}
"""Bytes in use of each 16 that hold packed elements."""


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of tensor memory cells of one CTA."""

    cta: int
    mask: int
    """Lanes, one bit each."""
    low: int
    high: int

    def overlaps(self, cta: int, mask: int, low: int, high: int) -> bool:
        """Whether another rectangle shares a cell."""
        return self.cta == cta and bool(self.mask & mask) and self.low < high and low < self.high


def cluster_members(ck: Chunk, row: int) -> list[int]:
    """Return the rows in the chunk of the CTAs of a CTA's cluster, by rank."""
    x, y, z = ck.launch.cluster
    size = x * y * z
    first = row - row % size
    return list(range(first, first + size))


def pair_of(ck: Chunk, row: int, group: int) -> tuple[int, ...]:
    """Return the rows of the CTAs that a CTA's tcgen05 instructions act on: itself, or its pair by rank."""
    if group == 1:
        return (row,)
    members = cluster_members(ck, row)
    even = (row - members[0]) & ~1
    return tuple(members[even : even + 2])


class Work:
    """A piece of work. `writes` and `touches` (all that it writes or reads) are known once it is prepared.

    Args:
        item: the instruction.
        cta: issuing CTA, row in the chunk.
        thread: issuing thread.
        ctas: rows of the CTAs whose tensor memory takes part.
    """

    def __init__(self, item: Instruction, cta: int, thread: int, ctas: tuple[int, ...]) -> None:
        self.item, self.cta, self.thread, self.ctas = item, cta, thread, ctas
        self.writes: list[Region] = []
        self.touches: list[Region] = []
        self.records: list[Spans] = []
        """What it reads in shared memory, for happens-before."""
        self._seen: dict[tuple[int, str], Array] = {}
        self._flags: dict[int, Array] = {}
        """Which bytes of a copy's source were written, by CTA; (pieces, 16)."""
        self._used = 16
        """Bytes in use of each piece of the operand looked at."""

    def prepare(self, cores: TensorCores) -> bool:
        """Decode and check; False if the work cannot be done, with a finding or an exception saying why."""
        raise NotImplementedError

    def run(self, cores: TensorCores) -> None:
        """Take effect."""
        raise NotImplementedError

    def _allocated(self, cores: TensorCores, regions: list[Region]) -> bool:
        for r in regions:
            if not cores.memory(r.cta).allocated(r.low, r.high):
                text = f"uses columns {r.low} to {r.high - 1} of tensor memory, which are not all allocated"
                cores.report("tmem-lifetime", self.item, text, r.cta, self.thread)
                return False
        return True

    def _shared(self, cores: TensorCores, cta: int, where: Pieces, name: str) -> Array | None:
        """Return the bytes of pieces of shared memory, after checks the first time; None out of bounds."""
        space = cores.chunk.space_shared
        low, high = where.low - SHARED_BASE, where.high - SHARED_BASE
        if low < 0 or high > space.size:
            text = (
                f"{name} takes shared memory from byte {low} to {high - 1}, of which there are {space.size}"
            )
            cores.report("out-of-bounds", self.item, text, cta, self.thread)
            return None
        index = (where.at + (cta * space.stride - SHARED_BASE)) >> 4
        if cores.chunk.options.check_memory and (cta, name) not in self._seen:
            flags = space.shadow[16].take(index).view(np.uint8).reshape(-1, 16)
            if name == SOURCE:
                self._flags[cta] = flags
            elif (flags[:, : self._used].view(np.uint32) != _WRITTEN).any():
                text = f"{name} has bytes of shared memory that were never written"
                cores.report("uninitialized-read", self.item, text, cta, self.thread)
            if space.proxies is not None:
                byte = space.proxies.unfenced(cta, index)
                if byte is not None:
                    cores.report(RULE, self.item, f"{name}: {space.proxies.text(byte)}", cta, self.thread)
        return space.data[16].take(index).view(np.uint8)

    def _note(self, cores: TensorCores, cta: int, where: Pieces, name: str) -> bool:
        raw = self._shared(cores, cta, where, name)
        if raw is not None:
            self._seen[cta, name] = raw
            ck = cores.chunk
            if ck.order is not None:
                index = (where.at + (cta * ck.space_shared.stride - SHARED_BASE)) >> 4
                lanes = np.array([self.cta * ck.launch.threads + self.thread])
                self.records += ck.order.operands(self.item, lanes, "mma", [index])
        return raw is not None

    def _fetch(self, cores: TensorCores, cta: int, where: Pieces, name: str) -> Array:
        raw = self._shared(cores, cta, where, name)
        assert raw is not None
        if not self.records and not np.array_equal(raw, self._seen[cta, name]):
            text = (
                f"{name} changes in shared memory before the instruction is known to be done: no wait for an "
                "mbarrier that a tcgen05.commit after it signals"
            )
            cores.report("buffer-reuse", self.item, text, cta, self.thread)
        return raw


class Copy(Work):
    """tcgen05.cp."""

    def __init__(
        self, item: Instruction, cta: int, thread: int, ctas: tuple[int, ...], shape: str, multicast: str,
        address: int, descriptor: int,
    ) -> None:  # fmt: skip
        super().__init__(item, cta, thread, ctas)
        self._shape, self._multicast, self._address, self._bits = shape, multicast, address, descriptor

    def prepare(self, cores: TensorCores) -> bool:
        """See `Work`."""
        rows, count, _ = COPY_SHAPES[self._shape]
        try:
            matrix = shared_matrix(self._bits)
        except DescriptorError as error:
            cores.chunk.unsupported(self.item, str(error))
        self._at = pieces(matrix, True, rows, count * 16, 1)
        first, self._column = split_address(self._address)
        self._lanes = copy_lanes(self._shape, self._multicast) + (first & 0x7F)
        if int(self._lanes.max()) >= LANES:
            text = f"copies to lanes up to {int(self._lanes.max())} of tensor memory, which has 128"
            cores.report("out-of-bounds", self.item, text, self.cta, self.thread)
            return False
        mask = sum(1 << lane for lane in self._lanes.ravel().tolist())
        self.writes = [Region(c, mask, self._column, self._column + 4 * count) for c in self.ctas]
        self.touches = self.writes
        if not self._allocated(cores, self.writes):
            return False
        good = True
        for cta in self.ctas:
            good &= self._note(cores, cta, self._at, SOURCE)
        return good

    def run(self, cores: TensorCores) -> None:
        """See `Work`."""
        for cta in self.ctas:
            words = self._fetch(cores, cta, self._at, SOURCE).view(np.uint32)
            memory = cores.memory(cta)
            written: Any = True  # scale factors of rows that do not exist may be left unwritten
            if cta in self._flags:
                written = self._flags[cta].reshape(*words.shape, 4).any(axis=-1)
            span = slice(self._column, self._column + words.shape[1])
            for replica in self._lanes:
                memory.data[replica, span] = words
                memory.written[replica, span] = written


@dataclass(frozen=True, slots=True)
class MmaForm:
    """What the qualifiers of a tcgen05.mma say."""

    kind: str
    group: int
    factors: int = 0
    """Scale factors a row of A; 0 without block scaling."""
    tensor_a: bool = False
    """A lies in tensor memory."""
    stationary: bool = False
    """`.ws`."""


class Mma(Work):
    """tcgen05.mma; see `TensorCores.mma` for the arguments."""

    def __init__(
        self, item: Instruction, cta: int, thread: int, ctas: tuple[int, ...], form: MmaForm,
        values: dict[str, int], disabled: int, shift: int,
    ) -> None:  # fmt: skip
        super().__init__(item, cta, thread, ctas)
        self._kind, self._factors, self._tensor_a = form.kind, form.factors, form.tensor_a
        self._stationary = form.stationary
        self._values, self._disabled, self._shift = values, disabled, shift

    def prepare(self, cores: TensorCores) -> bool:
        """See `Work`."""
        v = self._values
        try:
            self._form = form = instruction(v["descriptor"], self._kind, len(self.ctas), self._stationary)
            self._b_at = self._pieces(shared_matrix(v["b"]), form.b_k_major, form.n // len(self.ctas), form.b)
            self._rows = form.m // len(self.ctas)
            if not self._tensor_a:
                self._a_at = self._pieces(shared_matrix(v["a"]), form.a_k_major, self._rows, form.a)
            elif self._rows != LANES or self._kind.startswith("mxf4") or form.a in ("e2m1", "e2m3", "e3m2"):
                raise DescriptorError(f"A of type {form.a} with {self._rows} rows in tensor memory")
            if self._factors and self._rows != LANES:
                raise DescriptorError(f"scale factors of {self._rows} rows a CTA")
            self._check_factors(form)
        except DescriptorError as error:
            cores.chunk.unsupported(self.item, str(error))
        if not self._place(cores, form):
            return False
        good = True
        for cta in self.ctas:
            self._used = self._bytes_used(form.b)
            good &= self._note(cores, cta, self._b_at, "B")
            if not self._tensor_a:
                self._used = self._bytes_used(form.a)
                good &= self._note(cores, cta, self._a_at, "A")
        return good

    def _pieces(self, matrix: SharedMatrix, k_major: bool, rows: int, name: str) -> Pieces:
        if self._kind in ("mxf4", "mxf4nvf4"):
            return pieces(matrix, True, rows, self._form.k // 2, 1)
        return pieces(matrix, k_major, rows, self._form.k, maths.STORAGE[name])

    def _bytes_used(self, name: str) -> int:
        return 16 if self._kind.startswith("mxf4") else _USED.get(name, 16)

    def _check_factors(self, form: MmaShape) -> None:
        if not self._factors:
            return
        for first in (form.a_scale_id, form.b_scale_id):
            if first % self._factors or first + self._factors > 4:
                raise DescriptorError(f"{self._factors} scale factors a row from byte {first}")
        if form.scale_format != "ue8m0" and (self._kind != "mxf4nvf4" or self._factors != 4):
            raise DescriptorError(f"scale factors of type {form.scale_format} for kind::{self._kind}")

    def _place(self, cores: TensorCores, form: MmaShape) -> bool:
        """Find the cells of D, of A and of the scale factors."""
        v = self._values
        lane, self._column = split_address(v["d"])
        self._scattered = form.m == 64 and not self._stationary
        self._fold = 1 if self._scattered else LANES // self._rows
        width = form.n // self._fold
        allowed = (0, 16) if self._scattered else (0,)
        if lane not in allowed:
            text = f"D starts at lane {lane} of tensor memory; M = {form.m} wants lane {allowed[0]}"
            cores.report("out-of-bounds", self.item, text, self.cta, self.thread)
            return False
        self._lanes = scattered_lanes() + lane if self._scattered else np.arange(LANES)
        mask = sum(1 << x for x in self._lanes.tolist()) if self._scattered else EVERY_LANE
        self.writes = [Region(c, mask, self._column, self._column + width) for c in self.ctas]
        self.touches = list(self.writes)
        if self._tensor_a:
            _, self._a_column = split_address(v["a"])
            columns = form.k * maths.STORAGE[form.a] // 4
            self.touches += [
                Region(c, EVERY_LANE, self._a_column, self._a_column + columns) for c in self.ctas
            ]
        if self._factors:
            self._scale_a, self._scale_b = v["scale_a"] & 0x1FF, v["scale_b"] & 0x1FF
            for start, rows in ((self._scale_a, LANES), (self._scale_b, form.n)):
                columns = -(-rows // 32)
                self.touches += [Region(c, EVERY_LANE, start, start + columns) for c in self.ctas]
        return self._allocated(cores, self.touches)

    # -- completion --------------------------------------------------------------------------------

    def run(self, cores: TensorCores) -> None:
        """See `Work`."""
        form = self._form
        b = np.concatenate([
            self._operand(self._fetch(cores, c, self._b_at, "B"), form.b_k_major, form.b) for c in self.ctas
        ])  # fmt: skip
        for rank, cta in enumerate(self.ctas):
            memory = cores.memory(cta)
            if self._tensor_a:
                a = self._tensor_operand(cores, memory, cta)
            else:
                a = self._operand(self._fetch(cores, cta, self._a_at, "A"), form.a_k_major, form.a)
            scale_a = scale_b = None
            if self._factors:
                scale_a = self._scales(cores, cta, self._scale_a, LANES, form.a_scale_id, "A")
                scale_b = self._scales(cores, cta, self._scale_b, form.n, form.b_scale_id, "B")
            self._add(cores, memory, cta, rank, maths.product(form, a, b, scale_a, scale_b))

    def _operand(self, raw: Array, k_major: bool, name: str) -> Array:
        """Return float64 (rows, K) from the bytes of an operand's pieces."""
        if not k_major:
            size = maths.STORAGE[name]
            elements = raw.reshape(raw.shape[0], self._form.k, 16 // size, size)
            raw = np.ascontiguousarray(elements.transpose(0, 2, 1, 3)).reshape(-1, self._form.k * size)
        return maths.decode(raw, self._kind, name)

    def _tensor_operand(self, cores: TensorCores, memory: TensorMemory, cta: int) -> Array:
        columns = self._form.k * maths.STORAGE[self._form.a] // 4
        span = slice(self._a_column, self._a_column + columns)
        if not memory.written[:, span].all():
            text = "A has cells of tensor memory that were never written"
            cores.report("uninitialized-read", self.item, text, cta, self.thread)
        return maths.decode(memory.data[:, span].view(np.uint8), self._kind, self._form.a)

    def _scales(self, cores: TensorCores, cta: int, start: int, rows: int, first: int, name: str) -> Array:
        memory = cores.memory(cta)
        span = slice(start, start + -(-rows // 32))
        needed = np.arange(32)[:, None] + np.arange(span.start, span.stop)[None, :] * 32 < rows + 32 * start
        used = memory.written[:, span].reshape(4, 32, -1)[:, needed]
        if not used.all():
            text = f"scale factors of {name} lie in cells of tensor memory that were never written"
            cores.report("uninitialized-read", self.item, text, cta, self.thread)
        return maths.scale_factors(
            memory.data[:32, span], rows, self._factors, first, self._form.scale_format
        )

    def _add(self, cores: TensorCores, memory: TensorMemory, cta: int, rank: int, product: Array) -> None:
        form = self._form
        width = form.n // self._fold
        span = slice(self._column, self._column + width)
        lanes: Any = self._lanes if self._scattered else slice(0, LANES)
        if self._fold > 1:  # the rows with the next part of the columns lie in the next lanes
            product = product.reshape(-1, self._fold, width).transpose(1, 0, 2).reshape(LANES, width)
        old = memory.data[lanes, span]
        if self._values["accumulate"]:
            if not memory.written[lanes, span].all():
                text = "adds to cells of tensor memory that were never written"
                cores.report("uninitialized-read", self.item, text, cta, self.thread)
            before = maths.accumulator_values(np.ascontiguousarray(old), form.d)
            with np.errstate(invalid="ignore"):
                product = product + np.ldexp(before, -self._shift)
        result = maths.accumulator_cells(product, form.d, form.saturate)
        if self._disabled:
            bits = self._disabled >> (LANES * rank)
            keep = np.array([bits >> int(x) & 1 for x in self._lanes], bool)[:, None]
            memory.data[lanes, span] = np.where(keep, old, result)
            memory.written[lanes, span] |= ~keep
            return
        memory.data[lanes, span] = result
        memory.written[lanes, span] = True


def scattered_lanes() -> Array:
    """Return the lane of each row of an accumulator with M = 64 (not `.ws`), to which 0 or 16 is added.

    PTX ISA "data path layout organization", layout F; in the others (A, B, D, E, G) row r of part p of the
    columns lies in lane r + p * rows.
    """
    rows = np.arange(64)
    return 32 * (rows // 16) + rows % 16


assert COLUMNS == 512  # scale factor addresses keep nine column bits
