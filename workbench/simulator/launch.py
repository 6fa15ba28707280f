"""What all CTAs of one launch share: parameters, tables of special registers, findings, limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.access import GlobalSpace
from workbench.simulator.adversary import PLAIN, Adversary
from workbench.simulator.faults import FindingLog
from workbench.simulator.memory import Memory
from workbench.simulator.torn import TornSpace
from workbench.simulator.traffic import Traffic
from workbench.simulator.values import NUMPY

if TYPE_CHECKING:
    from workbench.simulator.codegen import Program
    from workbench.simulator.ordering.order import LaunchOrder
    from workbench.simulator.trace import Trace, Tracer

Array = npt.NDArray[Any]
Dimensions = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """How to simulate."""

    processes: int = 1
    """Processes that share the CTAs of launches whose CTAs do not depend on each other."""
    seed: int = 0
    """0 runs the lowest block first, which is fast; any other number picks schedules at random: the order
    of CTA groups and, where lanes have diverged, which of them go on; and lets a try_wait that could succeed
    come too early now and then. A kernel without races gives the same
    result."""
    check_memory: bool = True
    """Check bounds, alignment and initialisation of every access. Without it only address faults that would
    leave the arena are prevented."""
    check_races: bool = True
    """Follow happens-before between threads and look for races; see `workbench.simulator.ordering`."""
    count_sectors: bool = False
    """Count 32-byte sectors of global accesses and shared-memory bank conflicts; costs time."""
    max_lane_instructions: int = 1 << 40
    """Budget of one launch, in PTX instructions times lanes, for each process."""
    max_steps: int = 1 << 60
    """Budget of one launch in blocks of instructions, each run by some lanes together; with
    `max_lane_instructions` it bounds a run without a clock."""
    max_order_work: int = 1 << 60
    """Budget of one launch in entries of clocks that happens-before compares."""
    time_limit: float = 600.0
    """Seconds of wall time for all launches together."""
    chunk_lanes: int = 32768
    """Lanes executed as one array; 16k to 64k keep arrays in the cache and hide Python's cost."""
    parallel_work: int = 4_000_000
    """Lane-instructions, estimated from the code, from which a launch is shared among processes."""
    printf_limit: int = 4096
    """Lines of printf output kept."""
    trace: Trace | None = None
    """Record what one thread or everybody at one address does; such a run is slow and uses one process."""
    most_ctas: int | None = None
    """Run only so many CTAs, the first and the last ones, of a launch whose CTAs neither poll nor share
    atomics; the others count as done. For launches too large to run whole."""
    adversary: Adversary = PLAIN
    """How the schedule departs from the plain one; see `workbench.simulator.adversary`."""
    observer: Callable[..., None] | None = None
    """Called with (site, address array, cohort, chunk) before every global and shared access and atomic."""


class LimitReachedError(Exception):
    """The run used up its time or its instructions."""


class Tally:
    """Counts events that may let a waiting lane go on; launches that run side by side share one."""

    def __init__(self) -> None:
        self.count = 0


