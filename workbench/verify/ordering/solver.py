"""How well each thread is ordered after the grid's dependencies, at every event of a kernel.

For each thread of one CTA a level is carried forward over the control-flow graph; where paths meet the lower
one counts. A thread that executes the wait is at SELF. A barrier lifts its participants to ORDERED if one of
them is certain to have waited (or to be ordered) by then; where that cannot be decided, to MAYBE. Levels only
rise from one round to the next, starting with no barrier lifting anybody, so no edge is credited that is not
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.verify.ordering.program import Condition, Event, Kind, Program
from workbench.verify.ordering.quorum import Mbarriers
from workbench.verify.ordering.rounds import unrolled

NONE, MAYBE, ORDERED, SELF, UNREACHED = 0, 1, 2, 3, 255
"""Not ordered; perhaps; after another thread's wait through a barrier; waited itself; never gets there."""
Levels = NDArray[np.uint8]
RELAXED = -1
"""Count of a cluster arrival that orders nothing (`.relaxed`)."""
VARIES = -2
_NOWHERE = -1
_ARRIVES = frozenset((Kind.BARRIER, Kind.BARRIER_ARRIVE, Kind.CLUSTER_ARRIVE))
_RECEIVES = frozenset((Kind.BARRIER, Kind.WARP_BARRIER, Kind.CLUSTER_WAIT, Kind.MBARRIER_WAIT, Kind.ACQUIRE))
_CLUSTER = "cluster"


@dataclass(frozen=True)
class Solution:
    """Levels before each event (by instruction index), of the threads that execute it, and at the end."""

    before: dict[int, Levels]
    at_exit: Levels
    """Lowest level of each thread where it ends; UNREACHED for a thread that never ends."""

    def lowest(self, event: Event) -> int:
        """The lowest level among the threads that execute an event; UNREACHED if none does."""
        return int(self.before[event.index].min(initial=UNREACHED))


def active(event: Event, levels: Levels) -> NDArray[np.bool_]:
    """Threads that may execute an event."""
    reached = levels != UNREACHED
    return reached if event.guard is None else np.asarray(reached & (event.guard != 0))


Relay = tuple[Event, Event]
"""A store that may end a poll, and the event from which it releases: itself, or a fence before it."""


def solve(program: Program, relays: Mapping[int, Sequence[Relay]] | None = None) -> Solution:
    """Find the levels of a kernel.

    Args:
        program: the kernel.
        relays: by index of an event that only threads pass whose poll has ended: all that may have ended it;
            empty if another kernel may have.
    """
    phases = arrivals_before(program)
    grants: dict[int, Levels] = {}
    rounds = unrolled(program)
    while True:
        levels, at_exit = _propagate(rounds, grants)
        new = _grants(program, levels, phases)
        for index, raised in (relays or {}).items():
            lifted = MAYBE if not raised else ORDERED if _all_ordered(raised, levels) else NONE
            if lifted != NONE:
                new[index] = np.full(program.threads.count, lifted, np.uint8)
        if all(np.array_equal(new[k], grants[k]) if k in grants else not new[k].any() for k in new):
            before = {
                e.index: np.where(active(e, levels[e.index]), levels[e.index], UNREACHED).astype(np.uint8)
                for block in program.events
                for e in block
            }
            return Solution(before, at_exit)
        grants = {k: np.maximum(v, grants[k]) if k in grants else v for k, v in new.items()}


def _all_ordered(relays: Sequence[Relay], levels: dict[int, Levels]) -> bool:
    """Whether some thread may make one of the stores, and all that may are ordered before they release."""
    reached = [(levels[source.index], active(store, levels[store.index])) for store, source in relays]
    return any(who.any() for _, who in reached) and all((at[who] >= ORDERED).all() for at, who in reached)


def _propagate(program: Program, grants: dict[int, Levels]) -> tuple[dict[int, Levels], Levels]:
    """Levels before each event, given what each barrier lifts its threads to."""
    n = program.threads.count
    unreached = np.full(n, UNREACHED, dtype=np.uint8)
    entry = [unreached.copy() for _ in program.events]
    facts: list[_Facts] = [None] * len(entry)
    at_exit = unreached.copy()
    before: dict[int, Levels] = {}
    if not entry:
        return before, at_exit
    entry[0] = np.zeros(n, dtype=np.uint8)
    facts[0] = frozenset()
    todo = [0]
    while todo:
        b = todo.pop()
        levels, known = entry[b], facts[b]
        for event in program.events[b]:
            if event.kind is Kind.REDEFINE:
                known = _forget(known, event)
                continue
            holds = event.condition is not None and (known is None or event.condition in known)
            here = _waited(levels) if holds else levels
            other = before.get(event.index)  # in another round
            before[event.index] = here if other is None else np.minimum(here, other)
            if event.kind is Kind.WAIT and event.condition is not None and known is not None:
                known = known | {event.condition}
            levels = _apply(program, event, levels, grants)
        if program.leaves[b]:
            mask = program.leaving.get(b)
            ends = levels if mask is None else np.where(mask != 0, levels, UNREACHED).astype(np.uint8)
            at_exit = np.minimum(at_exit, ends)
        for s in program.successors[b]:
            mask = program.edges.get((b, s))
            taken = levels if mask is None else np.where(mask != 0, levels, UNREACHED).astype(np.uint8)
            carried = known
            condition = program.conditions.get((b, s))
            if condition is not None and known is not None:
                if condition in known:
                    taken = _waited(taken)
                carried = known | {(condition[0], not condition[1])}  # holds of nobody on this edge
            if not (taken[taken != UNREACHED] != SELF).any():
                carried = None
            lower = np.minimum(entry[s], taken)
            fewer = _both(facts[s], carried)
            if not np.array_equal(lower, entry[s]) or fewer != facts[s]:
                entry[s], facts[s] = lower, fewer
                todo.append(s)
    for block in program.events:
        for event in block:
            before.setdefault(event.index, unreached)
    return before, at_exit


