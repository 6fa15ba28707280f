"""Tensor memory of one CTA: allocation, and the cells that tcgen05.ld, .st and .cp touch.

128 lanes by 512 columns of 32 bits (PTX ISA "Tensor Memory"). An address has the lane in bits 16 to 31 and
the column in bits 0 to 15.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction

Array = npt.NDArray[Any]

LANES, COLUMNS = 128, 512
POISON = 0x7FF7DEAD
"""What unwritten cells hold: a NaN."""


class TensorMemory:
    """The tensor memory of one CTA.

    Attributes:
        data: uint32 (128, 512).
        written: bool (128, 512); False for cells that nobody wrote since their allocation.
        owner: int (512,), start column of the allocation a column belongs to, -1 where free.
        permit: whether the CTA may still allocate.
    """

    __slots__ = ("allocations", "data", "owner", "permit", "written")

    def __init__(self) -> None:
        self.data = np.full((LANES, COLUMNS), POISON, np.uint32)
        self.written = np.zeros((LANES, COLUMNS), bool)
        self.owner = np.full(COLUMNS, -1, np.int64)
        self.permit = True
        self.allocations: dict[int, tuple[int, Instruction]] = {}
        """Columns and instruction of each live allocation, by start column."""

    def allocate(self, columns: int, item: Instruction) -> int | None:
        """Reserve columns, poisoned, at the lowest multiple of their number; None if there is no room."""
        for start in range(0, COLUMNS, columns):
            if (self.owner[start : start + columns] < 0).all():
                self.owner[start : start + columns] = start
                self.data[:, start : start + columns] = POISON
                self.written[:, start : start + columns] = False
                self.allocations[start] = (columns, item)
                return start
        return None

    def free(self, start: int, columns: int) -> bool:
        """Give an allocation back; False if there is none of that start and size."""
        if self.allocations.get(start, (0, None))[0] != columns:
            return False
        del self.allocations[start]
        self.owner[start : start + columns] = -1
        self.written[:, start : start + columns] = False
        return True

    def allocated(self, low: int, high: int) -> bool:
        """Whether all columns from `low` up to `high` lie inside allocations."""
        return low >= 0 and high <= COLUMNS and bool((self.owner[low:high] >= 0).all())


def split_address(address: int) -> tuple[int, int]:
    """Return lane and column of a tensor memory address."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


SHAPES = {"32x32b": (32, 1, 1), "16x64b": (16, 2, 1), "16x128b": (16, 4, 2), "16x256b": (16, 8, 4),
          "16x32bx2": (16, 1, 1)}  # fmt: skip
"""Rows, columns and registers a lane of each tcgen05.ld and .st shape at .x1."""
REPEATS = (1, 2, 4, 8, 16, 32, 64, 128)


def registers(shape: str, repeat: int) -> int:
    """Return how many registers a lane gives to a tcgen05.ld or .st, packed or not."""
    return SHAPES[shape][2] * repeat


@lru_cache(maxsize=256)
def cells(shape: str, repeat: int, split: int = 0) -> tuple[Array, Array]:
    """Return the cell of every register of a tcgen05.ld or .st, relative to its address.

    PTX ISA "tcgen05 matrix fragments".

    Args:
        shape: one of `SHAPES`.
        repeat: the number after `.x`.
        split: column offset of the second half of `16x32bx2`.

    Returns:
        Rows and columns, both (registers, 32) int64.
    """
    lane = np.arange(32)[None, :]
    r = np.arange(registers(shape, repeat))[:, None]
    if shape == "32x32b":
        row, column = lane + 0 * r, r + 0 * lane
    elif shape == "16x64b":
        row, column = lane // 4 + 8 * (lane % 2) + 0 * r, lane // 2 % 2 + 2 * r
    elif shape == "16x128b":
        row, column = lane // 4 + 8 * (r % 2), lane % 4 + 4 * (r // 2)
    elif shape == "16x256b":
        row, column = lane // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (lane % 4) + 8 * (r // 4)
    else:
        row, column = lane % 16 + 0 * r, r + split * (lane // 16)
    return row.astype(np.int64), column.astype(np.int64)


COPY_SHAPES = {
    "128x256b": (128, 2, 0), "128x128b": (128, 1, 0), "4x256b": (4, 2, 0), "32x128b": (32, 1, 4),
    "64x128b": (64, 1, 2),
}  # fmt: skip
"""Rows, 16-byte pieces a row and number of replicas of each tcgen05.cp shape."""


def copy_lanes(shape: str, multicast: str) -> Array:
    """Return the lanes that receive each row of a tcgen05.cp, (replicas, rows).

    Args:
        shape: one of `COPY_SHAPES`.
        multicast: `warpx4`, `warpx2::02_13`, `warpx2::01_23` or empty.
    """
    r = np.arange(COPY_SHAPES[shape][0])
    if shape == "4x256b":
        return (32 * r)[None, :]
    if multicast == "warpx4":
        return r[None, :] + 32 * np.arange(4)[:, None]
    if multicast == "warpx2::02_13":
        return r[None, :] + 64 * np.arange(2)[:, None]
    if multicast == "warpx2::01_23":
        return (64 * (r // 32) + r % 32)[None, :] + 32 * np.arange(2)[:, None]
    return r[None, :]
