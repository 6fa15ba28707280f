"""Simulated global memory: one flat arena, named allocations between guard gaps, shadow state for each byte.

The arena is a shared, lazily zero mapping: processes forked later see the same bytes, and gigabytes of
zeros cost nothing until they are touched. Device addresses are arena offsets plus `BASE`, so a small
integer or a host offset taken for a pointer is out of bounds.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.errors import MemoryShortageError, UnknownNameError, WorkbenchError

if TYPE_CHECKING:
    from workbench.simulator.multimem import MulticastRange

Array = npt.NDArray[Any]

BASE = 0x7F2A_0000_0000
"""Device address of arena offset 0."""
MULTICAST, MULTICAST_END = 0x7E00_0000_0000, 0x7E80_0000_0000
"""Window of multicast addresses, which only `multimem` instructions may use."""
GUARD = 4096
"""Least distance in bytes between two allocations, and from either end of the arena."""
DEFAULT_CAPACITY = 1 << 36
_LARGE = 1 << 22
"""Bytes from which giving pages back is cheaper than writing zeros."""
_PAGE = mmap.PAGESIZE


@dataclass(slots=True)
class Allocation:
    """One buffer. `start` is an arena offset in bytes."""

    name: str
    start: int
    size: int
    writable: bool
    initialized: bool
    """No byte can be unwritten: reads need a bounds test only."""

    @property
    def end(self) -> int:
        """Offset after the last byte."""
        return self.start + self.size


def _shared(nbytes: int) -> mmap.mmap:
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; older Pythons do not name it
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | no_reserve
    return mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _clear(mapping: mmap.mmap, array: Array, a: Allocation) -> None:
    """Fill a buffer with zeros; pages of large ones are given back, since most have never been touched."""
    first, last = -(-a.start // _PAGE) * _PAGE, a.end // _PAGE * _PAGE
    if last - first >= _LARGE:
        try:
            mapping.madvise(mmap.MADV_REMOVE, first, last - first)
        except OSError:  # the kernel cannot for this kind of mapping
            first = last = a.end
        array[a.start : first] = array[last : a.end] = 0
    else:
        array[a.start : a.end] = 0


class Memory:
    """Global memory of the simulated device.

    Args:
        capacity: address space in bytes; it is reserved, not used.

    Raises:
        MemoryShortageError: if the machine refuses the reservation.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        capacity = -(-capacity // _PAGE) * _PAGE
        try:
            self._arena = _shared(capacity)
            self._shadow = _shared(capacity)
        except (OSError, ValueError) as error:
            raise MemoryShortageError(
                f"cannot reserve {capacity >> 20} MiB of address space for simulated memory ({error}); "
                "allow overcommit or pass a smaller capacity"
            ) from error
        self.capacity = capacity
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._arena, np.uint8)
        self.shadow: npt.NDArray[np.uint8] = np.frombuffer(self._shadow, np.uint8)
        """1 for a byte that has been written; not kept up for `initialized` allocations."""
        self._allocations: list[Allocation] = []
        self._starts: list[int] = []
        self._by_name: dict[str, Allocation] = {}
        self._top = GUARD
        self.multicast: list[MulticastRange] = []
        """Addresses that stand for a buffer of every rank."""

    def allocate(
        self, name: str, nbytes: int, *, align: int = 256, writable: bool = True, initialized: bool = False
    ) -> npt.NDArray[np.uint8]:
        """Reserve `nbytes` bytes, all zero, and return them as an array.

        Args:
            name: what findings call the buffer; unique.
            nbytes: size in bytes.
            align: alignment of the device address, a power of two.
            writable: False makes kernel writes `read-only-write` findings.
            initialized: True if the host provides every byte; otherwise reads before a write are findings.

        Raises:
            WorkbenchError: if the name is taken, the arguments are bad, or the address space is used up.
        """
        if name in self._by_name:
            raise WorkbenchError(f"simulated memory already has a buffer {name!r}")
        if nbytes < 0 or align <= 0 or align & (align - 1):
            raise WorkbenchError(f"buffer {name!r}: bad size {nbytes} or alignment {align}")
        start = -(-self._top // align) * align
        top = start + nbytes + GUARD
        if top > self.capacity:
            raise WorkbenchError(
                f"simulated memory is full: {name!r} needs {nbytes} bytes of {self.capacity}"
            )
        allocation = Allocation(name, start, nbytes, writable, initialized)
        self._top = top
        self._allocations.append(allocation)
        self._starts.append(start)
        self._by_name[name] = allocation
        return self.bytes[start : start + nbytes]

    @property
    def top(self) -> int:
        """Arena offset after the last allocation and its guard."""
        return self._top

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """All allocations by ascending address."""
        return tuple(self._allocations)

    def allocation(self, name: str) -> Allocation:
        """Return an allocation by name.

        Raises:
            UnknownNameError: if there is none.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise UnknownNameError("buffer", name, self._by_name) from None

    def __contains__(self, name: str) -> bool:
        """Whether there is a buffer called `name`."""
        return name in self._by_name

    def address(self, name: str) -> int:
        """Return the device address of a buffer."""
        return BASE + self.allocation(name).start

    def view(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a buffer's bytes, writable by the host."""
        a = self.allocation(name)
        return self.bytes[a.start : a.end]

    def unwrite(self, name: str) -> None:
        """Call all of a buffer unwritten; its bytes stay."""
        a = self.allocation(name)
        _clear(self._shadow, self.shadow, a)
        a.initialized = False

    def poison(self, name: str, byte: int) -> None:
        """Fill a buffer with `byte` and call all of it unwritten."""
        a = self.allocation(name)
        if byte == 0:
            _clear(self._arena, self.bytes, a)
        else:
            self.bytes[a.start : a.end] = byte
        self.unwrite(name)

    def mark_written(self, name: str) -> None:
        """Call every byte of a buffer written, as after a copy from the host."""
        a = self.allocation(name)
        self.shadow[a.start : a.end] = 1

    def unwritten(self, name: str) -> int:
        """Return how many bytes of a buffer no one has written."""
        a = self.allocation(name)
        return 0 if a.initialized else int(a.size - np.count_nonzero(self.shadow[a.start : a.end]))

    def find(self, offset: int) -> Allocation | None:
        """Return the allocation that contains arena offset `offset`, if any."""
        k = bisect_right(self._starts, offset) - 1
        if k >= 0 and offset < self._allocations[k].end:
            return self._allocations[k]
        return None

    def nearest(self, offset: int) -> Allocation | None:
        """Return the allocation whose bounds lie closest to `offset`; None if memory is empty."""

        def distance(a: Allocation) -> int:
            return max(a.start - offset, offset - a.end, 0)

        return min(self._allocations, key=distance, default=None)

    def mark(self) -> int:
        """Return a point to which `release` can go back."""
        return len(self._allocations)

    def release(self, mark: int) -> None:
        """Free every allocation made after `mark`; arrays of them must not be used any more."""
        if mark >= len(self._allocations):
            return
        gone = self._allocations[mark:]
        first = gone[0].start - gone[0].start % _PAGE
        keep = self._allocations[mark - 1].end if mark else 0
        first = max(first, -(-keep // _PAGE) * _PAGE)
        for a in gone:
            del self._by_name[a.name]
            low = max(a.start, keep)
            self.bytes[low : min(a.end, first)] = 0
            self.shadow[low : min(a.end, first)] = 0
        last = -(-gone[-1].end // _PAGE) * _PAGE
        if last > first:
            self._arena.madvise(mmap.MADV_REMOVE, first, last - first)
            self._shadow.madvise(mmap.MADV_REMOVE, first, last - first)
        del self._allocations[mark:], self._starts[mark:]
        self._top = (keep or 0) + GUARD
