"""Litmus tests as PTX kernels, and what the simulator shows of them under many schedules.

A thread of the test is the first lane of a warp of its own; its CTA is that of its place. Every cell is four
bytes of one buffer, 32 bytes apart. Between the instructions stand branches that are never taken, so that a
seeded schedule may stop a thread anywhere. The last instructions of a thread store its registers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from workbench import memory_model as mm
from workbench.isa.ptx import parse
from workbench.isa.ptx.model import Module
from workbench.memory_model import program as p
from workbench.memory_model.runs import Memory as Cells
from workbench.simulator import (
    Adversary,
    Domain,
    KernelLaunch,
    Memory,
    Outcome,
    Pick,
    RankLaunch,
    Schedule,
    SimulationOptions,
    Starved,
    Unit,
    simulate_module,
    simulate_ranks,
)

OWN = Path(__file__).parent / "litmus"
PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "litmus"
STRIDE = 32
"""Bytes from one cell to the next."""
UNIT = 16
"""Bytes of a bulk copy, and of each transaction that a test counts."""
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


class UnfitError(Exception):
    """A test that cannot be run as a kernel; says why."""


class Kernel:
    """The kernels of a test, one a grid; raises UnfitError if it has what the translation lacks.

    Locations whose names begin with `s` are in shared memory of the CTA that names them (or of the CTA that
    waits for the mbarrier of an st.async to them); an mbarrier is in that of the CTA that waits for it.
    """

    def __init__(self, test: p.Litmus) -> None:
        self.test = test
        self.cells = Cells.of(test)
        if any(location.aliases for location in test.locations):
            raise UnfitError("aliases")
        places = [t.place for t in test.threads]
        self.grids = sorted({(t.gpu, t.grid) for t in places})
        """By GPU and number."""
        self.gpus = len({gpu for gpu, _ in self.grids})
        edges = {e.later: e for e in test.grids}
        if self.gpus > 1 and (edges or len(self.grids) > self.gpus):
            raise UnfitError("several grids on several GPUs")
        numbers = [g for _, g in self.grids] if self.gpus == 1 else [0]
        if [g for g in numbers[1:] if g not in edges or edges[g].earlier != g - 1] or numbers[0]:
            raise UnfitError("grids that are no chain")
        self.programmatic = [g in edges and edges[g].programmatic for _, g in self.grids]
        ctas = sorted({_cta(t) for t in places})
        per_grid = [[c for c in ctas if c[:2] == g] for g in self.grids]
        self.ctas = [len(cs) for cs in per_grid]
        self.slots: list[tuple[int, int]] = []
        """By thread: CTA of its grid and warp."""
        filled = dict.fromkeys(ctas, 0)
        for place in places:
            cta = _cta(place)
            self.slots.append((per_grid[self.grids.index(cta[:2])].index(cta), filled[cta]))
            filled[cta] += 1
        self.warps = max(filled.values())
        clusters = {c for *_, c, _ in ctas} if places[0].cluster is not None else set()
        self.cluster = max(self.ctas) // len(clusters) if clusters else 1
        names = {n for _, n, _ in test.registers}
        for thread in test.threads:
            for instruction in thread.code:
                names |= {v.name for v in _values(instruction) if isinstance(v, p.Register)}
        self.names = sorted(names)
        instructions = [i for t in test.threads for i in t.code]
        self.barriers = any(
            isinstance(i, p.Barrier | p.ClusterBarrier | p.MbarrierArrive | p.MbarrierWait)
            for i in instructions
        )
        if self.barriers and any(isinstance(i, p.Branch) for i in instructions):
            raise UnfitError("branches and barriers")
        self.shared = [loc.name for loc in test.locations if loc.name.startswith("s")]
        self.home = self._homes()
        self.text = self._module()

    def _homes(self) -> dict[str, int]:
        """CTA of each mbarrier and shared location."""
        homes: dict[str, int] = {}
        for number, thread in enumerate(self.test.threads):
            cta = self.slots[number][0]
            for i in thread.code:
                if isinstance(i, p.MbarrierWait) and homes.setdefault(i.barrier, cta) != cta:
                    raise UnfitError("an mbarrier that two CTAs wait for")
        for number, thread in enumerate(self.test.threads):
            for i in thread.code:
                for value in _values(i):
                    if not isinstance(value, p.Address) or value.name not in self.shared:
                        continue
                    cta = self.slots[number][0]
                    if isinstance(i, p.Copy) and i.kind == "st.async":
                        cta = homes.get(str(i.barrier), cta)
                    if homes.setdefault(value.name, cta) != cta:
                        raise UnfitError("a shared location of two CTAs")
        return homes

    # -- text -----------------------------------------------------------------------------------------

    @cached_property
    def module(self) -> Module:
        """The module, parsed."""
        return parse(self.text)

    def _module(self) -> str:
        lines = [".version 9.0", ".target sm_103a", ".address_size 64"]
        for n in range(len(self.grids)):
            lines += self._entry(n)
        return "\n".join([*lines, ""])

    def _entry(self, grid: int) -> list[str]:
        members = [n for n, t in enumerate(self.test.threads) if _cta(t.place)[:2] == self.grids[grid]]
        lines = [
            f".visible .entry k{grid}(.param .u64 p_mem, .param .u64 p_out, .param .u32 p_zero)",
            "{",
            ".reg .pred %lead, %never, %t, %again;",
            ".reg .b32 %id, %tid, %cta, %zero, %tmp<4>, %sh, %far;",
            ".reg .b64 %mem, %out, %state, %wide;",
            *(f".reg .b32 %v_{n};" for n in self.names),
            *(f".shared .align 8 .b8 {m.name}_bar[8];" for m in self.test.mbarriers),
            *(f".shared .align 32 .b8 {n}_mem[{STRIDE * self.cells.lengths[n]}];" for n in self.shared),
            "ld.param.u64 %mem, [p_mem];",
            "ld.param.u64 %out, [p_out];",
            "ld.param.u32 %zero, [p_zero];",
            "mov.u32 %tid, %tid.x;",
            "mov.u32 %cta, %ctaid.x;",
            "shr.u32 %id, %tid, 5;",
            f"mad.lo.u32 %id, %cta, {self.warps}, %id;",
        ]
        lines += self._begin()
        lines += ["and.b32 %tid, %tid, 31;", "setp.eq.u32 %lead, %tid, 0;"]
        if not self.barriers:
            lines.append("@!%lead bra DONE;")
        for number in members:
            cta, warp = self.slots[number]
            lines += [f"setp.eq.u32 %t, %id, {cta * self.warps + warp};", f"@%t bra T{number};"]
        lines.append("bra DONE;")
        for number in members:
            lines += self._column(number)
        lines.append("DONE:")
        if self.cluster > 1 and (self.test.mbarriers or self.shared):
            # Who is reached from elsewhere stays until all are through.
            lines += ["barrier.cluster.arrive.release;", "barrier.cluster.wait.acquire;"]
        return [*lines, "ret;", "}"]

    def _begin(self) -> list[str]:
        """Initialise mbarriers and shared locations; everybody knows of it."""
        if not self.test.mbarriers and not self.shared:
            return []
        lines = ["setp.eq.u32 %t, %tid, 0;"]
        for m in self.test.mbarriers:
            lines += [f"mov.u32 %sh, {m.name}_bar;", f"@%t mbarrier.init.shared.b64 [%sh], {m.count};"]
        for name in self.shared:
            lines.append(f"mov.u32 %sh, {name}_mem;")
            for index in range(self.cells.lengths[name]):
                value = self.cells.initial[self.cells.cells[name, index]] & 0xFFFFFFFF
                for word in range(4):
                    lines += [
                        f"mov.u32 %tmp0, {0 if word else value};",
                        f"@%t st.shared.u32 [%sh+{STRIDE * index + 4 * word}], %tmp0;",
                    ]
        lines += ["@%t fence.mbarrier_init.release.cluster;", "@%t fence.proxy.async;", "bar.sync 15;"]
        if self.cluster > 1:
            lines += ["barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"]
        return lines

    def _column(self, number: int) -> list[str]:
        lines = [f"T{number}:"]
        initial = {n: v for t, n, v in self.test.registers if t == number}
        lines += [f"mov.u32 %v_{n}, {initial.get(n, 0) & 0xFFFFFFFF};" for n in self.names]
        for instruction in self.test.threads[number].code:
            lines += self._instruction(number, instruction)
            if not isinstance(instruction, p.Label | p.Branch):
                lines += ["setp.ne.u32 %never, %zero, 0;", f"@%never bra END{number};"]
        lines.append(f"END{number}:")
        base = number * (len(self.names) + 1) * 4
        lines += [
            f"@%lead st.global.u32 [%out+{base + 4 * n}], %v_{name};" for n, name in enumerate(self.names)
        ]
        end = base + 4 * len(self.names)
        return [*lines, "mov.u32 %tmp0, 1;", f"@%lead st.global.u32 [%out+{end}], %tmp0;", "bra DONE;"]

    def _where(self, address: p.Address) -> tuple[list[str], str, str]:
        """Instructions that form an address, the operand, and the state space."""
        if isinstance(address.index, p.Register):
            raise UnfitError("an index in a register")
        index = address.index or 0
        if address.name in self.shared:
            return [f"mov.u32 %sh, {address.name}_mem;"], f"[%sh+{STRIDE * index}]", "shared"
        return [], f"[%mem+{self.cells.cells[address.name, index] * STRIDE}]", "global"

    def _mbarrier(self, number: int, name: str) -> tuple[list[str], str, str]:
        """Instructions that form an mbarrier's address, the operand, and the state space."""
        lines = [f"mov.u32 %far, {name}_bar;"]
        home = self.home.get(name, self.slots[number][0])
        if home == self.slots[number][0]:
            return lines, "[%far]", "shared::cta"
        return (
            [*lines, f"mapa.shared::cluster.u32 %far, %far, {home % self.cluster};"],
            "[%far]",
            "shared::cluster",
        )

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
            case p.Load(proxy=p.Proxy.GENERIC):
                if len(i.targets) > 1:
                    raise UnfitError("vectors")
                before, where, space = self._where(i.address)
                yield from before
                yield f"@%lead ld.{_order(i.order, i.scope)}{space}.u32 %v_{i.targets[0].name}, {where};"
            case p.Store(proxy=p.Proxy.GENERIC):
                if len(i.values) > 1:
                    raise UnfitError("vectors")
                more, value = self._operand(i.values[0], "%tmp0")
                before, where, space = self._where(i.address)
                yield from (*more, *before)
                yield f"@%lead st.{_order(i.order, i.scope)}{space}.u32 {where}, {value};"
            case p.Atomic():
                more, value = self._operand(i.operands[0], "%tmp0")
                before, where, space = self._where(i.address)
                yield from (*more, *before)
                operands = [where, value]
                if i.operation == "cas":
                    more, second = self._operand(i.operands[1], "%tmp1")
                    yield from more
                    operands.append(second)
                name = "red" if i.target is None else "atom"
                if i.target is not None:
                    operands.insert(0, f"%v_{i.target.name}")
                if i.operation == "sub":
                    raise UnfitError("atom.sub")
                kind = _TYPES.get(i.operation, "b32")
                opcode = f"{name}.{_order(i.order, i.scope)}{space}.{i.operation}.{kind}"
                yield f"@%lead {opcode} {', '.join(operands)};"
            case p.Fence():
                yield f"@%lead fence.{i.order.value}.{i.scope.name.lower()};"
            case p.ProxyFence(kind="async"):
                yield "@%lead fence.proxy.async;"
            case p.Barrier():
                yield self._barrier(number, i)
            case p.ClusterBarrier(waits=True):
                yield "barrier.cluster.wait.acquire.aligned;"
            case p.ClusterBarrier():
                yield f"barrier.cluster.arrive.{i.order.value}.aligned;"
            case p.GridControl():
                yield f"@%lead griddepcontrol.{'wait' if i.waits else 'launch_dependents'};"
            case p.MbarrierArrive():
                before, where, space = self._mbarrier(number, i.barrier)
                yield from before
                if i.expect:
                    yield f"@%lead mbarrier.expect_tx.relaxed.cta.{space}.b64 {where}, {UNIT * i.expect};"
                state = "%state" if space == "shared::cta" else "_"
                if i.count:
                    order = _order(i.order, i.scope)
                    yield f"@%lead mbarrier.arrive.{order}{space}.b64 {state}, {where}, {i.count};"
            case p.MbarrierWait():
                if not isinstance(i.parity, int):
                    raise UnfitError("a parity in a register")
                label = f"W{number}_{i.line}"
                yield f"mov.u32 %far, {i.barrier}_bar;"
                yield f"{label}:"
                order = _order(i.order, i.scope)
                yield f"mbarrier.try_wait.parity.{order}shared::cta.b64 %again, [%far], {i.parity};"
                yield f"@!%again bra {label};"
            case p.Copy():
                yield from self._copy(number, i)
            case p.CopyArrive():
                yield f"mov.u32 %far, {i.barrier}_bar;"
                yield "@%lead cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%far];"
            case p.CommitGroup():
                yield f"@%lead cp.async.{'bulk.' if i.bulk else ''}commit_group;"
            case p.WaitGroup(pending=-1):
                yield "@%lead cp.async.wait_all;"
            case p.WaitGroup():
                name = f"cp.async.{'bulk.' if i.bulk else ''}wait_group{'.read' if i.read else ''}"
                yield f"@%lead {name} {i.pending};"
            case _:
                raise UnfitError(type(i).__name__)

    def _copy(self, number: int, copy: p.Copy) -> Iterator[str]:
        if copy.kind == "st.async":
            assert not isinstance(copy.source, p.Address)
            before, value = self._operand(copy.source, "%tmp0")
            home = self.home[str(copy.barrier)] % self.cluster
            if copy.target.name not in self.shared:
                raise UnfitError("st.async to global memory")
            yield from before
            yield f"mov.u32 %sh, {copy.target.name}_mem;"
            yield f"mapa.shared::cluster.u32 %sh, %sh, {home};"
            yield f"mov.u32 %far, {copy.barrier}_bar;"
            yield f"mapa.shared::cluster.u32 %far, %far, {home};"
            for word in range(UNIT // 4):
                name = "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32"
                yield f"@%lead {name} [%sh+{4 * word}], {value}, [%far];"
            return
        assert isinstance(copy.source, p.Address)
        lines, target, into = self._where(copy.target)
        more, source, out_of = self._where(copy.source)
        yield from (*lines, *more)
        if copy.kind == "cp.async":
            if (into, out_of) != ("shared", "global"):
                raise UnfitError("cp.async but from global to shared memory")
            yield f"@%lead cp.async.ca.shared.global {target}, {source}, 4;"
        elif (into, out_of) == ("global", "shared") and copy.barrier is None:
            yield f"@%lead cp.async.bulk.global.shared::cta.bulk_group {target}, {source}, {UNIT};"
        elif (into, out_of) == ("shared", "global") and copy.barrier is not None:
            before, where, _ = self._mbarrier(number, copy.barrier)
            yield from before
            name = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
            yield f"@%lead {name} {target}, {source}, {UNIT}, {where};"
        else:
            raise UnfitError("a bulk copy of another direction")

    def _barrier(self, number: int, barrier: p.Barrier) -> str:
        if barrier.level == "warp":
            raise UnfitError("bar.warp.sync")
        if barrier.logical is not None and barrier.quorum is None:
            raise UnfitError("a barrier with a logical id")
        place = self.test.threads[number].place
        members = [
            t
            for t in self.test.threads
            if _cta(t.place) == _cta(place)
            and any(isinstance(i, p.Barrier) and i.instance == barrier.instance for i in t.code)
        ]
        count = barrier.quorum if isinstance(barrier.quorum, int) else len(members)
        return f"bar.{'sync' if barrier.blocks else 'arrive'} {barrier.instance}, {32 * count};"

    # -- runs -----------------------------------------------------------------------------------------

    def run(self, seed: int = 0, adversary: Adversary | None = None) -> Shown:
        """Run the kernels once; on several GPUs the seed also says how they take turns."""
        domain = Domain(self.gpus) if self.gpus > 1 else None
        memory = domain.memory if domain is not None else Memory(1 << 20)
        cells = memory.allocate("mem", len(self.cells.initial) * STRIDE, initialized=True)
        words = cells.view(np.uint32)
        for cell, value in enumerate(self.cells.initial):
            words[cell * STRIDE // 4] = value & 0xFFFFFFFF
        width = len(self.names) + 1
        out = memory.allocate("out", len(self.slots) * width * 4, initialized=True)
        raw = struct.pack("<QQI", memory.address("mem"), memory.address("out"), 0)
        launches = [
            KernelLaunch(
                f"k{n}",
                (self.ctas[n], 1, 1),
                (32 * self.warps, 1, 1),
                raw,
                (self.cluster, 1, 1),
                pdl=self.programmatic[n],
            )
            for n in range(len(self.grids))
        ]
        options = SimulationOptions(
            parallel_work=1 << 60, seed=seed, adversary=adversary or Adversary(), max_steps=20_000
        )
        if domain is None:
            outcome = simulate_module(self.module, launches, memory, options)
        else:
            turns = list(Schedule)[seed % len(Schedule)]
            ranks = [[RankLaunch(self.module, launch)] for launch in launches]
            outcome = simulate_ranks(domain, ranks, options, schedule=turns)
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
            for name in self.global_names
        )
        rules = frozenset(f.rule for f in outcome.findings)
        return Shown(registers, final, rules, outcome.completed, outcome)

    @property
    def global_names(self) -> tuple[str, ...]:
        """Locations in global memory, whose final values a run shows."""
        return tuple(sorted(loc.name for loc in self.test.locations if loc.name not in self.shared))

    def schedules(self, seeds: int) -> Iterator[tuple[int, Adversary]]:
        """Plain, starved and random schedules."""
        yield 0, Adversary()
        yield 0, Adversary(pick=Pick.HIGHEST)
        for unit, count in ((Unit.WARP, self.warps), (Unit.CTA, max(self.ctas))):
            for index in range(count if count > 1 else 0):
                yield 0, Adversary(starved=Starved(unit, index))
                yield 0, Adversary(starved=Starved(unit, index, ahead=True))
        for overlap in [False, True] if any(self.programmatic) else [False]:
            for seed in range(1, seeds + 1):
                yield seed, Adversary(overlap=overlap, early=seed % 2 == 0)
        if any(self.programmatic):
            yield 0, Adversary(overlap=True)


def _cta(place: p.Place) -> tuple[int, int, int, int]:
    return place.gpu, place.grid, place.cluster or 0, place.cta


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
        "cluster-barrier", "elected-arrive", "cp-async-group", "proxy-fence-missing",
        "uninitialized-read", "barrier-reuse", "pdl-load-before-wait", "pdl-early-trigger",
        "pdl-chain-not-transitive",
    }
)  # fmt: skip
"""Rules under which the simulator reports accesses that nothing orders."""
End = tuple[tuple[frozenset[tuple[str, int]], ...], tuple[tuple[str, tuple[int, ...]], ...]]
"""How a complete run ends: registers by thread, and memory."""


