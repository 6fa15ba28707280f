"""cp.async.bulk.tensor and its relatives in tile mode (PTX ISA 9.7.9.27).

Loads complete when their mbarrier is waited for, stores when their bulk group is: see `pending`. A load marks
its destination unwritten when it is issued, a store takes its source when the queue asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.access import (
    PARAM_WINDOW,
    SHARED_BASE,
    SHARED_WINDOW,
    WINDOW,
    Site,
)
from workbench.simulator.cluster import RANK_SHIFT
from workbench.simulator.memory import BASE
from workbench.simulator.pending import Operation, cohort_of, lanes_of
from workbench.simulator.program import UnsupportedInstruction
from workbench.simulator.proxies import RULE
from workbench.simulator.tensor_box import SHARED_ALIGN, Box, Window, strided
from workbench.simulator.tensor_reduce import reduced, reduction_known
from workbench.simulator.tensormap import SIZE, TensorMapError, decode

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
_MAP_ALIGN = 64


@lru_cache(maxsize=512)
def box_of(raw: bytes) -> Box:
    """Return the box of a tensor map given as bytes.

    Raises:
        TensorMapError: see `tensormap.decode`.
    """
    return Box(decode(raw))


@dataclass(frozen=True, slots=True)
class Tile:
    """One lane's box, placed in global memory.

    Attributes:
        box: its geometry.
        window: the part inside the tensor.
        start: offset of the window's first byte in global memory.
        initialized: the buffer is known to hold no unwritten byte.
    """

    box: Box
    window: Window
    start: int
    initialized: bool


# -- tensor maps and tiles -----------------------------------------------------------------------


def map_bytes(site: Site, address: int, co: Cohort, ck: Chunk) -> bytes | None:
    """Return the 128 bytes at a generic address; None after a finding."""
    place = np.full((1, 1), address, np.int64)
    every = np.ones((1, 1), bool)
    if address % _MAP_ALIGN:
        text = f"a tensor map at address {address:#x}, which is no multiple of {_MAP_ALIGN}"
        ck.report("misaligned", site.instruction, text, co, every)
        return None
    if PARAM_WINDOW <= address < PARAM_WINDOW + WINDOW:
        at = address - PARAM_WINDOW
        if at + SIZE > len(ck.launch.parameters):
            ck.fault("out-of-bounds", site.inside("param"), co, every, place - PARAM_WINDOW)
            return None
        return bytes(ck.launch.parameters[at : at + SIZE])
    if SHARED_WINDOW <= address < PARAM_WINDOW:
        raise UnsupportedInstruction(site.instruction, "a tensor map in shared or local memory")
    at = address - BASE
    memory = ck.launch.memory
    a = memory.find(at)
    if a is None or at + SIZE > a.end:
        ck.fault("out-of-bounds", site, co, every, place)
        return None
    if not a.initialized and not memory.shadow[at : at + SIZE].all():
        ck.fault("uninitialized-read", site, co, every, place)
        return None
    return memory.bytes[at : at + SIZE].tobytes()


def _boxes(site: Site, maps: Array, rank: int, co: Cohort, ck: Chunk) -> list[Box | None]:
    """Return the box of each lane's map."""
    found: dict[int, Box | None] = {}
    for address in np.unique(maps).tolist():
        raw = map_bytes(site, address, co, ck)
        try:
            box = box_of(raw) if raw is not None else None
        except TensorMapError as e:
            raise UnsupportedInstruction(site.instruction, str(e)) from e
        if box is not None and box.tensor.rank != rank:
            text = f"a {rank}d copy with a tensor map of rank {box.tensor.rank}"
            ck.report("out-of-bounds", site.instruction, text, co, maps.reshape(co.shape) == address)
            box = None
        if box is not None and box.tensor.address % (32 if box.tensor.element.pitch == 16 else 16):
            text = f"the tensor map's global address {box.tensor.address:#x} is not aligned to 16 (32) bytes"
            ck.report("misaligned", site.instruction, text, co, maps.reshape(co.shape) == address)
            box = None
        found[address] = box
    return [found[int(m)] for m in maps.tolist()]


