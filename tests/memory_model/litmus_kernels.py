"""Litmus tests as PTX kernels, and what the simulator shows of them under many schedules.

A thread of the test is the first lane of a warp of its own; its CTA is that of its place. Every cell is four
bytes of one buffer, 32 bytes apart. Between the instructions stand branches that are never taken, so that a
seeded schedule may stop a thread anywhere. The last instructions of a thread store its registers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from workbench import memory_model as mm
from workbench.isa.ptx import parse
from workbench.memory_model import program as p
from workbench.memory_model.runs import Memory as Cells
from workbench.simulator import (
    Adversary,
    KernelLaunch,
    Memory,
    Outcome,
    Pick,
    SimulationOptions,
    Starved,
    Unit,
    simulate_module,
)

STRIDE = 32
"""Bytes from one cell to the next."""
_TYPES = {"add": "u32", "min": "u32", "max": "u32"}
_TESTS = {"beq": "eq", "bne": "ne", "blt": "lt", "ble": "le", "bgt": "gt", "bge": "ge"}


@dataclass(frozen=True)
class Shown:
    """How one simulated run ended."""

    registers: tuple[tuple[tuple[str, int], ...] | None, ...]
    """By thread; None if it did not finish."""
    memory: tuple[tuple[str, tuple[int, ...]], ...]
    rules: frozenset[str]
    completed: bool
    outcome: Outcome


class Kernel:
    """The kernel of a test."""

    def __init__(self, test: p.Litmus) -> None:
        self.test = test
        self.cells = Cells.of(test)
        self.lines: dict[int, int] = {}
        """By line of the PTX text: number of the line in the test."""
        places = [t.place for t in test.threads]
        self.ctas = sorted({(t.grid, t.gpu, t.cluster or 0, t.cta) for t in places})
        if len({(g, d) for g, d, _, _ in self.ctas}) > 1:
            raise ValueError("one grid on one GPU")
        self.slots: list[tuple[int, int]] = []
        """By thread: CTA and warp."""
        filled = dict.fromkeys(self.ctas, 0)
        for place in places:
            cta = (place.grid, place.gpu, place.cluster or 0, place.cta)
            self.slots.append((self.ctas.index(cta), filled[cta]))
            filled[cta] += 1
        self.warps = max(filled.values())
        clusters = sorted({c for _, _, c, _ in self.ctas if places[0].cluster is not None})
        self.cluster = len(self.ctas) // len(clusters) if clusters else 1
        names = {n for i, n, _ in test.registers for _ in (i,)}
        for thread in test.threads:
            for instruction in thread.code:
                for value in _values(instruction):
                    if isinstance(value, p.Register):
                        names.add(value.name)
        self.names = sorted(names)
        self.barriers = any(
            isinstance(i, p.Barrier | p.ClusterBarrier | p.MbarrierArrive | p.MbarrierWait)
            for t in test.threads
            for i in t.code
        )
        self.text = self._text()
        self.module = parse(self.text)

    # -- text -----------------------------------------------------------------------------------------

    def _text(self) -> str:
        registers = "".join(f".reg .b32 %v_{n};\n" for n in self.names)
        shared = "".join(f".shared .align 8 .b8 {m.name}_bar[8];\n" for m in self.test.mbarriers)
        head = f""".version 9.0
