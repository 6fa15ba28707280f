"""An elected lane that arrives for lanes whose stores nothing has brought to it (`elected-arrive`).

mbarrier.arrive releases what its own thread did and what other threads' work was ordered before it; lanes of
a warp are ordered by bar.warp.sync (or a CTA barrier), not by standing in one warp (ISA 8.9.1, 9.7.13.15).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.findings import Finding, Severity
from workbench.isa.ptx.model import Address
from workbench.verify.ordering.memory import Space, Touch, touches
from workbench.verify.ordering.paths import CLUSTER, CTA_MEETINGS, Change, Marks, after, executing
from workbench.verify.ordering.view import PtxView, Step, finding


def elected_arrivals(view: PtxView) -> Iterator[Finding]:
    """Arrivals by fewer lanes than stored, with no barrier of the warp in between."""
    arrivals = [
        s for s in view.steps("mbarrier") if s.instruction.modifiers[:1] == ("arrive",) and not s.guarded
    ]
    stores = [
        t
        for t in touches(view)
        if t.space is Space.SHARED and t.writes and not t.asynchronous and not t.step.guarded
        if t.address.known is not None
    ]
    if not arrivals or not stores:
        return
    waits = [
        s for s in view.steps("mbarrier") if s.instruction.modifiers[:1] in (("try_wait",), ("test_wait",))
    ]
    loads = [t for t in touches(view) if t.space is Space.SHARED and t.reads and t.address.known is not None]
    behind: dict[int, frozenset[int]] = {}
    for a in arrivals:
        found = _uncovered(view, a, stores, waits, loads, behind)
        if found is not None:
            yield found


def _key(s: Step) -> int | None:
    at = next((n for n, o in enumerate(s.instruction.operands) if isinstance(o, Address)), None)
    return None if at is None else s.values[at].constant()


def _uncovered(
    view: PtxView,
    a: Step,
    stores: list[Touch],
    waits: list[Step],
    loads: list[Touch],
    behind: dict[int, frozenset[int]],
) -> Finding | None:
    arriving = executing(view, a)
    key = _key(a)
    if not arriving.any() or key is None:
        return None
    warps = view.threads.linear // np.uint64(32)
    beside = np.isin(warps, warps[arriving]) & ~arriving
    if not beside.any():
        return None
    readers: set[int] = set()
    for w in waits:
        if _key(w) == key and (executing(view, w) & ~np.isin(warps, warps[arriving])).any():
            readers |= _behind(view, w.index, behind)
    wanted = [t for t in loads if t.index in readers]
    if not wanted:
        return None
    for t in stores:
        others = executing(view, t.step) & beside
        if not others.any() or a.index not in _behind(view, t.index, behind):
            continue
        if not any(_overlap(view, t, others, r) for r in wanted):
            continue
        if not _reaches(view, t, others, a):
            line = view.place(t.index).ptx_line
            return finding(
                "elected-arrive",
                Severity.ERROR,
                view,
                a.index,
                f"lanes that do not arrive store to shared memory (line {line}) before this arrival, "
                "and a release covers what its own thread did only: whoever waits may read the old content",
                "put bar.warp.sync before the elected lane's arrival, or let every lane arrive",
            )
    return None


def _behind(view: PtxView, index: int, known: dict[int, frozenset[int]]) -> frozenset[int]:
    """Instructions behind one, found once."""
    if index not in known:
        known[index] = after(view.graph, index)
    return known[index]


def _overlap(view: PtxView, store: Touch, who: Any, read: Touch) -> bool:
    """Whether a load may read bytes that some of the threads stored."""
    if store.address.known is None or read.address.known is None:
        return False
    a = store.address.known[who].astype(np.int64)
    b = read.address.known[executing(view, read.step)].astype(np.int64)
    n, m = max(store.nbytes, 1), max(read.nbytes, 1)
    if not a.size or not b.size:
        return False
    return bool(((a[:, None] < b[None, :] + m) & (b[None, :] < a[:, None] + n)).any())


def _reaches(view: PtxView, store: Touch, others: Any, a: Step) -> bool:
    """Whether a barrier brings the stores of all those lanes to an arriving thread of their warp.

    Lanes are followed one by one, so that a barrier of some of them does not stand for all.
    """
    lanes = view.threads.linear % np.uint64(32)
    present = sorted({int(x) for x in lanes[others]})
    if len(present) > 3:  # the first, one in the middle and the last stand for the rest
        present = [present[0], present[len(present) // 2], present[-1]]
    for lane in present:
        who = (others & (lanes == np.uint64(lane))).astype(np.uint64)
        changes = {store.index: Change(gives=1, who=who)}
        if not Marks(view, changes, CTA_MEETINGS | CLUSTER).carried(a):
            return False
    return True
