"""ldmatrix and stmatrix: 8 by 8 matrices of 16-bit elements between shared memory and the lanes of a warp
(PTX ISA 9.7.14.5.15 and 9.7.14.5.16).

Lane `8 * j + r` has the address of row r of matrix j, 16 bytes in shared memory. In registers, lane
`4 * r + c` holds elements 2c and 2c + 1 of row r, or with `.trans` of column r. Addresses of the other lanes
are not looked at.
"""

from __future__ import annotations

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
    site: Site, address: Array, count: int, transposed: bool, co: Cohort, ck: Chunk, item: Instruction
) -> tuple[Array, ...]:
    """ldmatrix.m8n8: return `count` registers, uint32 (rows, columns)."""
    w = check_warps(co, ck, item)
    rows = co.shape[0]
    if not w.dense and not bool((w.position[:, : 8 * count] >= 0).all()):
        return tuple(np.full((1, 1), 0x7FF7DEAD, np.uint32) for _ in range(count))
    some, at = _addressing(w, address, 8 * count, co)
    function = runtime.load_shared if site.space == "shared" else runtime.load_generic
    raw = function(site, at, some, ck)
    raw = np.broadcast_to(raw, (rows, some.shape[1]))
    if w.dense:
        raw = raw.reshape(rows, w.groups, 8 * count)
    else:
        place = np.cumsum(w.lane < 8 * count) - 1  # column among the addressing lanes
        raw = raw[:, place[w.position[:, : 8 * count]]]
    words = np.ascontiguousarray(raw).view(np.uint32).reshape(rows, w.groups, count, 32)
    if transposed:
        halves = words.view(np.uint16).reshape(rows, w.groups, count, 8, 8)
        turned = np.ascontiguousarray(halves.swapaxes(3, 4))
        words = turned.view(np.uint32).reshape(rows, w.groups, count, 32)
    return tuple(by_lane(w, words[:, :, j]) for j in range(count))


def store(
    site: Site, address: Array, values: tuple[Array, ...], transposed: bool, co: Cohort, ck: Chunk,
    item: Instruction,
) -> None:  # fmt: skip
    """stmatrix.m8n8: the inverse of `load`."""
    w = check_warps(co, ck, item)
    rows, count = co.shape[0], len(values)
    if not w.dense and not bool((w.position[:, : 8 * count] >= 0).all()):
        return
    words = np.stack([by_warp(w, v, rows) for v in values], axis=2)
    if transposed:
        halves = words.view(np.uint16).reshape(rows, w.groups, count, 8, 8)
        words = np.ascontiguousarray(halves.swapaxes(3, 4)).view(np.uint32)
    raw = words.reshape(rows, w.groups, 8 * count, 4).view(RAW[ROW])[..., 0]
    some, at = _addressing(w, address, 8 * count, co)
    if w.dense:
        value = raw.reshape(rows, -1)
    else:
        keep = w.lane < 8 * count
        value = raw[:, w.group[keep], w.lane[keep]]
    at = np.broadcast_to(at, some.shape)
    function = runtime.store_shared if site.space == "shared" else runtime.store_generic
    function(site, at, np.ascontiguousarray(value), some, ck)
