"""A cohort: all lanes that stand at the same instruction, and their registers.

Rectangular cohorts (rows are CTAs, columns are threads) keep values that do not depend on the thread or on
the CTA as (1, 1), (rows, 1) or (1, columns) arrays. A cohort that is no rectangle is flat: one row, a
column a lane.
"""

from __future__ import annotations

import weakref
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
_MANY_LANES = 2048
"""From so many lanes on, registers that a branch leaves alone are not copied when its sides meet."""


class Cohort:
    """Lanes in lockstep.

    Attributes:
        ctas: CTA index inside the chunk; (rows,) if rectangular, else one a lane.
        threads: linear thread index; (columns,) if rectangular, else one a lane.
        registers: array of each live register, of a shape that broadcasts to `shape`.
    """

    __slots__ = ("_cache", "chunk", "ctas", "origin", "rectangular", "registers", "shape", "threads")

    def __init__(
        self, chunk: Chunk, ctas: Array, threads: Array, rectangular: bool, registers: dict[str, Array]
    ) -> None:
        self.chunk, self.ctas, self.threads, self.rectangular = chunk, ctas, threads, rectangular
        self.registers = registers
        self.shape = (len(ctas), len(threads)) if rectangular else (1, len(threads))
        self._cache: dict[Any, Any] = {}
        self.origin: tuple[Cohort, dict[str, weakref.ref[Array]]] | None = None
        """The cohort that this one was split from, and the registers as they were then."""

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.shape[0] * self.shape[1]

    def like(self, registers: dict[str, Array]) -> Cohort:
        """Return the same lanes with other registers."""
        other = Cohort(self.chunk, self.ctas, self.threads, self.rectangular, registers)
        other._cache = self._cache
        return other

    # -- who the lanes are -----------------------------------------------------------------------

    def rows(self) -> Array:
        """CTA index of each lane, (rows, 1) or (1, lanes)."""
        return self.ctas[:, None] if self.rectangular else self.ctas[None, :]

    def columns(self) -> Array:
        """Thread index of each lane, (1, columns) or (1, lanes)."""
        return self.threads[None, :]

    def shared_rows(self, stride: int) -> Array:
        """Offset of each lane's shared memory in the chunk's."""
        key = ("shared", stride)
        if key not in self._cache:
            self._cache[key] = self.rows() * np.int64(stride)
        result: Array = self._cache[key]
        return result

    def local_rows(self, stride: int) -> Array:
        """Offset of each lane's local memory in the chunk's."""
        key = ("local", stride)
        if key not in self._cache:
            self._cache[key] = (
                self.rows() * np.int64(self.chunk.launch.threads) + self.columns()
            ) * np.int64(stride)
        result: Array = self._cache[key]
        return result

    def special(self, name: str) -> Array:
        """Return a special register as uint32 (uint64 for the 64-bit ones)."""
        if name in self._cache:
            result: Array = self._cache[name]
            return result
        value = self.chunk.special(self, name)
        if not name.startswith(("%clock", "%globaltimer")):
            self._cache[name] = value
        return value

    def warps(self) -> Array:
        """Return the distinct warps in the cohort, numbered CTA by CTA."""
        if "warps" not in self._cache:
            per_cta = self.chunk.launch.warps
            present = np.zeros((len(self.chunk.alive), per_cta), bool)
            present[self.rows(), self.columns() >> 5] = True
            self._cache["warps"] = np.flatnonzero(present)
        result: Array = self._cache["warps"]
        return result

    def whole(self) -> bool:
        """Whether every live lane of each warp in the cohort is in it."""
        # What was found before the first lane exited holds after it only if it was true.
        if not self._cache.get("whole", False) and ("whole" not in self._cache or self.chunk.exited):
            launch = self.chunk.launch
            if self.rectangular and self.shape[1] == launch.threads:
                whole = True
            elif self.rectangular and not self.chunk.exited:
                counts = np.bincount(self.threads >> 5, minlength=launch.warps)
                whole = bool(((counts == 0) | (counts == launch.warp_sizes)).all())
            else:
                rows, columns = np.broadcast_arrays(self.rows(), self.columns())
                warps = (rows * launch.warps + (columns >> 5)).ravel()
                counts = np.bincount(warps, minlength=len(self.chunk.alive) * launch.warps)
                alive = self.chunk.live_lanes_of_warps()
                whole = bool(((counts == 0) | (counts == alive)).all())
            if not self.chunk.exited:
                self._cache["whole"] = whole
            return whole
        return bool(self._cache["whole"])

    def lanes_of_whole_warps(self) -> Array:
        """Which lanes belong to a warp all of whose live lanes are here; bool, shaped like the values."""
        launch = self.chunk.launch
        rows, columns = np.broadcast_arrays(self.rows(), self.columns())
        warps = (rows * launch.warps + (columns >> 5)).ravel()
        counts = np.bincount(warps, minlength=len(self.chunk.alive) * launch.warps)
        whole = counts == self.chunk.live_lanes_of_warps()
        result: Array = whole[warps].reshape(self.shape)
        return result

    # -- division --------------------------------------------------------------------------------

    def _select_rows(self, keep: Array, live: frozenset[str]) -> Cohort:
        index = np.flatnonzero(keep)
        registers = {n: v[index] if v.shape[0] > 1 else v for n, v in self.registers.items() if n in live}
        return Cohort(self.chunk, self.ctas[index], self.threads, True, registers)

    def _select_columns(self, keep: Array, live: frozenset[str]) -> Cohort:
        index = np.flatnonzero(keep)
        registers = {n: v[:, index] if v.shape[1] > 1 else v for n, v in self.registers.items() if n in live}
        ctas = self.ctas if self.rectangular else self.ctas[index]
        return Cohort(self.chunk, ctas, self.threads[index], self.rectangular, registers)

    def _select_lanes(self, mask: Array, live: frozenset[str]) -> Cohort:
        index = np.flatnonzero(mask.ravel())
        rows, columns = index // self.shape[1], index % self.shape[1]
        registers = {}
        for n, v in self.registers.items():
            if n not in live or v.shape == (1, 1):
                if n in live:
                    registers[n] = v
                continue
            if v.shape[0] == 1:
                registers[n] = v[:, columns]
            elif v.shape[1] == 1:
                registers[n] = v[rows, 0][None, :]
            else:
                registers[n] = v.ravel()[index][None, :]
        return Cohort(self.chunk, self.ctas[rows], self.threads[columns], False, registers)

    def select(self, mask: Array, live: frozenset[str]) -> Cohort:
        """Return the lanes where `mask` (bool, broadcastable to `shape`, some but not all true) with live
        registers.
        """
        if not self.rectangular:
            return self._select_columns(np.broadcast_to(mask, self.shape)[0], live)
        by_column = mask.shape[0] == 1 and self.shape[0] > 1
        if by_column or (mask.shape[1] > 1 and bool((mask == mask[:1]).all())):
            return self._select_columns(np.broadcast_to(mask[0], self.shape[1:]), live)
        if mask.shape[1] == 1 or bool((mask == mask[:, :1]).all()):
            return self._select_rows(np.broadcast_to(mask[:, 0], self.shape[:1]), live)
        return self._select_lanes(np.broadcast_to(mask, self.shape), live)

    def split(
        self, mask: Array, if_true: frozenset[str], if_false: frozenset[str]
    ) -> tuple[Cohort | None, Cohort | None]:
        """Divide by a predicate; a side without lanes is None."""
        if mask.size == 1:
            return (self, None) if mask[0, 0] else (None, self)
        if mask.all():
            return self, None
        if not mask.any():
            return None, self
        sides = self.select(mask, if_true), self.select(~mask, if_false)
        self.origin = None
        if self.rectangular and self.lanes >= _MANY_LANES:
            for side in sides:
                side.origin = self, {n: weakref.ref(v) for n, v in side.registers.items()}
        return sides


