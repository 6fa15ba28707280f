"""Runs of a launch list in the simulator: its memory, its launches, and what a run shows in audit rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from workbench.findings import Finding, Severity
from workbench.isa.ptx.model import Module
from workbench.ops.model import Role
from workbench.simulator import (
    KernelLaunch,
    Memory,
    Outcome,
    SimulationOptions,
    simulate_module,
)
from workbench.simulator.memory import BASE
from workbench.verify.ordering.contents import Fill, SimulatedBuffer, place, reset, write_inputs
from workbench.verify.ordering.polls import (
    sentinels,
)
from workbench.verify.ordering.schedules import Schedule
from workbench.verify.ordering.words import Watch, strong

_STEP, LANE_INSTRUCTION, _COMPARED, _SHARED_BYTE = 0.7e-3, 10e-9, 0.3e-6, 3e-9
"""Seconds that a block of instructions, a lane's instruction, an entry of a clock that happens-before
compares and a byte of all CTAs' shared memory take, about."""
_BUFFER_BYTE = 0.5e-9
"""Seconds to prepare a byte of a buffer for a run, about."""
LATER = 3
"""How often a list whose kernels poll is launched again: three sets of mailboxes have come round then."""
Place = tuple[str, str | None, int | None]
"""Rule, kernel and PTX line: findings that agree in these are one."""


@dataclass(frozen=True)
class DynamicLaunch:
    """A launch whose parameters are filled in once its buffers have addresses."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    pdl: bool
    parameters: Callable[[Mapping[str, int]], bytes]
    """Parameter block for the addresses of buffers."""
    capacity: int | None = None
    """CTAs of it that the device holds at a time; None if that is not known."""
    static_smem: int = 0
    """Static shared memory, bytes a CTA."""
    parameters_later: tuple[Callable[[Mapping[str, int]], bytes], ...] = ()
    """Those of the next launches of the list, where they differ: `LATER` of them, or none."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory, bytes a CTA."""
        return self.smem_bytes + self.static_smem


class BudgetSpentError(Exception):
    """There is no budget for another run."""


def place_of(f: Finding) -> Place:
    """What findings that are one agree in."""
    return f.rule, f.kernel, f.ptx_line


@dataclass
class Run:
    """One pass over the launch list, in terms of audit rules."""

    findings: dict[Place, Finding] = field(default_factory=dict)
    completed: bool = True
    limited: bool = False