.target sm_103a
.address_size 64
.visible .entry k(.param .u64 p_mem, .param .u64 p_out, .param .u32 p_zero)
{{
.reg .pred %lead, %never, %t, %again;
.reg .b32 %id, %tid, %cta, %zero, %tmp<4>, %sh;
.reg .b64 %mem, %out, %state;
{registers}{shared}
ld.param.u64 %mem, [p_mem];
ld.param.u64 %out, [p_out];
ld.param.u32 %zero, [p_zero];
mov.u32 %tid, %tid.x;
mov.u32 %cta, %ctaid.x;
shr.u32 %id, %tid, 5;
mad.lo.u32 %id, %cta, {self.warps}, %id;
and.b32 %tid, %tid, 31;
setp.eq.u32 %lead, %tid, 0;
"""
        lines = head.splitlines()
        for m in self.test.mbarriers:
            lines += [
                f"mov.u32 %sh, {m.name}_bar;",
                "mov.u32 %tmp0, %tid.x;",
                "setp.eq.u32 %t, %tmp0, 0;",
                f"@%t mbarrier.init.shared.b64 [%sh], {m.count};",
            ]
        if self.test.mbarriers:
            lines.append("bar.sync 15;")
        if not self.barriers:
            lines.append("@!%lead bra DONE;")
        for number, (cta, warp) in enumerate(self.slots):
            lines += [f"setp.eq.u32 %t, %id, {cta * self.warps + warp};", f"@%t bra T{number};"]
        lines.append("bra DONE;")
        for number, thread in enumerate(self.test.threads):
            lines.append(f"T{number}:")
            initial = {n: v for t, n, v in self.test.registers if t == number}
            lines += [f"mov.u32 %v_{n}, {initial.get(n, 0) & 0xFFFFFFFF};" for n in self.names]
            for instruction in thread.code:
                for line in self._instruction(number, instruction):
                    lines.append(line)
                    self.lines[len(lines)] = instruction.line
                if not isinstance(instruction, p.Label | p.Branch):
                    lines += ["setp.ne.u32 %never, %zero, 0;", f"@%never bra END{number};"]
            lines.append(f"END{number}:")
            base = number * (len(self.names) + 1) * 4
            lines += [
                f"@%lead st.global.u32 [%out+{base + 4 * n}], %v_{name};" for n, name in enumerate(self.names)
            ]
            lines += [
                "mov.u32 %tmp0, 1;",
                f"@%lead st.global.u32 [%out+{base + 4 * len(self.names)}], %tmp0;",
                "bra DONE;",
            ]
        return "\n".join([*lines, "DONE:", "ret;", "}", ""])

    def _address(self, address: p.Address) -> str:
        index = address.index if isinstance(address.index, int) else 0
        return f"[%mem+{self.cells.cells[address.name, index] * STRIDE}]"

    def _operand(self, operand: p.Operand, temporary: str) -> tuple[list[str], str]:
        if isinstance(operand, p.Register):
            return [], f"%v_{operand.name}"
        return [f"mov.u32 {temporary}, {operand & 0xFFFFFFFF};"], temporary

    def _instruction(self, number: int, i: p.Instruction) -> Iterator[str]:
        match i:
            case p.Label():
                yield f"L{number}_{i.name}:"
            case p.Branch(test=None):
                yield f"bra L{number}_{i.target};"
            case p.Branch():
                before, left = self._operand(i.operands[0], "%tmp0")
                more, right = self._operand(i.operands[1], "%tmp1")
                yield from (*before, *more)
                yield f"setp.{_TESTS[str(i.test)]}.u32 %t, {left}, {right};"
                yield f"@%t bra L{number}_{i.target};"
            case p.Arithmetic(operation="mov"):
                before, value = self._operand(i.operands[0], "%tmp0")
                yield from before
                yield f"mov.u32 %v_{i.target.name}, {value};"
            case p.Arithmetic(operation="add"):
                before, left = self._operand(i.operands[0], "%tmp0")
                more, right = self._operand(i.operands[1], "%tmp1")
                yield from (*before, *more)
                yield f"add.u32 %v_{i.target.name}, {left}, {right};"
            case p.Load():
                order = _order(i.order, i.scope)
                yield f"@%lead ld.{order}global.u32 %v_{i.targets[0].name}, {self._address(i.address)};"
            case p.Store():
                before, value = self._operand(i.values[0], "%tmp0")
                yield from before
                order = _order(i.order, i.scope)
                yield f"@%lead st.{order}global.u32 {self._address(i.address)}, {value};"
            case p.Atomic():
                before, value = self._operand(i.operands[0], "%tmp0")
                yield from before
                operands = [self._address(i.address), value]
                if i.operation == "cas":
                    more, second = self._operand(i.operands[1], "%tmp1")
                    yield from more
                    operands.append(second)
                kind = _TYPES.get(i.operation, "b32")
                name = "red" if i.target is None else "atom"
                if i.target is not None:
                    operands.insert(0, f"%v_{i.target.name}")
                opcode = f"{name}.{_order(i.order, i.scope)}global.{i.operation}.{kind}"
                yield f"@%lead {opcode} {', '.join(operands)};"
            case p.Fence():
                yield f"@%lead fence.{i.order.value}.{i.scope.name.lower()};"
            case p.Barrier():
                yield self._barrier(number, i)
            case p.ClusterBarrier(waits=True):
                yield "barrier.cluster.wait.acquire.aligned;"
            case p.ClusterBarrier():
                yield f"barrier.cluster.arrive.{i.order.value}.aligned;"
            case p.MbarrierArrive(expect=0):
                yield f"mov.u32 %sh, {i.barrier}_bar;"
                order = _order(i.order, i.scope)
                yield f"@%lead mbarrier.arrive.{order}shared::cta.b64 %state, [%sh], {i.count};"
            case p.MbarrierWait():
                assert isinstance(i.parity, int)
                label = f"W{number}_{i.line}"
                yield f"mov.u32 %sh, {i.barrier}_bar;"
                yield f"{label}:"
                order = _order(i.order, i.scope)
                yield f"mbarrier.try_wait.parity.{order}shared::cta.b64 %again, [%sh], {i.parity};"
                yield f"@!%again bra {label};"
            case _:
                raise ValueError(type(i))

    def _barrier(self, number: int, barrier: p.Barrier) -> str:
        if barrier.level == "warp":
            raise ValueError("bar.warp.sync")
        place = self.test.threads[number].place
        members = [
            t
            for t in self.test.threads
            if (t.place.cluster, t.place.cta) == (place.cluster, place.cta)
            and any(isinstance(i, p.Barrier) and i.instance == barrier.instance for i in t.code)
        ]
        count = barrier.quorum if isinstance(barrier.quorum, int) else len(members)
        return f"bar.{'sync' if barrier.blocks else 'arrive'} {barrier.instance}, {32 * count};"

    # -- runs -----------------------------------------------------------------------------------------

    def run(self, seed: int = 0, adversary: Adversary | None = None) -> Shown:
        """Run the kernel once."""
        memory = Memory(1 << 20)
        cells = memory.allocate("mem", len(self.cells.initial) * STRIDE, initialized=True)
        words = cells.view(np.uint32)
        for cell, value in enumerate(self.cells.initial):
            words[cell * STRIDE // 4] = value & 0xFFFFFFFF
        width = len(self.names) + 1
        out = memory.allocate("out", len(self.slots) * width * 4, initialized=True)
        raw = struct.pack("<QQI", memory.address("mem"), memory.address("out"), 0)
        launch = KernelLaunch("k", (len(self.ctas), 1, 1), (32 * self.warps, 1, 1), raw, (self.cluster, 1, 1))
        options = SimulationOptions(
            parallel_work=1 << 60, seed=seed, adversary=adversary or Adversary(), max_steps=20_000
        )
        outcome = simulate_module(self.module, [launch], memory, options)
        table = out.view(np.uint32).reshape(len(self.slots), width)
        registers = tuple(
            tuple(zip(self.names, map(int, row[:-1]), strict=True)) if row[-1] else None for row in table
        )
        final = tuple(
            (
                name,
                tuple(
                    int(words[self.cells.cells[name, i] * STRIDE // 4])
                    for i in range(self.cells.lengths[name])
                ),
            )
            for name in sorted(location.name for location in self.test.locations)
        )
        rules = frozenset(f.rule for f in outcome.findings)
        return Shown(registers, final, rules, outcome.completed, outcome)

    def schedules(self, seeds: int) -> Iterator[tuple[int, Adversary]]:
        """Plain, starved and random schedules."""
        yield 0, Adversary()
        yield 0, Adversary(pick=Pick.HIGHEST)
        for unit, count in ((Unit.WARP, self.warps), (Unit.CTA, len(self.ctas))):
            for index in range(count if count > 1 else 0):
                yield 0, Adversary(starved=Starved(unit, index))
                yield 0, Adversary(starved=Starved(unit, index, ahead=True))
        for seed in range(1, seeds + 1):
            yield seed, Adversary()


def _order(order: p.Order, scope: p.Scope | None) -> str:
    return "" if order is p.Order.WEAK or scope is None else f"{order.value}.{scope.name.lower()}."


def _values(instruction: p.Instruction) -> Iterator[object]:
    for name in instruction.__dataclass_fields__:
        value = getattr(instruction, name)
        yield from value if isinstance(value, tuple) else (value,)


RACES = frozenset(
    {
        "race", "flag-without-acquire", "flag-without-release", "scope-too-narrow", "buffer-reuse",
        "mbarrier-phase",
        "cluster-barrier", "elected-arrive", "cp-async-group", "proxy-fence-missing", "barrier-reuse",
    }
)  # fmt: skip
"""Rules under which the simulator reports accesses that nothing orders."""
End = tuple[tuple[frozenset[tuple[str, int]], ...], tuple[tuple[str, tuple[int, ...]], ...]]
"""How a complete run ends: registers by thread, and memory."""


@dataclass
class Model:
    """What the model says of a test."""

    ends: dict[End, bool]
    """Every complete end, and whether an execution that ends so has a race."""
    hangs: bool
    """Whether a thread may hang."""
    racy: bool
    """Whether some execution has a race."""


def model_of(kernel: Kernel, limit: int = 50_000) -> Model:
    """Ask the model; raises UndecidedError where a test has too many executions."""
    test = kernel.test
    locations = tuple(location.name for location in test.locations)
    model = Model({}, False, False)
    for execution in mm.executions(test, locations, limit):
        model.racy = model.racy or bool(execution.races)
        if any(execution.outcome.hung):
            model.hangs = True
            continue
        end = _end(kernel, execution.outcome.registers, execution.outcome.memory)
        model.ends[end] = model.ends.get(end, False) or bool(execution.races)
    model.hangs = model.hangs or not model.ends
    return model


def end_of(kernel: Kernel, shown: Shown) -> End | None:
    """How a simulated run ended; None if it is not complete."""
    if not shown.completed or None in shown.registers:
        return None
    return _end(kernel, tuple(r for r in shown.registers if r is not None), shown.memory)


def _end(kernel: Kernel, registers: tuple[tuple[tuple[str, int], ...], ...], memory: object) -> End:
    rows = tuple(
        frozenset((name, dict(row).get(name, 0) & 0xFFFFFFFF) for name in kernel.names) for row in registers
    )
    return rows, memory  # type: ignore[return-value]


FEW, MANY = 8, 24
"""Random schedules of a kernel, besides the plain and the starved ones."""


@dataclass(frozen=True)
class Comparison:
    """Where the simulator and the model differ."""

    ends: tuple[str, ...]
    """Ends that the simulator shows and the model forbids."""
    false_alarms: tuple[str, ...]
    """Races that the simulator reports of a run that ends as only executions without a race do."""
    missed: bool
    """True if the model has a race and no schedule shows one."""


@cache
def compare(test: mm.Litmus, seeds: int) -> Comparison:
    """Run a test as a kernel and ask the model; raises UndecidedError where it has too many executions."""
    kernel = Kernel(test)
    model = model_of(kernel)
    ends, alarms = [], []
    racy = False
    for seed, adversary in kernel.schedules(seeds):
        shown = kernel.run(seed, adversary)
        found = sorted(shown.rules & RACES)
        racy = racy or bool(found)
        end = end_of(kernel, shown)
        where = f"seed {seed}, {adversary}"
        if end is None:
            if not model.hangs:
                ends.append(f"{where}: does not end: {sorted(shown.rules)}")
        elif end not in model.ends:
            ends.append(f"{where}: {end} is not allowed")
        elif found and not model.ends[end]:
            alarms.append(f"{where}: {found} in {end}, which has no race")
    return Comparison(tuple(ends), tuple(alarms), model.racy and not racy)