class LaunchState:
    """One launch while it runs."""

    order: LaunchOrder | None = None
    """Happens-before between its threads; set up when first needed."""
    rank = 0
    """Of several."""
    before: LaunchState | None = None
    """The launch whose completion `griddepcontrol.wait` waits for."""
    _torn: TornSpace | None = None
    number = 0
    """Its place in the list of launches."""
    complete = False
    """All CTAs have exited; memory is as the launch leaves it."""
    external: bool = True
    """What precedes the first launch in the stream has completed."""

    def __init__(
        self, program: Program, memory: Memory, grid: Dimensions, block: Dimensions, cluster: Dimensions,
        shared_dynamic: int, parameters: bytes, options: SimulationOptions, deadline: float,
        addresses: dict[str, int],
    ) -> None:  # fmt: skip
        self.program, self.memory, self.options = program, memory, options
        self.grid, self.block, self.cluster = grid, block, cluster
        self.shared_dynamic, self.parameters = shared_dynamic, parameters
        self.deadline = deadline
        self.addresses = addresses
        self.ctas = grid[0] * grid[1] * grid[2]
        self.threads = block[0] * block[1] * block[2]
        self.warps = -(-self.threads // 32)
        sizes = np.full(self.warps, 32, np.int64)
        sizes[-1] = self.threads - 32 * (self.warps - 1)
        self.warp_sizes = sizes
        self.barrier_weights = np.ones(self.threads, np.int64)
        """What a thread counts for at a barrier, which counts whole warps."""
        self.barrier_weights[-1] += 32 * self.warps - self.threads
        self.tracer: Tracer | None = None
        self.prefix = ""
        """What the names of threads start with."""
        self.stepwise = False
        """Let others run after every block, not only while all lanes poll."""
        self.log = FindingLog(program.kernel.name)
        self.tally = Tally()
        self.open = np.zeros(self.ctas, bool)
        """CTAs that have executed griddepcontrol.launch_dependents or exited."""
        self.lane_instructions = 0
        self.steps = 0
        """Blocks that were run."""
        self.async_bytes = 0
        """Bytes of bulk and tensor copies, whose sizes only show at run time."""
        self.printed: list[str] = []
        self.traffic = Traffic(memory.top) if options.count_sectors else None
        index = np.arange(self.threads, dtype=np.uint32)
        x, y, _ = block
        self.tid = {"x": index % x, "y": index // x % y, "z": index // (x * y)}

    @property
    def order_work(self) -> int:
        """Entries of clocks that happens-before has compared."""
        return self.order.world.work if self.order is not None else 0

    @property
    def first_cta(self) -> int:
        """What is added to the numbers of its CTAs to tell them from those of other launches and ranks."""
        return (self.rank << 16 | self.number) << 32

    @property
    def progress(self) -> int:
        """Events so far that may let a waiting lane go on."""
        return self.tally.count

    @progress.setter
    def progress(self, value: int) -> None:
        self.tally.count = value

    @property
    def may_pass_wait(self) -> bool:
        """Whether griddepcontrol.wait returns: the grid before has completed and its memory is visible."""
        return self.external if self.before is None else self.before.complete

    def thread_name(self, cta: int, thread: int) -> str:
        """Return a thread of a CTA as findings name it."""
        x, y, _ = self.grid
        where = ",".join(str(n) for n in (cta % x, cta // x % y, cta // (x * y)))
        which = ",".join(str(int(self.tid[a][thread])) for a in "xyz")
        return f"{self.prefix}cta=({where}) thread=({which})"

    def restart(self) -> None:
        """Forget what the launch has done so far, to run it again."""
        self.order = None
        self.log = FindingLog(self.program.kernel.name)
        self.open[:] = False
        self.lane_instructions = self.steps = self.async_bytes = 0
        self.printed = []
        if self.traffic is not None:
            self.traffic = Traffic(self.memory.top)

    def parameter(self, offset: int, dtype: str) -> Array:
        """Return a value from the parameter block as (1, 1)."""
        kind = np.dtype(NUMPY[dtype])
        raw = self.parameters[offset : offset + kind.itemsize]
        return np.frombuffer(raw, kind).reshape(1, 1)

    def global_address(self, name: str) -> int:
        """Return the device address of a module variable."""
        return self.addresses[name]

    def space(self) -> GlobalSpace:
        """Return global memory as the launch's chunks see it."""
        torn = self.options.adversary.torn
        if torn is None:
            return GlobalSpace(self.memory)
        self._torn = TornSpace(self.memory, torn)
        return self._torn

    def settle(self) -> None:
        """Let all that the launch has stored arrive: it has completed."""
        if self._torn is not None:
            self._torn.arrive()

    def bind(self) -> None:
        """Give the generated code the values that belong to this launch."""
        names = self.program.context.names
        for name, make in self.program.context.bound.items():
            names[name] = make(self)
        for site in self.program.context.sites:
            site.reset()

    def check_limits(self) -> None:
        """Count a step and stop a run that has used up its budget.

        Raises:
            LimitReachedError: with what was used up.
        """
        self.steps += 1
        if self.lane_instructions > self.options.max_lane_instructions:
            raise LimitReachedError(f"{self.options.max_lane_instructions} lane-instructions")
        if self.steps > self.options.max_steps:
            raise LimitReachedError(f"{self.options.max_steps} steps")
        if self.order_work > self.options.max_order_work:
            raise LimitReachedError(f"{self.options.max_order_work} comparisons of clocks")
        if time.monotonic() > self.deadline:
            raise LimitReachedError("the time limit")