def _tiles(
    site: Site, maps: Array, coordinates: tuple[Array, ...], co: Cohort, ck: Chunk, write: bool
) -> list[Tile | None]:
    """Return each lane's tile; None where a finding says why there is none."""

    def flat(value: Array) -> Array:
        result: Array = np.broadcast_to(value, co.shape).ravel()
        return result

    addresses = flat(maps)
    origins = np.stack([flat(c) for c in coordinates], axis=1).tolist()
    tiles: list[Tile | None] = []
    memory = ck.launch.memory
    bad: dict[str, list[tuple[int, int]]] = {}
    for lane, box in enumerate(_boxes(site, addresses, len(coordinates), co, ck)):
        tiles.append(None)
        if box is None:
            continue
        try:
            window = box.window(tuple(origins[lane]))
        except TensorMapError as e:
            raise UnsupportedInstruction(site.instruction, str(e)) from e
        start = box.tensor.address + window.start - BASE
        if not window.shape:
            tiles[-1] = Tile(box, window, 0, True)
            continue
        a = memory.find(start)
        if a is None or start + window.span > a.end:
            bad.setdefault("out-of-bounds", []).append((lane, start if a is None else a.end))
        elif write and not a.writable:
            bad.setdefault("read-only-write", []).append((lane, start))
        else:
            tiles[-1] = Tile(box, window, start, a.initialized)
    for rule, lanes in bad.items():
        mask, where = np.zeros(co.lanes, bool), np.zeros(co.lanes, np.int64)
        for lane, at in lanes:
            mask[lane], where[lane] = True, at + BASE
        ck.fault(rule, site, co, mask.reshape(co.shape), where.reshape(co.shape))
    return tiles


def _shared(
    site: Site, address: Array, tiles: list[Tile | None], co: Cohort, ck: Chunk
) -> tuple[Array, Array]:
    """Return for each lane the CTA row and shared-memory offset of its box; tiles that do not fit go."""
    rows, offsets, wrong = ck.cluster.locate(site, address, co)
    rows = np.broadcast_to(rows, co.shape).ravel()
    offsets = np.broadcast_to(offsets, co.shape).ravel()
    bad = np.zeros(co.lanes, bool) if wrong is None else np.broadcast_to(wrong, co.shape).ravel()
    size = ck.space_shared.size
    skewed, outside = np.zeros(co.lanes, bool), np.zeros(co.lanes, bool)
    for lane, tile in enumerate(tiles):
        if tile is None:
            continue
        if bad[lane]:
            tiles[lane] = None
            continue
        if offsets[lane] % SHARED_ALIGN:
            skewed[lane] = True
            tiles[lane] = None
            continue
        _, low, high = tile.box.granules(int(offsets[lane]) + SHARED_BASE)
        if offsets[lane] + low < 0 or offsets[lane] + high > size:
            outside[lane] = True
            tiles[lane] = None
    if skewed.any():
        text = f"the shared-memory address of a tensor copy is no multiple of {SHARED_ALIGN}"
        ck.report("misaligned", site.instruction, text, co, skewed.reshape(co.shape))
    if outside.any():
        text = f"the box of a tensor copy does not fit into the {size} bytes of shared memory"
        ck.report("out-of-bounds", site.instruction, text, co, outside.reshape(co.shape))
    return rows, offsets


def _index(tile: Tile, row: int, offset: int, ck: Chunk) -> tuple[Array, int]:
    """Return the items of the box in the chunk's shared memory, and their size in bytes."""
    relative, _, _ = tile.box.granules(offset + SHARED_BASE)
    size = tile.box.granule
    return (relative + (row * ck.space_shared.stride + offset)) >> (size.bit_length() - 1), size