_Facts = frozenset[Condition] | None
"""Conditions under which a thread is sure to have waited; None for all, as nobody is left who has not."""


def _forget(known: _Facts, event: Event) -> _Facts:
    """Facts about a predicate end when it gets a new value."""
    if known is None or event.condition is None:
        return known
    return frozenset(c for c in known if c[0] != event.condition[0])


def _both(a: _Facts, b: _Facts) -> _Facts:
    """Facts that hold on either of two paths."""
    return b if a is None else a if b is None else a & b


def _waited(levels: Levels) -> Levels:
    return np.where(levels == UNREACHED, UNREACHED, SELF).astype(np.uint8)


def _apply(program: Program, event: Event, levels: Levels, grants: dict[int, Levels]) -> Levels:
    if event.kind is Kind.WAIT:
        if event.guarded:
            return levels
        who = active(event, levels)
        raised = levels.copy()
        if event.whole_warp and event.guard is not None:
            warps = _warps(program)
            held = np.bincount(warps, weights=who) > 0
            beside = held[warps] & (levels != UNREACHED)
            raised[beside] = np.maximum(raised[beside], ORDERED)
        raised[who] = SELF
        return raised
    grant = grants.get(event.index)
    if grant is None:
        return levels
    who = active(event, levels)
    raised = levels.copy()
    raised[who] = np.maximum(raised[who], grant[who])
    return raised


