"""A wait that flags hand on: one CTA waits and raises a flag, the others poll it (ORDERING.md, section 3).

Who leaves a polling loop is ordered after the wait if whatever can end the loop is stored, with a release, by
threads that are ordered after it. That the loop is not ended by what an earlier launch left in the flag is
another question, `stale-epoch`, which runs answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from workbench.isa.ptx.model import Instruction
from workbench.verify.ordering.dependence import Poll, polls
from workbench.verify.ordering.memory import Scope, Space, Touch, touches
from workbench.verify.ordering.program import Event, Kind, Mode
from workbench.verify.ordering.solver import Relay, solve
from workbench.verify.ordering.view import PtxView


def handed_on(view: PtxView, foreign: frozenset[str]) -> PtxView:
    """The view, solved with what flags hand on.

    Args:
        view: a kernel for one launch.
        foreign: buffers that other kernels of the list are given: they may raise flags there.
    """
    if view.launch.pdl is False or not view.analysis.waits:
        return view
    relays: dict[int, tuple[Relay, ...]] = {}
    for poll in polls(view):
        elsewhere = bool(poll.touch.names & foreign)
        raised = () if elsewhere else _raised(view, poll)
        for index in _received(view, poll) if raised or elsewhere else ():
            relays[index] = raised if index not in relays or not relays[index] else relays[index] + raised
    if not relays:
        return view
    program = view.analysis.program
    return replace(view, analysis=replace(view.analysis, solution=solve(program, relays)))


def _events(view: PtxView) -> Mapping[int, Event]:
    return {
        e.index: e for block in view.analysis.program.events for e in block if e.kind is not Kind.REDEFINE
    }


def _wide(item: Instruction) -> bool:
    return bool({"gpu", "sys", "gl"} & set(item.modifiers))


def _raised(view: PtxView, poll: Poll) -> tuple[Relay, ...]:
    """All that may end a poll; nothing if some of it is not known to release."""
    touch = poll.touch
    plain = touch.mode is Mode.LOAD and touch.space is Space.GLOBAL and touch.names
    if not plain or poll.data or poll.ends_at_zero or not poll.loop or (touch.scope or 0) < Scope.GPU:
        return ()
    block_of = view.graph.block_of
    if any(
        t is not touch and block_of[t.index] in poll.loop
        for t in touches(view)
        if t.space is not Space.SHARED
    ):
        return ()  # it would be taken for one after the loop
    events = _events(view)
    found = []
    for t in touches(view):
        if not t.writes or t.space is Space.SHARED or (t.names and not t.names & touch.names):
            continue
        source = _source(view, t, events)
        if not t.names or t.asynchronous or source is None or t.index not in events:
            return ()
        found.append((events[t.index], source))
    return tuple(found)


def _source(view: PtxView, t: Touch, events: Mapping[int, Event]) -> Event | None:
    """What a store releases from: itself, or the last fence that is sure to stand before it."""
    if (t.scope or 0) < Scope.GPU:
        return None
    if t.releases:
        return events.get(t.index)
    graph = view.graph
    here = graph.block_of[t.index]
    for index in sorted(events, reverse=True):
        e = events[index]
        if (
            e.kind is not Kind.RELEASE
            or e.access is not None
            or e.guarded
            or not _wide(graph.instructions[index])
        ):
            continue
        there = graph.block_of[index]
        if (there == here and index < t.index) or (there != here and graph.dominates(there, here)):
            return e
    return None


def _received(view: PtxView, poll: Poll) -> tuple[int, ...]:
    """Where a poll's value orders its thread: at the load if that acquires, else at fences after the loop."""
    if poll.touch.acquires:
        return (poll.touch.index,)
    graph = view.graph
    header = graph.block_of[poll.touch.index]
    found = []
    for index, e in _events(view).items():
        if e.kind not in (Kind.RELEASE, Kind.ACQUIRE) or e.access is not None or e.guarded:
            continue
        there = graph.block_of[index]
        if there not in poll.loop and graph.dominates(header, there) and _wide(graph.instructions[index]):
            found.append(index)
    return tuple(found)