def fitting(folder: Path) -> list[Path]:
    """Litmus tests below a folder that can be run as kernels."""
    found = []
    for path in sorted(folder.rglob("*.litmus")):
        try:
            Kernel(mm.read(path))
        except UnfitError:
            continue
        found.append(path)
    return found


@dataclass
class Model:
    """What the model says of a test."""

    ends: dict[End, bool]
    """Every complete end, and whether an execution that ends so has a race."""
    hangs: bool
    """Whether a thread may hang."""
    racy: bool
    """Whether some execution has a race."""
    reportable: bool
    """Whether one of these races is none that the simulator leaves out on purpose."""


class Excuse:
    """Says which races the simulator leaves out on purpose: those of data that are their own flag.

    At a place that strong loads read, writes and strong accesses are left out; what the flag orders shows
    where weak loads read.
    """

    def __init__(self, test: p.Litmus) -> None:
        self.polled: set[str] = set()
        self.kinds: dict[tuple[int, int], tuple[bool, bool]] = {}
        """By thread and line: whether the instruction writes, and whether it is strong."""
        for number, thread in enumerate(test.threads):
            for i in thread.code:
                if isinstance(i, p.Load | p.Store | p.Atomic):
                    strong = i.order is not p.Order.WEAK
                    self.kinds[number, i.line] = not isinstance(i, p.Load), strong
                    if isinstance(i, p.Load) and strong:
                        self.polled.add(i.address.name)

    def __call__(self, race: mm.Race) -> bool:
        """True if the simulator leaves this race out."""
        sides = [self.kinds.get((a.thread, a.line), (False, False)) for a in (race.first, race.second)]
        if race.first.location not in self.polled or all(strong for _, strong in sides):
            return False
        return all(writes or strong for writes, strong in sides)


def model_of(kernel: Kernel, limit: int = 50_000) -> Model:
    """Ask the model; raises UndecidedError where a test has too many executions."""
    test = kernel.test
    locations = kernel.global_names
    model = Model({}, False, False, False)
    excused = Excuse(test)
    for execution in mm.executions(test, locations, limit):
        model.racy = model.racy or bool(execution.races)
        model.reportable = model.reportable or not all(map(excused, execution.races))
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


POISON = 0xFFFFFFFF
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
        if found and end is not None and any((n, POISON) in row for row in end[0] for n in kernel.names):
            # What the simulator puts where a copy is under way: no end of an execution.
            if not model.racy:
                alarms.append(f"{where}: {found} though there is no race")
        elif end is None:
            if not model.hangs:
                ends.append(f"{where}: does not end: {sorted(shown.rules)}")
        elif end not in model.ends:
            ends.append(f"{where}: {end} is not allowed")
        elif found and not model.ends[end]:
            alarms.append(f"{where}: {found} in {end}, which has no race")
    return Comparison(tuple(ends), tuple(alarms), model.reportable and not racy)
