"""One kernel as the rules read it: instructions, control flow, and what each thread's operands hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from workbench.findings import Finding, Severity
from workbench.isa.flow import ControlFlowGraph
from workbench.isa.ptx.cfg import build
from workbench.isa.ptx.first import FirstValues
from workbench.isa.ptx.model import Instruction, Kernel, Module
from workbench.isa.ptx.values import PARAM_BASE, PtxValues
from workbench.isa.sass.cfg import build as build_sass
from workbench.isa.sass.model import SassFunction, SassInstruction
from workbench.isa.sass.values import SassValues
from workbench.isa.values import Lanes, Threads, Value
from workbench.verify.ordering.analysis import Analysis
from workbench.verify.ordering.binding import Effects, Launch, Layout
from workbench.verify.ordering.program import Place
from workbench.verify.ordering.ptx import ptx_program
from workbench.verify.ordering.rounds import waits_in_loops, with_first_rounds
from workbench.verify.ordering.sass import sass_program
from workbench.verify.ordering.solver import Levels, solve
from workbench.verify.tensor_maps import MAP_BYTES, box_bytes

_ASKED = frozenset(
    ("ld", "ldu", "st", "atom", "red", "multimem", "cp", "ldmatrix", "stmatrix", "fence", "membar", "bar")
) | frozenset(("barrier", "mbarrier", "tcgen05", "wgmma", "griddepcontrol", "elect", "mapa", "tensormap"))
"""Opcodes that rules ask for."""
_SASS_ASKED = frozenset(
    ("LDG", "LD", "LDS", "LDSM", "LDGMC", "LDGSTS", "STG", "ST", "STS", "STSM", "STAS", "ATOM", "ATOMG")
) | frozenset(
    ("RED", "ATOMS", "REDG", "REDAS", "UBLKCP", "UTMALDG", "UTMASTG", "MEMBAR", "CCTL", "FENCE", "SYNCS")
)
UNDECIDED = "undecided"
"""Rule id of what a rule cannot decide; such a finding makes the verdict unknown."""


@dataclass(frozen=True)
class CtaThreads(Threads):
    """The threads of one CTA of a grid; it stands first in its cluster."""

    grid: tuple[int, int, int] | None = None
    cta: tuple[int, int, int] = (0, 0, 0)

    def special(self, name: str) -> Lanes | None:
        """What a special register holds in each thread, if that is known."""
        what, _, axis = name.partition(".")
        if axis in ("x", "y", "z"):
            n = "xyz".index(axis)
            if what == "ctaid":
                return self.full(self.cta[n])
            if what == "nctaid" and self.grid is not None:
                return self.full(self.grid[n])
        if not any(self.cta) and (what in ("clusterid", "cluster_ctaid") or name == "cluster_ctarank"):
            return self.full(0)
        return super().special(name)


@dataclass(frozen=True)
class Step:
    """One instruction that some thread may execute, with its operands' values before it."""

    index: int
    instruction: Instruction
    guard: Lanes | None
    """Threads whose predicate lets them execute it (0 or 1); None if there is none or it is not known."""
    guarded: bool
    """True if it has a predicate whose value is not known."""
    values: tuple[Value, ...]
    """One an operand."""


