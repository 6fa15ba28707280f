"""What warp-synchronous instructions do, on cohorts with whole or partial warps (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.adversary import Pick

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
FULL = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Lanes:
    """How the columns of a cohort fall into warps; column j is lane `lane[j]` of group `group[j]`."""

    lane: Array
    group: Array
    groups: int
    position: Array
    """Column of each (group, lane), -1 where the lane is absent; (groups, 32)."""
    active: Array
    """uint32 mask of the lanes present, a group."""
    dense: bool
    """Every group has all 32 lanes, in order: columns reshape to (groups, 32)."""


def lanes_of(co: Cohort) -> Lanes:
    """Return the warps of a cohort (cached in it)."""
    cached = co._cache.get("lanes")
    if cached is not None:
        return cached  # type: ignore[no-any-return]
    threads = co.threads
    lane = (threads & 31).astype(np.int64)
    warp = threads >> 5
    if not co.rectangular:
        warp = warp + co.ctas * co.chunk.launch.warps
    _, group = np.unique(warp, return_inverse=True)
    groups = int(group.max()) + 1
    position = np.full((groups, 32), -1, np.int64)
    position[group, lane] = np.arange(len(threads))
    present = position >= 0
    active = (present.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
    dense = bool(present.all() and (position.ravel() == np.arange(len(threads))).all())
    result = Lanes(lane, group, groups, position, active, dense)
    co._cache["lanes"] = result
    return result


def check_mask(mask: Array | None, co: Cohort, ck: Chunk, item: Instruction) -> None:
    """Report lanes that the member mask leaves out, and named lanes that are alive elsewhere."""
    w = lanes_of(co)
    if w.dense and mask is None:
        return
    active = w.active[w.group][None, :]
    m = np.full((1, 1), FULL) if mask is None else mask
    outside = (m >> w.lane.astype(np.uint32)[None, :]) & np.uint32(1) == 0
    if outside.any():
        text = "a lane executes a warp-synchronous instruction whose member mask leaves it out"
        ck.report("membermask", item, text, co, outside)
    missing = m & ~active
    if missing.any():
        absent = missing & ck.living_masks(co)
        if absent.any():
            text = "lanes that the member mask names are elsewhere in the program"
            ck.report("warp-divergence", item, text, co, absent != 0)


def _spread(w: Lanes, value: Array) -> Array:
    """Return (rows, groups, 32) from (rows, columns); absent lanes repeat column 0."""
    if value.shape[1] == 1:
        return np.broadcast_to(value[:, :, None], (value.shape[0], w.groups, 32))
    if w.dense:
        return value.reshape(value.shape[0], w.groups, 32)
    return value[:, np.maximum(w.position, 0)]


def _gather(w: Lanes, spread: Array) -> Array:
    """Return (rows, columns) from (rows, groups, 32)."""
    if w.dense:
        return np.ascontiguousarray(spread).reshape(spread.shape[0], -1)
    return np.ascontiguousarray(spread[:, w.group, w.lane])


def _expand(w: Lanes, per_group: Array) -> Array:
    """Return (rows, columns) from (rows, groups)."""
    return per_group[:, w.group]


def shuffle(
    mode: str,
    value: Array,
    b: Array,
    c: Array,
    mask: Array | None,
    predicate: bool,
    co: Cohort,
    ck: Chunk,
    item: Instruction,
) -> tuple[Array, Array | None]:
    """shfl.sync: return the value of each lane's source lane and whether it was in range (PTX ISA
    9.7.9.6).
    """
    w = lanes_of(co)
    if mask is not None or not w.dense:
        check_mask(mask, co, ck, item)
    constant = b.size == 1 and c.size == 1
    key = ("shuffle", mode, int(b[0, 0]), int(c[0, 0])) if constant else None
    if key is not None and key in co._cache:
        source, in_range, present = co._cache[key]
    else:
        lane = w.lane[None, :]
        b5, clamp, segment = (b & np.uint32(31)).astype(np.int64), (c & np.uint32(31)).astype(np.int64), None
        segment = ((c >> np.uint32(8)) & np.uint32(31)).astype(np.int64)
        highest = (lane & segment) | (clamp & ~segment)
        lowest = lane & segment
        if mode == "up":
            other = lane - b5
            in_range = other >= highest
        elif mode == "down":
            other = lane + b5
            in_range = other <= highest
        elif mode == "bfly":
            other = lane ^ b5
            in_range = other <= highest
        else:
            other = lowest | (b5 & ~segment)
            in_range = other <= highest
        other = np.where(in_range, other, lane)
        source = w.position[w.group[None, :], other]
        present = bool((source >= 0).all())
        if not present:
            absent = source < 0
            source = np.where(absent, np.arange(len(w.lane))[None, :], source)
            text = "a shuffle reads a lane that does not take part; its value is undefined"
            ck.report("inactive-lane", item, text, co, absent)
        if key is not None and present:
            co._cache[key] = (source, in_range, present)
    if value.shape[1] == 1:
        result = value
    elif source.shape[0] == 1:
        if w.dense and mode == "bfly" and constant and in_range.all():
            step = int(b[0, 0]) & 31
            result = _butterfly(value, step) if step else value
        else:
            result = value.take(source[0], axis=1)
    else:
        result = np.take_along_axis(np.broadcast_to(value, (source.shape[0], value.shape[1])), source, axis=1)
    return result, in_range if predicate else None


def _butterfly(value: Array, step: int) -> Array:
    if step & (step - 1):
        return value.reshape(value.shape[0], -1, 32)[:, :, np.arange(32) ^ step].reshape(value.shape)
    blocks = value.reshape(value.shape[0], -1, 2, step)
    out = np.empty_like(blocks)
    out[:, :, 0], out[:, :, 1] = blocks[:, :, 1], blocks[:, :, 0]
    return out.reshape(value.shape)


def _ballots(w: Lanes, p: Array) -> Array:
    """Return the uint32 ballot of each group, (rows, groups)."""
    spread = _spread(w, p)
    if not w.dense:
        spread = spread & (w.position >= 0)[None]
    packed = np.packbits(np.ascontiguousarray(spread), axis=-1, bitorder="little")
    ballots: Array = packed.view(np.uint32)[..., 0]
    return ballots


def _votes(p: Array, mask: Array | None, co: Cohort, ck: Chunk, item: Instruction) -> tuple[Array, Array]:
    w = lanes_of(co)
    if mask is not None or not w.dense:
        check_mask(mask, co, ck, item)
    ballot = _expand(w, _ballots(w, p))
    members = w.active[w.group][None, :]
    if mask is not None:
        ballot, members = ballot & mask, members & mask
    return ballot, members


def vote_ballot(p: Array, mask: Array | None, co: Cohort, ck: Chunk, item: Instruction) -> Array:
    """vote.sync.ballot."""
    return _votes(p, mask, co, ck, item)[0]


def vote_any(p: Array, mask: Array | None, co: Cohort, ck: Chunk, item: Instruction) -> Array:
    """vote.sync.any."""
    result: Array = _votes(p, mask, co, ck, item)[0] != 0
    return result


def vote_all(p: Array, mask: Array | None, co: Cohort, ck: Chunk, item: Instruction) -> Array:
    """vote.sync.all."""
    ballot, members = _votes(p, mask, co, ck, item)
    result: Array = ballot == members
    return result


def vote_uni(p: Array, mask: Array | None, co: Cohort, ck: Chunk, item: Instruction) -> Array:
    """vote.sync.uni: all predicates equal."""
    ballot, members = _votes(p, mask, co, ck, item)
    result: Array = (ballot == members) | (ballot == 0)
    return result


def _members(w: Lanes, mask: Array | None) -> Array:
    """Return who each lane works with, (rows, groups, 32, 32) bool: [.., lane, other]."""
    present = w.position >= 0
    who = np.broadcast_to(present[None, :, None, :], (1, w.groups, 32, 32))
    if mask is None:
        return who
    bits = (_spread(w, mask)[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    result: Array = who & (bits != 0)
    return result


def match_any(
    value: Array, mask: Array | None, co: Cohort, ck: Chunk, item: Instruction
) -> tuple[Array, Array]:
    """match.any.sync: mask of the member lanes that hold the same value."""
    check_mask(mask, co, ck, item)
    w = lanes_of(co)
    spread = _spread(w, value)
    same = (spread[..., :, None] == spread[..., None, :]) & _members(w, mask)
    packed = np.packbits(np.ascontiguousarray(same), axis=-1, bitorder="little").view(np.uint32)[..., 0]
    result = _gather(w, packed)
    return result, result != 0


def match_all(
    value: Array, mask: Array | None, co: Cohort, ck: Chunk, item: Instruction
) -> tuple[Array, Array]:
    """match.all.sync: the member mask if all members hold one value, else 0; and which."""
    check_mask(mask, co, ck, item)
    w = lanes_of(co)
    spread = _spread(w, value)
    members = _members(w, mask)
    equal = ((spread[..., :, None] == spread[..., None, :]) | ~members).all(axis=-1)
    same = _gather(w, equal)
    everyone = w.active[w.group][None, :]
    if mask is not None:
        everyone = everyone & mask
    return np.where(same, everyone, np.uint32(0)), same


_REDUCE: dict[str, Callable[..., Array]] = {
    "add": np.add.reduce, "min": np.minimum.reduce, "max": np.maximum.reduce, "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce,
}  # fmt: skip


def _identity(op: str, dtype: np.dtype[Any]) -> int:
    if op in ("add", "or", "xor"):
        return 0
    info = np.iinfo(dtype)
    return int({"min": info.max, "max": info.min, "and": -1 if dtype.kind == "i" else info.max}[op])


def redux(
    op: str, value: Array, mask: Array | None, co: Cohort, ck: Chunk, item: Instruction,
    absolute: bool = False, nan: bool = False,
) -> Array:  # fmt: skip
    """redux.sync: reduce over the member lanes. f32 min and max order -0 below +0 and drop NaN unless
    `.NaN`.
    """
    if mask is not None or not lanes_of(co).dense:
        check_mask(mask, co, ck, item)
    w = lanes_of(co)
    if value.dtype.kind == "f":
        return _redux_float(op, value, mask, w, absolute, nan)
    spread = _spread(w, value)
    if mask is None and w.dense:
        return _expand(w, _REDUCE[op](spread, axis=-1, dtype=value.dtype))
    filled = np.where(_members(w, mask), spread[..., None, :], value.dtype.type(_identity(op, value.dtype)))
    return _gather(w, _REDUCE[op](filled, axis=-1, dtype=value.dtype))


def _redux_float(op: str, value: Array, mask: Array | None, w: Lanes, absolute: bool, nan: bool) -> Array:
    bits = value.view(np.int32)
    if absolute:
        bits = bits & np.int32(0x7FFFFFFF)
    is_nan = (bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000)
    ordered = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    worst = np.int32(0x7FFFFFFF) if op == "min" else np.int32(-0x80000000)
    ordered = np.where(is_nan, worst, ordered)
    members = _members(w, mask)
    filled = np.where(members, _spread(w, ordered)[..., None, :], worst)
    best = _gather(w, _REDUCE[op](filled, axis=-1))
    nans = _gather(w, (_spread(w, is_nan)[..., None, :] & members).sum(axis=-1))
    all_nan = nans == _gather(w, members.sum(axis=-1))
    result = np.where(best < 0, best ^ np.int32(0x7FFFFFFF), best)
    result = np.where((nans > 0) if nan else all_nan, np.int32(0x7FFFFFFF), result)
    return result.view(np.float32)


def elect(mask: Array | None, co: Cohort, ck: Chunk, item: Instruction) -> tuple[Array, Array]:
    """elect.sync: some member lane leads; return its number and who it is.

    The lowest one, or the highest where the schedule prefers high places: which it is nobody promises.
    """
    check_mask(mask, co, ck, item)
    w = lanes_of(co)
    members = w.active[w.group][None, :]
    if mask is not None:
        members = members & mask
    if ck.options.adversary.pick is Pick.HIGHEST:
        below = members
        for n in (1, 2, 4, 8, 16):
            below = below | below >> np.uint32(n)
        leader = (np.bitwise_count(below) - np.uint8(1)).astype(np.uint32)
    else:
        lowest = members & (~members + np.uint32(1))
        leader = np.bitwise_count(lowest - np.uint32(1)).astype(np.uint32)
    return leader, leader == w.lane.astype(np.uint32)[None, :]


def active_mask(co: Cohort) -> Array:
    """activemask: the lanes of the warp that execute together."""
    w = lanes_of(co)
    return w.active[w.group][None, :]
