"""wgmma: matrix products of four warps with operands in shared memory (PTX ISA 9.7.15, sm_90a).

An operation is carried out when `wgmma.wait_group` observes it: only then is shared memory read and are the
accumulators written. Until then they hold poison, and an instruction that touches them is a finding, as is
one that touches them, or A in registers, with no `wgmma.fence` before the next operation. A in registers is
taken at issue. Operands in shared memory that change in between are a finding, too.

Each warp computes its 16 of the 64 rows, so that the four warps need not stand at one instruction. Products
are exact in float64 and are rounded once an instruction together with the accumulator; what hardware may do
differently is said in `workbench.simulator.matrix`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.access import SHARED_BASE, Site
from workbench.simulator.cohort import Cohort
from workbench.simulator.matrix import (
    BITS,
    by_lane,
    by_warp,
    check_warps,
    integers,
    numbers,
    operand_words,
    rounded,
)
from workbench.simulator.warp import Lanes, lanes_of

if TYPE_CHECKING:
    from workbench.simulator.ordering.records import Spans
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
PIECE = 16
"""Bytes that every layout of a matrix keeps together."""
DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
"""K of one instruction."""
_WIDTH = {0: 0, 1: 128, 2: 64, 3: 32}
"""Bytes of a swizzled row by the descriptor's mode."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of `wgmma.mma_async`: D (64, n) = A (64, k) B (k, n) + D."""

    n: int
    a: str
    b: str
    d: str
    """f16, f32 or s32."""
    saturate: bool = False
    negate: bool = False
    """imm-scale-a and imm-scale-b have different signs."""
    transpose_a: bool = False
    """A in shared memory is M-major."""
    transpose_b: bool = False
    """B is N-major."""

    @property
    def registers(self) -> int:
        """Registers of D a lane."""
        return self.n // (4 if self.d == "f16" else 2)


@dataclass(slots=True)
class _Pending:
    """One instruction's operations of several warps; arrays are (warps,)."""

    item: Instruction
    form: Form
    accumulator: int
    left: int
    """Register set of A, -1 if A is in shared memory."""
    warps: Array
    """CTA row in the chunk times warps a CTA, plus warp."""
    group: Array
    """Number of the committed group, -1 before the commit."""
    a: Array
    """Descriptors, or the words of A's rows (warps, 16, words)."""
    b: Array
    scale: Array
    """Whether D is added."""
    before: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    """Operands in shared memory at issue, by operand, CTA and descriptor."""
    records: list[Spans] = field(default_factory=list)
    """What is read in shared memory, for happens-before."""

    def part(self, keep: Array) -> _Pending:
        """Return the operations of some warps."""
        return replace(
            self, warps=self.warps[keep], group=self.group[keep], a=self.a[keep], b=self.b[keep],
            scale=self.scale[keep],
        )  # fmt: skip