@dataclass(frozen=True)
class PtxView:
    """The PTX of one kernel for one launch."""

    module: Module
    kernel: Kernel
    graph: ControlFlowGraph[Instruction]
    values: PtxValues
    analysis: Analysis
    _steps: dict[int, Step] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(module: Module, kernel: Kernel, launch: Launch, layout: Layout) -> PtxView:
        """Evaluate a kernel for one CTA shape and the scalars that are known."""
        threads = Threads(launch.block)
        graph = build(kernel)
        values = PtxValues(module, kernel, graph, threads, launch.parameter_block(layout))
        program = ptx_program(graph, values)
        if waits_in_loops(program, graph):
            known = FirstValues(module, kernel, graph, threads, launch.parameter_block(layout))
            program = with_first_rounds(program, graph, known)
        return PtxView(module, kernel, graph, values, Analysis(program, solve(program), launch, layout))

    @property
    def launch(self) -> Launch:
        """How the kernel is launched."""
        return self.analysis.launch

    @property
    def threads(self) -> Threads:
        """The threads of one CTA."""
        return self.values.threads

    def steps(self, *opcodes: str) -> Iterator[Step]:
        """Instructions with one of these opcodes (all, if none is given), in program order; no dead code."""
        self._evaluate(frozenset(opcodes))
        wanted = frozenset(opcodes)
        for at in sorted(self._steps):
            if not wanted or self.graph.instructions[at].opcode in wanted:
                yield self._steps[at]

    def step(self, index: int) -> Step | None:
        """One instruction; None if no path reaches it."""
        self._evaluate(frozenset((self.graph.instructions[index].opcode,)))
        return self._steps.get(index)

    def _evaluate(self, opcodes: frozenset[str]) -> None:
        done = self._evaluated
        if "" in done or (opcodes and opcodes <= done):
            return
        wanted = opcodes - done
        if wanted and not done & _ASKED and wanted & _ASKED:
            wanted |= _ASKED  # all at once: each walk costs
        for b in self.graph.reverse_postorder:
            block = self.graph.blocks[b]
            if wanted and not any(
                self.graph.instructions[at].opcode in wanted for at in range(block.start, block.end)
            ):
                continue
            for at in self.values.walk(b):
                i = self.graph.instructions[at]
                if at in self._steps or (wanted and i.opcode not in wanted):
                    continue
                guard = None if i.predicate is None else self.values.operand(i.predicate).known
                if guard is not None and i.negated:
                    guard = guard ^ np.uint64(1)
                found = tuple(self.values.operand(o) for o in i.operands)
                unknown = i.predicate is not None and guard is None
                self._steps[at] = Step(at, i, guard, unknown, found)
        done.update(wanted or {""})

    @cached_property
    def _evaluated(self) -> set[str]:
        return set()

    @cached_property
    def block_threads(self) -> dict[int, Levels]:
        """Threads that may reach each block of the graph, as 0 and 1; role branches that are known count."""
        n = self.threads.count
        found = {0: np.ones(n, np.uint8)}
        program = self.analysis.program
        todo = [0]
        while todo:
            b = todo.pop()
            for s in self.graph.successors[b]:
                mask = program.edges.get((b, s))
                coming = found[b] if mask is None else found[b] & (mask != 0).astype(np.uint8)
                old = found.get(s)
                new = coming if old is None else old | coming
                if old is None or not np.array_equal(old, new):
                    found[s] = new
                    todo.append(s)
        return found

    def executing(self, step: Step) -> Lanes:
        """Threads that may execute an instruction, as 0 and 1: they reach it and their guard lets them."""
        reach = self.block_threads.get(self.graph.block_of[step.index])
        if reach is None:
            return np.zeros(self.threads.count, np.uint64)
        who = reach.astype(np.uint64)
        return who if step.guard is None else who & (step.guard != 0).astype(np.uint64)

    @cached_property
    def effects(self) -> Effects:
        """What the launch does; a wait that some CTA is sure to come to is one of the grid."""
        analysis = self.analysis
        if analysis.surely_waits or not analysis.waits or self.launch.grid is None:
            return analysis.effects
        grid = self.launch.grid
        block = self.launch.parameter_block(analysis.layout)
        for cta in ((0, 0, 0), (grid[0] - 1, grid[1] - 1, grid[2] - 1)):
            threads = CtaThreads(self.threads.block, grid=grid, cta=cta)
            values = PtxValues(self.module, self.kernel, self.graph, threads, block)
            program = ptx_program(self.graph, values)
            if Analysis(program, solve(program), self.launch, analysis.layout).surely_waits:
                return replace(analysis.effects, waits=True, drains=analysis.late_triggers)
        return analysis.effects

    def map_bytes(self, step: Step, place: Value) -> int | None:
        """Bytes that a tensor copy through the map at an address brings; None if that is not known."""
        at = place.constant()
        where = None if at is None or at < PARAM_BASE else self.analysis.layout.find(at - PARAM_BASE)
        if where is None or {"im2col", "im2col::w", "tile::gather4"} & set(step.instruction.modifiers):
            return None
        param = self.launch.params.get(where[0])
        raw = b"" if param is None else bytes.fromhex(param.data)[where[1] : where[1] + MAP_BYTES]
        return box_bytes(raw) if len(raw) == MAP_BYTES else None

    def place(self, index: int) -> Place:
        """Where an instruction stands."""
        return self.analysis.program.places[index]

    def buffers(self, value: Value) -> frozenset[str]:
        """Buffers an address may point into; empty if that cannot be told."""
        return self.launch.pointed(value.roots, self.analysis.layout)


