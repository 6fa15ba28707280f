"""ldmatrix and stmatrix: matrices between shared memory and the lanes of a warp (PTX ISA 9.7.14.5.15 and
9.7.14.5.16).

A row is 16 bytes in shared memory; lane `rows * j + r` has the address of row r of matrix j. Addresses of the
other lanes are not looked at. In registers:

- `m8n8`, 16-bit elements: lane `4 * r + c` holds elements 2c and 2c + 1 of row r, or with `.trans` of
  column r.
- `m8n16`, 8-bit elements unpacked from 4 or 6 bits, which become the low bits: lane `4 * r + c` holds
  elements 4c to 4c + 3 of row r.
- `m16n16.trans`, 8-bit elements (or unpacked): lane `4 * n + c` holds rows 4c to 4c + 3 of column n in the
  first register of a matrix and of column n + 8 in the second.
- `m16n8.trans` (stores), 8-bit elements: lane `4 * g + c` holds elements 2c and 2c + 1 of rows g and g + 8,
  as in an accumulator of `mma`; a column is a row in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator import runtime
from workbench.simulator.access import RAW, Site
from workbench.simulator.matrix import by_lane, by_warp, check_warps
from workbench.simulator.warp import Lanes

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
ROW = 16
"""Bytes of a row."""


@dataclass(frozen=True, slots=True)
class Move:
    """One form of ldmatrix or stmatrix."""

    shape: str
    """m8n8, m8n16, m16n16 or m16n8."""
    count: int
    transposed: bool
    bits: int
    """Bits of an element in shared memory: 16, 8, 6 or 4."""

    @property
    def registers(self) -> int:
        """Registers a lane."""
        return self.count * (2 if self.shape == "m16n16" else 1)

    @property
    def lanes(self) -> int:
        """Lanes whose addresses count."""
        return self.count * (16 if self.shape == "m16n16" else 8)


def _addressing(w: Lanes, address: Array, count: int, co: Cohort) -> tuple[Cohort, Array]:
    """Return the lanes whose addresses count, and those addresses."""
    if count == 32:
        return co, address
    keep = (w.lane < count)[None, :]
    some, _ = co.split(keep, frozenset(), frozenset())
    assert some is not None, "a warp without its first lanes"
    if address.shape[1] > 1:
        address = np.broadcast_to(address, (address.shape[0], len(w.lane)))[:, keep[0]]
    return some, address


def load(
    site: Site, address: Array, form: Move, co: Cohort, ck: Chunk, item: Instruction
) -> tuple[Array, ...]:
    """ldmatrix: return the registers, uint32 (rows, columns)."""
    w = check_warps(co, ck, item)
    rows, lanes = co.shape[0], form.lanes
    if not w.dense and not bool((w.position[:, :lanes] >= 0).all()):
        return tuple(np.full((1, 1), 0x7FF7DEAD, np.uint32) for _ in range(form.registers))
    some, at = _addressing(w, address, lanes, co)
    function = runtime.load_shared if site.space == "shared" else runtime.load_generic
    raw = function(site, at, some, ck)
    raw = np.broadcast_to(raw, (rows, some.shape[1]))
    if w.dense:
        raw = raw.reshape(rows, w.groups, lanes)
    else:
        place = np.cumsum(w.lane < lanes) - 1  # column among the addressing lanes
        raw = raw[:, place[w.position[:, :lanes]]]
    octets = np.ascontiguousarray(raw).view(np.uint8).reshape(rows, w.groups, lanes, ROW)
    if form.bits < 8:
        octets = _unpacked(octets, form.bits)
    if form.transposed:
        kind = np.uint16 if form.bits == 16 else np.uint8
        edge = ROW // np.dtype(kind).itemsize
        elements = octets.view(kind).reshape(rows, w.groups, form.count, edge, edge)
        octets = np.ascontiguousarray(elements.swapaxes(3, 4))
    words = octets.view(np.uint32).reshape(rows, w.groups, form.registers, 32)
    return tuple(by_lane(w, words[:, :, j]) for j in range(form.registers))


def _unpacked(octets: Array, bits: int) -> Array:
    """Return 16 elements of `bits` bits at the start of each row as 16 bytes."""
    flags = np.unpackbits(octets[..., : 2 * bits], axis=-1, bitorder="little")
    flags = flags.reshape(*octets.shape[:-1], ROW, bits)
    padded = np.zeros((*flags.shape[:-1], 8), np.uint8)
    padded[..., :bits] = flags
    return np.packbits(padded, axis=-1, bitorder="little")[..., 0]


def store(
    site: Site, address: Array, values: tuple[Array, ...], form: Move, co: Cohort, ck: Chunk,
    item: Instruction,
) -> None:  # fmt: skip
    """stmatrix: the inverse of `load`."""
    w = check_warps(co, ck, item)
    rows, lanes = co.shape[0], form.lanes
    if not w.dense and not bool((w.position[:, :lanes] >= 0).all()):
        return
    words = np.stack([by_warp(w, v, rows) for v in values], axis=2)
    if form.shape == "m16n8":
        octets = words.view(np.uint8).reshape(rows, w.groups, form.count, 8, 4, 2, 2)
        words = np.ascontiguousarray(octets.transpose(0, 1, 2, 4, 6, 5, 3))
    elif form.transposed:
        halves = words.view(np.uint16).reshape(rows, w.groups, form.count, 8, 8)
        words = np.ascontiguousarray(halves.swapaxes(3, 4))
    raw = words.reshape(rows, w.groups, lanes, -1).view(np.uint32).view(RAW[ROW])[..., 0]
    some, at = _addressing(w, address, lanes, co)
    if w.dense:
        value = raw.reshape(rows, -1)
    else:
        keep = w.lane < lanes
        value = raw[:, w.group[keep], w.lane[keep]]
    at = np.broadcast_to(at, some.shape)
    function = runtime.store_shared if site.space == "shared" else runtime.store_generic
    function(site, at, np.ascontiguousarray(value), some, ck)
