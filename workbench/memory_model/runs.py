"""All runs of the threads of a test: what each does for every value its reads may return.

The values that a location may hold are found by iteration. It ends because a value comes out of a chain of
writes in which no write stands twice (no thin air): there are no more rounds than writes, and no value is
kept whose chain would need more writes of its own location than a run has.

A loop that comes back to its head in the same state and without an effect is followed no further: the run
without that iteration has fewer events and so allows at least as much. Other loops are followed `LOOPS`
times; a run that would go on is left out and the exploration says that it is not complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from workbench.errors import WorkbenchError
from workbench.memory_model import program as p
from workbench.memory_model.condition import RELATIONS, terms
from workbench.memory_model.events import ALIAS_FENCE, Event, Kind, Run, Sync
from workbench.memory_model.program import MASK, Proxy, Scope

LOOPS = 3
"""How often a loop with effects is followed."""
CANDIDATE = 20
"""Work of one candidate execution; a step of a thread or a choice among runs is 1."""
MAX_RUNS = 4000
"""Runs of one thread beyond which a test is given up."""
MAX_EVENTS = 60
"""Events of one run beyond which a test is given up."""

_BRANCHES = {"beq": "==", "bne": "!=", "blt": "<", "ble": "<=", "bgt": ">", "bge": ">="}
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: (a + b) & MASK,
    "sub": lambda a, b: (a - b) & MASK,
    "mul": lambda a, b: (a * b) & MASK,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": min,
    "max": max,
    "exch": lambda _, b: b,
}


class UndecidedError(WorkbenchError):
    """A test that has more executions than are followed; the message says which bound was met."""


class Budget:
    """Work that may still be spent on a test, so that a verdict never takes for ever."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit * CANDIDATE

    def spend(self, cost: int) -> None:
        """Spend work; raises UndecidedError when there is none left."""
        self.left -= cost
        if self.left < 0:
            raise UndecidedError(f"more than the work of {self.limit} candidate executions")


@dataclass(frozen=True)
class Memory:
    """Numbers of the cells (physical elements) and views (virtual elements) of a test."""

    cells: dict[tuple[str, int], int]
    views: dict[tuple[str, int], int]
    initial: tuple[int, ...]
    """Initial value of each cell."""
    roots: dict[str, str]
    """Physical location of each declared one."""
    lengths: dict[str, int]
    """Number of elements of each declared location."""

    @staticmethod
    def of(test: p.Litmus) -> Memory:
        """Number the locations of a test.

        An alias through the generic proxy is another virtual address of the same cells; through another
        proxy it is the virtual address of its target.
        """
        declared = {location.name: location for location in test.locations}
        cells: dict[tuple[str, int], int] = {}
        views: dict[tuple[str, int], int] = {}
        initial: list[int] = []
        roots: dict[str, str] = {}
        lengths: dict[str, int] = {}
        for location in test.locations:
            if location.aliases is None:
                for index, value in enumerate(location.initial):
                    cells[location.name, index] = len(initial)
                    initial.append(value)
        for location in test.locations:
            root, virtual = location, location
            while root.aliases is not None:
                target = declared[root.aliases]
                if virtual is root and root.proxy is not Proxy.GENERIC:
                    virtual = target
                root = target
            roots[location.name] = root.name
            lengths[location.name] = len(root.initial)
            for index in range(len(root.initial)):
                views.setdefault((virtual.name, index), len(views))
                views[location.name, index] = views[virtual.name, index]
                cells[location.name, index] = cells[root.name, index]
        return Memory(cells, views, tuple(initial), roots, lengths)


@dataclass(frozen=True)
class Runs:
    """Runs of each thread; `complete` is false if some were left out."""

    memory: Memory
    threads: tuple[tuple[Run, ...], ...]
    complete: bool


def all_runs(test: p.Litmus, budget: Budget) -> Runs:
    """Every run of every thread; raises UndecidedError if there are too many."""
    memory = Memory.of(test)
    # By cell: each value it may hold and how many writes of the cell its chain has at least.
    domain: list[dict[int, int]] = [{value: 0} for value in memory.initial]
    bound = 1
    rounds = 0
    while True:
        found: list[tuple[Run, ...]] = []
        complete = True
        for number, thread in enumerate(test.threads):
            machine = _Machine(test, number, thread, memory, domain, budget)
            found.append(tuple(machine.runs()))
            complete = complete and machine.complete
        grown = _grow(found, domain)
        bound = sum(max((_count(r) for r in runs), default=0) for runs in found)
        rounds += 1
        if not grown or rounds > bound:
            return Runs(memory, tuple(found), complete)


