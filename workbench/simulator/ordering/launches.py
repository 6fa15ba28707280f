"""Happens-before from one launch to the next where launches overlap (programmatic dependent launch).

The end of a launch comes before every return of `griddepcontrol.wait` in the launch after it, for all
proxies, and what its threads knew comes along: a launch in which somebody waits does not end before its own
predecessor. A fence of gpu or sys scope before the first `launch_dependents` of its CTA comes before the
start of the dependent launch, with all that its thread knew then (rules X7 and X8 of docs/memory-model.md).
Nothing else orders launches that overlap, except flags. In plain stream order the end of a launch comes
before the start of the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.ordering.records import Record, Spans
from workbench.simulator.ordering.rules import verb
from workbench.simulator.ordering.world import ENDED, Clock, World, launch_of

if TYPE_CHECKING:
    from workbench.simulator.launch import LaunchState
    from workbench.simulator.ordering.shadow import Clash, Region

Array = npt.NDArray[Any]


class Launches:
    """What launches that share their clocks tell each other.

    Args:
        world: the clocks.
        states: the launches; those of one rank in order.
        programmatic: each is a programmatic dependent of the one before; else it starts after its end.
    """

    def __init__(self, world: World, states: Sequence[LaunchState], *, programmatic: bool) -> None:
        self._world, self._programmatic = world, programmatic
        self._states = {launch_of(s.first_cta): s for s in states}
        self._ends: dict[int, tuple[Clock, int]] = {}
        """By launch: what follows its end knows; the number of accesses until then."""
        self._starts: dict[int, Clock] = {}
        """By launch: what the start of its dependent knows."""

    def triggered(self, number: int, clock: Clock) -> None:
        """A CTA of launch `number` hands `clock` to the dependent launch."""
        self._starts[number] = self._world.join(self._starts.get(number), clock)

    def begun(self, number: int) -> Clock | None:
        """Return what every thread of launch `number` knows when it starts."""
        return self._starts.get(number + 1) if self._programmatic else self.ended(number)

    def ended(self, number: int) -> Clock | None:
        """Return what the end of the launch before launch `number` makes known."""
        clock, _ = self._ends.get(number + 1, ({}, 0))
        return clock

    def end(self, state: LaunchState) -> None:
        """A launch has completed."""
        number, world = launch_of(state.first_cta), self._world
        layout = world.layout
        if layout is None:
            return
        base = layout.base

        def whole(vector: Array) -> Array:
            out = np.zeros_like(vector)
            out[:base] = vector[0]
            return out

        clock: Clock = {}
        owners = {id(c): c for c in world.owners.values() if c.number == number}
        for clocks in owners.values():
            for known in {id(k): k for k in clocks.foreign.values()}.values():
                far = {k: v for k, v in known.items() if k < 0 or launch_of(k) != number}
                clock = world.join(clock, world.change(far, "ended", whole))
        everything = np.zeros((layout.count, 1), np.int64)
        everything[:base] = ENDED
        self._ends[number] = {**clock, number: everything}, world.time.number()

    # -- findings --------------------------------------------------------------------------------

    def report(self, clash: Clash, region: Region) -> None:
        """Add a finding about accesses of two launches that nothing orders; its first lane stands for all."""
        n = clash.later
        ahead = clash.ahead
        assert ahead is not None
        behind = clash.earlier if ahead is n else n
        later, earlier = self._states[ahead.clocks.number], self._states[behind.clocks.number]
        mine, theirs = later.program.kernel.name, earlier.program.kernel.name
        first = clash.lanes if ahead is n else clash.others
        text = (
            f"{mine} (launch {later.number}) {verb(ahead)} {region.name!r}, which {theirs} (launch "
            f"{earlier.number}) {verb(behind)} at line {behind.kind.item.line}"
        )
        middle = later.before
        _, ended = self._ends.get(ahead.clocks.number + 1, ({}, ahead.number))
        if middle is not None and middle is not earlier and ahead.number > ended:
            middle.log.add(
                "pdl-chain-not-transitive", None,
                f"no thread of {middle.program.kernel.name} (launch {middle.number}) waits for its "
                f"predecessor, so it may complete before launch {earlier.number}: after its own wait, {text}",
                fix="let at least one thread of every launch in a PDL chain execute griddepcontrol.wait",
                buffer=region.name, count=len(np.unique(clash.lanes)),
            )  # fmt: skip
            return
        if _waits(later):
            rule, of, item, other = "pdl-load-before-wait", later, ahead.kind.item, behind.kind.item
            text += ", and no griddepcontrol.wait comes before the access of its thread"
            fix = "move the access after griddepcontrol.wait, or order it after a thread that waits"
        else:
            rule, of, item, other = "pdl-early-trigger", earlier, behind.kind.item, ahead.kind.item
            text += f", and launch {later.number} never waits for its end"
            fix = (
                "let the dependent execute griddepcontrol.wait (launch_dependents publishes only what a "
                "fence of gpu scope before it, in its thread, has released)"
            )
        where = _thread(later, ahead, int(first[0])) if of is later else None
        of.log.add(
            rule, item, text, thread=where, fix=fix, buffer=region.name, count=len(np.unique(clash.lanes)),
            other=other,
        )  # fmt: skip


def _waits(launch: LaunchState) -> bool:
    """Whether a kernel has a griddepcontrol.wait at all."""
    items = launch.program.kernel.instructions
    return any(i.opcode == "griddepcontrol" and i.modifiers == ("wait",) for i in items)


def _thread(launch: LaunchState, r: Record, lane: int) -> str:
    rows, threads = r.by if isinstance(r, Spans) else r.lanes()
    return launch.thread_name(int(r.clocks.ctas[rows[lane]]) & 0xFFFFFFFF, int(threads[lane]))