def _lines(
    site: Site, maps: Array, coordinates: tuple[Array, ...], lines: int, co: Cohort, ck: Chunk, write: bool
) -> list[list[Tile | None]]:
    """Return the tiles of each lane: one list, or one for each row of gather4 and scatter4."""
    if lines == 1:
        return [_tiles(site, maps, coordinates, co, ck, write)]
    groups = [_tiles(site, maps, (coordinates[0], row), co, ck, write) for row in coordinates[1:]]
    for tile in groups[0]:
        if tile is not None and tile.box.tensor.box[1] != 1:
            reason = f"gather4 or scatter4 with a box of {tile.box.tensor.box[1]} rows: it must be 1"
            raise UnsupportedInstruction(site.instruction, reason)
    return groups


def _lines_fit(site: Site, groups: list[list[Tile | None]], offsets: Array, co: Cohort, ck: Chunk) -> None:
    """Report lanes whose further rows lie outside shared memory, and take their tiles away."""
    outside = np.zeros(co.lanes, bool)
    for lane, tile in enumerate(groups[0]):
        if tile is not None and len(groups) > 1:
            end = int(offsets[lane]) + (len(groups) - 1) * tile.box.row
            _, low, high = tile.box.granules(end + SHARED_BASE)
            outside[lane] = end + low < 0 or end + high > ck.space_shared.size
            if outside[lane]:
                groups[0][lane] = None
    if outside.any():
        text = f"the box of a tensor copy does not fit into the {ck.space_shared.size} bytes of shared memory"
        ck.report("out-of-bounds", site.instruction, text, co, outside.reshape(co.shape))


def _pieces(groups: list[list[Tile | None]], lane: int) -> list[tuple[Tile, int]]:
    """Return the tiles of a lane, each with its distance in shared memory from the first."""
    found = [(tiles[lane], i) for i, tiles in enumerate(groups)]
    return [(tile, i * tile.box.row) for tile, i in found if tile is not None]


# -- operations ----------------------------------------------------------------------------------


class TensorLoad(Operation):
    """Boxes from global to shared memory; an element is a lane and a destination CTA."""

    def __init__(
        self, site: Site, lanes: Array, slots: Array, tiles: list[Tile], rows: Array, offsets: Array,
        ck: Chunk,
    ) -> None:  # fmt: skip
        super().__init__(
            site.instruction, lanes, slots, np.array([t.box.nbytes for t in tiles], np.int64).reshape(-1)
        )
        self.site, self.tiles, self.rows, self.offsets = site, tiles, rows, offsets
        self._blocks: dict[int, Array] = {}
        space = ck.space_shared
        for tile, row, offset in zip(tiles, rows.tolist(), offsets.tolist(), strict=True):
            _, low, high = tile.box.granules(offset + SHARED_BASE)
            space.unsettle(offset + low, offset + high, ck)
            index, size = _index(tile, row, offset, ck)
            space.shadow[size][index] = 0
            space.data[size][index] = np.full(size, 0xFF, np.uint8).view(space.data[size].dtype)[0]

    def read(self, ck: Chunk, chosen: Array) -> None:
        """Read the boxes from global memory."""
        memory = ck.launch.memory
        for k in chosen.tolist():
            tile = self.tiles[k]
            block = tile.box.empty()
            if tile.window.shape:
                block[tile.window.inside] = strided(memory.bytes, tile.start, tile.window)
                if not tile.initialized and ck.options.check_memory:
                    written = strided(memory.shadow, tile.start, tile.window)
                    if not written.all():
                        first = np.argwhere(written == 0)[0]
                        at = tile.start + int(first @ np.array(tile.window.steps))
                        one = cohort_of(ck, self.lanes[k : k + 1])
                        where = np.full((1, 1), at + BASE, np.int64)
                        ck.fault("uninitialized-read", self.site, one, np.ones((1, 1), bool), where)
            self._blocks[k] = block

    def apply(self, ck: Chunk, chosen: Array) -> None:
        """Write the boxes to shared memory."""
        space = ck.space_shared
        for k in chosen.tolist():
            block = self._blocks.pop(k)
            index, size = _index(self.tiles[k], int(self.rows[k]), int(self.offsets[k]), ck)
            space.data[size][index] = block.reshape(-1).view(space.data[size].dtype)
            space.shadow[size][index] = np.ones(size, np.uint8).view(space.shadow[size].dtype)[0]