class Runs:
    """The memory and the launches of one audit."""

    def __init__(
        self,
        module: Module,
        launches: Sequence[DynamicLaunch],
        buffers: tuple[SimulatedBuffer, ...],
        budget: float,
        some: int | None = None,
    ) -> None:
        self.module, self.buffers, self.given = module, buffers, launches
        self.memory = Memory(sum(b.nbytes + b.align + 8192 for b in buffers) + (1 << 22))
        place(self.memory, buffers)
        addresses = {b.name: self.memory.address(b.name) for b in buffers}
        self.launches = [
            KernelLaunch(x.kernel, x.grid, x.block, x.parameters(addresses), x.cluster, x.smem_bytes, x.pdl)
            for x in launches
        ]
        self.lists = [self.launches]
        for k in range(LATER):
            self.lists.append(
                [
                    replace(made, parameters=x.parameters_later[k](addresses)) if x.parameters_later else made
                    for made, x in zip(self.launches, launches, strict=True)
                ]
            )
        self.advances = self.lists[1] != self.launches
        self.watch = Watch(self.memory)
        self.left = budget
        self.some = some
        ctas = [min(math.prod(x.grid), some or math.prod(x.grid)) for x in launches]
        shared = sum(n * x.shared_bytes for n, x in zip(ctas, launches, strict=True))
        self.kernels = {x.kernel: module.kernel(x.kernel) for x in launches}
        self.items = {(name, i.line): i for name, kernel in self.kernels.items() for i in kernel.instructions}
        self.sentinels = sorted({s for k in self.kernels.values() for s in sentinels(k)})
        self.mailbox = self.sentinels[0] if self.sentinels else 0
        self.buffers = tuple(replace(b, fill=self.mailbox) if b.sentinel else b for b in buffers)
        self.not_judged: dict[str, None] = {}
        self.warned: dict[Place, Finding] = {}
        self.fill = Fill.NUMBERS
        self.references: dict[Schedule, dict[str, bytes] | None] = {}
        first = launches[0]
        produced = {b.name for b in buffers if b.role in (Role.OUTPUT, Role.SCRATCH)}
        self.arriving = (
            [b for b in buffers if b.role is Role.ACTIVATION and b.name not in produced] if first.pdl else []
        )
        self.preparing = shared * _SHARED_BYTE + sum(b.nbytes for b in self.arriving) * _BUFFER_BYTE

    # -- runs ------------------------------------------------------------------------------------

    def run(
        self, schedule: Schedule, fill: Fill, seed: int = 0, *, again: bool = False, number: int | None = None
    ) -> Run:
        """Run the launch list once.

        Args:
            schedule: who runs first.
            fill: contents of the inputs.
            seed: of the contents.
            again: on the flags, mailboxes and scratch as an earlier run left them.
            number: which launch of the list it is; the second if `again`, else the first.
        """
        if self.left <= 0:
            raise BudgetSpentError
        if again:
            self._replay(fill, seed)
        else:
            reset(self.memory, self.buffers, fill, seed, self.mailbox)
        for b in self.arriving:
            self.memory.poison(b.name, 0xFF)
        options = SimulationOptions(
            seed=schedule.seed,
            adversary=schedule.adversary,
            observer=self.watch,
            max_lane_instructions=max(1, int(self.left / LANE_INSTRUCTION)),
            max_steps=max(1, int(self.left / _STEP)),
            max_order_work=max(1, int(self.left / _COMPARED)),
            time_limit=math.inf,
            most_ctas=self.some,
        )

        def arrive() -> None:
            for n, b in enumerate(self.buffers):
                if b in self.arriving:
                    write_inputs(self.memory, b, fill, seed + n)

        launches = self.lists[int(again) if number is None else number]
        outcome = simulate_module(self.module, launches, self.memory, options, arrive)
        run = self._judged(outcome, schedule)
        cost = self._cost(outcome)
        self.left -= max(cost, self.left / 2) if run.limited else cost
        return run

    def _cost(self, outcome: Outcome) -> float:
        """Seconds that a run takes, about, from what it did."""
        return (
            outcome.steps * _STEP
            + outcome.lane_instructions * LANE_INSTRUCTION
            + outcome.order_work * _COMPARED
            + self.preparing
        )

    def _replay(self, fill: Fill, seed: int) -> None:
        """Prepare a second pass: new inputs, data that the first pass wrote is unwritten again."""
        for n, b in enumerate(self.buffers):
            if b.role.is_input:  # all of them, as a first pass with this seed has them
                write_inputs(self.memory, b, fill, seed + n)
            elif b.role in (Role.OUTPUT, Role.SCRATCH, Role.FLAG, Role.MAILBOX):
                a = self.memory.allocation(b.name)
                words = slice(a.start // 4, a.start // 4 + a.size // 4)
                if b.role is Role.OUTPUT and not self.watch.sync[words].any():
                    self.memory.unwrite(b.name)
                    continue
                data = np.flatnonzero(self.watch.written[words] & ~self.watch.sync[words])
                self.memory.shadow[a.start : a.start + a.size // 4 * 4].view(np.uint32)[data] = 0
                a.initialized = False

    def _judged(self, outcome: Outcome, schedule: Schedule) -> Run:
        """Turn what the simulator reports into findings under audit rules."""
        run = Run(completed=outcome.completed)
        met = {
            (f.kernel, f.ptx_line) for f in outcome.findings if f.rule != "uninitialized-read"
        }  # reading what is not there yet follows from them
        behind = any(f.rule == "deadlock" and self._awaits_others(f) for f in outcome.findings)
        for f in outcome.findings:
            if behind and f.rule in ("barrier-divergence", "mbarrier-phase", "cluster-barrier"):
                continue  # it follows from the wait for others
            if f.rule == "time-limit":
                run.limited = True
                continue
            if f.rule == "uninitialized-read":
                if (f.kernel, f.ptx_line) in met:
                    continue
                changed = self._unwritten(f)
                if changed is None:
                    continue
                f = changed
            elif f.rule in ("read-only-write", "trap"):
                continue
            elif f.rule == "deadlock" and self._awaits_others(f):
                self.not_judged.setdefault(f"a wait at PTX line {f.ptx_line} for what no launch here writes")
                continue
            text = f"{f.message} (schedule: {schedule})"
            if f.severity is Severity.WARNING:  # nothing else follows from it
                self.warned.setdefault(place_of(f), f.model_copy(update={"message": text}))
                continue
            run.findings.setdefault(place_of(f), f.model_copy(update={"message": text}))
        return run

    def _awaits_others(self, f: Finding) -> bool:
        """Whether a poll waits for memory that nobody here has written: another rank or kernel may do so."""
        b = next((b for b in self.buffers if f"of {b.name!r}" in f.message), None)
        if b is None:
            return False
        a = self.memory.allocation(b.name)
        return not bool(self.watch.written[a.start // 4 : -(-a.end // 4)].any())

    def _unwritten(self, f: Finding) -> Finding | None:
        """What reading bytes that nobody has written means; None if the contract allows it."""
        b = next((b for b in self.buffers if b.name == f.buffer), None)
        if b is None:
            return f
        item = self.items.get((f.kernel or "", f.ptx_line or 0))
        if b in self.arriving:
            return self._before_wait(f, b)
        if item is not None and strong(item):
            return None  # a counter, flag or mailbox under another role: it is zero at first
        if self.memory.unwritten(b.name) == b.nbytes:
            return None  # nobody here writes it: some earlier kernel does
        if b.role is Role.OUTPUT and f.address is not None and self.memory.shadow[f.address - BASE]:
            return None  # updated in place: what it held before was for the caller to say
        return f

    def _before_wait(self, f: Finding, b: SimulatedBuffer) -> Finding:
        items = self.kernels[f.kernel or ""].instructions
        waits = any(i.opcode == "griddepcontrol" and i.modifiers == ("wait",) for i in items)
        what = f"reads {b.name!r} while the kernel before it in the stream may still be writing it"
        return f.model_copy(
            update={
                "rule": "pdl-load-before-wait" if waits else "pdl-wait-missing",
                "message": f"{what}: "
                + (
                    "in this schedule no griddepcontrol.wait comes before the load"
                    if waits
                    else "the kernel never executes griddepcontrol.wait"
                ),
                "fix": "read it after griddepcontrol.wait, in the waiting thread or ordered after it",
            }
        )
