"""Several launches of one stream that overlap as programmatic dependent launch allows.

A launch with programmatic stream serialization may start once every CTA of the launch before it has executed
`griddepcontrol.launch_dependents` or has exited; any other launch starts when all before it have completed.
`griddepcontrol.wait` returns when the launch before has completed. That launch may itself have completed
before an earlier one, if none of its threads waited: what the earlier one still writes is then unordered.

The dependent is always ahead here: it starts as soon as it may and runs until it waits or polls; only then
its predecessor goes on. What it does before it waits therefore happens before anything that the predecessor
has yet to do: an access that is not ordered after the wait meets memory that it must not rely on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from workbench.simulator.launch import LaunchState, Tally
from workbench.simulator.ordering.order import share
from workbench.simulator.running import Part, numpy_errors, partition, run_steps


@dataclass(slots=True)
class _Running:
    """A launch that has started."""

    index: int
    state: LaunchState
    steps: Generator[bool, None, Part]
    stalled_at: int = -1
    """Count of events when it last found nothing to do; -1 while it has something."""


def run_stream(
    states: Sequence[LaunchState], pdl: Sequence[bool], arrive: Callable[[], None] | None = None
) -> list[Part]:
    """Run launches; return what those did that ran to their end or to a limit, in order.

    Args:
        states: the launches; each needs a program of its own.
        pdl: which of them have programmatic stream serialization.
        arrive: called when what precedes the first launch in the stream completes, which is when nobody can
            go on without; None if it has completed already.
    """
    tally = Tally()
    for n, state in enumerate(states):
        state.tally, state.number = tally, n
        state.before = states[n - 1] if n else None
        state.external = arrive is None or not pdl[0]
    if arrive is not None and not pdl[0]:
        arrive()
        arrive = None
    _share_orders(states, pdl)
    parts: dict[int, Part] = {}
    active: list[_Running] = []
    following = 0
    with numpy_errors():
        while True:
            while following < len(states) and _may_start(states, pdl, following):
                state = states[following]
                steps = run_steps(state, partition(state)[0], together=True)
                active.append(_Running(following, state, steps))
                following += 1
            if not active:
                break
            ready = [r for r in active if r.stalled_at != tally.count]
            if not ready and not states[0].external:
                states[0].external = True
                tally.count += 1
                if arrive is not None:
                    arrive()
                continue
            for turn in ready[-1:] if ready else list(active):
                part = _turn(turn, tally)
                if part is None:
                    continue
                active.remove(turn)
                parts[turn.index] = part
                if not part.completed:
                    for other in active:
                        parts[other.index] = _abandoned(other)
                    return _in_order(states, parts)
                turn.state.settle()
                turn.state.complete = True
                if turn.state.order is not None and turn.state.order.launches is not None:
                    turn.state.order.launches.end(turn.state)
    if not states[0].external and arrive is not None:
        arrive()
    return _in_order(states, parts)


def _share_orders(states: Sequence[LaunchState], pdl: Sequence[bool]) -> None:
    """Have launches that may overlap follow happens-before together."""
    first = 0
    for n in range(1, len(states) + 1):
        if n < len(states) and pdl[n]:
            continue
        some, first = states[first:n], n
        if len(some) > 1 and some[0].options.check_races:
            share(some, programmatic=True)


def _in_order(states: Sequence[LaunchState], parts: dict[int, Part]) -> list[Part]:
    """Return the parts with what later launches have found of earlier ones."""
    for n, part in parts.items():
        part.findings = states[n].log.findings()
    return [parts[n] for n in sorted(parts)]


def _may_start(states: Sequence[LaunchState], pdl: Sequence[bool], n: int) -> bool:
    if n == 0:
        return True
    if pdl[n]:
        return bool(states[n - 1].complete or states[n - 1].open.all())
    return all(s.complete for s in states[:n])


def _turn(running: _Running, tally: Tally) -> Part | None:
    """Let a launch run one step; return what it did if that was the last one."""
    try:
        busy = next(running.steps)
    except StopIteration as end:
        tally.count += 1
        part: Part = end.value
        return part
    running.stalled_at = -1 if busy else tally.count
    return None


def _abandoned(running: _Running) -> Part:
    """Return the findings so far of a launch that goes on no more because another one failed."""
    running.steps.close()
    state = running.state
    blocks = len(state.program.blocks)
    return Part.empty(blocks, state.log.findings())
