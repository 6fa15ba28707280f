"""Records of accesses: which lanes of one instruction touched which granules of memory, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.ordering.clocks import Clocks
from workbench.simulator.ordering.layers import SCOPES
from workbench.simulator.ordering.world import FOREVER

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort

Array = npt.NDArray[Any]
CTA, CLUSTER, GPU, SYS = 1, 2, 3, 4
"""Scopes of strong accesses; 0 for weak ones."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What matters of an access besides its place."""

    item: Instruction
    write: bool
    scope: int = 0
    """0: weak."""
    atomic: bool = False
    release: bool = False
    acquire: bool = False
    readonly: bool = False
    """ld.global.nc."""
    agent: str = ""
    """`cp.async`, `copy` (bulk and tensor) or `mma`: not the thread itself accesses memory."""
    space: str = "shared"


def scope_of(item: Instruction, default: int) -> int:
    """Return the scope an instruction names."""
    for m in item.modifiers:
        if m in SCOPES:
            return SCOPES[m]
    return default


def kind_of(item: Instruction, write: bool, space: str) -> Kind:
    """Say what matters of a load, store or atomic operation."""
    m = item.modifiers
    atomic = item.opcode in ("atom", "red") or (item.opcode == "multimem" and "red" in m)
    scope = 0
    if atomic:
        scope = scope_of(item, GPU)
    elif "volatile" in m or "mmio" in m:
        scope = SYS
    elif "relaxed" in m or "acquire" in m or "release" in m:
        scope = scope_of(item, SYS)
    both = "acq_rel" in m
    return Kind(
        item, write, scope, atomic, release="release" in m or both,
        acquire=("acquire" in m or both) and item.opcode != "red",
        readonly="nc" in m and item.opcode == "ld", space=space,
    )  # fmt: skip


class Record:
    """One instruction's accesses of several lanes.

    Attributes:
        number: counts accesses in order of execution.
        low: first granule of the interval touched, counted in each bank.
        high: granule after the last.
        stamps: stamp of each lane if they are not those of the lanes' classes.
    """

    __slots__ = (
        "_flat",
        "_granules",
        "class_of",
        "clocks",
        "ctas",
        "high",
        "kind",
        "last",
        "low",
        "note",
        "number",
        "per",
        "place",
        "rectangular",
        "remote",
        "shape",
        "shared",
        "stamps",
        "stride",
        "threads",
        "time",
        "trips",
    )  # fmt: skip

    def __init__(
        self, kind: Kind, clocks: Clocks, co: Cohort, place: Array, per: int, low: int, high: int, stride: int
    ) -> None:
        self.kind, self.clocks = kind, clocks
        self.ctas, self.threads, self.rectangular, self.shape = co.ctas, co.threads, co.rectangular, co.shape
        self.place: Array | None = place
        self.number = clocks.world.time.number()
        self.per, self.low, self.high, self.stride = per, low, high, stride
        self.class_of, self.last = clocks.class_of, clocks.last
        self.time = clocks.world.time.now
        self.stamps: Array | None = None
        self.remote = False
        self.shared: tuple[Array, Array] | None = None
        """Granules and lanes of a store by which several lanes write one granule."""
        self.note: Any = None
        self._flat: tuple[Array, Array] | None = None
        self._granules: tuple[Array, Array] | None = None

    def lanes(self) -> tuple[Array, Array]:
        """Return row and thread of each lane, (lanes,)."""
        if self._flat is None:
            if self.rectangular:
                rows = np.repeat(self.ctas, self.shape[1])
                threads = np.tile(self.threads, self.shape[0])
            else:
                rows, threads = self.ctas, self.threads
            self._flat = rows, threads
        return self._flat

    def granules(self) -> tuple[Array, Array]:
        """Return the granules touched and the lane that touches each."""
        if self._granules is None:
            assert self.place is not None
            first = self.place
            if self.stride:
                rows = self.ctas[:, None] if self.rectangular else self.ctas[None, :]
                first = first + rows * self.stride
            first = np.broadcast_to(first, self.shape).ravel()
            lanes = np.arange(len(first))
            if self.per > 1:
                first = (first[:, None] + np.arange(self.per)).ravel()
                lanes = np.repeat(lanes, self.per)
            self._granules = first, lanes
        return self._granules

    def refine(self, k: int) -> None:
        """Count in granules of 1/k of the size."""
        self.low, self.high, self.per, self.stride = (
            self.low * k,
            self.high * k,
            self.per * k,
            self.stride * k,
        )
        if self.place is not None:
            self.place, self._granules = self.place * k, None
        elif self._granules is not None:
            self._granules = finer(self._granules, k)

    def stamp(self, lanes: Array) -> Array:
        """Return the stamps of lanes."""
        if self.stamps is not None:
            return self.stamps[lanes]
        rows, threads = self.lanes()
        result: Array = self.last[rows[lanes], self.class_of[threads[lanes]]]
        return result

    def covered(self, floor: Array) -> bool:
        """Whether every thread of each CTA is known to be ordered after the accesses."""
        if self.remote:
            return False
        rows, threads = self.lanes()
        now = floor[0 if self.kind.agent or not self.kind.write else -1, rows, self.clocks.class_of[threads]]
        stamps = self.stamps if self.stamps is not None else self.last[rows, self.class_of[threads]]
        return bool((now > stamps).all())

    def same_place(self, other: Record) -> bool:
        """Whether the same lanes of the same instruction touch the same granules."""
        if isinstance(self, Spans) and isinstance(other, Spans):
            return _same_spans(self, other)
        if self.kind is not other.kind or self.shape != other.shape or self.stamps is not None:
            return False
        if self.place is None or other.place is None or self.stride != other.stride:
            return False
        return (
            np.array_equal(self.ctas, other.ctas)
            and np.array_equal(self.threads, other.threads)
            and (self.place is other.place or np.array_equal(self.place, other.place))
        )


