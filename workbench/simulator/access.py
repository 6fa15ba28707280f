"""Checked loads and stores: state spaces, access sites and what they report.

A `Site` is one memory instruction of a kernel. It remembers the address interval in which every access is
known to be in bounds and initialised, so the usual check is three reductions over the addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.memory import BASE, Allocation, Memory

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.ordering.order import ChunkOrder
    from workbench.simulator.proxies import Proxies
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]

SHARED_BASE = 0x400
"""Address of the first byte of shared memory in the shared window; the first KiB is the system's."""
LOCAL_BASE = 0x10
SHARED_WINDOW = 0x5000_0000_0000
LOCAL_WINDOW = 0x6000_0000_0000
PARAM_WINDOW = 0x6800_0000_0000
WINDOW = 1 << 32

_minimum, _maximum, _or = np.minimum.reduce, np.maximum.reduce, np.bitwise_or.reduce
RAW = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128", 32: "V32"}
"""Dtypes whose items NumPy copies as one piece."""
_WHOLE_CHECK_LIMIT = 1 << 26


def typed_views(data: npt.NDArray[np.uint8]) -> dict[int, Array]:
    """Return `data` as arrays of 1 to 32-byte items; the tail that fills no item is left out."""
    return {size: data[: len(data) // size * size].view(kind) for size, kind in RAW.items()}


class Site:
    """One memory instruction."""

    __slots__ = (
        "_inside",
        "_offset",
        "high",
        "instruction",
        "k",
        "low",
        "mask",
        "quiet",
        "shift",
        "size",
        "space",
        "tries",
        "unused",
    )

    def __init__(self, instruction: Instruction, space: str, size: int, offset: int) -> None:
        self.instruction, self.space, self.size, self._offset = instruction, space, size, offset
        self._inside: dict[str, Site] = {}
        origin = {"global": BASE, "shared": SHARED_BASE, "local": LOCAL_BASE}.get(space, 0)
        self.k = np.array([[offset - origin]], np.int64)
        """What turns an address register into an offset inside the space."""
        self.shift = size.bit_length() - 1
        self.mask = size - 1
        used = instruction.used_bytes
        self.unused = b"" if used is None else bytes(~used >> i & 1 for i in range(size))
        """1 for each byte that is loaded and not used; empty if all are used."""
        self.reset()

    @property
    def offset(self) -> int:
        """The constant in the instruction's address."""
        return self._offset

    def reset(self) -> None:
        """Forget what earlier launches proved."""
        self.low, self.high = 1, 0
        self.tries = 0
        self.quiet = False
        """It reads a buffer that no kernel may write: happens-before need not be looked at."""
        self._inside.clear()

    def at_shared(self) -> Site:
        """Return a site for shared memory whose addresses have the constant in them already."""
        if "at" not in self._inside:
            self._inside["at"] = Site(self.instruction, "shared", self.size, 0)
        return self._inside["at"]

    def inside(self, space: str) -> Site:
        """Return the site for the lanes of a generic access that fall into `space`."""
        if space not in self._inside:
            windows = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}
            window = SHARED_WINDOW if space == "cluster" else windows.get(space, 0)
            self._inside[space] = Site(self.instruction, space, self.size, self._offset - window)
        return self._inside[space]


def all_written(flags: Array, size: int, shape: tuple[int, ...], unused: bytes = b"") -> Array:
    """Turn shadow items of `size` bytes into one boolean a lane; bytes set in `unused` do not count."""
    if size <= 8:
        if unused:
            flags = flags | np.frombuffer(unused, flags.dtype)
        equal: Array = np.equal(flags, np.array(int("01" * size, 16), flags.dtype))
        return equal
    words = np.ascontiguousarray(flags).view(np.uint64).reshape(*shape, size // 8)
    if unused:
        words = words | np.frombuffer(unused, np.uint64)
    result: Array = (words == np.uint64(0x0101010101010101)).all(axis=-1)
    return result


class GlobalSpace:
    """Global memory of a launch."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.data = typed_views(memory.bytes)
        self.shadow = typed_views(memory.shadow)

    def load(self, site: Site, address: Array, co: Cohort, ck: Chunk) -> Array:
        """Return raw items of `site.size` bytes, shape of `address` (int64 device addresses)."""
        i = self.locate(site, address, co, ck)
        if ck.order is not None and not site.quiet:
            ck.order.far(site, False, i, None, co)
        if site.shift:
            i = i >> site.shift
        return self.data[site.size].take(i, mode="clip")

    def locate(self, site: Site, address: Array, co: Cohort, ck: Chunk) -> Array:
        """Check a read and return offsets in the arena; lanes that fault are at offset 0, which is zero."""
        i: Array = address + site.k
        if (
            site.low <= _minimum(i, axis=None)
            and _maximum(i, axis=None) <= site.high
            and not _or(i, axis=None) & site.mask
        ):
            return i
        return self._check_load(site, i, co, ck)

    def _check_load(self, site: Site, i: Array, co: Cohort, ck: Chunk) -> Array:
        if not ck.options.check_memory:
            return np.clip(i, 0, self.memory.capacity - site.size)
        i = self.in_bounds(site, i, co, ck, write=False)
        low, high = int(_minimum(i, axis=None)), int(_maximum(i, axis=None))
        a = self.memory.find(low)
        if a is not None and high + site.size <= a.end and a.initialized:
            site.low, site.high = a.start, a.end - site.size
            return i
        self._check_written(site, i, co, ck, a if a is not None and high < a.end else None)
        return i

    def _check_written(self, site: Site, i: Array, co: Cohort, ck: Chunk, a: Allocation | None) -> None:
        flags = self.shadow[site.size].take(i >> site.shift, mode="clip")
        written = all_written(flags, site.size, i.shape, site.unused)
        if not written.all():
            bad = ~written
            if a is None:
                for other in self.memory.allocations:
                    if other.initialized:
                        bad &= (i < other.start) | (i >= other.end)
            bad &= i != 0
            if bad.any():
                ck.fault("uninitialized-read", site, co, bad, i + BASE)
        elif a is not None:
            site.tries += 1
            tries = site.tries
            if (
                not tries & (tries - 1)
                and a.size <= _WHOLE_CHECK_LIMIT
                and self.shadow[1][a.start : a.end].all()
            ):
                site.low, site.high = a.start, a.end - site.size

    def in_bounds(self, site: Site, i: Array, co: Cohort, ck: Chunk, *, write: bool) -> Array:
        """Report lanes that are misaligned or touch no buffer; return offsets with those lanes moved to 0."""
        low, high = int(_minimum(i, axis=None)), int(_maximum(i, axis=None))
        a = self.memory.find(low)
        aligned = not int(_or(i, axis=None)) & site.mask
        if a is not None and high + site.size <= a.end and aligned and (a.writable or not write):
            return i
        bad = np.zeros(i.shape, bool)
        if not aligned:
            misaligned = (i & site.mask) != 0
            ck.fault("misaligned", site, co, misaligned, i + BASE)
            bad |= misaligned
        allocations = self.memory.allocations
        if allocations:
            starts = np.array([x.start for x in allocations], np.int64)
            ends = np.array([x.end for x in allocations], np.int64)
            which = np.searchsorted(starts, i, side="right") - 1
            outside = (which < 0) | (i + site.size > ends[which])
        else:
            outside = np.ones(i.shape, bool)
        outside &= ~bad
        if outside.any():
            ck.fault("out-of-bounds", site, co, outside, i + BASE)
            bad |= outside
        if write and allocations:
            fixed = np.array([not x.writable for x in allocations])[which] & ~bad
            if fixed.any():
                ck.fault("read-only-write", site, co, fixed, i + BASE)
                bad |= fixed
        return np.where(bad, 0, i) if bad.any() else i

    def store(self, site: Site, address: Array, value: Array, co: Cohort, ck: Chunk) -> None:
        """Write raw items; `address` and `value` have broadcastable shapes."""
        i = address + site.k
        if ck.options.check_memory:
            i = self.in_bounds(site, i, co, ck, write=True)
        if ck.order is not None:
            ck.order.far(site, True, i, value, co)
        write(self.data, self.shadow, site, i, value, co, ck, BASE, 0)
        self.data[1][0:32] = 0
        self.shadow[1][0:32] = 0

    def prepare(self, site: Site, address: Array, co: Cohort, ck: Chunk, *, write: bool) -> Array:
        """Check an atomic access and return its offsets; lanes that fault are at offset 0."""
        i = self.in_bounds(site, address + site.k, co, ck, write=write)
        if write and ck.options.check_memory:
            a = self.memory.find(int(_minimum(i, axis=None)))
            if a is None or not a.initialized:
                self._check_written(site, i, co, ck, a if a is not None and int(i.max()) < a.end else None)
        return i


def write(
    data: dict[int, Array],
    shadow: dict[int, Array],
    site: Site,
    i: Array,
    value: Array,
    co: Cohort,
    ck: Chunk,
    base: int,
    void: int,
) -> None:
    """Scatter `value` to byte offsets `i`, mark the bytes written, report lanes that disagree on a byte.

    Lanes that faulted write to offset `void`, where nobody looks.
    """
    if value.shape != i.shape:
        shape = np.broadcast_shapes(i.shape, value.shape, co.shape if value.size > i.size else i.shape)
        i, value = np.broadcast_to(i, shape), np.broadcast_to(value, shape)
    index = (i >> site.shift).ravel()
    flat = np.ascontiguousarray(value).reshape(-1)
    view = data[site.size]
    view[index] = flat
    shadow[site.size][index] = _ONES[site.size]
    ck.progress += 1
    if len(index) > 1 and not (index[1:] > index[:-1]).all():
        back = view.take(index, mode="clip")
        words = 8 if site.size > 8 else site.size
        differ = back.view(RAW[words]) != flat.view(RAW[words])
        if differ.any():
            bad = differ.reshape(len(index), -1).any(axis=1).reshape(i.shape) & (i != void)
            if bad.any():
                ck.fault("race", site, co, bad, i + base)


_ONES = {size: np.full(size, 1, np.uint8).view(kind)[0] for size, kind in RAW.items()}


class BankedSpace:
    """Shared memory (a bank per CTA) or local memory (a bank per thread) of a chunk.

    Args:
        banks: number of CTAs or threads.
        size: bytes in each.
        rows: how a cohort finds its bank numbers: 'shared' or 'local'.
    """

    proxies: Proxies | None = None
    """Follows ordinary stores, if async reads occur in the kernel and no order is kept."""
    order: ChunkOrder | None = None
    """Is shown every access, if set."""
    rows: Array | None = None
    """Bank of each lane if lanes look at banks of other CTAs."""

    def __init__(self, banks: int, size: int, kind: str) -> None:
        self.size, self.kind = size, kind
        self.stride = -(-max(size, 1) // 32) * 32
        self.banks = banks
        data = np.full(banks * self.stride + 32, 0xFF, np.uint8)
        shadow = np.zeros(len(data), np.uint8)
        self.data, self.shadow = typed_views(data), typed_views(shadow)
        self.base = SHARED_BASE if kind == "shared" else LOCAL_BASE
        self.good: list[tuple[int, int]] = []
        """Intervals in which every byte of every bank is known to be written."""
        self.unsettled = np.zeros(size, bool)
        """Bytes that asynchronous operations write: unwritten again while one is under way."""

    def place(self, i: Array, co: Cohort) -> Array:
        """Return offsets in the chunk's array for offsets in the bank of each lane."""
        return i + (co.shared_rows(self.stride) if self.kind == "shared" else co.local_rows(self.stride))

    def check(self, site: Site, i: Array, co: Cohort, ck: Chunk) -> tuple[Array, Array | None, int, int]:
        """Report lanes out of bounds or misaligned and move them to offset 0; return offsets, those lanes,
        bounds.
        """
        low, high = int(_minimum(i, axis=None)), int(_maximum(i, axis=None))
        if low >= 0 and high + site.size <= self.size and not int(_or(i, axis=None)) & site.mask:
            return i, None, low, high
        outside = (i < 0) | (i + site.size > self.size)
        misaligned = ~outside & ((i & site.mask) != 0)
        if outside.any():
            ck.fault("out-of-bounds", site, co, outside, i + self.base)
        if misaligned.any():
            ck.fault("misaligned", site, co, misaligned, i + self.base)
        bad = outside | misaligned
        i = np.where(bad, 0, i)
        return i, bad, int(i.min()), int(i.max())

    def load(self, site: Site, address: Array, co: Cohort, ck: Chunk) -> Array:
        """Return raw items of `site.size` bytes at addresses of the space (int64)."""
        i, bad, low, high = self.check(site, address + site.k, co, ck)
        if self.order is not None and bad is None:
            self.order.near(site, False, i, None, low, high + site.size, co, self.rows)
        at = self.place(i, co)
        at >>= site.shift
        result = self.data[site.size].take(at, mode="clip")
        if (
            bad is None
            and not (site.low <= low and high <= site.high)
            and ck.options.check_memory
            and not (self.order is not None and self.order.early)
        ):
            self._check_written(site, i, at, low, high, co, ck)
        return result

    def _check_written(
        self, site: Site, i: Array, at: Array, low: int, high: int, co: Cohort, ck: Chunk
    ) -> None:
        end = high + site.size
        for start, stop in self.good:
            if start <= low and end <= stop:
                site.low, site.high = start, stop - site.size
                return
        written = all_written(self.shadow[site.size].take(at, mode="clip"), site.size, at.shape, site.unused)
        if written.all():
            site.tries += 1
            tries = site.tries
            if not tries & (tries - 1):
                grid = self.shadow[1][: self.banks * self.stride].reshape(self.banks, self.stride)
                columns = np.flatnonzero(~grid[:, : self.size].all(axis=0) | self.unsettled)
                before, after = columns[columns < low], columns[columns >= low]
                start = int(before[-1]) + 1 if len(before) else 0
                stop = int(after[0]) if len(after) else self.size
                if start <= low and end <= stop:
                    self.good.append((start, stop))
        else:
            ck.fault("uninitialized-read", site, co, ~written, i + self.base)

    def unsettle(self, low: int, high: int, ck: Chunk) -> None:
        """Keep what is known of bytes `low` to `high` of the banks from being taken as lasting."""
        if self.proxies is not None:
            self.proxies.forget(low, high)
        if not self.unsettled[low:high].all():
            self.unsettled[low:high] = True
            self.good.clear()
            for site in ck.launch.program.context.sites:
                if site.space != "global":
                    site.reset()

    def store(self, site: Site, address: Array, value: Array, co: Cohort, ck: Chunk) -> None:
        """Write raw items."""
        i, bad, low, high = self.check(site, address + site.k, co, ck)
        if self.order is not None and bad is None:
            self.order.near(site, True, i, value, low, high + site.size, co, self.rows)
        at = self.place(i, co)
        if bad is not None:
            at = np.where(bad, self.banks * self.stride, at)
        write(self.data, self.shadow, site, at, value, co, ck, 0, self.banks * self.stride)
        if self.proxies is not None:
            self.proxies.wrote(at, site.size)

    def prepare(
        self, site: Site, address: Array, co: Cohort, ck: Chunk, *, write: bool, fresh: bool = False
    ) -> Array:
        """Check an atomic access, or with `fresh` a plain write, and return its offsets in the chunk's
        array.
        """
        i, bad, low, high = self.check(site, address + site.k, co, ck)
        at = self.place(i, co)
        if bad is not None:
            at = np.where(bad, self.banks * self.stride, at)
        elif ck.options.check_memory and not fresh:
            self._check_written(site, i, at >> site.shift, low, high, co, ck)
        return at
