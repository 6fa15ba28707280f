"""Where the box of a tensor copy lies: in global memory a sub-box of strided rows, in shared memory granules.

A box travels as a block: its data bytes in the order of shared memory without swizzle and padding, dimension
0 fastest. Index arrays are computed once for a map and phase of the shared address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.swizzle import place
from workbench.simulator.tensormap import TensorMap, TensorMapError

Array = npt.NDArray[Any]

OOB_NAN = 0x7FF7
"""Each 16 bits of the NaN that fills out-of-bounds elements; measured on sm_100 by others, not documented."""
SHARED_ALIGN = 128
_PERIOD = 1024
"""Every swizzle repeats after so many bytes at the latest."""


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a box that is inside the tensor.

    Attributes:
        start: bytes from the map's address to its first byte.
        shape: extents, dimension 0 last and in bytes; empty if nothing of the box is inside.
        steps: strides of `shape` in bytes.
        inside: where it lies in the block, an index for an array of shape `Box.shape`.
        span: bytes from the first to after the last byte.
    """

    start: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    inside: tuple[slice, ...]
    span: int


class Box:
    """The box of one tensor map."""

    def __init__(self, tensor: TensorMap) -> None:
        self.tensor = tensor
        e, swizzle = tensor.element, tensor.swizzle
        counts = [-(-b // s) for b, s in zip(tensor.box, tensor.steps, strict=True)]
        units = counts[0] // e.group
        self.shape = (*reversed(counts[1:]), units * e.data)
        """Extents of the block, dimension 0 last and in bytes."""
        self.nbytes = int(np.prod(self.shape))
        """Bytes of data, which is what the copy counts for at an mbarrier."""
        if e.data == e.pitch:
            self.granule = swizzle.granule
            within: Array = np.arange(0, units * e.data, self.granule, dtype=np.int64)
        else:
            self.granule = 4 if e.data % 8 else 8
            parts = np.arange(0, e.data, self.granule, dtype=np.int64)
            within = (np.arange(units, dtype=np.int64)[:, None] * e.pitch + parts).ravel()
        self.row = max(units * e.pitch, swizzle.span)
        """Bytes between rows in shared memory: a row takes at least one span of the swizzle."""
        rows = self.nbytes // self.shape[-1]
        self._offsets: Array = (np.arange(rows, dtype=np.int64)[:, None] * self.row + within).ravel()
        last = rows * self.row
        self.extent = last if swizzle.span else last - self.row + units * e.pitch
        """Bytes of shared memory that the box may touch, from its base on."""
        self._granules: dict[int, tuple[Array, int, int]] = {}

    def granules(self, base: int) -> tuple[Array, int, int]:
        """Return where the granules of the block lie for a box at shared address `base`.

        Returns:
            offsets from `base` (int64, one a granule, in the block's order), the lowest, and the end of the
            highest.
        """
        phase = base % _PERIOD
        if phase not in self._granules:
            at = place(self.tensor.swizzle, _PERIOD + phase, self._offsets) - (_PERIOD + phase)
            self._granules[phase] = (at, int(at.min()), int(at.max()) + self.granule)
        return self._granules[phase]

    def window(self, origin: tuple[int, ...]) -> Window:
        """Return the part inside the tensor of the box at an origin, given dimension 0 first.

        Raises:
            TensorMapError: if a sub-byte type has an origin inside a unit.
        """
        t, e = self.tensor, self.tensor.element
        align = 128 if e.pitch == 16 else e.group
        if origin[0] % align:
            raise TensorMapError(
                f".{e.name} at element {origin[0]}: coordinates in dimension 0 are multiples of {align}"
            )
        start, span = 0, 1
        shape: list[int] = []
        steps: list[int] = []
        inside: list[slice] = []
        for i, c in enumerate(origin):
            if i == 0:
                count, step, size, stride = self.shape[-1] // e.data, 1, t.dims[0] // e.group, e.data
                c //= e.group
            else:
                count, step, size, stride = self.shape[-1 - i], t.steps[i], t.dims[i], t.strides[i - 1]
            low = max(0, -(c // step))
            high = min(count, -((c - size) // step))
            if high <= low:
                return Window(0, (), (), (), 0)
            start += (c + low * step) * stride
            if i == 0:
                shape.append((high - low) * e.data)
                steps.append(1)
                inside.append(slice(low * e.data, high * e.data))
                span += (high - low) * e.data - 1
            else:
                shape.append(high - low)
                steps.append(step * stride)
                inside.append(slice(low, high))
                span += (high - low - 1) * step * stride
        return Window(start, tuple(shape[::-1]), tuple(steps[::-1]), tuple(inside[::-1]), span)

    def empty(self) -> Array:
        """Return a block (uint8, `shape`) of out-of-bounds elements."""
        if not self.tensor.fill_nan:
            return np.zeros(self.shape, np.uint8)
        return np.full(self.nbytes // 2, OOB_NAN, "<u2").view(np.uint8).reshape(self.shape)


def strided(memory: Array, start: int, window: Window) -> Array:
    """Return the window as a view of `memory` (uint8); `start` is the offset of its first byte.

    The caller has checked that all of it is inside.
    """
    part = memory[start : start + window.span]
    return np.lib.stride_tricks.as_strided(part, window.shape, window.steps)