class Spans(Record):
    """Accesses of asynchronous agents: explicit granules, one lane an element.

    Args:
        by: rows and threads that issue, (elements,): whose knowledge counts at issue.
        agents: rows and agent numbers, (elements,): who must be known afterwards.
        granules: granule numbers and the element each belongs to.
    """

    __slots__ = ("by",)

    def __init__(
        self, kind: Kind, clocks: Clocks, by: tuple[Array, Array], agents: tuple[Array, Array],
        granules: tuple[Array, Array], low: int, high: int,
    ) -> None:  # fmt: skip
        self.kind, self.clocks = kind, clocks
        self.ctas, self.threads = agents
        self.number = clocks.world.time.number()
        self.rectangular, self.shape = False, (1, len(by[0]))
        self.place, self.per, self.low, self.high, self.stride = None, 1, low, high, 0
        self.class_of, self.last = clocks.class_of, clocks.last
        self.time = clocks.world.time.now
        self.stamps = np.full(len(by[0]), FOREVER, np.int64)
        self.remote = False
        self.shared = None
        self.note = None
        self._flat = agents
        self._granules = granules
        self.by = by


def _same_spans(old: Spans, new: Spans) -> bool:
    """Whether the same agents read the same granules, and the old reads are over."""
    if old.kind.item is not new.kind.item or old.shape != new.shape or old.stamps is None:
        return False
    if bool((old.stamps == FOREVER).any()) or old._granules is None or new._granules is None:
        return False
    if old.clocks is not new.clocks:
        return False
    pairs = zip((*old._granules, *old.lanes()), (*new._granules, *new.lanes()), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def finer(granules: tuple[Array, Array], k: int) -> tuple[Array, Array]:
    """Return granules and their lanes counted in granules of 1/k of the size."""
    at, lanes = granules
    return (at[:, None] * k + np.arange(k)).ravel(), np.repeat(lanes, k)
