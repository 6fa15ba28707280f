"""Reads in the asynchronous proxy of bytes that the generic proxy wrote with no proxy fence since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workbench.isa.values import Lanes
from workbench.verify.ordering.carried import BARE, FENCED, MEETS, Carried, Mark
from workbench.verify.ordering.program import Event, Kind
from workbench.verify.ordering.rules.regions import Region, overlaps
from workbench.verify.ordering.view import PtxView, SassStep, SassView, Step


@dataclass(frozen=True, eq=False)
class Touch:
    """A read or write of shared memory by one instruction."""

    index: int
    guard: Lanes | None
    guarded: bool
    regions: tuple[Region, ...]
    what: str
    """How a message calls it."""
    barrier: int | None = None
    arrives: bool = False
    """True if its completion arrives at the mbarrier at address `barrier` (None if not known)."""


@dataclass(frozen=True)
class Hit:
    """A read that comes after a write with no fence between, and how many such pairs it stands for."""

    read: Touch
    write: Touch
    count: int = 1


def touch(
    step: Step | SassStep,
    regions: tuple[Region, ...],
    what: str,
    barrier: int | None = None,
    arrives: bool = False,
) -> Touch:
    """A touch by one step."""
    return Touch(step.index, step.guard, step.guarded, regions, what, barrier, arrives)


def mark_of(step: Step | SassStep, *, fence: bool) -> tuple[int, Mark]:
    """What a step does, for `carry`."""
    return step.index, Mark(fence=fence, who=step.guard, sure=not step.guarded)


def stale(
    view: PtxView | SassView,
    writes: list[Touch],
    reads: list[Touch],
    fences: list[tuple[int, Mark]],
    arenas: frozenset[str],
) -> Iterator[Hit]:
    """Reads that certainly see unfenced writes.

    Args:
        view: the kernel.
        writes: generic writes of shared memory.
        reads: reads in the asynchronous proxy.
        fences: proxy fences that cover shared memory.
        arenas: variables that hold several things, so that unknown offsets in them say nothing.
    """
    allowed = (True,) if arenas else (True, None)
    wanted = [w for w in writes if any(_meet(w, r, arenas) in allowed for r in reads)]
    if not wanted:
        return
    groups = _grouped(view, wanted, fences)
    carried = carry(view, groups, fences)
    found: dict[tuple[int, str], Hit] = {}
    for r in reads:
        sure: Touch | None = None
        maybe: Touch | None = None
        clean = False
        for n, group in enumerate(groups):
            meetings = [(w, _meet(w, r, arenas)) for w in group]
            exact = next((w for w, m in meetings if m), None)
            loose = next((w for w, m in meetings if m is None), None)
            if exact is None and loose is None:
                continue
            wrong = bare(carried, n, r)
            if exact is not None and wrong:
                sure = sure or exact
            elif loose is not None and not arenas:
                reaches = bool((carried.before(r.index)[n] & (BARE | FENCED)).any())
                clean = clean or (reaches and not wrong)
                maybe = loose if wrong else maybe
        writer = sure if sure is not None else maybe if not clean else None
        if writer is not None:
            key = (writer.index, r.what)
            old = found.get(key)
            found[key] = Hit(r, writer) if old is None else Hit(old.read, writer, old.count + 1)
    yield from found.values()


def _meet(a: Touch, b: Touch, arenas: frozenset[str]) -> bool | None:
    """Whether two touches share bytes; None if that is not known."""
    open_ = False
    for x in a.regions:
        for y in b.regions:
            shared = overlaps(x, y)
            if shared or (shared is None and arenas and x.symbol not in arenas):
                return True
            open_ = open_ or shared is None
    return None if open_ else False


def _grouped(
    view: PtxView | SassView, writes: list[Touch], fences: list[tuple[int, Mark]]
) -> list[list[Touch]]:
    """Writes between which nothing happens that orders anything, by the same threads."""
    events = view.analysis.program.all_events(*MEETS)
    marks = sorted({at for at, _ in fences} | {e.index for e in events})
    found: dict[tuple[int, int, bytes | None, bool], list[Touch]] = {}
    for w in writes:
        at = int(np.searchsorted(marks, w.index))
        guard = None if w.guard is None else w.guard.tobytes()
        found.setdefault((view.graph.block_of[w.index], at, guard, w.arrives), []).append(w)
    return list(found.values())


def carry(
    view: PtxView | SassView,
    groups: list[list[Touch]],
    fences: list[tuple[int, Mark]],
    own: bool = False,
) -> Carried:
    """Follow each group of writes through the kernel; `own`: a fence counts only for its own thread."""
    marks: dict[int, Mark] = dict(fences)
    extra: list[Event] = []
    for n, group in enumerate(groups):
        for w in group:
            old = marks.get(w.index, Mark()).writes
            marks[w.index] = Mark(writes=(*old, n), who=w.guard, sure=not w.guarded)
            if w.arrives:
                extra.append(Event(Kind.MBARRIER_ARRIVE, w.index, w.guard, w.guarded, key=w.barrier))
    return Carried(view.analysis.program, view.graph, marks, len(groups), tuple(extra), own)


def bare(carried: Carried, write: int, reader: Touch | Step | SassStep) -> bool:
    """True if the threads that execute an instruction come after the write with no fence on any path."""
    state = carried.before(reader.index)[write]
    who = state != 0 if reader.guard is None else (state != 0) & (reader.guard != 0)
    wrong = ((state & BARE) != 0) & ((state & FENCED) == 0)
    if not who.any():
        return False
    return bool(wrong[who].all() if reader.guarded else wrong[who].any())
