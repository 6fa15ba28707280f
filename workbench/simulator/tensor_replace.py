"""tensormap.replace and tensormap.cp_fenceproxy: maps edited by kernels (PTX ISA 9.7.9.28, 9.7.13)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.access import SHARED_BASE, SHARED_WINDOW, WINDOW, Site
from workbench.simulator.memory import BASE
from workbench.simulator.tensormap import FIELDS as FIELDS
from workbench.simulator.tensormap import SIZE, replace

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
_ALIGN = 64


def _spot(
    site: Site, address: int, lane: int, row: int, co: Cohort, ck: Chunk, write: bool
) -> tuple[Array, Array] | None:
    """Return the 128 bytes of a map and their written flags as views; None after a finding."""
    space = site.space
    if space == "generic":
        shared = SHARED_WINDOW <= address < SHARED_WINDOW + WINDOW
        space, address = ("shared", address - SHARED_WINDOW) if shared else ("global", address)
    near = site if space == "global" else site.at_shared()
    mask = (np.arange(co.lanes) == lane).reshape(co.shape)
    where = np.full(co.shape, address, np.int64)
    if address % _ALIGN:
        text = f"a tensor map at address {address:#x}, which is no multiple of {_ALIGN}"
        ck.report("misaligned", site.instruction, text, co, mask)
        return None
    if space == "shared":
        offset, room = address - SHARED_BASE, ck.space_shared
        if offset < 0 or offset + SIZE > room.size:
            ck.fault("out-of-bounds", near, co, mask, where)
            return None
        at = row * room.stride + offset
        return room.data[1][at : at + SIZE], room.shadow[1][at : at + SIZE]
    memory = ck.launch.memory
    a = memory.find(address - BASE)
    if a is None or address - BASE + SIZE > a.end:
        ck.fault("out-of-bounds", near, co, mask, where)
        return None
    if write and not a.writable:
        ck.fault("read-only-write", near, co, mask, where)
        return None
    at = address - BASE
    return memory.bytes[at : at + SIZE], memory.shadow[at : at + SIZE]


def tensormap_replace(
    site: Site, address: Array, name: str, ordinal: int, value: Array, co: Cohort, ck: Chunk
) -> None:
    """tensormap.replace: change one field of a map in memory, lane after lane."""
    rows = np.broadcast_to(co.rows(), co.shape).ravel().tolist()
    places = np.broadcast_to(address + site.offset, co.shape).ravel().tolist()
    values = np.broadcast_to(value, co.shape).ravel().tolist()
    for lane, (row, place, new) in enumerate(zip(rows, places, values, strict=True)):
        spot = _spot(site, place, lane, row, co, ck, write=True)
        if spot is not None:
            raw = bytearray(spot[0].tobytes())
            replace(raw, name, ordinal, new)
            spot[0][:] = np.frombuffer(raw, np.uint8)
    ck.progress += 1


def tensormap_copy(write: Site, to: Array, read: Site, start: Array, co: Cohort, ck: Chunk) -> None:
    """tensormap.cp_fenceproxy: the warp copies one map from shared to global memory."""
    rows = np.broadcast_to(co.rows(), co.shape).ravel().tolist()
    targets = np.broadcast_to(to + write.offset, co.shape).ravel().tolist()
    sources = np.broadcast_to(start + read.offset, co.shape).ravel().tolist()
    for row, target, source in sorted(set(zip(rows, targets, sources, strict=True))):
        lane = next(k for k in range(co.lanes) if (rows[k], targets[k], sources[k]) == (row, target, source))
        old = _spot(read, source, lane, row, co, ck, write=False)
        new = _spot(write, target, lane, row, co, ck, write=True)
        if old is not None and new is not None:
            new[0][:], new[1][:] = old[0], old[1]
    ck.progress += 1


NAMES: dict[str, Any] = {"tensormap_replace": tensormap_replace, "tensormap_copy": tensormap_copy}