def merge(cohorts: list[Cohort], live: frozenset[str], dtypes: dict[str, str]) -> Cohort:
    """Join cohorts that stand at the same block; registers that some of them never wrote hold poison
    there.
    """
    cohorts.sort(key=lambda c: (int(c.ctas[0]), int(c.threads[0])))
    first = cohorts[0]
    names = [n for n in live if any(n in c.registers for c in cohorts)]
    if all(c.rectangular for c in cohorts):
        whole = _rejoin(cohorts, names, dtypes)
        if whole is not None:
            return whole
        same_rows = all(np.array_equal(c.ctas, first.ctas) for c in cohorts[1:])
        if same_rows:
            return _merge_columns(cohorts, names, dtypes)
        if all(np.array_equal(c.threads, first.threads) for c in cohorts[1:]):
            return _merge_rows(cohorts, names, dtypes)
    return _merge_lanes(cohorts, names, dtypes)


def _rejoin(cohorts: list[Cohort], names: list[str], dtypes: dict[str, str]) -> Cohort | None:
    """Join the two sides of a split: registers that neither has changed are those from before it."""
    first, *others = cohorts
    if first.origin is None or len(others) != 1 or others[0].origin is None:
        return None
    other, (parent, mine), (same, theirs) = others[0], first.origin, others[0].origin
    if same is not parent or first.lanes + other.lanes != parent.lanes:
        return None
    kept = {n for n in names if _unchanged(first, n, mine) and _unchanged(other, n, theirs)}
    if not kept:
        return None
    changed = [n for n in names if n not in kept]
    join = _merge_columns if np.array_equal(first.ctas, other.ctas) else _merge_rows
    result = join(cohorts, changed, dtypes)
    if not (np.array_equal(result.ctas, parent.ctas) and np.array_equal(result.threads, parent.threads)):
        return None
    result.registers.update((n, parent.registers[n]) for n in kept)
    return result


def _unchanged(co: Cohort, name: str, before: dict[str, weakref.ref[Array]]) -> bool:
    return name in before and name in co.registers and before[name]() is co.registers[name]


