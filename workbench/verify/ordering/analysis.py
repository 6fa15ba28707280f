"""One form of a kernel with what the solver found: accesses, waits, effects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from workbench.verify.ordering.binding import Effects, Launch, Layout
from workbench.verify.ordering.program import Access, Event, Kind, Mode, Place, Program
from workbench.verify.ordering.solver import NONE, ORDERED, SELF, UNREACHED, Solution, solve

_ACCESSES = (Kind.ACCESS, Kind.ACQUIRE, Kind.RELEASE)


@dataclass(frozen=True)
class Site:
    """One access with what is known of it."""

    event: Event
    access: Access
    level: int
    """Lowest level of the threads that execute it."""
    buffers: frozenset[str]
    """Buffers it may touch; empty if that cannot be told."""
    place: Place


@dataclass(frozen=True)
class Analysis:
    """One form of a kernel (its PTX or its SASS), solved."""

    program: Program
    solution: Solution
    launch: Launch
    layout: Layout

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Accesses that some thread executes, in program order."""
        found = []
        for event in self.program.all_events(*_ACCESSES):
            if event.access is None:
                continue
            level = self.solution.lowest(event)
            if level == UNREACHED:
                continue
            buffers = self.launch.touched(event.access, self.layout)
            found.append(Site(event, event.access, level, buffers, self.program.places[event.index]))
        return tuple(found)

    @cached_property
    def waits(self) -> tuple[Event, ...]:
        """Waits that some thread executes."""
        found = self.program.all_events(Kind.WAIT)
        return tuple(e for e in found if self.solution.lowest(e) != UNREACHED)

    @cached_property
    def surely_waits(self) -> bool:
        """True if some thread waits on every path to its end."""
        return bool((self.solution.at_exit == SELF).any())

    @cached_property
    def effects(self) -> Effects:
        """Buffers written and read, and whether earlier grids are complete when a dependent can start."""
        writes: set[str] = set()
        reads: set[str] = set()
        for s in self.sites:
            touched = s.buffers or self.launch.mutable
            if s.access.mode is not Mode.STORE:
                reads |= touched
            if s.access.mode is not Mode.LOAD:
                writes |= touched
        drains = self.surely_waits and self.late_triggers
        return Effects(frozenset(writes), frozenset(reads), drains, self.surely_waits)

    @cached_property
    def late_triggers(self) -> bool:
        """True if every thread's trigger comes after the wait; also if there is none."""
        triggers = [self.solution.lowest(e) for e in self.program.all_events(Kind.TRIGGER)]
        return all(t >= ORDERED for t in triggers if t != UNREACHED)

    @cached_property
    def reaches_wait(self) -> frozenset[int]:
        """Blocks from which a wait can still be reached."""
        holding = {
            b for b, events in enumerate(self.program.events) if any(e.kind is Kind.WAIT for e in events)
        }
        found = set(holding)
        grew = True
        while grew:
            grew = False
            for b, following in enumerate(self.program.successors):
                if b not in found and any(s in found for s in following):
                    found.add(b)
                    grew = True
        return frozenset(found)

    @cached_property
    def early_loads(self) -> tuple[Site, ...]:
        """Loads that stand before a wait that their threads can still reach."""
        block_of = {e.index: b for b, events in enumerate(self.program.events) for e in events}
        found = []
        for s in self.sites:
            if s.access.mode is not Mode.LOAD or s.level != NONE:
                continue
            b = block_of[s.event.index]
            later = any(e.kind is Kind.WAIT and e.index > s.event.index for e in self.program.events[b])
            if later or any(n in self.reaches_wait for n in self.program.successors[b]):
                found.append(s)
        return tuple(found)


def analyse(program: Program, launch: Launch, layout: Layout) -> Analysis:
    """Solve a program for one launch."""
    return Analysis(program, solve(program), launch, layout)