class TensorStore(Operation):
    """Boxes from shared to global memory, with or without a reduction; a member of a bulk group."""

    def __init__(
        self,
        site: Site,
        lanes: Array,
        tiles: list[Tile],
        rows: Array,
        offsets: Array,
        reduction: str,
        ck: Chunk,
    ) -> None:
        super().__init__(site.instruction, lanes)
        self.site, self.tiles, self.rows, self.offsets = site, tiles, rows, offsets
        self.reduction = reduction
        self._blocks: dict[int, Array] = {}
        self._issued: list[Array] = []
        """What the sources held when the copy was issued."""
        if ck.options.check_memory:
            for tile, row, offset in zip(tiles, rows.tolist(), offsets.tolist(), strict=True):
                index, size = _index(tile, row, offset, ck)
                self._issued.append(ck.space_shared.data[size].take(index).view(np.uint8))

    def read(self, ck: Chunk, chosen: Array) -> None:
        """Take the boxes from shared memory."""
        space = ck.space_shared
        for k in chosen.tolist():
            tile, row, offset = self.tiles[k], int(self.rows[k]), int(self.offsets[k])
            index, size = _index(tile, row, offset, ck)
            block = np.ascontiguousarray(space.data[size].take(index)).view(np.uint8)
            self._blocks[k] = block.reshape(tile.box.shape)
            if not tile.window.shape or not ck.options.check_memory:
                continue
            flags = np.ascontiguousarray(space.shadow[size].take(index)).view(np.uint8)
            inside = flags.reshape(tile.box.shape)[tile.window.inside]
            changed = (self._issued[k].reshape(tile.box.shape) != self._blocks[k])[tile.window.inside]
            if changed.any() and not self.records:
                one = cohort_of(ck, self.lanes[k : k + 1])
                text = (
                    "the source of a tensor copy changes in shared memory before the copy has read it: no "
                    "cp.async.bulk.wait_group.read, or no barrier after it, before the tile is written again"
                )
                ck.report("buffer-reuse", self.item, text, one, np.ones((1, 1), bool))
            if not inside.all():
                byte = int(np.flatnonzero(flags == 0)[0])
                at = (int(index[byte // size]) * size + byte % size) - row * space.stride + SHARED_BASE
                one = cohort_of(ck, self.lanes[k : k + 1])
                near = self.site.at_shared()
                where = np.full((1, 1), at, np.int64)
                ck.fault("uninitialized-read", near, one, np.ones((1, 1), bool), where)

    def apply(self, ck: Chunk, chosen: Array) -> None:
        """Write the part of the boxes that is inside the tensor."""
        memory = ck.launch.memory
        for k in chosen.tolist():
            tile, block = self.tiles[k], self._blocks.pop(k)
            if not tile.window.shape:
                continue
            new = block[tile.window.inside]
            there = strided(memory.bytes, tile.start, tile.window)
            if self.reduction:
                if not tile.initialized and ck.options.check_memory:
                    written = strided(memory.shadow, tile.start, tile.window)
                    if not written.all():
                        one = cohort_of(ck, self.lanes[k : k + 1])
                        first = np.argwhere(written == 0)[0]
                        at = tile.start + int(first @ np.array(tile.window.steps)) + BASE
                        where = np.full((1, 1), at, np.int64)
                        ck.fault("uninitialized-read", self.site, one, np.ones((1, 1), bool), where)
                new = reduced(self.reduction, tile.box.tensor.element, there, new)
            there[...] = new
            strided(memory.shadow, tile.start, tile.window)[...] = 1


# -- what generated code calls -------------------------------------------------------------------


def tensor_load(
    where: Site, maps: Array, coordinates: tuple[Array, ...], to: Site, target: Array, signal: Site,
    barrier: Array, mask: Array | None, pair: bool, leader: bool, lines: int, co: Cohort, ck: Chunk,
) -> None:  # fmt: skip
    """cp.async.bulk.tensor to shared memory.

    Args:
        where: site of the tensor map; `maps` are its generic addresses.
        coordinates: of the box, dimension 0 first (int32).
        to: site of the destination `target`, a shared address (int64).
        signal: site of the mbarrier `barrier`, a shared address (int64).
        mask: destination CTAs of a multicast by rank.
        pair: `.cta_group::2`: the mbarrier may be in the other CTA of the pair.
        leader: the mbarrier's address had its bit 24 cleared: it is in the even CTA of the pair.
        lines: 4 in the mode `.tile::gather4`, whose coordinates are a column and four rows; else 1.
        co: the issuing lanes.
        ck: their chunk.
    """
    groups = _lines(where, maps, coordinates, lines, co, ck, write=False)
    tiles = groups[0]
    rows, offsets = _shared(to, target, tiles, co, ck)
    _lines_fit(to, groups, offsets, co, ck)
    banks, size = ck.mbarriers.banks, ck.cluster.size
    if leader and size > 1:
        even = co.special("%cluster_ctarank").astype(np.int64) & ~1
        barrier = np.where(barrier >> RANK_SHIFT, barrier, barrier | (even + 1) << RANK_SHIFT)
    slots = np.broadcast_to(ck.mbarriers.locate(signal, barrier, co), co.shape).ravel()
    column, home = slots // banks, slots % banks
    lanes = lanes_of(co)
    masks = np.broadcast_to(mask, co.shape).ravel().tolist() if mask is not None else None
    elements: list[tuple[int, Tile, int, int, int]] = []

    def complain(rule: str, lane: int, text: str) -> None:
        ck.report(rule, where.instruction, text, co, (np.arange(co.lanes) == lane).reshape(co.shape))

    for lane, tile in enumerate(tiles):
        if tile is None or slots[lane] < 0:
            continue
        if tile.box.tensor.element.name.startswith("tf32"):
            raise UnsupportedInstruction(where.instruction, "rounding of a tf32 tensor map is not documented")
        if tile.box.tensor.swizzle.atom == 64:
            raise UnsupportedInstruction(
                where.instruction, "a load with a swizzle of 64-byte atoms traps on sm_100"
            )
        row = int(rows[lane])
        first = row - row % size
        if masks is None:
            if (not pair and home[lane] != row) or (pair and home[lane] | 1 != row | 1):
                complain(
                    "mbarrier-phase", lane, "the mbarrier of a tensor copy is not in its destination's CTA"
                )
                continue
            for line, shift in _pieces(groups, lane):
                elements.append((lane, line, row, int(slots[lane]), shift))
            continue
        if masks[lane] >> size or not masks[lane]:
            complain("out-of-bounds", lane, f"a multicast to CTAs {masks[lane]:#x} of a cluster of {size}")
        for r in range(size):
            if masks[lane] >> r & 1:
                signalled = (r & ~1 | int(home[lane]) % size & 1) if pair else r
                slot = int(column[lane]) * banks + first + signalled
                for line, shift in _pieces(groups, lane):
                    elements.append((lane, line, first + r, slot, shift))
    if not elements:
        return
    which = np.array([e[0] for e in elements])
    ck.launch.async_bytes += sum(t.box.nbytes for k in set(which.tolist()) for t, _ in _pieces(groups, k))
    operation = TensorLoad(
        where, lanes[which], np.array([e[3] for e in elements], np.int64), [e[1] for e in elements],
        np.array([e[2] for e in elements], np.int64),
        offsets[which] + np.array([e[4] for e in elements], np.int64), ck,
    )  # fmt: skip
    _order(operation, ck, load=True)
    ck.asyncs.issue(operation)


def _order(operation: TensorLoad | TensorStore, ck: Chunk, *, load: bool) -> None:
    """Show what an operation reads and writes to happens-before."""
    if ck.order is None:
        return
    tiles = operation.tiles
    items = [
        _index(tile, row, offset, ck)
        for tile, row, offset in zip(tiles, operation.rows.tolist(), operation.offsets.tolist(), strict=True)
    ]
    if not load:
        ck.order.items(operation, False, items)
    starts, sizes, elements = [], [], []
    for k, tile in enumerate(tiles):
        a = ck.launch.memory.find(tile.start)
        shape = tile.window.shape
        if not shape or a is None or not a.writable:
            continue
        at = np.zeros(shape[:-1], np.int64)
        for axis, (count, step) in enumerate(zip(shape[:-1], tile.window.steps[:-1], strict=True)):
            at += (np.arange(count) * step).reshape([-1 if i == axis else 1 for i in range(at.ndim)])
        starts.append(at.ravel() + tile.start)
        sizes.append(np.full(at.size, shape[-1], np.int64))
        elements.append(np.full(at.size, k))
    if starts:
        ck.order.extents(
            operation, not load, False, np.concatenate(starts), np.concatenate(sizes),
            np.concatenate(elements), atomic=not load and bool(operation.reduction),  # type: ignore[union-attr]
        )  # fmt: skip
    if load:
        ck.order.items(operation, True, items)


def tensor_store(
    where: Site, maps: Array, coordinates: tuple[Array, ...], origin: Site, source: Array, reduction: str,
    lines: int, co: Cohort, ck: Chunk,
) -> None:  # fmt: skip
    """cp.async.bulk.tensor to global memory, or cp.reduce.async.bulk.tensor with `reduction`.

    `lines` is 4 in the mode `.tile::scatter4`, whose coordinates are a column and four rows; else 1.
    """
    groups = _lines(where, maps, coordinates, lines, co, ck, write=True)
    tiles = groups[0]
    rows, offsets = _shared(origin, source, tiles, co, ck)
    _lines_fit(origin, groups, offsets, co, ck)
    chosen: list[int] = []
    for lane, tile in enumerate(tiles):
        if tile is None:
            continue
        element = tile.box.tensor.element
        if tile.box.tensor.swizzle.flip or element.pitch != element.data:
            raise UnsupportedInstruction(where.instruction, f"stores .{element.name} or with an 8-byte flip")
        if reduction and not reduction_known(reduction, element):
            raise UnsupportedInstruction(where.instruction, f"reduction .{reduction} on .{element.name}")
        chosen.append(lane)
    if chosen:
        pieces = [(lane, *piece) for lane in chosen for piece in _pieces(groups, lane)]
        which, good = np.array([p[0] for p in pieces]), [p[1] for p in pieces]
        at = offsets[which] + np.array([p[2] for p in pieces], np.int64)
        ck.launch.async_bytes += sum(t.box.nbytes for t in good)
        _check_fence(where, good, which, rows[which], at, co, ck)
        operation = TensorStore(where, lanes_of(co)[which], good, rows[which], at, reduction, ck)
        _order(operation, ck, load=False)
        ck.asyncs.issue(operation)


def _check_fence(
    where: Site, tiles: list[Tile], lanes: Array, rows: Array, offsets: Array, co: Cohort, ck: Chunk
) -> None:
    """Report stores whose source ordinary stores wrote with no proxy fence since."""
    proxies = ck.space_shared.proxies
    if proxies is None:
        return
    for tile, lane, row, offset in zip(tiles, lanes.tolist(), rows.tolist(), offsets.tolist(), strict=True):
        if tile.window.shape:
            index, size = _index(tile, row, offset, ck)
            byte = proxies.unfenced(row, index * size >> 4)
            if byte is not None:
                mask = (np.arange(co.lanes) == lane).reshape(co.shape)
                ck.report(RULE, where.instruction, proxies.text(byte), co, mask)


def tensor_prefetch(where: Site, maps: Array, rank: int, co: Cohort, ck: Chunk) -> None:
    """cp.async.bulk.prefetch.tensor: no effect, but the map must be good."""
    _boxes(where, np.broadcast_to(maps, co.shape).ravel(), rank, co, ck)


NAMES: dict[str, Any] = {
    "tensor_load": tensor_load,
    "tensor_store": tensor_store,
    "tensor_prefetch": tensor_prefetch,
}