class Warpgroups:
    """The wgmma operations under way in a chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.warps = len(chunk.ctas) * chunk.launch.warps
        self.pending: list[_Pending] = []
        self.committed = np.zeros(self.warps, np.int64)
        self._live: dict[int, Array] = {}
        """Accumulators of operations under way, (warps, 16, n), by register set."""
        self._flight: dict[int, Array] = {}
        """Operations under way that use a register set, a warp."""
        self._touched: dict[int, Array] = {}
        """Whether a register set was used since the last fence, a warp."""
        self._fenced = np.zeros(self.warps, bool)

    def _ids(self, w: Lanes, co: Cohort) -> Array:
        """Return the warps of a cohort, (rows * groups,), row by row."""
        first = np.maximum(w.position, 0).max(axis=1)
        warps = np.broadcast_to(co.rows() * self.chunk.launch.warps + (co.columns() >> 5), co.shape)
        return np.ascontiguousarray(warps[:, first]).ravel()

    def _count(self, name: int) -> Array:
        if name not in self._flight:
            self._flight[name] = np.zeros(self.warps, np.int64)
        return self._flight[name]

    def _unfenced(self, name: int) -> Array:
        if name not in self._touched:
            self._touched[name] = ~self._fenced  # the first operation wants a fence, too
        return self._touched[name]

    def _report(self, item: Instruction, text: str, w: Lanes, bad: Array, co: Cohort) -> None:
        lanes = bad.reshape(co.shape[0], w.groups)[:, w.group]
        self.chunk.report("wgmma-order", item, text, co, lanes)

    def touch(
        self, name: int, write: bool, a_operand: bool, copy: bool, co: Cohort, item: Instruction
    ) -> None:
        """Take note that another instruction reads or writes registers of set `name`.

        A `copy` that a compiler put there wants no fence: the assembler makes one register of the two.
        """
        w = lanes_of(co)
        ids = self._ids(w, co)
        busy = self._count(name)[ids] > 0
        if busy.any() and (write or not a_operand):
            which = "operand A" if a_operand else "the accumulator"
            text = f"{'writes' if write else 'reads'} a register of {which} of a wgmma that may be under way"
            self._report(item, text, w, busy, co)
        if not copy and (write or not a_operand):
            self._unfenced(name)[ids] = True

    def fence(self, co: Cohort) -> None:
        """wgmma.fence: order register accesses before later operations."""
        ids = self._ids(lanes_of(co), co)
        for touched in self._touched.values():
            touched[ids] = False
        self._fenced[ids] = True

    def issue(
        self, form: Form, accumulator: int, left: int, d: tuple[Array, ...], a: Array | tuple[Array, ...],
        b: Array, scale: Array, co: Cohort, item: Instruction,
    ) -> None:  # fmt: skip
        """wgmma.mma_async: remember an operation."""
        w = check_warps(co, self.chunk, item)
        rows = co.shape[0]
        ids = self._ids(w, co)
        self._check_order(ids, accumulator, left, w, co, item)

        def a_warp(value: Array) -> Array:
            spread = by_warp(w, np.broadcast_to(value, (rows, value.shape[1])), rows)
            return np.ascontiguousarray(spread[:, :, 0]).ravel()

        count = self._count(accumulator)
        fresh = count[ids] == 0
        if fresh.any():
            matrix = _gather(form, d, w, rows)
            if accumulator not in self._live:
                self._live[accumulator] = np.zeros((self.warps, 16, form.n), matrix.dtype)
            self._live[accumulator][ids[fresh]] = matrix[fresh]
        words = operand_words(a, w, rows, 2) if isinstance(a, tuple) else a_warp(a)
        group = np.full(len(ids), -1, np.int64)
        p = _Pending(item, form, accumulator, left, ids, group, words, a_warp(b), a_warp(scale))
        if self.chunk.options.check_memory:
            self._remember(p)
        self.pending.append(p)
        count[ids] += 1
        if left >= 0:
            self._count(left)[ids] += 1

    def _check_order(
        self, ids: Array, accumulator: int, left: int, w: Lanes, co: Cohort, item: Instruction
    ) -> None:
        launch = self.chunk.launch
        tail = (ids % launch.warps) // 4 * 4 + 4 > launch.warps
        if tail.any():
            text = "wgmma wants four whole warps, but the CTA's last warpgroup has fewer"
            lanes = tail.reshape(co.shape[0], w.groups)[:, w.group]
            self.chunk.report("inactive-lane", item, text, co, lanes)
        for name in (accumulator, left) if left >= 0 else (accumulator,):
            bad = self._unfenced(name)[ids]
            if bad.any():
                text = "no wgmma.fence between this wgmma and the last use of its registers (or the start)"
                self._report(item, text, w, bad, co)
                self._unfenced(name)[ids] = False

    def commit(self, co: Cohort) -> None:
        """wgmma.commit_group: close a group, empty or not."""
        ids = self._ids(lanes_of(co), co)
        mine = np.zeros(self.warps, bool)
        mine[ids] = True
        for p in self.pending:
            which = mine[p.warps] & (p.group < 0)
            p.group[which] = self.committed[p.warps[which]]
        self.committed[ids] += 1

    def wait(
        self, left: int, sets: tuple[tuple[int, Form], ...], values: tuple[Array, ...], co: Cohort
    ) -> tuple[Array, ...]:
        """wgmma.wait_group: carry out all but the last `left` groups; return all accumulator registers."""
        if not self.pending:
            return values
        w = lanes_of(co)
        ids = self._ids(w, co)
        limit = np.full(self.warps, -1, np.int64)
        limit[ids] = self.committed[ids] - left
        remaining: list[_Pending] = []
        finished: dict[int, Array] = {}
        for p in self.pending:
            done = (p.group >= 0) & (p.group < limit[p.warps])
            if done.any():
                now = p if done.all() else p.part(done)
                self._perform(now)
                if self.chunk.order is not None:
                    for r in now.records:
                        rows = now.warps // self.chunk.launch.warps
                        self.chunk.order.operands_read([r], np.flatnonzero(np.isin(r.ctas, rows)))
                self._count(now.accumulator)[now.warps] -= 1
                if now.left >= 0:
                    self._count(now.left)[now.warps] -= 1
                over = finished.setdefault(now.accumulator, np.zeros(self.warps, bool))
                over[now.warps] = True
                if done.all():
                    continue
                p = p.part(~done)
            remaining.append(p)
        self.pending = remaining
        if self.chunk.order is not None:
            warp = ids % self.chunk.launch.warps
            self.chunk.order.warpgroups_wait(ids // self.chunk.launch.warps, warp // 4 * 128)
        self.chunk.progress += 1
        return self._deliver(sets, values, finished, ids, w, co)

    def _deliver(
        self, sets: tuple[tuple[int, Form], ...], values: tuple[Array, ...], finished: dict[int, Array],
        ids: Array, w: Lanes, co: Cohort,
    ) -> tuple[Array, ...]:  # fmt: skip
        out = list(values)
        at = 0
        for name, form in sets:
            start, at = at, at + form.registers
            if name not in finished:
                continue
            ready = finished[name][ids] & (self._count(name)[ids] == 0)
            if not ready.any():
                continue
            fresh = _scatter(form, self._live[name][ids], w, co.shape[0])
            mask = ready.reshape(co.shape[0], w.groups)[:, w.group]
            for k, value in enumerate(fresh):
                out[start + k] = value if ready.all() else np.where(mask, value, out[start + k])
        return tuple(out)

    # -- carrying out -------------------------------------------------------------------------------

    def _perform(self, p: _Pending) -> None:
        form = p.form
        depth = DEPTH[form.a]
        live = self._live[p.accumulator]
        if p.left < 0:
            quarter = p.warps % self.chunk.launch.warps % 4
            tiles, which = self._tiles(p, "a")
            a = tiles.reshape(len(tiles), 4, 16, depth)[which, quarter]
        else:
            a = numbers(p.a, form.a)
        tiles, which = self._tiles(p, "b")
        order = np.argsort(which, kind="stable")
        bounds = np.searchsorted(which[order], np.arange(len(tiles) + 1))
        with np.errstate(all="ignore"):
            for k, tile in enumerate(tiles):
                mine = order[bounds[k] : bounds[k + 1]]
                product = (a[mine].reshape(-1, depth) @ tile.T).reshape(len(mine), 16, form.n)
                if form.negate:
                    product = -product
                warps = p.warps[mine]
                old = live[warps]
                scale = p.scale[mine]
                if not scale.all():
                    old = np.where(scale[:, None, None], old, old.dtype.type(0))
                if form.d == "s32":
                    total = integers(product.astype(np.int64) + old, form.saturate)
                else:
                    total = rounded(product + old, form.d)
                live[warps] = total.view(live.dtype)

    def _tiles(self, p: _Pending, which_operand: str) -> tuple[Array, Array]:
        """Read each distinct matrix once: float64 (distinct, rows, depth), and which of them a warp wants."""
        form, kind = p.form, p.form.a if which_operand == "a" else p.form.b
        rows, transposed = (64, form.transpose_a) if which_operand == "a" else (form.n, form.transpose_b)
        depth = DEPTH[kind]
        distinct, which = self._distinct(p, which_operand)
        out = np.empty((len(distinct), rows, depth), np.float64)
        for some, address in self._addresses(p, which_operand, distinct):
            ctas = distinct[some, 0].astype(np.int64)
            raw = self._read(p, address, ctas)
            self._compare(p, which_operand, distinct[some], raw)
            if transposed:
                pieces = np.ascontiguousarray(raw).view(np.uint16)
                pieces = pieces.reshape(len(some), rows // 8, depth, 8).swapaxes(2, 3)
                words = np.ascontiguousarray(pieces).reshape(len(some), rows, depth).view(np.uint32)
            else:
                words = np.ascontiguousarray(raw).view(np.uint32)
            with np.errstate(all="ignore"):
                out[some] = numbers(words, kind)
        return out, which

    def _distinct(self, p: _Pending, which_operand: str) -> tuple[Array, Array]:
        """Return the distinct pairs of CTA and descriptor, (distinct, 2), and which one a warp has."""
        descriptors = p.a if which_operand == "a" else p.b
        keys = np.stack([(p.warps // self.chunk.launch.warps).astype(np.uint64), descriptors], axis=1)
        distinct, which = np.unique(keys, axis=0, return_inverse=True)
        return distinct, which.ravel()

    def _addresses(self, p: _Pending, which_operand: str, distinct: Array) -> Iterator[tuple[Array, Array]]:
        """Yield, for matrices of one layout, their numbers and the addresses of their pieces."""
        form, kind = p.form, p.form.a if which_operand == "a" else p.form.b
        rows, transposed = (64, form.transpose_a) if which_operand == "a" else (form.n, form.transpose_b)
        starts = np.uint64(0x3FFF)
        layouts = distinct[:, 1] & ~starts
        for layout in np.unique(layouts):
            some = np.flatnonzero(layouts == layout)
            bits = int(layout)
            if bits >> 49 & 7:
                self.chunk.unsupported(p.item, "a matrix descriptor with a base offset")
            width = _WIDTH[bits >> 62]
            leading, stride = (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
            relative = offsets(width, leading, stride, transposed, rows, DEPTH[kind], BITS[kind] // 8)
            start = ((distinct[some, 1] & starts).astype(np.int64) << 4)[:, None, None]
            yield some, _swizzled(start + relative, width)

    def _remember(self, p: _Pending) -> None:
        """Keep what the operands are at issue: nothing may change them until the operation is over."""
        space = self.chunk.space_shared
        for which_operand in ("b",) if p.left >= 0 else ("a", "b"):
            distinct, _ = self._distinct(p, which_operand)
            for some, address in self._addresses(p, which_operand, distinct):
                ctas = distinct[some, 0].astype(np.int64)
                at = (address - SHARED_BASE + (ctas * space.stride)[:, None, None]) >> 4
                self._order(p, at, ctas)
                raw = space.data[PIECE].take(at, mode="clip")
                for k, (cta, descriptor) in enumerate(distinct[some]):
                    p.before[which_operand, int(cta), int(descriptor)] = raw[k].tobytes()

    def _order(self, p: _Pending, at: Array, ctas: Array) -> None:
        """Show what is read to happens-before, as read by the warp group of the first warp of each CTA."""
        order = self.chunk.order
        if order is None:
            return
        warps = self.chunk.launch.warps
        first = [int(p.warps[np.flatnonzero(p.warps // warps == cta)[0]]) for cta in ctas.tolist()]
        mine = [warp % warps // 4 * 128 for warp in first]
        lanes = ctas * self.chunk.launch.threads + np.array(mine)
        p.records += order.operands(p.item, lanes, "wgmma", list(at))

    def _compare(self, p: _Pending, which_operand: str, keys: Array, raw: Array) -> None:
        for k, (cta, descriptor) in enumerate(keys):
            before = p.before.get((which_operand, int(cta), int(descriptor)))
            if before is not None and before != raw[k].tobytes() and not p.records:
                text = (
                    f"operand {which_operand.upper()} in shared memory changes between this wgmma and the "
                    "wgmma.wait_group that covers it"
                )
                self.chunk.report("buffer-reuse", p.item, text, *self._user(p, int(cta)))

    def _read(self, p: _Pending, address: Array, rows_of: Array) -> Array:
        """Return pieces of 16 bytes of shared memory; report what is wrong with their addresses."""
        ck = self.chunk
        space = ck.space_shared
        i = address - SHARED_BASE
        site = Site(p.item, "shared", PIECE, 0)
        outside = (i < 0) | (i + PIECE > space.size)
        if outside.any():
            self._fault("out-of-bounds", site, p, rows_of, outside, address)
            i = np.where(outside, 0, i)
        at = (i + (rows_of * space.stride)[:, None, None]) >> 4
        if ck.options.check_memory:
            flags = space.shadow[PIECE].take(at, mode="clip")
            written = np.ascontiguousarray(flags).view(np.uint64).reshape(*at.shape, 2)
            bad = (written != np.uint64(0x0101010101010101)).any(axis=-1) & ~outside
            if bad.any():
                self._fault("uninitialized-read", site, p, rows_of, bad, address)
        if space.proxies is not None:
            for k, row in enumerate(rows_of):
                byte = space.proxies.unfenced(int(row), at[k])
                if byte is not None:
                    ck.report(
                        "proxy-fence-missing", p.item, space.proxies.text(byte), *self._user(p, int(row))
                    )
        raw: Array = space.data[PIECE].take(at, mode="clip")
        return raw

    def _user(self, p: _Pending, row: int) -> tuple[Cohort, Array]:
        """Return the first thread of a CTA that takes part, for a finding."""
        warps = self.chunk.launch.warps
        warp = int(p.warps[np.flatnonzero(p.warps // warps == row)[0]]) % warps
        return Cohort(self.chunk, np.array([row]), np.array([warp * 32]), True, {}), np.ones((1, 1), bool)

    def _fault(self, rule: str, site: Site, p: _Pending, rows_of: Array, bad: Array, address: Array) -> None:
        """Report a bad piece of some matrix as the first thread of a warp that uses it."""
        k = int(np.argmax(bad.reshape(len(bad), -1).any(axis=1)))
        where = int(address[k].ravel()[np.argmax(bad[k])])
        self.chunk.fault(rule, site, *self._user(p, int(rows_of[k])), np.array([[where]]))


@lru_cache(maxsize=256)
def offsets(
    width: int, leading: int, stride: int, transposed: bool, rows: int, depth: int, element: int
) -> Array:
    """Return where the 16-byte pieces of a matrix lie relative to its start, before swizzling.

    Args:
        width: bytes of a swizzled row, 0 for none.
        leading: leading dimension byte offset.
        stride: stride dimension byte offset.
        transposed: neighbours along M or N, not along K, are neighbours in memory.
        rows: size along M or N.
        depth: size along K.
        element: bytes an element.

    Returns:
        int64 (rows, depth * element / 16), or if transposed (rows * element / 16, depth).
    """
    if not transposed:
        r = np.arange(rows, dtype=np.int64)[:, None]
        c = np.arange(depth * element // PIECE, dtype=np.int64)[None, :]
        if width:
            return r % 8 * width + r // 8 * stride + c * PIECE
        return r % 8 * PIECE + r // 8 * stride + c * leading
    r = np.arange(rows * element // PIECE, dtype=np.int64)[:, None]
    k = np.arange(depth, dtype=np.int64)[None, :]
    if width:
        across = width // PIECE
        return r % across * PIECE + r // across * leading + k % 8 * width + k // 8 * stride
    return r * stride + k % 8 * PIECE + k // 8 * leading


def _swizzled(address: Array, width: int) -> Array:
    """Exchange pieces inside a row of `width` bytes by the number of the 128-byte line."""
    if not width:
        return address
    result: Array = address ^ ((address >> 7 & (width // PIECE - 1)) << 4)
    return result


def _gather(form: Form, registers: tuple[Array, ...], w: Lanes, rows: int) -> Array:
    """Return the accumulator matrices (warps, 16, n) held in registers."""
    dtype = {"f16": np.float16, "f32": np.float32, "s32": np.int32}[form.d]
    out = np.empty((rows, w.groups, 2, 8, form.n // 8, 4, 2), dtype)
    for k, register in enumerate(registers):
        spread = by_warp(w, register, rows).reshape(rows, w.groups, 8, 4)
        if form.d == "f16":
            pair = np.ascontiguousarray(spread).view(np.float16).reshape(rows, w.groups, 8, 4, 2)
            out[:, :, k % 2, :, k // 2] = pair
        else:
            out[:, :, k // 2 % 2, :, k // 4, :, k % 2] = spread
    return out.reshape(rows * w.groups, 16, form.n)


def _scatter(form: Form, matrix: Array, w: Lanes, rows: int) -> list[Array]:
    """Inverse of `_gather`: return the registers."""
    grid = matrix.reshape(rows, w.groups, 2, 8, form.n // 8, 4, 2)
    out = []
    for k in range(form.registers):
        if form.d == "f16":
            pair = np.ascontiguousarray(grid[:, :, k % 2, :, k // 2]).view(np.uint32)
            out.append(by_lane(w, pair.reshape(rows, w.groups, 32)))
        else:
            part = np.ascontiguousarray(grid[:, :, k // 2 % 2, :, k // 4, :, k % 2])
            out.append(by_lane(w, part.reshape(rows, w.groups, 32)))
    return out