def _count(run: Run, cell: int | None = None) -> int:
    """Number of writes of a run, or of those to one cell."""
    return sum(e.kind is Kind.WRITE and cell in (None, e.cell) for e in run.events)


def _grow(found: list[tuple[Run, ...]], domain: list[dict[int, int]]) -> bool:
    """Add what the runs write to the values that cells may hold; true if there was anything new."""
    most = [0] * len(domain)
    for runs in found:
        for cell in range(len(domain)):
            most[cell] += max((_count(r, cell) for r in runs), default=0)
    grown = False
    before = [dict(values) for values in domain]
    for run in (run for runs in found for run in runs):
        for event in run.events:
            if event.kind is not Kind.WRITE:
                continue
            depth = 1
            needs, index = event.needs, 0
            while needs:
                if needs & 1 and run.events[index].cell == event.cell:
                    depth = max(depth, 1 + before[event.cell].get(run.events[index].value, 0))
                needs, index = needs >> 1, index + 1
            if depth <= most[event.cell] and depth < domain[event.cell].get(event.value, MASK):
                grown = grown or event.value not in domain[event.cell]
                domain[event.cell][event.value] = depth
    return grown


@dataclass
class _State:
    """Where a run stands."""

    at: int
    registers: dict[str, int]
    origins: dict[str, int]
    """Reads on which each register depends."""
    control: int
    events: tuple[Event, ...]
    straight: int
    """Events that are in program order."""
    effects: int
    visits: dict[int, tuple[int, list[tuple[int, tuple[tuple[str, int], ...]]]]]
    """By place of a label: how often, and with which effects and registers it was reached."""
    groups: tuple[tuple[int, int], ...] = ()
    """Bulk groups: reads' ends and writes' ends of each."""
    simple_groups: tuple[int, ...] = ()
    open_bulk: tuple[int, int] = (0, 0)
    open_simple: int = 0

    def fork(self) -> _State:
        registers, origins = dict(self.registers), dict(self.origins)
        return replace(self, registers=registers, origins=origins, visits=dict(self.visits))