def poison(dtype: str) -> Array:
    """Return what a register holds that nobody has written: a NaN, a wild address, false.

    Real kernels do read such registers where the result is not used, so that alone is no finding.
    """
    kind = np.dtype(dtype)
    if kind.itemsize == 1:
        return np.zeros((1, 1), kind)
    pattern = 0x7FF7DEAD7FF7DEAD >> (64 - 8 * kind.itemsize)
    return np.full((1, 1), pattern, f"u{kind.itemsize}").view(kind)


def _values(cohorts: list[Cohort], name: str, dtypes: dict[str, str]) -> list[Array]:
    return [c.registers[name] if name in c.registers else poison(dtypes[name]) for c in cohorts]


def _uniform(values: list[Array]) -> bool:
    """Whether all are one and the same (1, 1) value or the same array."""
    first = values[0]
    if all(v is first for v in values[1:]):
        return True
    if any(v.shape != (1, 1) for v in values):
        return False
    kind = f"u{first.itemsize}"
    pattern = first.view(kind)[0, 0]
    return all(v.view(kind)[0, 0] == pattern for v in values[1:])


def _order(keys: Array) -> Array | None:
    return None if (keys[1:] > keys[:-1]).all() else np.argsort(keys, kind="stable")


def _merge_columns(cohorts: list[Cohort], names: list[str], dtypes: dict[str, str]) -> Cohort:
    threads = np.concatenate([c.threads for c in cohorts])
    order = _order(threads)
    registers = {}
    for name in names:
        values = _values(cohorts, name, dtypes)
        if _uniform(values) and values[0].shape[1] == 1:
            registers[name] = values[0]
            continue
        height = max(v.shape[0] for v in values)
        wide = [np.broadcast_to(v, (height, c.shape[1])) for v, c in zip(values, cohorts, strict=True)]
        joined = np.concatenate(wide, axis=1)
        registers[name] = joined if order is None else joined[:, order]
    return Cohort(
        cohorts[0].chunk, cohorts[0].ctas, threads if order is None else threads[order], True, registers
    )


def _merge_rows(cohorts: list[Cohort], names: list[str], dtypes: dict[str, str]) -> Cohort:
    ctas = np.concatenate([c.ctas for c in cohorts])
    order = _order(ctas)
    registers = {}
    for name in names:
        values = _values(cohorts, name, dtypes)
        if _uniform(values) and values[0].shape[0] == 1:
            registers[name] = values[0]
            continue
        width = max(v.shape[1] for v in values)
        tall = [np.broadcast_to(v, (c.shape[0], width)) for v, c in zip(values, cohorts, strict=True)]
        joined = np.concatenate(tall, axis=0)
        registers[name] = joined if order is None else joined[order]
    return Cohort(
        cohorts[0].chunk, ctas if order is None else ctas[order], cohorts[0].threads, True, registers
    )


def _merge_lanes(cohorts: list[Cohort], names: list[str], dtypes: dict[str, str]) -> Cohort:
    chunk = cohorts[0].chunk
    ctas = np.concatenate([np.broadcast_to(c.rows(), c.shape).ravel() for c in cohorts])
    threads = np.concatenate([np.broadcast_to(c.columns(), c.shape).ravel() for c in cohorts])
    order = _order(ctas * chunk.launch.threads + threads)
    if order is not None:
        ctas, threads = ctas[order], threads[order]
    total = len(ctas)
    rows = int(np.count_nonzero(ctas[1:] != ctas[:-1])) + 1
    width = total // rows
    rectangular = rows * width == total
    if rectangular:
        grid = threads.reshape(rows, width)
        starts = ctas.reshape(rows, width)
        rectangular = bool((grid == grid[0]).all() and (starts == starts[:, :1]).all())
    registers = {}
    for name in names:
        values = _values(cohorts, name, dtypes)
        if _uniform(values) and values[0].shape == (1, 1):
            registers[name] = values[0]
            continue
        joined = np.concatenate(
            [np.broadcast_to(v, c.shape).ravel() for v, c in zip(values, cohorts, strict=True)]
        )
        if order is not None:
            joined = joined[order]
        registers[name] = _narrowed(joined.reshape(rows, width)) if rectangular else joined[None, :]
    if rectangular:
        return Cohort(chunk, starts[:, 0].copy(), grid[0].copy(), True, registers)
    return Cohort(chunk, ctas, threads, False, registers)


def _narrowed(value: Array) -> Array:
    """Give a value of a rectangle that varies along one axis only its small shape again."""
    bits = value if value.dtype.kind != "f" else value.view(f"u{value.itemsize}")
    if value.shape[0] > 1 and (bits[-1] == bits[0]).all() and (bits == bits[:1]).all():
        value, bits = value[:1], bits[:1]
    if value.shape[1] > 1 and (bits[:, -1] == bits[:, 0]).all() and (bits == bits[:, :1]).all():
        value = np.ascontiguousarray(value[:, :1])
    return value


def lanes_of(cohorts: list[Cohort]) -> int:
    """Return the number of lanes in all cohorts together."""
    return reduce(lambda n, c: n + c.lanes, cohorts, 0)
