"""A simulated NVLink domain: 2 to 16 ranks over one memory, peer pointers, multicast addresses.

Each rank has its buffers at addresses of their own; a peer's pointer is the plain address of its buffer. All
ranks run in one scheduler, so that a rank that polls what another one writes makes progress. Accesses take
effect in the order in which they are executed, except that `late_stores` lets what goes to another rank
arrive late and word by word. Happens-before is followed from rank to rank: a flag between two ranks orders
them if both sides have sys scope.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.artifact import Artifact
from workbench.errors import WorkbenchError
from workbench.findings import Finding
from workbench.isa.ptx import parse
from workbench.isa.ptx.model import Module
from workbench.simulator.access import GlobalSpace, Site
from workbench.simulator.codegen import Program, compile_kernel
from workbench.simulator.counters import Counters
from workbench.simulator.launch import LaunchState, SimulationOptions
from workbench.simulator.memory import GUARD, MULTICAST, Memory
from workbench.simulator.multimem import MulticastRange
from workbench.simulator.ordering.order import share
from workbench.simulator.running import counters_of, numpy_errors, partition, run_steps
from workbench.simulator.simulate import (
    KernelLaunch,
    Outcome,
    bound,
    check_float_environment,
    keep_freed_arrays,
    place_variables,
)
from workbench.simulator.trace import Tracer, TraceRecord

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]

MOST_RANKS = 16
_ALIGN = 1 << 21
"""Alignment of multicast addresses."""


class Schedule(StrEnum):
    """How the ranks take turns."""

    INTERLEAVED = "interleaved"
    """One block of instructions each, in turn."""
    SKEWED = "skewed"
    """The next block is that of the first rank that can go on, in an order drawn from the seed: the first
    rank is as far ahead as the protocol lets it, the last one as far behind.
    """
    RANDOM = "random"
    """The next block is that of a rank drawn at random."""


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """A launch of one rank."""

    module: Module
    launch: KernelLaunch


class Domain:
    """The memory of several ranks.

    Args:
        ranks: how many, 2 to 16.
        memory: where the buffers are; a new one if left out.

    Raises:
        WorkbenchError: if the number of ranks is out of range.
    """

    def __init__(self, ranks: int, memory: Memory | None = None) -> None:
        if not 2 <= ranks <= MOST_RANKS:
            raise WorkbenchError(f"a domain has 2 to {MOST_RANKS} ranks, not {ranks}")
        self.ranks = ranks
        self.memory = memory if memory is not None else Memory()
        self._next = MULTICAST + _ALIGN
        self._multicast: dict[str, MulticastRange] = {}

    @staticmethod
    def name(rank: int, name: str) -> str:
        """Return what memory and findings call buffer `name` of a rank."""
        return f"{name}@{rank}"

    def allocate(
        self, rank: int, name: str, nbytes: int, *, align: int = 256, writable: bool = True,
        initialized: bool = False,
    ) -> npt.NDArray[np.uint8]:  # fmt: skip
        """Reserve a buffer of one rank; see `Memory.allocate`."""
        return self.memory.allocate(
            self.name(self._checked(rank), name), nbytes, align=align, writable=writable,
            initialized=initialized,
        )  # fmt: skip

    def symmetric(
        self, name: str, nbytes: int, *, align: int = 256, initialized: bool = False
    ) -> tuple[npt.NDArray[np.uint8], ...]:
        """Reserve a buffer of the same size on every rank and a multicast address for all of them.

        Returns:
            The bytes of each rank's buffer.
        """
        views = tuple(
            self.allocate(r, name, nbytes, align=align, initialized=initialized) for r in range(self.ranks)
        )
        replicas = tuple(self.memory.allocation(self.name(r, name)).start for r in range(self.ranks))
        bound_to = MulticastRange(name, self._next, nbytes, replicas)
        self._next += -(-(nbytes + GUARD) // _ALIGN) * _ALIGN
        self._multicast[name] = bound_to
        self.memory.multicast.append(bound_to)
        return views

    def address(self, rank: int, name: str) -> int:
        """Return the device address of a rank's buffer, which every rank can use."""
        return self.memory.address(self.name(self._checked(rank), name))

    def multicast(self, name: str) -> int:
        """Return the multicast address of a symmetric buffer.

        Raises:
            WorkbenchError: if there is no such buffer.
        """
        if name not in self._multicast:
            raise WorkbenchError(f"there is no symmetric buffer {name!r}")
        return self._multicast[name].start

    def view(self, rank: int, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a rank's buffer."""
        return self.memory.view(self.name(self._checked(rank), name))

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise WorkbenchError(f"the domain has ranks 0 to {self.ranks - 1}, not {rank}")
        return rank


def artifact_launches(artifact: Artifact, addresses: dict[str, int]) -> list[RankLaunch]:
    """Return the launches of an artifact for one rank.

    Args:
        artifact: what to launch.
        addresses: device address of each buffer that its launches name: the rank's own, a peer's, or a
            multicast address.
    """
    module = parse(artifact.ptx)
    return [RankLaunch(module, bound(module, launch, addresses)) for launch in artifact.launches]


class _Events:
    """Counts what may let some waiting lane of any rank go on."""

    def __init__(self) -> None:
        self.count = 0


class _LateSpace(GlobalSpace):
    """Global memory as one rank sees it, with vector stores to other ranks that arrive in pieces.

    A vector access is several accesses in no order (PTX ISA 8.2.2): some 4-byte words are there at once, the
    others when their rank stores again, reads there or ends its launch, or when all ranks wait.
    """

    def __init__(self, memory: Memory, own: str, random: Random, events: _Events) -> None:
        super().__init__(memory)
        self._own, self._random, self._events = own, random, events
        self._late: tuple[Array, Array] | None = None
        """Word index and word."""

    def arrive(self) -> bool:
        """Let what is under way arrive; whether there was anything."""
        if self._late is None:
            return False
        index, words = self._late
        self._late = None
        self.data[4][index] = words
        self.shadow[4][index] = 0x01010101
        self._events.count += 1
        return True

    def locate(self, site: Site, address: Array, co: Cohort, ck: Chunk) -> Array:
        """Check a read; see `GlobalSpace.locate`."""
        if self._late is not None:
            words = (address + site.k) >> 2
            if (
                int(words.max()) + site.size >= self._late[0].min()
                and int(words.min()) <= self._late[0].max()
            ):
                self.arrive()
        return super().locate(site, address, co, ck)

    def prepare(self, site: Site, address: Array, co: Cohort, ck: Chunk, *, write: bool) -> Array:
        """Check an atomic access; see `GlobalSpace.prepare`."""
        self.arrive()
        return super().prepare(site, address, co, ck, write=write)

    def store(self, site: Site, address: Array, value: Array, co: Cohort, ck: Chunk) -> None:
        """Write raw items; see `GlobalSpace.store`."""
        replica = site.instruction.opcode == "multimem" and site.size > 4
        i = address + site.k
        a = self.memory.find(int(i.min()))
        away = a is not None and int(i.max()) + site.size <= a.end and not a.name.endswith(self._own)
        vector = site.size > 4 and not bool((i & site.mask).any())
        if not (away and vector):
            if not replica:  # one instruction writes its replicas one after the other
                self.arrive()
            super().store(site, address, value, co, ck)
            return
        words = ((i >> 2).ravel()[:, None] + np.arange(site.size // 4)).ravel()
        words = np.unique(words)
        late = words[np.array([self._random.random() < 0.5 for _ in range(len(words))], bool)]
        if self._late is not None and np.isin(words, self._late[0]).any():
            self.arrive()
        old, marks = self.data[4][late].copy(), self.shadow[4][late].copy()
        super().store(site, address, value, co, ck)
        new = self.data[4][late].copy()
        self.data[4][late], self.shadow[4][late] = old, marks
        if self._late is None:
            self._late = (late, new)
        else:
            self._late = (np.append(self._late[0], late), np.append(self._late[1], new))
        if not len(self._late[0]):
            self._late = None


class _RankState(LaunchState):
    """A launch of one rank; its progress is that of the domain."""

    events: _Events | None = None
    late: _LateSpace | None = None

    def space(self) -> GlobalSpace:
        """Return global memory as the rank sees it."""
        return self.late if self.late is not None else super().space()

    @property
    def progress(self) -> int:
        """Events of all ranks."""
        return self.events.count if self.events is not None else 0

    @progress.setter
    def progress(self, value: int) -> None:
        if self.events is not None and value > self.events.count:
            self.events.count = value


_programs: OrderedDict[tuple[int, str, int, bool], tuple[Module, Program]] = OrderedDict()
"""Programs by module, kernel and rank: the code that is generated holds the parameters of one launch."""


def _program(module: Module, kernel: str, rank: int, traced: bool) -> Program:
    key = (id(module), kernel, rank, traced)
    if key not in _programs:
        _programs[key] = (module, compile_kernel(module, module.kernel(kernel), traced))
        while len(_programs) > 8 * MOST_RANKS:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return _programs[key][1]


@dataclass(slots=True)
class _Rank:
    """What one rank does and has done."""

    number: int
    steps: Generator[bool, None, None]
    findings: list[Finding]
    counters: list[Counters]
    printed: list[str]
    completed: bool = True
    done: bool = False
    late: _LateSpace | None = None
    stalled_at: int = -1
    """Count of events when it last found nothing to do; -1 while it has something."""


def simulate_ranks(
    domain: Domain,
    launches_by_rank: Sequence[Sequence[RankLaunch]],
    options: SimulationOptions | None = None,
    *,
    schedule: Schedule | str = Schedule.INTERLEAVED,
    late_stores: bool = False,
) -> Outcome:
    """Run the launches of every rank: those of one rank in order, the ranks side by side.

    Args:
        domain: the ranks and their memory; changed in place.
        launches_by_rank: for each rank its launches.
        options: as for one device; `seed` also draws the schedule, `processes` is not used.
        schedule: how the ranks take turns.
        late_stores: vector stores to other ranks arrive in pieces, some of them late, drawn from the seed.

    Returns:
        The outcome; findings name the rank in `thread`, counters stand rank by rank.

    Raises:
        UnsupportedInstruction: if a kernel has an instruction that the simulator lacks.
        WorkbenchError: if the number of launch lists is not that of the ranks.
    """
    if len(launches_by_rank) != domain.ranks:
        raise WorkbenchError(f"{domain.ranks} ranks need as many lists, not {len(launches_by_rank)}")
    schedule = Schedule(schedule)
    options = options or SimulationOptions()
    check_float_environment()
    keep_freed_arrays()
    deadline = time.monotonic() + options.time_limit
    traced = [options.trace is not None and options.trace.concerns(r) for r in range(domain.ranks)]
    programs = [
        {(id(x.module), x.launch.kernel): _program(x.module, x.launch.kernel, r, traced[r]) for x in launches}
        for r, launches in enumerate(launches_by_rank)
    ]
    memory = domain.memory
    tracer = Tracer(options.trace, memory) if options.trace is not None else None
    mark = memory.mark()
    events = _Events()
    start = time.perf_counter()
    try:
        ranks: list[_Rank] = []
        states_by_rank: list[list[_RankState]] = []
        spaces: list[_LateSpace | None] = [None] * domain.ranks
        if late_stores:
            random = Random(options.seed + 1)
            spaces = [_LateSpace(memory, f"@{r}", random, events) for r in range(domain.ranks)]
        for r, launches in enumerate(launches_by_rank):
            addresses: dict[int, dict[str, int]] = {}
            states: list[_RankState] = []
            for x in launches:
                if id(x.module) not in addresses:
                    label = f"module variable of rank {r}, {len(addresses)}"
                    addresses[id(x.module)] = place_variables(x.module, memory, label)
                run = x.launch
                state = _RankState(
                    programs[r][id(x.module), run.kernel], memory, run.grid, run.block, run.cluster,
                    run.smem_bytes, run.parameters, replace(options, processes=1), deadline,
                    addresses[id(x.module)],
                )  # fmt: skip
                state.events = events
                state.rank, state.number = r, len(states)
                state.prefix = f"rank={r} "
                state.late = spaces[r]
                if traced[r]:
                    state.tracer = tracer
                state.stepwise = True
                states.append(state)
            rank = _Rank(r, iter(()), [], [], [])  # type: ignore[arg-type]
            rank.steps = _steps(rank, states)
            rank.late = spaces[r]
            ranks.append(rank)
            states_by_rank.append(states)
        every = [state for states in states_by_rank for state in states]
        if options.check_races and every:
            share(every, programmatic=False)
        with numpy_errors():
            _drive(ranks, events, schedule, Random(options.seed))
    finally:
        seconds = time.perf_counter() - start
        memory.release(mark)
    return Outcome(
        tuple(f for x in ranks for f in x.findings),
        tuple(c for x in ranks for c in x.counters),
        all(x.completed for x in ranks),
        tuple(line for x in ranks for line in x.printed),
        tracer.record() if tracer is not None else TraceRecord(),
        seconds,
    )


def _steps(rank: _Rank, states: list[_RankState]) -> Generator[bool, None, None]:
    """Run a rank's launches; yields whether it could go on at once."""
    for state in states:
        groups = partition(state)[0]
        if state.program.spins:
            groups = [np.sort(np.concatenate(groups))]
        part = yield from run_steps(state, groups)
        if rank.late is not None:
            rank.late.arrive()
        if state.order is not None and state.order.launches is not None:
            state.order.launches.end(state)
        rank.findings.extend(_named(f, rank.number) for f in part.findings)
        rank.printed.extend(part.printed)
        rank.counters.append(counters_of(state, part))
        if not part.completed:
            rank.completed = False
            return


def _named(finding: Finding, rank: int) -> Finding:
    return finding if finding.thread else finding.model_copy(update={"thread": f"rank={rank}"})


def _drive(ranks: list[_Rank], events: _Events, schedule: Schedule, random: Random) -> None:
    """Give the ranks their turns until all are done.

    A rank that polls in vain is left alone until something has happened, or until all ranks do so.
    """
    order = list(ranks)
    if schedule is Schedule.SKEWED:
        random.shuffle(order)
    while True:
        live = [x for x in order if not x.done]
        if not live:
            return
        ready = [x for x in live if x.stalled_at != events.count]
        if not ready:
            arrived = [x.late.arrive() for x in order if x.late is not None]
            if any(arrived):
                continue
            for x in live:
                _turn(x, events)
            continue
        if schedule is Schedule.SKEWED:
            _turn(ready[0], events)
        elif schedule is Schedule.RANDOM:
            _turn(random.choice(ready), events)
        else:
            for x in ready:
                _turn(x, events)


def _turn(rank: _Rank, events: _Events) -> None:
    try:
        busy = next(rank.steps)
    except StopIteration:
        rank.done = True
        events.count += 1
        return
    rank.stalled_at = -1 if busy else events.count
