"""Clusters: barriers that order nothing, arrivals too narrow for remote stores, exits that come too early.

`cluster-barrier`: barrier.cluster.arrive.relaxed taken for ordering, arrivals and waits that do not pair up,
and a CTA that may exit while a peer still reads its shared memory. `scope-too-narrow`: an mbarrier arrival or
wait of scope .cta that is to publish ordinary stores to another CTA's shared memory (ISA 9.7.13).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.findings import Finding, Severity
from workbench.isa.ptx.model import Address
from workbench.verify.ordering.memory import Scope, Space, Touch, fences, mapped, touches
from workbench.verify.ordering.paths import CLUSTER, CTA_MEETINGS, MBARRIERS, Change, Marks, after, change
from workbench.verify.ordering.program import Kind
from workbench.verify.ordering.solver import RELAXED
from workbench.verify.ordering.view import PtxView, SassStep, SassView, Step, finding

View = PtxView | SassView
_OWN, _REMOTE = 1, 2
_LIFETIME = 4


def cluster_rules(view: PtxView) -> Iterator[Finding]:
    """All of it on the PTX."""
    yield from _relaxed(view)
    yield from _pairing(view)
    yield from _lifetime(view)
    yield from _narrow_arrivals(view)


def sass_cluster_rules(view: SassView) -> Iterator[Finding]:
    """On a cubin alone: arrivals without a MEMBAR before them, and exits."""
    if view.ptx is None:
        yield from _relaxed(view)
        yield from _lifetime(view)
        yield from _narrow_arrivals(view)


def _line(view: View, index: int) -> str:
    place = view.place(index)
    return f"line {place.ptx_line}" if place.ptx_line is not None else f"offset {place.sass_offset:#x}"


def _plain(t: Touch) -> bool:
    return not t.asynchronous


# -- arrive.relaxed --------------------------------------------------------------------------------


def _relaxed(view: View) -> Iterator[Finding]:
    """Stores before a relaxed arrival, and what peers (or this CTA) read after the wait."""
    arrivals = view.analysis.program.all_events(Kind.CLUSTER_ARRIVE)
    if not arrivals:
        return
    all_touches = touches(view)
    remote_reads = [t for t in all_touches if t.space is Space.REMOTE and t.reads and _plain(t)]
    remote_writes = [t for t in all_touches if t.space is Space.REMOTE and t.writes and _plain(t)]
    if not remote_reads and not remote_writes:
        return
    changes: dict[int, Change] = {}
    for t in all_touches:
        if t.writes and _plain(t) and t.space in (Space.SHARED, Space.REMOTE):
            gives = (_OWN if t.space is Space.SHARED else 0) | (_REMOTE if t.space is Space.REMOTE else 0)
            changes[t.index] = change(view, t.step, gives=gives)
    for f in fences(view):
        if f.releases and f.scope >= Scope.CLUSTER:
            changes[f.step.index] = change(view, f.step, takes=_OWN | _REMOTE)
    in_ptx = isinstance(view, PtxView)
    for e in arrivals:
        if in_ptx and e.count != RELAXED:
            changes[e.index] = Change(takes=_OWN | _REMOTE, who=e.guard, sure=not e.guarded)
    marks = Marks(view, changes, CTA_MEETINGS | CLUSTER)
    brought = 0
    for e in arrivals:
        if e.index not in changes:  # relaxed; in SASS any, as the MEMBAR of the others stands before them
            brought |= int(np.bitwise_or.reduce(marks.before(e.index)))
    if not brought:
        return
    stores = [t for t in all_touches if t.index in changes and t.writes]
    for t in remote_reads:
        if marks.carried(t.step) & _OWN and _came_over(view, changes, t, _OWN):
            yield _order_finding(view, stores, t, Space.SHARED, "the CTA it belongs to")
            return
    for t in all_touches:
        local = t.space is Space.SHARED and t.reads and _plain(t)
        if local and marks.carried(t.step) & _REMOTE and _came_over(view, changes, t, _REMOTE):
            yield _order_finding(view, stores, t, Space.REMOTE, "a peer")
            return


def _came_over(view: View, changes: dict[int, Change], t: Touch, bit: int) -> bool:
    """Whether a store's mark reaches a read through a cluster barrier."""
    program = view.analysis.program
    waits = program.all_events(Kind.CLUSTER_WAIT)
    if not waits:
        return False
    if isinstance(view, SassView):  # where the cluster is one CTA, SASS has a CTA barrier in its place
        waits += program.all_events(Kind.BARRIER)
    blocked = dict(changes)
    for e in waits:
        blocked[e.index] = Change(clears=_OWN | _REMOTE, who=e.guard, sure=not e.guarded)
    return Marks(view, blocked, CTA_MEETINGS | CLUSTER).carried(t.step) & bit == 0


