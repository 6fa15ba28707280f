"""Multicast addresses: one address that stands for a buffer of every rank (PTX ISA 9.7.9.13, multimem).

The ISA leaves open in which order `multimem.ld_reduce` combines the replicas. Here it is the order of the
ranks, or with a seed a permutation of it for each instruction; numbers of the type itself are rounded after
every step, with `.acc::f32` once at the end. A result that must not depend on the order can be tested with
several seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction, Reg
from workbench.simulator import atomics
from workbench.simulator.access import RAW, Site
from workbench.simulator.arith import lookup
from workbench.simulator.memory import BASE, MULTICAST, MULTICAST_END

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class MulticastRange:
    """A range of multicast addresses. `replicas` are arena offsets, one a rank."""

    name: str
    start: int
    """Device address of the first byte."""
    size: int
    replicas: tuple[int, ...]

    @property
    def end(self) -> int:
        """Device address after the last byte."""
        return self.start + self.size


def is_multicast(address: int) -> bool:
    """Whether a device address lies in the window of multicast addresses."""
    return MULTICAST <= address < MULTICAST_END


def describe(ranges: list[MulticastRange], address: int) -> tuple[str | None, str]:
    """Return the buffer behind a multicast address and the place in words."""
    for r in ranges:
        if r.start <= address < r.end:
            return r.name, f"byte {address - r.start} of the multicast address of {r.name!r}"
    return None, f"multicast address {address:#x}, which no buffer is bound to"


def _targets(site: Site, address: Array, co: Cohort, ck: Chunk) -> list[tuple[MulticastRange, Array | None]]:
    """Return the ranges that lanes address, each with its lanes (None: all); report the other lanes."""
    at = address + np.int64(site.offset)
    ranges: list[MulticastRange] = ck.launch.memory.multicast
    found: list[tuple[MulticastRange, Array | None]] = []
    low, high = int(at.min()), int(at.max())
    if not bool((at & site.mask).any()):
        for r in ranges:
            if r.start <= low and high + site.size <= r.end:
                return [(r, None)]
    good = np.zeros(at.shape, bool)
    aligned = (at & site.mask) == 0
    for r in ranges:
        inside = (at >= r.start) & (at + site.size <= r.end) & aligned
        if inside.any():
            found.append((r, np.broadcast_to(inside, co.shape)))
            good |= inside
    bad = ~good
    outside = bad & ((at < MULTICAST) | (at >= MULTICAST_END))
    if outside.any():
        ck.fault("multimem-order", site, co, outside, at)
    if (bad & ~outside & ~aligned).any():
        ck.fault("misaligned", site, co, bad & ~outside & ~aligned, at)
    if (bad & ~outside & aligned).any():
        ck.fault("out-of-bounds", site, co, bad & ~outside & aligned, at)
    return found


def _replica(site: Site, which: int) -> Site:
    """Return the site of an access's part that goes to one replica."""
    key = f"replica {which}"
    if key not in site._inside:
        site._inside[key] = Site(site.instruction, "global", site.size, site.offset)
    return site._inside[key]


def _lanes(co: Cohort, mask: Array | None, *values: Array) -> tuple[Cohort, list[Array]]:
    if mask is None:
        return co, list(values)
    if mask.all():
        return co, list(values)
    some = co.select(mask, frozenset())
    return some, [np.broadcast_to(v, co.shape)[mask].reshape(some.shape) for v in values]


def store(site: Site, address: Array, value: Array, co: Cohort, ck: Chunk) -> None:
    """multimem.st: write to every replica."""
    for r, mask in _targets(site, address, co, ck):
        some, (a, v) = _lanes(co, mask, address, value)
        for k, start in enumerate(r.replicas):
            one, at = _replica(site, k), a + np.int64(BASE + start - r.start)
            if ck.watched:
                ck.watch(one, at, some)
            ck.space_global.store(one, at, v, some, ck)


def reduce(
    site: Site, op: str, kind: str, address: Array, values: tuple[Array, ...], co: Cohort, ck: Chunk
) -> None:
    """multimem.red: combine with every replica."""
    for r, mask in _targets(site, address, co, ck):
        some, (a, *vs) = _lanes(co, mask, address, *values)
        for k, start in enumerate(r.replicas):
            at = a + np.int64(BASE + start - r.start)
            atomics.atomic(_replica(site, k), "global", op, kind, at, (tuple(vs),), False, some, ck)


def load_reduce(
    site: Site, op: str, kind: str, count: int, wide: bool, address: Array, co: Cohort, ck: Chunk
) -> list[Array]:
    """multimem.ld_reduce: return the combination of all replicas, one array of raw bits an element."""
    width = site.size // count
    raw = np.dtype(f"uint{8 * width}")
    results = [np.zeros(co.shape, raw) for _ in range(count)]
    for r, mask in _targets(site, address, co, ck):
        some, (a,) = _lanes(co, mask, address)
        order = list(range(len(r.replicas)))
        if ck.options.seed:
            Random(ck.options.seed * 7919 + site.instruction.line).shuffle(order)
        parts: list[list[Array]] = [[] for _ in range(count)]
        for k in order:
            one, at = _replica(site, k), a + np.int64(BASE + r.replicas[k] - r.start)
            if ck.watched:
                ck.watch(one, at, some)
            items = np.broadcast_to(ck.space_global.load(one, at, some, ck), some.shape)
            elements = np.ascontiguousarray(items).view(RAW[site.size]).reshape(-1).view(raw)
            for e in range(count):
                parts[e].append(np.ascontiguousarray(elements.reshape(-1, count)[:, e]))
        for e in range(count):
            value = combined(op, kind, wide, parts[e])
            if mask is None:
                results[e] = value.reshape(co.shape)
            else:
                results[e][mask] = value
    return results


def combined(op: str, kind: str, wide: bool, parts: list[Array]) -> Array:
    """Combine raw items one after the other; `wide` adds 16-bit numbers in f32 and rounds once."""
    if not wide:
        total = parts[0]
        for p in parts[1:]:
            total = atomics.combine(op, kind, total, [p])
        return total
    half = kind.removesuffix("x2")
    numbers = [_convert("f32", half, p.view(np.uint16)) for p in parts]
    sums = numbers[0]
    for n in numbers[1:]:
        sums = sums + n
    return _convert(half, "f32", sums).view(np.uint16).view(parts[0].dtype)


def _convert(to: str, of: str, value: Array) -> Array:
    rounding = () if to == "f32" else ("rn",)
    semantics = lookup(Instruction("cvt", (*rounding, to, of), (Reg("d"), Reg("a")), 0))
    assert semantics is not None
    result: Array = semantics.function(value[None])[0]
    return result.view(np.float32) if to == "f32" else result.view(np.uint16)


NAMES: dict[str, Any] = {
    "multimem_store": store,
    "multimem_reduce": reduce,
    "multimem_load": load_reduce,
}
