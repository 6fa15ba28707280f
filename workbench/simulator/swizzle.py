"""The shared-memory swizzles of tensor copies, wgmma and tcgen05 (PTX ISA 5.5.7), as functions on addresses.

A swizzle permutes the atoms of a span of shared memory by exclusive-or with the number of the 128-byte line.
It acts on the address itself, not on the offset in a tile: a tile that does not start at a multiple of
`repeat` meets the pattern in its middle.

Established: 32, 64 and 128-byte spans of 16-byte atoms (CUDA programming guide, table of index relations);
128-byte spans of 32 or 64-byte atoms and the 8-byte flip (PTX ISA 5.5.7; public measurements on sm_100).
The 96-byte span is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LINE = 128
"""Bytes whose index, counted in lines, selects the permutation."""


@dataclass(frozen=True, slots=True)
class Swizzle:
    """A swizzle mode.

    Attributes:
        span: bytes inside which atoms change places; 0 for none, else 32, 64 or 128.
        atom: bytes that stay together: 16; with a span of 128 also 32 or 64.
        flip: also exchange the 8-byte halves of each 16 bytes in every second line; only with 32-byte atoms.
    """

    span: int = 0
    atom: int = 16
    flip: bool = False

    def __post_init__(self) -> None:
        """Refuse combinations that do not exist."""
        good = self.span in (0, 32, 64, 128) and self.atom in (16, 32, 64)
        if not good or (self.atom != 16 and self.span != 128) or (self.flip and self.atom != 32):
            raise ValueError(
                f"there is no swizzle of {self.span} bytes in atoms of {self.atom}, flip {self.flip}"
            )

    @property
    def repeat(self) -> int:
        """Bytes after which the pattern begins anew; 128 without a swizzle."""
        return LINE * (self.span // self.atom if self.span else 1)

    @property
    def granule(self) -> int:
        """Largest number of aligned bytes that are never taken apart, at most 16."""
        return 8 if self.flip else 16


NONE = Swizzle()
SWIZZLE_32B = Swizzle(32)
SWIZZLE_64B = Swizzle(64)
SWIZZLE_128B = Swizzle(128)
SWIZZLE_128B_ATOM_32B = Swizzle(128, 32)
SWIZZLE_128B_ATOM_32B_FLIP_8B = Swizzle(128, 32, flip=True)
SWIZZLE_128B_ATOM_64B = Swizzle(128, 64)


def swizzled(swizzle: Swizzle, address: Array) -> Array:
    """Return where the byte at each unswizzled shared-memory address (int64) really is.

    The function is its own inverse.
    """
    if not swizzle.span:
        return address
    line = address >> 7
    result: Array = address ^ ((line & (swizzle.span // swizzle.atom - 1)) * swizzle.atom)
    if swizzle.flip:
        result = result ^ ((line & 1) << 3)
    return result


def place(swizzle: Swizzle, base: int, offsets: Array) -> Array:
    """Return the addresses of tile offsets (int64) in a tile whose unswizzled base address is `base`."""
    return swizzled(swizzle, np.int64(base) + offsets)