def _order_finding(view: View, stores: list[Touch], read: Touch, space: Space, who: str) -> Finding:
    store = next(t for t in stores if t.space is space)
    return finding(
        "cluster-barrier",
        Severity.ERROR,
        view,
        read.index,
        f"shared memory that {who} stored to ({_line(view, store.index)}) is read after a cluster barrier "
        "with a relaxed arrival: it orders no memory, and the old content may be read",
        "use barrier.cluster.arrive (a release), or fence.acq_rel.cluster before the relaxed arrival",
    )


# -- pairing ---------------------------------------------------------------------------------------


def _pairing(view: PtxView) -> Iterator[Finding]:
    program = view.analysis.program
    arrivals = program.all_events(Kind.CLUSTER_ARRIVE)
    waits = program.all_events(Kind.CLUSTER_WAIT)
    events = [*arrivals, *waits]
    if not events or any(e.guarded for e in events):
        return
    pending, idle = 1, 2
    changes = {e.index: Change(clears=idle, gives=pending, who=e.guard) for e in arrivals}
    changes |= {e.index: Change(clears=pending, gives=idle, who=e.guard) for e in waits}
    marks = Marks(view, changes, (), start=idle)
    certain = all(_unconditional(view, e.index) for e in events) or not arrivals or not waits
    if not certain:
        return
    for e in arrivals:
        if marks.before(e.index)[_who(e, marks, view)].any() and _any(marks, e, view, pending):
            yield finding(
                "cluster-barrier",
                Severity.ERROR,
                view,
                e.index,
                "a thread arrives at the cluster barrier again without having waited after its last arrival: "
                "the barrier's behaviour is undefined",
                "put barrier.cluster.wait between the two arrivals",
            )
            return
    for e in waits:
        if _any(marks, e, view, idle):
            yield finding(
                "cluster-barrier",
                Severity.ERROR,
                view,
                e.index,
                "a thread waits at the cluster barrier without having arrived at it: the barrier's behaviour "
                "is undefined",
                "execute barrier.cluster.arrive in every thread before the wait",
            )
            return


def _who(e, marks: Marks, view: PtxView):  # type: ignore[no-untyped-def]
    reach = marks.reach(e.index)
    return reach if e.guard is None else reach & (e.guard != 0)


def _any(marks: Marks, e, view: PtxView, bit: int) -> bool:  # type: ignore[no-untyped-def]
    return bool((marks.before(e.index)[_who(e, marks, view)].astype(int) & bit).any())


def _unconditional(view: PtxView, index: int) -> bool:
    """Whether who comes to an instruction is known: no branch above it depends on what is not known."""
    graph, program = view.graph, view.analysis.program
    b: int | None = graph.block_of[index]
    while b is not None:
        above = graph.immediate_dominators[b]
        if above is None:
            return True
        known = len(graph.successors[above]) < 2 or any(
            (above, s) in program.edges for s in graph.successors[above]
        )
        if not known and not graph.post_dominates(b, above):
            return False
        b = above
    return True


# -- exits -----------------------------------------------------------------------------------------


def _lifetime(view: View) -> Iterator[Finding]:
    """Reads of peers' shared memory after which the peer is told nothing before it may exit."""
    reads = [t for t in touches(view) if t.space is Space.REMOTE and t.reads and _plain(t)]
    if not reads:
        return
    changes = {t.index: change(view, t.step, gives=_LIFETIME) for t in reads}
    arrivals = view.analysis.program.all_events(Kind.CLUSTER_ARRIVE)
    for e in arrivals:
        changes[e.index] = Change(takes=_LIFETIME, who=e.guard, sure=True)
    for index in _remote_arrivals(view):
        changes[index] = Change(takes=_LIFETIME, sure=True)
    for t in touches(view):
        if t.space is Space.REMOTE and t.writes and t.index not in changes:
            changes[t.index] = Change(takes=_LIFETIME, sure=True)  # may tell the peer
    marks = Marks(view, changes, CTA_MEETINGS | MBARRIERS)
    if not (marks.at_end() != 0).any():
        return
    for t in reads:
        if isinstance(view, SassView) and any(e.index in after(view.graph, t.index) for e in arrivals):
            continue  # SASS goes around the barrier where the cluster is one CTA
        alone = {i: c for i, c in changes.items() if i == t.index or not c.gives}
        if (Marks(view, alone, CTA_MEETINGS | MBARRIERS).at_end() != 0).any():
            yield finding(
                "cluster-barrier",
                Severity.ERROR,
                view,
                t.index,
                "shared memory of another CTA is read here, and no cluster barrier follows before the end of "
                "the kernel: that CTA may have exited, and its memory be in use by another",
                "execute barrier.cluster.arrive and wait in all threads after the last such read",
            )
            return