@dataclass(frozen=True)
class SassStep:
    """One SASS instruction with its operands' values before it."""

    index: int
    instruction: SassInstruction
    guard: Lanes | None
    guarded: bool
    values: tuple[Value, ...]


@dataclass(frozen=True)
class SassView:
    """The SASS of one kernel for one launch, with its PTX where that is there."""

    function: SassFunction
    graph: ControlFlowGraph[SassInstruction]
    values: SassValues
    analysis: Analysis
    ptx: PtxView | None = None
    static_smem: int = 0
    """Static shared memory, bytes a CTA."""
    _steps: dict[int, SassStep] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(
        function: SassFunction,
        launch: Launch,
        layout: Layout,
        base: int,
        ptx: PtxView | None = None,
        static_smem: int = 0,
    ) -> SassView:
        """Evaluate a function; `base` is where parameters start in constant bank 0."""
        threads = Threads(launch.block)
        graph = build_sass(function)
        x, y, z = launch.cluster or (1, 1, 1)
        values = SassValues(graph, threads, launch.parameter_block(layout), base, x * y * z > 1)
        program = sass_program(graph, values, function)
        analysis = Analysis(program, solve(program), launch, layout)
        return SassView(function, graph, values, analysis, ptx, static_smem)

    @property
    def launch(self) -> Launch:
        """How the kernel is launched."""
        return self.analysis.launch

    def steps(self, *opcodes: str) -> Iterator[SassStep]:
        """Instructions with one of these opcodes, block by block in program order, dead code left out."""
        wanted = frozenset(opcodes)
        missing = wanted - self._evaluated
        if missing:
            if not self._evaluated & _SASS_ASKED and missing & _SASS_ASKED:
                missing |= _SASS_ASKED
            self._evaluate(missing)
            self._evaluated.update(missing)
        for at in sorted(self._steps):
            if self.graph.instructions[at].opcode in wanted:
                yield self._steps[at]

    def _evaluate(self, opcodes: frozenset[str]) -> None:
        for b in self.graph.reverse_postorder:
            block = self.graph.blocks[b]
            if not any(self.graph.instructions[at].opcode in opcodes for at in range(block.start, block.end)):
                continue
            for at, state in self.values.walk(b):
                i = self.graph.instructions[at]
                if i.opcode not in opcodes or at in self._steps:
                    continue
                guard = None if i.predicate is None else self.values.predicate(i.predicate, i.negated, state)
                found = tuple(self.values.operand(o, state) for o in i.operands)
                self._steps[at] = SassStep(at, i, guard, i.predicate is not None and guard is None, found)

    @cached_property
    def _evaluated(self) -> set[str]:
        return set()

    def place(self, index: int) -> Place:
        """Where an instruction stands."""
        return self.analysis.program.places[index]

    def buffers(self, value: Value) -> frozenset[str]:
        """Buffers an address may point into; empty if that cannot be told."""
        return self.launch.pointed(value.roots, self.analysis.layout)


def finding(
    rule: str,
    severity: Severity,
    view: PtxView | SassView,
    index: int,
    message: str,
    fix: str,
    buffer: str | None = None,
) -> Finding:
    """A finding at an instruction of a view."""
    place = view.place(index)
    return Finding(
        rule=rule,
        severity=severity,
        message=message,
        fix=fix,
        kernel=view.launch.kernel,
        ptx_line=place.ptx_line,
        sass_offset=place.sass_offset,
        source=place.source,
        buffer=buffer,
    )


def undecided(view: PtxView | SassView, index: int, why: str, fix: str, buffer: str | None = None) -> Finding:
    """Say that a rule could not decide something at an instruction; the verdict becomes unknown."""
    return finding(UNDECIDED, Severity.INFO, view, index, why, fix, buffer)
