"""Which arrivals meet which waits: barriers, mbarriers, cluster and grid operations of one choice of runs.

The synchronizing operations are executed in every order that makes a difference. Each end of that execution
is a `Meeting`: the synchronizes-with edges it made, and the threads that hang and where.

Our own rules, as docs/memory-model.md says: a barrier without a quorum waits for the threads that execute it
at all; an mbarrier's wait synchronizes with all arrivals of the phases that were complete when it passed; the
completion of an asynchronous copy counts whatever the scope of the wait; a dependent grid starts once every
CTA of its primary has launched it or is over, and its wait passes once the primary is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workbench.memory_model.events import Event, Run, Sync
from workbench.memory_model.program import Litmus, Place, Scope
from workbench.memory_model.runs import CANDIDATE, Budget

Point = tuple[int, int]
"""Thread and event of its run."""


@dataclass(frozen=True)
class Meeting:
    """One way in which the synchronizing operations met."""

    edges: frozenset[tuple[Point, Point]]
    stops: tuple[int, ...]
    """By thread: number of events it executes."""
    hung: tuple[bool, ...]
    deadlock: bool = False
    """True if threads hang and all of them at barriers without a quorum."""


@dataclass(frozen=True)
class _Phase:
    """State of an mbarrier."""

    number: int
    pending: int
    transactions: int
    arrived: frozenset[Point] = frozenset()
    done: frozenset[Point] = frozenset()


@dataclass(frozen=True)
class _State:
    at: tuple[int, ...]
    """By thread: operations passed."""
    waiting: int
    """Threads that have arrived at their operation and wait there."""
    copies: int
    """Completions of copies that have happened."""
    phases: tuple[_Phase, ...]
    quorums: frozenset[tuple[tuple[object, ...], frozenset[Point]]] = frozenset()
    launched: frozenset[tuple[object, Point]] = frozenset()
    edges: frozenset[tuple[Point, Point]] = frozenset()


def includes(scope: Scope | None, one: Place, other: Place) -> bool:
    """True if an operation of that scope at `one` includes threads at `other` (PTX ISA 8.5)."""
    if scope is None:
        return False
    if scope is Scope.SYS:
        return True
    if one.gpu != other.gpu:
        return False
    if scope is Scope.GPU:
        return True
    if one.grid != other.grid or one.cluster != other.cluster:
        return False
    return one.cta == other.cta or (scope is Scope.CLUSTER and one.cluster is not None)


def meetings(test: Litmus, runs: tuple[Run, ...], budget: Budget) -> Iterator[Meeting]:
    """Every way in which the operations of these runs may meet; raises UndecidedError if too many."""
    return _Matcher(test, runs).meetings(budget)


class _Matcher:
    def __init__(self, test: Litmus, runs: tuple[Run, ...]) -> None:
        self.test, self.runs = test, runs
        self.places = [t.place for t in test.threads]
        self.names = {m.name: n for n, m in enumerate(test.mbarriers)}
        self.main: list[list[tuple[int, Sync]]] = []
        self.copies: list[tuple[int, int, Sync, int]] = []
        """Thread, event, operation and the thread's operations that precede each completion of a copy."""
        for number, run in enumerate(runs):
            straight: list[tuple[int, Sync]] = []
            for at, event in enumerate(run.events):
                if event.sync is None:
                    continue
                if event.detached:
                    self.copies.append((number, at, event.sync, len(straight)))
                else:
                    straight.append((at, event.sync))
            self.main.append(straight)
        self.rounds: dict[tuple[object, ...], dict[int, list[int]]] = {}
        """By barrier and thread: its operations on it, in order (those that count as arrivals)."""
        self.turn: dict[tuple[int, int], int] = {}
        """How many operations on the same barrier precede a thread's operation."""
        for number, operations in enumerate(self.main):
            seen: dict[tuple[object, ...], int] = {}
            for position, (_, sync) in enumerate(operations):
                if sync.what in ("barrier", "cluster.arrive", "cluster.wait") and not sync.quorum:
                    key = (sync.what, *sync.key)
                    self.turn[number, position] = seen.get(key, 0)
                    seen[key] = seen.get(key, 0) + 1
                    self.rounds.setdefault(key, {}).setdefault(number, []).append(position)

    def meetings(self, budget: Budget) -> Iterator[Meeting]:
        phases = tuple(_Phase(0, m.count, 0) for m in self.test.mbarriers)
        stack = [_State((0,) * len(self.runs), 0, 0, phases)]
        seen: set[_State] = set()
        ends: set[Meeting] = set()
        while stack:
            state = self._settle(stack.pop())
            if state in seen:
                continue
            seen.add(state)
            budget.spend(CANDIDATE)
            following = [*self._choices(state)]
            if following:
                stack.extend(following)
                continue
            end = self._end(state)
            if end not in ends:
                ends.add(end)
                yield end

    # -- operations whose order makes no difference -----------------------------------------------------

    def _settle(self, state: _State) -> _State:
        """Execute everything that can go on in one way only."""
        at, waiting = list(state.at), state.waiting
        moved = True
        while moved:
            moved = False
            for number, operations in enumerate(self.main):
                while at[number] < len(operations):
                    sync = operations[at[number]][1]
                    if sync.what in ("mbarrier.arrive", "mbarrier.wait", "grid.launch") or sync.quorum:
                        break
                    if sync.what == "barrier" and not waiting >> number & 1:
                        waiting |= 1 << number
                        moved = True
                    if sync.blocks and not self._passes(number, at, waiting, state):
                        break
                    waiting &= ~(1 << number)
                    at[number] += 1
                    moved = True
        return _State(
            tuple(at), waiting, state.copies, state.phases, state.quorums, state.launched, state.edges
        )

    def _passes(self, number: int, at: list[int], waiting: int, state: _State) -> bool:
        sync = self.main[number][at[number]][1]
        if sync.what == "barrier":
            return self._round_complete(("barrier", *sync.key), self.turn[number, at[number]], at, waiting)
        if sync.what == "cluster.wait":
            key = ("cluster.arrive", *sync.key)
            return self._round_complete(key, self.turn[number, at[number]], at, waiting)
        grid = self.places[number].grid
        for edge in self.test.grids:
            if edge.later != grid:
                continue
            whole = sync.what == "grid.wait" or not edge.programmatic
            if not self._grid_over(edge.earlier, at, state, whole):
                return False
        return True

    def _round_complete(self, key: tuple[object, ...], turn: int, at: list[int], waiting: int) -> bool:
        for thread, positions in self.rounds.get(key, {}).items():
            if turn < len(positions):
                position = positions[turn]
                if at[thread] < position or (at[thread] == position and not waiting >> thread & 1):
                    return False
        return True

    def _grid_over(self, grid: int, at: list[int], state: _State, whole: bool) -> bool:
        """True if a grid is complete, or (not whole) has released its dependents."""
        ctas: dict[tuple[object, ...], bool] = {}
        triggered = {key for key, _ in state.launched}
        for number, place in enumerate(self.places):
            if place.grid == grid:
                cta = ("cta", place.grid, place.gpu, place.cluster, place.cta)
                ctas[cta] = ctas.get(cta, True) and at[number] == len(self.main[number])
        return all(over or (not whole and cta in triggered) for cta, over in ctas.items())

    # -- operations whose order counts ------------------------------------------------------------------

    def _choices(self, state: _State) -> Iterator[_State]:
        for number, operations in enumerate(self.main):
            if state.at[number] < len(operations) and not state.waiting >> number & 1:
                position, sync = operations[state.at[number]]
                if sync.what == "grid.launch":
                    yield self._launch(state, number, position, sync)
                elif sync.quorum and sync.what == "barrier":
                    yield self._quorum(state, number, position, sync)
                elif sync.what == "mbarrier.arrive":
                    following = self._arrive(state, (number, position), sync)
                    if following is not None:
                        yield self._advanced(following, number)
                elif sync.what == "mbarrier.wait":
                    phase = state.phases[self.names[str(sync.key[1])]]
                    if phase.number & 1 != sync.parity:
                        edges = self._acquired(phase.done, (number, position))
                        yield self._advanced(_with(state, edges=state.edges | edges), number)
        for index, (number, position, sync, first) in enumerate(self.copies):
            if not state.copies >> index & 1 and state.at[number] >= first:
                following = self._arrive(state, (number, position), sync)
                if following is not None:
                    yield _with(following, copies=following.copies | 1 << index)

    def _advanced(self, state: _State, number: int) -> _State:
        at = list(state.at)
        at[number] += 1
        return _with(state, at=tuple(at))

    def _launch(self, state: _State, number: int, position: int, sync: Sync) -> _State:
        cta = sync.key[1]
        launched = state.launched
        if cta not in {key for key, _ in launched}:
            launched |= {(cta, (number, position))}
        return self._advanced(_with(state, launched=launched), number)

    def _quorum(self, state: _State, number: int, position: int, sync: Sync) -> _State:
        key = (*sync.key, sync.quorum)
        quorums = dict(state.quorums)
        arrived = quorums.get(key, frozenset()) | {(number, position)}
        if len(arrived) < sync.quorum:
            quorums[key] = arrived
            state = _with(state, quorums=frozenset(quorums.items()))
            if sync.blocks:
                return _with(state, waiting=state.waiting | 1 << number)
            return self._advanced(state, number)
        quorums.pop(key, None)
        edges = {
            (one, other)
            for one in arrived
            for other in arrived
            if one != other and self._event(other).sync.blocks  # type: ignore[union-attr]
        }
        at, waiting = list(state.at), state.waiting
        at[number] += 1
        for thread, event in arrived:
            operations = self.main[thread]
            if thread != number and at[thread] < len(operations) and operations[at[thread]][0] == event:
                at[thread] += 1
                waiting &= ~(1 << thread)
        left = frozenset(quorums.items())
        return _with(state, at=tuple(at), waiting=waiting, quorums=left, edges=state.edges | edges)

    def _arrive(self, state: _State, point: Point, sync: Sync) -> _State | None:
        """Count an arrival or a completed copy; None if the mbarrier expects no further arrival."""
        index = self.names[str(sync.key[1])]
        phase = state.phases[index]
        pending, transactions = phase.pending - sync.quorum, phase.transactions + sync.expect
        if sync.what == "copied":
            transactions -= 1
        if pending < 0:
            return None
        arrived = phase.arrived | {point}
        if pending == 0 and transactions == 0 and (sync.quorum or sync.what == "copied"):
            count = self.test.mbarriers[index].count
            phase = _Phase(phase.number + 1, count, 0, frozenset(), phase.done | arrived)
        else:
            phase = _Phase(phase.number, pending, transactions, arrived, phase.done)
        phases = (*state.phases[:index], phase, *state.phases[index + 1 :])
        return _with(state, phases=phases)

    def _acquired(self, arrivals: frozenset[Point], wait: Point) -> frozenset[tuple[Point, Point]]:
        """Edges into an mbarrier's wait from those arrivals that release to it."""
        waiter = self._event(wait)
        edges = set()
        for point in arrivals:
            event = self._event(point)
            assert event.sync is not None
            if event.sync.what in ("copied", "copies-arrive"):
                edges.add((point, wait))
            elif event.releases and waiter.acquires:
                one, other = self.places[point[0]], self.places[wait[0]]
                if point[0] == wait[0] or (
                    includes(event.scope, one, other) and includes(waiter.scope, other, one)
                ):
                    edges.add((point, wait))
        return frozenset(edges)

    # -- the end ----------------------------------------------------------------------------------------

    def _event(self, point: Point) -> Event:
        return self.runs[point[0]].events[point[1]]

    def _end(self, state: _State) -> Meeting:
        edges = set(state.edges)
        for key, by_thread in self.rounds.items():
            for turn in range(max(map(len, by_thread.values()))):
                members = [(t, places[turn]) for t, places in by_thread.items() if turn < len(places)]
                if key[0] == "barrier":
                    done = [(t, p) for t, p in members if p < state.at[t]]
                    edges |= self._round_edges(members, done, state)
                elif key[0] == "cluster.arrive":
                    waits = self.rounds.get(("cluster.wait", *key[1:]), {})
                    done = [(t, w[turn]) for t, w in waits.items() if turn < len(w) and w[turn] < state.at[t]]
                    released = [
                        (t, p)
                        for t, p in members
                        if p < state.at[t] and self._event((t, self.main[t][p][0])).releases
                    ]
                    edges |= {
                        ((t, self.main[t][p][0]), (u, self.main[u][q][0]))
                        for t, p in released
                        for u, q in done
                    }
        edges |= self._grid_edges(state)
        stops, hung, deadlock = [], [], False
        for number, operations in enumerate(self.main):
            stuck = state.at[number] < len(operations)
            hung.append(stuck)
            if stuck:
                sync = operations[state.at[number]][1]
                plain = sync.what == "barrier" and not sync.quorum
                deadlock = plain and (deadlock or not any(hung[:-1]))
            stops.append(operations[state.at[number]][0] if stuck else len(self.runs[number].events))
        return Meeting(frozenset(edges), tuple(stops), tuple(hung), deadlock)

    def _round_edges(
        self, members: list[tuple[int, int]], done: list[tuple[int, int]], state: _State
    ) -> set[tuple[Point, Point]]:
        edges = set()
        for thread, position in done:
            here = (thread, self.main[thread][position][0])
            if not self._event(here).sync.blocks:  # type: ignore[union-attr]
                continue
            for other, there in members:
                if (other, there) != (thread, position) and there < state.at[other]:
                    edges.add(((other, self.main[other][there][0]), here))
        return edges

    def _grid_edges(self, state: _State) -> set[tuple[Point, Point]]:
        edges: set[tuple[Point, Point]] = set()
        for edge in self.test.grids:
            ends = self._points(edge.earlier, "grid.end", state)
            starts = self._points(edge.later, "grid.start", state)
            waits = self._points(edge.later, "grid.wait", state)
            edges |= {(end, wait) for end in ends for wait in waits}
            if not edge.programmatic:
                edges |= {(end, start) for end in ends for start in starts}
                continue
            for _, (thread, event) in state.launched:
                place = self.places[thread]
                if place.grid == edge.earlier:
                    edges |= {(fence, start) for fence in self._fences(thread, event) for start in starts}
        return edges

    def _points(self, grid: int, what: str, state: _State) -> list[Point]:
        return [
            (number, event)
            for number, operations in enumerate(self.main)
            if self.places[number].grid == grid
            for position, (event, sync) in enumerate(operations)
            if sync.what == what and position < state.at[number]
        ]

    def _fences(self, thread: int, launch: int) -> Iterator[Point]:
        """Release fences of gpu or sys scope that stand before a launch in its thread."""
        events = self.runs[thread].events
        for at in range(launch):
            event = events[at]
            wide = event.scope in (Scope.GPU, Scope.SYS)
            if event.releases and wide and event.cell < 0 and event.sync is None:
                yield thread, at


def _with(state: _State, **changes: object) -> _State:
    values = {name: getattr(state, name) for name in state.__dataclass_fields__} | changes
    return _State(**values)