def _remote_arrivals(view: View) -> list[int]:
    if isinstance(view, SassView):
        return [
            s.index
            for s in view.steps("SYNCS")
            if "ARRIVE" in s.instruction.modifiers and "RED" in s.instruction.modifiers
        ]
    return [s.index for s in view.steps("mbarrier") if _arrives_remotely(s)]


def _arrives_remotely(s: Step) -> bool:
    if s.instruction.modifiers[:1] not in (("arrive",), ("arrive_drop",)):
        return False
    at = next((n for n, o in enumerate(s.instruction.operands) if isinstance(o, Address)), None)
    return at is not None and mapped(s.values[at])


# -- mbarriers across the cluster --------------------------------------------------------------------


def _narrow_arrivals(view: View) -> Iterator[Finding]:
    """Ordinary remote stores published by an mbarrier arrival or awaited by a wait of scope .cta.

    In SASS an arrival of scope .cluster has a MEMBAR before it.
    """
    stores = [t for t in touches(view) if t.space is Space.REMOTE and t.writes and _plain(t)]
    arrivals: list[Step | SassStep]
    if isinstance(view, SassView):
        arrivals = [s for s in view.steps("SYNCS") if {"ARRIVE", "RED"} <= set(s.instruction.modifiers)]
    else:
        arrivals = [s for s in view.steps("mbarrier") if _arrives_remotely(s)]
    if not stores or not arrivals:
        return
    changes: dict[int, Change] = {t.index: change(view, t.step, gives=1) for t in stores}
    if isinstance(view, SassView):  # in PTX no fence widens the arrival's own scope
        for f in fences(view):
            if f.releases and f.scope >= Scope.CLUSTER:
                changes[f.step.index] = change(view, f.step, takes=1)
    for e in view.analysis.program.all_events(Kind.CLUSTER_ARRIVE):
        if e.count != RELAXED:
            changes[e.index] = Change(takes=1, who=e.guard, sure=not e.guarded)
    marks = Marks(view, changes, CTA_MEETINGS)
    published: set[int | None] = set()
    for s in arrivals:
        store = next(iter(stores))
        narrow = "cluster" not in s.instruction.modifiers
        if not narrow and isinstance(s, Step):
            published.add(_key(s))
        if narrow and marks.carried(s):
            yield finding(
                "scope-too-narrow",
                Severity.ERROR,
                view,
                s.index,
                "this arrival at another CTA's mbarrier has scope .cta, so ordinary stores to that CTA's "
                f"shared memory ({_line(view, store.index)}) are not released to it: it may see the "
                "arrival and read the old content",
                "use mbarrier.arrive.release.cluster",
            )
            return
    if isinstance(view, SassView):
        return
    for s in view.steps("mbarrier"):
        m = s.instruction.modifiers
        if m[:1] not in (("try_wait",), ("test_wait",)) or "cluster" in m or "relaxed" in m:
            continue
        if _key(s) is not None and _key(s) in published and _reads_after(view, s):
            yield finding(
                "scope-too-narrow",
                Severity.ERROR,
                view,
                s.index,
                "this wait acquires with scope .cta what another CTA releases with its arrival "
                f"after ordinary stores to shared memory ({_line(view, stores[0].index)}): later loads "
                "may return the old content",
                "use mbarrier.try_wait with .acquire.cluster",
            )
            return


def _key(s: Step) -> int | None:
    at = next((n for n, o in enumerate(s.instruction.operands) if isinstance(o, Address)), None)
    return None if at is None else s.values[at].constant()


def _reads_after(view: PtxView, s: Step) -> bool:
    changes = {s.index: change(view, s, gives=1)}
    for f in fences(view):
        if f.acquires and f.scope >= Scope.CLUSTER:
            changes[f.step.index] = change(view, f.step, takes=1)
    marks = Marks(view, changes, CTA_MEETINGS)
    loads = (t for t in touches(view) if t.space is Space.SHARED and t.reads and _plain(t))
    return any(marks.carried(t.step) for t in loads)