def _warps(program: Program) -> NDArray[np.intp]:
    return (program.threads.linear // np.uint64(32)).astype(np.intp)


# -- which arrival belongs to which wait -----------------------------------------------------------


def _name(event: Event) -> object:
    return _CLUSTER if event.kind in (Kind.CLUSTER_ARRIVE, Kind.CLUSTER_WAIT) else event.key


def arrivals_before(program: Program) -> dict[int, NDArray[np.int32]]:
    """How often each thread has arrived at the event's barrier before the event; VARIES in loops.

    Negative where a thread never gets to the event. Found once a program; not to be written to.
    """
    known: dict[int, NDArray[np.int32]] | None = program.__dict__.get("_arrivals_before")
    if known is not None:
        return known
    events = program.all_events(*_ARRIVES, Kind.CLUSTER_WAIT)
    names = {_name(e) for e in events}
    found = {e.index: np.full(program.threads.count, _NOWHERE, np.int32) for e in events}
    for name in names:
        found |= _phases_of(program, name)
    program.__dict__["_arrivals_before"] = found
    return found


def _phases_of(program: Program, name: object) -> dict[int, NDArray[np.int32]]:
    n = program.threads.count
    nowhere = np.full(n, _NOWHERE, dtype=np.int32)
    entry = [nowhere.copy() for _ in program.events]
    entry[0] = np.zeros(n, dtype=np.int32)
    found: dict[int, NDArray[np.int32]] = {}
    todo = [0]
    while todo:
        b = todo.pop()
        count = entry[b]
        for event in program.events[b]:
            if event.kind not in _ARRIVES and event.kind is not Kind.CLUSTER_WAIT:
                continue
            if _name(event) != name:
                continue
            found[event.index] = count
            if event.kind is Kind.CLUSTER_WAIT:
                continue
            moves = count >= 0 if event.guard is None else (count >= 0) & (event.guard != 0)
            count = np.where(moves, VARIES if event.guarded else count + 1, count).astype(np.int32)
        for s in program.successors[b]:
            mask = program.edges.get((b, s))
            taken = count if mask is None else np.where(mask != 0, count, _NOWHERE)
            old = entry[s]
            merged = np.where(
                taken == _NOWHERE, old, np.where((old == _NOWHERE) | (old == taken), taken, VARIES)
            ).astype(np.int32)
            if not np.array_equal(merged, old):
                entry[s] = merged
                todo.append(s)
    return found


def _grants(
    program: Program, levels: dict[int, Levels], phases: dict[int, NDArray[np.int32]]
) -> dict[int, Levels]:
    """What each receiving event lifts its threads to, given the levels at all events."""
    found: dict[int, Levels] = {}
    mbarrier_arrivals = program.all_events(Kind.MBARRIER_ARRIVE)
    released = any(
        (levels[e.index][active(e, levels[e.index])] >= MAYBE).any() for e in program.all_events(Kind.RELEASE)
    )
    for event in program.all_events(*_RECEIVES):
        n = program.threads.count
        match event.kind:
            case Kind.BARRIER | Kind.CLUSTER_WAIT:
                found[event.index] = np.full(n, _barrier_grant(program, event, levels, phases), np.uint8)
            case Kind.WARP_BARRIER:
                found[event.index] = _warp_grant(program, event, levels[event.index])
            case Kind.MBARRIER_WAIT:
                lifted = _mbarrier_grant(program.mbarriers, event, mbarrier_arrivals, levels)
                found[event.index] = np.full(n, lifted, np.uint8)
            case _:
                found[event.index] = np.full(n, MAYBE if released else NONE, np.uint8)
    return found


def _warp_grant(program: Program, event: Event, levels: Levels) -> Levels:
    warps = _warps(program)
    who = active(event, levels)
    carried = np.zeros(int(warps[-1]) + 1, dtype=np.uint8)
    np.maximum.at(carried, warps[who], np.minimum(levels[who], ORDERED))
    lifted = carried[warps]
    if event.guarded or event.key is None:  # a member mask or guard that is not known
        lifted = np.minimum(lifted, MAYBE)
    elif event.key != 0xFFFFFFFF:
        members = (event.key >> (program.threads.linear % np.uint64(32)).astype(np.int64)) & 1
        carried = np.zeros_like(carried)
        inside = who & (members != 0)
        np.maximum.at(carried, warps[inside], np.minimum(levels[inside], ORDERED))
        lifted = np.where(members != 0, carried[warps], NONE)
    return lifted.astype(np.uint8)


def _barrier_grant(
    program: Program, event: Event, levels: dict[int, Levels], phases: dict[int, NDArray[np.int32]]
) -> int:
    """ORDERED if some thread takes part in every such barrier phase and is ordered before it arrives."""
    cluster = event.kind is Kind.CLUSTER_WAIT
    sites = [e for e in program.all_events(*_ARRIVES) if (e.kind is Kind.CLUSTER_ARRIVE) == cluster]
    named = [s for s in sites if cluster or s.key == event.key]
    strangers = [s for s in sites if not cluster and s.key is None and event.key is not None]
    my_levels = levels[event.index]
    mine = active(event, my_levels)
    if not mine.any():
        return NONE
    my_phase = phases[event.index][mine] - (1 if cluster else 0)
    phase = int(my_phase[0]) if (my_phase == my_phase[0]).all() and my_phase[0] >= 0 else None
    lowest = np.full(program.threads.count, UNREACHED, dtype=np.uint8)
    highest = NONE
    fences = bool(program.all_events(Kind.RELEASE))
    for site in named:
        here = active(site, levels[site.index])
        if phase is not None:
            theirs = phases[site.index]
            here = here & ((theirs == phase) | (theirs == VARIES))
        if site is not event and not cluster:  # a thread that gets here meets the others here
            here = here & ~mine
        if not here.any():
            continue
        if site.count == RELAXED and cluster and not fences:
            continue
        highest = max(highest, int(levels[site.index][here].max()))
        if site.guarded or (site.count == RELAXED and cluster):  # a fence may stand in for the release
            continue
        lowest = np.where(here, np.minimum(lowest, levels[site.index]), lowest)
    takes_part = lowest != UNREACHED
    certain = event.key is not None or cluster
    if event.count is not None and not cluster:
        warps = np.unique(_warps(program)[takes_part]).size
        certain = certain and event.count >= 0 and warps * 32 <= event.count
    if takes_part.any() and (lowest[takes_part] >= ORDERED).any() and certain and not event.guarded:
        return ORDERED
    for site in strangers:
        here = active(site, levels[site.index])
        if here.any():
            highest = max(highest, int(levels[site.index][here].max()))
    return MAYBE if highest >= MAYBE else NONE


def _mbarrier_grant(
    mbarriers: Mbarriers | None, event: Event, arrivals: list[Event], levels: dict[int, Levels]
) -> int:
    """ORDERED if all who arrive at this mbarrier are ordered before, or one of them whom each phase needs."""
    names = mbarriers if mbarriers is not None else Mbarriers()
    relevant = [a for a in arrivals if names.may_meet(a, event)]
    reached = [(a, active(a, levels[a.index])) for a in relevant]
    reached = [(a, who) for a, who in reached if who.any()]
    if not reached:
        return NONE
    lowest = np.full(levels[event.index].shape, UNREACHED, np.uint8)
    for a, who in reached:
        lowest = np.where(who, np.minimum(lowest, levels[a.index]), lowest)
    takes_part = lowest != UNREACHED
    ordered = takes_part & (lowest >= ORDERED)
    if ordered[takes_part].all():
        return ORDERED
    if ordered.any() and names.all_needed(event, reached) and not any(a.guarded for a, _ in reached):
        return ORDERED
    return MAYBE if any((levels[a.index][who] >= MAYBE).any() for a, who in reached) else NONE