class _Machine:
    """Runs one thread in every way."""

    def __init__(
        self,
        test: p.Litmus,
        number: int,
        thread: p.Thread,
        memory: Memory,
        domain: list[dict[int, int]],
        budget: Budget,
    ) -> None:
        self.budget = budget
        self.test, self.number, self.thread = test, number, thread
        self.memory, self.domain = memory, domain
        self.code = thread.code
        self.complete = True
        self.labels = {i.name: n for n, i in enumerate(self.code) if isinstance(i, p.Label)}
        conditions = [test.condition, *([test.filter] if test.filter else [])]
        self.asked = {t.name for c in conditions for t in terms(c) if t.thread == number}
        self.live = _liveness(self.code, self.labels, self.asked)
        place = thread.place
        self.cta = ("cta", place.grid, place.gpu, place.cluster, place.cta)
        self.starts = any(e.later == place.grid for e in test.grids)
        self.ends = any(e.earlier == place.grid for e in test.grids)

    def runs(self) -> Iterator[Run]:
        """Every run; raises UndecidedError."""
        initial = {name: value for thread, name, value in self.test.registers if thread == self.number}
        start = _State(0, initial, {}, 0, (), 0, 0, {})
        if self.starts:
            self._sync(start, Sync("grid.start", (self.thread.place.grid,), blocks=True), 0)
        stack = [start]
        count = 0
        while stack:
            state = stack.pop()
            if len(state.events) > MAX_EVENTS:
                raise UndecidedError(f"{self.thread.name} has runs of more than {MAX_EVENTS} events")
            if state.at >= len(self.code):
                count += 1
                if count > MAX_RUNS:
                    raise UndecidedError(f"{self.thread.name} has more than {MAX_RUNS} runs")
                yield self._finished(state)
                continue
            self.budget.spend(1)
            stack.extend(self._step(state))

    def _finished(self, state: _State) -> Run:
        if self.ends:
            detached = sum(1 << n for n, e in enumerate(state.events) if e.detached)
            self._sync(state, Sync("grid.end", (self.thread.place.grid,)), 0, after=detached)
        registers = dict.fromkeys(self.asked, 0) | state.registers
        reads = frozenset((e.cell, e.value) for e in state.events if e.kind is Kind.READ)
        writes = frozenset((e.cell, e.value) for e in state.events if e.kind is Kind.WRITE)
        return Run(state.events, tuple(sorted(registers.items())), reads, writes)

    # -- events ---------------------------------------------------------------------------------------

    def _add(self, state: _State, event: Event) -> int:
        number = len(state.events)
        state.events = (*state.events, event)
        if not event.detached:
            state.straight |= 1 << number
        return number

    def _sync(self, state: _State, sync: Sync, line: int, *, after: int = 0, release: p.Order | None = None,
              scope: Scope | None = None, detached: bool = False) -> int:  # fmt: skip
        order = release or p.Order.WEAK
        state.effects += 1
        before = 0 if detached else state.straight
        return self._add(
            state,
            Event(Kind.SYNC, line, before, sync=sync, after=after, detached=detached, scope=scope,
                  releases=order.releases, acquires=order.acquires,
                  registers=tuple(sorted(state.registers.items())) if sync.blocks else ()),
        )  # fmt: skip

    def _value(self, state: _State, operand: p.Operand) -> tuple[int, int]:
        """An operand's value and the reads it depends on."""
        if isinstance(operand, int):
            return operand & MASK, 0
        return state.registers.get(operand.name, 0), state.origins.get(operand.name, 0)

    def _place(self, state: _State, address: p.Address, element: int = 0) -> tuple[int, int, int] | None:
        """Cell, view and the reads on which the address depends; None outside the array."""
        index, origin = self._value(state, address.index) if address.index is not None else (0, 0)
        if index + element >= self.memory.lengths[address.name]:
            return None
        key = (address.name, index + element)
        return self.memory.cells[key], self.memory.views[key], origin

    # -- steps ----------------------------------------------------------------------------------------

    def _step(self, state: _State) -> list[_State]:
        instruction = self.code[state.at]
        state.at += 1
        match instruction:
            case p.Label():
                return self._label(state)
            case p.Branch():
                return self._branch(state, instruction)
            case p.Arithmetic():
                values = [self._value(state, o) for o in instruction.operands]
                result = values[0][0]
                if len(values) == 2:
                    result = _OPERATIONS[instruction.operation](values[0][0], values[1][0])
                state.registers[instruction.target.name] = result
                state.origins[instruction.target.name] = values[0][1] | values[-1][1]
                return [state]
            case p.Load():
                return self._load(state, instruction)
            case p.Store():
                return self._store(state, instruction)
            case p.Atomic():
                return self._atomic(state, instruction)
            case p.Copy():
                return self._copy(state, instruction)
            case _:
                self._ordering(state, instruction)
                return [state]

    def _label(self, state: _State) -> list[_State]:
        at = state.at - 1
        live = tuple(sorted((n, v) for n, v in state.registers.items() if n in self.live[at]))
        visits, seen = state.visits.get(at, (0, []))
        if (state.effects, live) in seen:
            return []
        effects = seen[-1][0] if seen else -1
        if effects != state.effects and visits > LOOPS:
            self.complete = False
            return []
        state.visits[at] = (visits + (effects != state.effects), [*seen, (state.effects, live)])
        if len(seen) > 64:
            self.complete = False
            return []
        return [state]

    def _branch(self, state: _State, branch: p.Branch) -> list[_State]:
        taken = True
        if branch.test is not None:
            (left, a), (right, b) = (self._value(state, o) for o in branch.operands)
            taken = RELATIONS[_BRANCHES[branch.test]](left, right)
            state.control |= a | b
        if taken:
            state.at = self.labels[branch.target]
        return [state]

    def _load(self, state: _State, load: p.Load) -> list[_State]:
        states = [state]
        before = state.straight
        for element, target in enumerate(load.targets):
            following = []
            for current in states:
                place = self._place(current, load.address, element)
                if place is None:
                    continue
                cell, view, _ = place
                for value in self.domain[cell]:
                    fork = current.fork()
                    number = self._add(
                        fork,
                        Event(Kind.READ, load.line, before, cell, view, value, load.proxy,
                              load.order is not p.Order.WEAK, load.order.acquires, scope=load.scope),
                    )  # fmt: skip
                    fork.registers[target.name] = value
                    fork.origins[target.name] = 1 << number
                    following.append(fork)
            states = following
        return states

    def _store(self, state: _State, store: p.Store) -> list[_State]:
        before = state.straight
        for element, operand in enumerate(store.values):
            place = self._place(state, store.address, element)
            if place is None:
                return []
            cell, view, origin = place
            value, needs = self._value(state, operand)
            self._add(
                state,
                Event(Kind.WRITE, store.line, before, cell, view, value, store.proxy,
                      store.order is not p.Order.WEAK, releases=store.order.releases, scope=store.scope,
                      needs=needs | origin | state.control),
            )  # fmt: skip
        state.effects += 1
        return [state]

    def _atomic(self, state: _State, atomic: p.Atomic) -> list[_State]:
        place = self._place(state, atomic.address)
        if place is None:
            return []
        cell, view, origin = place
        states = []
        for value in self.domain[cell]:
            fork = state.fork()
            acquires = atomic.order.acquires and atomic.target is not None
            read = self._add(
                fork,
                Event(Kind.READ, atomic.line, fork.straight, cell, view, value, Proxy.GENERIC, True, acquires,
                      scope=atomic.scope),
            )  # fmt: skip
            first, needs = self._value(fork, atomic.operands[0])
            written: int | None
            if atomic.operation == "cas":
                second, more = self._value(fork, atomic.operands[1])
                written = second if value == first else None
                needs |= more | 1 << read
            else:
                written = _OPERATIONS[atomic.operation](value, first)
                needs |= 0 if atomic.operation == "exch" else 1 << read
            if written is not None:
                self._add(
                    fork,
                    Event(Kind.WRITE, atomic.line, fork.straight, cell, view, written, Proxy.GENERIC, True,
                          releases=atomic.order.releases, scope=atomic.scope, atomic=read,
                          needs=needs | origin | fork.control),
                )  # fmt: skip
                fork.effects += 1
            if atomic.target is not None:
                fork.registers[atomic.target.name] = value
                fork.origins[atomic.target.name] = 1 << read
            states.append(fork)
        return states

    def _copy(self, state: _State, copy: p.Copy) -> list[_State]:
        target = self._place(state, copy.target)
        if target is None:
            return []
        proxy = Proxy.ASYNC if copy.kind == "bulk" else Proxy.GENERIC
        before = state.straight
        states: list[tuple[_State, int, int, int]] = []
        if isinstance(copy.source, p.Address):
            source = self._place(state, copy.source)
            if source is None:
                return []
            for value in self.domain[source[0]]:
                fork = state.fork()
                read = self._add(
                    fork,
                    Event(Kind.READ, copy.line, before, source[0], source[1], value, proxy, detached=True),
                )
                states.append((fork, value, 1 << read | source[2], 1 << read))
        else:
            value, needs = self._value(state, copy.source)
            states.append((state, value, needs, 0))
        for fork, value, needs, read_mask in states:
            fork.effects += 1
            write = self._add(
                fork,
                Event(Kind.WRITE, copy.line, before, target[0], target[1], value, proxy, detached=True,
                      needs=needs | target[2] | fork.control, after=read_mask),
            )  # fmt: skip
            reads, done = read_mask, read_mask | 1 << write
            if proxy is Proxy.ASYNC:
                # The completion of a bulk copy is a fence between the async and the generic proxy.
                fences = [
                    self._add(
                        fork,
                        Event(Kind.PROXY_FENCE, copy.line, 0, via=Proxy.ASYNC, detached=True, after=mask),
                    )
                    for mask in (read_mask, 1 << write)
                ]
                reads, done = 1 << fences[0], 1 << fences[0] | 1 << fences[1]
            if copy.barrier is not None:
                sync = Sync("copied", ("mbarrier", copy.barrier))
                end = self._sync(fork, sync, copy.line, after=done, detached=True)
                done |= 1 << end
            elif copy.kind == "bulk":
                fork.open_bulk = (fork.open_bulk[0] | reads, fork.open_bulk[1] | done)
            if copy.kind == "cp.async":
                fork.open_simple |= done
        return [fork for fork, *_ in states]

    # -- ordering instructions --------------------------------------------------------------------------

    def _ordering(self, state: _State, instruction: p.Instruction) -> None:
        line = instruction.line
        match instruction:
            case p.Fence():
                state.effects += 1
                order = instruction.order
                self._add(
                    state,
                    Event(Kind.FENCE, line, state.straight, strong=True, acquires=order.acquires,
                          releases=order.releases, sequential=order is p.Order.SC, scope=instruction.scope),
                )  # fmt: skip
            case p.ProxyFence():
                self._proxy_fence(state, instruction)
            case p.Barrier():
                self._barrier(state, instruction)
            case p.ClusterBarrier():
                place = self.thread.place
                cluster = ("cluster", place.grid, place.gpu, place.cluster)
                key: tuple[object, ...] = self.cta if place.cluster is None else cluster
                what = "cluster.wait" if instruction.waits else "cluster.arrive"
                self._sync(state, Sync(what, key, blocks=instruction.waits), line, release=instruction.order)
            case p.MbarrierArrive():
                sync = Sync("mbarrier.arrive", ("mbarrier", instruction.barrier), quorum=instruction.count,
                            expect=instruction.expect)  # fmt: skip
                self._sync(state, sync, line, release=instruction.order, scope=instruction.scope)
            case p.MbarrierWait():
                parity, _ = self._value(state, instruction.parity)
                barrier = ("mbarrier", instruction.barrier)
                sync = Sync("mbarrier.wait", barrier, blocks=True, parity=parity & 1)
                self._sync(state, sync, line, release=instruction.order, scope=instruction.scope)
            case p.CopyArrive():
                sync = Sync("copies-arrive", ("mbarrier", instruction.barrier), quorum=1)
                every = state.open_simple
                for group in state.simple_groups:
                    every |= group
                self._sync(state, sync, line, after=every, detached=True)
            case p.CommitGroup():
                if instruction.bulk:
                    state.groups = (*state.groups, state.open_bulk)
                    state.open_bulk = (0, 0)
                else:
                    state.simple_groups = (*state.simple_groups, state.open_simple)
                    state.open_simple = 0
            case p.WaitGroup():
                self._wait_group(state, instruction)
            case p.GridControl():
                what = "grid.wait" if instruction.waits else "grid.launch"
                key = (self.thread.place.grid, self.cta)
                self._sync(state, Sync(what, key, blocks=instruction.waits), line)
            case _:
                raise AssertionError(type(instruction))

    def _proxy_fence(self, state: _State, fence: p.ProxyFence) -> None:
        state.effects += 1
        via = ALIAS_FENCE if fence.kind == "alias" else Proxy[fence.kind.upper()]
        order = fence.order
        self._add(
            state,
            Event(Kind.PROXY_FENCE, fence.line, state.straight, via=via, strong=order is not None,
                  acquires=order is p.Order.ACQUIRE, releases=order is p.Order.RELEASE, scope=fence.scope),
        )  # fmt: skip

    def _barrier(self, state: _State, barrier: p.Barrier) -> None:
        place = self.thread.place
        if barrier.level == "warp":
            key: tuple[object, ...] = ("warp", self.cta, place.warp)
            self._sync(state, Sync("barrier", key, blocks=True), barrier.line)
            return
        instance, _ = self._value(state, barrier.instance)
        logical = None if barrier.logical is None else self._value(state, barrier.logical)[0]
        quorum = 0 if barrier.quorum is None else self._value(state, barrier.quorum)[0]
        key = ("bar", self.cta, instance, logical)
        self._sync(state, Sync("barrier", key, blocks=barrier.blocks, quorum=quorum), barrier.line)

    def _wait_group(self, state: _State, wait: p.WaitGroup) -> None:
        done = 0
        if wait.bulk:
            for reads, all_ends in state.groups[: max(len(state.groups) - wait.pending, 0)]:
                done |= reads if wait.read else all_ends
        else:
            groups = (*state.simple_groups, state.open_simple) if wait.pending < 0 else state.simple_groups
            for ends in groups[: max(len(groups) - max(wait.pending, 0), 0)]:
                done |= ends
        self._add(state, Event(Kind.SYNC, wait.line, state.straight, after=done))


def _liveness(
    code: tuple[p.Instruction, ...], labels: dict[str, int], asked: set[str]
) -> list[frozenset[str]]:
    """Registers whose value still matters, before each instruction and at the end."""
    live: list[frozenset[str]] = [frozenset()] * len(code) + [frozenset(asked)]
    changed = True
    while changed:
        changed = False
        for at in range(len(code) - 1, -1, -1):
            instruction = code[at]
            after = live[at + 1]
            if isinstance(instruction, p.Branch):
                target = live[labels[instruction.target]]
                after = target if instruction.test is None else after | target
            used, defined = _registers(instruction)
            now = (after - defined) | used
            if now != live[at]:
                live[at], changed = now, True
    return live


def _registers(instruction: p.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Registers that an instruction reads and that it sets."""
    used: set[str] = set()
    defined: set[str] = set()
    for name in instruction.__dataclass_fields__:
        value = getattr(instruction, name)
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            if isinstance(part, p.Address):
                part = part.index
            if isinstance(part, p.Register):
                (defined if name in ("target", "targets") else used).add(part.name)
    return frozenset(used), frozenset(defined)
