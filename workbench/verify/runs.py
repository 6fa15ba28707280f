"""One artifact at its own workload: ordering on the compiled code, then judged runs in the simulator."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from workbench.artifact import Artifact, BoundBuffer
from workbench.compile import ArtifactCache
from workbench.errors import MissingToolError
from workbench.findings import Finding, Severity
from workbench.isa.sass import SassModule, disassemble, parse_sass
from workbench.ops.model import Op, Workload
from workbench.simulator import Counters, Memory, Outcome, SimulationOptions, UnsupportedInstruction, simulate
from workbench.verify.honesty import check_honesty, check_moved
from workbench.verify.inputs import (
    POISONS,
    Case,
    is_zero_at_first,
    place_scratch,
    reset_scratch,
    same_bits,
    swapped_inputs,
)
from workbench.verify.ordering import audit
from workbench.verify.ordering.rehearsal import rehearse
from workbench.verify.report import Check, Report, Verdict, verdict_of

SCREENED = ("ordinary", "ties", "negative_gates", "large")
"""Generators that a candidate of a search must pass, of those that its op has: plain inputs, ties in the
routing, and the two that tell rounding points apart. The winner, and `verify`, must pass all generators."""


class Level(StrEnum):
    """How much is checked."""

    SCREEN = "screen"
    """Ordering, memory, numerics on the screening inputs, and that a repeat gives the same bits."""
    FULL = "full"
    """Also every other generator, ordinary inputs of another seed, and the same source at small workloads."""


@dataclass(frozen=True)
class Verification:
    """A report and what the runs behind it counted."""

    report: Report
    counters: tuple[Counters, ...]
    """Of the first run, one a launch; empty if it did not finish."""
    lane_instructions: int
    """Of all runs."""
    sass: SassModule | None = None
    """The disassembled cubin, where there is a disassembler."""


class CaseCache:
    """Inputs and golden results by (op, workload, generator, seed); the least recently used go first."""

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._cases: OrderedDict[tuple[int, str, str, int], tuple[Op, Case, Memory]] = OrderedDict()

    def get(self, op: Op, workload: Workload, generator: str, seed: int) -> tuple[Case, Memory]:
        """The case and the memory that holds it, made if need be."""
        key = (id(op), workload.name, generator, seed)
        if key not in self._cases:
            while len(self._cases) >= self._capacity:
                self._cases.popitem(last=False)
            memory = Memory()
            # The op is kept with its case, so that its id stays its own.
            self._cases[key] = (op, Case.create(op, workload, generator, seed, memory), memory)
        self._cases.move_to_end(key)
        _, case, memory = self._cases[key]
        return case, memory


@dataclass
class _Runs:
    """Checks gathered from the runs of one artifact."""

    artifact: Artifact
    op: Op
    workload: Workload
    cases: CaseCache
    options: SimulationOptions
    checks: list[Check] = field(default_factory=list)
    memory_findings: dict[tuple[str, str | None, int | None, str | None], Finding] = field(
        default_factory=dict
    )
    labels: list[str] = field(default_factory=list)
    counters: tuple[Counters, ...] = ()
    counted: str = ""
    """Generator whose inputs the counters are of."""
    lane_instructions: int = 0
    schedules: bool = False
    """Run the inputs that are repeated under adversarial schedules too."""
    carried: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """What the run before left in scratch that is zero before the first launch alone."""
    relaunches: int = 0
    stale: bool = False
    """True once a launch was wrong for what another had left; from then on each is a first one."""
    ended: bool = True
    """False once a run did not come to its end."""

    def run(self, generator: str, seed: int, *, repeat: bool = False) -> bool:
        """Run one generator's inputs and judge the outputs; False if something failed."""
        case, memory = self.cases.get(self.op, self.workload, generator, seed)
        mark = memory.mark()
        try:
            scratch = place_scratch(memory, self.op, self.artifact.buffers)
            outputs: list[dict[str, torch.Tensor]] = []
            for poison in POISONS[:2] if repeat else POISONS[:1]:
                case.restore(poison)
                reset_scratch(memory, scratch, poison)
                self._carry_into(memory)
                outcome = simulate(self.artifact, memory, self.options)
                self._note(case.label, outcome)
                if not outcome.completed:
                    self.ended = False
                    why = (
                        "; ".join(f.message for f in outcome.findings[-1:]) or "it stopped without a finding"
                    )
                    if self.carried:
                        why += (
                            f" (launched again, with {', '.join(self.carried)} as the launch before left it)"
                        )
                    self.checks.append(
                        Check(
                            name=f"numerics/{case.label}",
                            verdict=Verdict.FAIL,
                            summary=f"the run did not end: {why}",
                        )
                    )
                    return False
                if not outputs:
                    if not self.counters:
                        self.counters, self.counted = outcome.counters, generator
                    self.options = _without_sectors(self.options)
                outputs.append(case.read_outputs())
            check = case.judge(outputs[0], POISONS[0])
            if check.verdict is Verdict.FAIL and self.carried:
                case.restore(POISONS[0])
                reset_scratch(memory, scratch, POISONS[0])
                outcome = simulate(self.artifact, memory, self.options)
                fresh = case.judge(case.read_outputs(), POISONS[0]) if outcome.completed else check
                if fresh.verdict is Verdict.PASS:
                    self.stale = True
                    self.checks.append(_state_carried(self.carried, case.label, check.summary))
                    check = fresh
            self.carried = {
                b.name: memory.view(b.name).copy() for b in scratch if is_zero_at_first(b) and not self.stale
            }
            self.checks.append(check)
            if repeat:
                self.checks.append(_determinism(outputs[0], outputs[1]))
                if self.carried and check.verdict is Verdict.PASS:
                    self._swap(case, memory, scratch)
            if repeat and self.schedules:

                def restore() -> None:
                    case.restore(POISONS[0])
                    reset_scratch(memory, scratch, POISONS[0])

                rehearsed = rehearse(self.artifact, memory, restore, outcome, self.options)
                if rehearsed is not None:
                    self.checks.append(rehearsed)
            return check.verdict is Verdict.PASS
        finally:
            memory.release(mark)

    def _swap(self, case: Case, memory: Memory, scratch: Sequence[BoundBuffer]) -> None:
        """Launch again on inputs of which a few elements have changed places.

        Whoever keeps what an earlier launch computed, and knows its inputs again by their addresses, by a few
        elements or by a sum, does not notice.
        """
        with swapped_inputs(case, memory):
            results = []
            for carry in (True, False):
                case.restore(POISONS[0])
                reset_scratch(memory, scratch, POISONS[0])
                if carry:
                    self._carry_into(memory)
                outcome = simulate(self.artifact, memory, self.options)
                self._note(case.label, outcome)
                results.append(case.read_outputs() if outcome.completed else None)
        again, fresh = results
        if again is None or fresh is None or not same_bits(again, fresh):
            self.stale = True
            wrong = (
                "after a few elements of the inputs have changed places the bits differ from a first launch's"
            )
            self.checks.append(_state_carried(self.carried, case.label, wrong))
            self.carried = {}

    def _carry_into(self, memory: Memory) -> None:
        """Launch again as a stream does: nobody resets scratch between two launches."""
        for name, left in self.carried.items():
            memory.view(name)[:] = left
        self.relaunches += bool(self.carried)

    def relaunch_check(self) -> Check | None:
        """That other inputs gave right results after earlier launches, if those can leave anything."""
        if not self.relaunches or self.stale:
            return None
        return Check(
            name="honesty/relaunch",
            verdict=Verdict.PASS,
            summary=f"{self.relaunches} launches that find {', '.join(self.carried)} as left are right",
        )

    def _note(self, label: str, outcome: Outcome) -> None:
        self.labels.append(label)
        self.lane_instructions += outcome.lane_instructions
        for f in outcome.findings:
            self.memory_findings.setdefault((f.rule, f.kernel, f.ptx_line, f.buffer), f)

    def memory_check(self) -> Check:
        """The check over everything that the simulator found in any run."""
        if not self.labels:
            return Check(name="memory", verdict=Verdict.UNKNOWN, summary="nothing was run")
        findings = tuple(self.memory_findings.values())
        runs = f"{len(self.labels)} runs ({', '.join(dict.fromkeys(self.labels))})"
        summary = f"{len(findings)} kinds of fault in {runs}" if findings else f"no fault in {runs}"
        return Check(name="memory", verdict=verdict_of(findings), summary=summary, findings=findings)


def _without_sectors(options: SimulationOptions) -> SimulationOptions:
    """Sectors are counted once: later runs touch the same ones but for the experts they choose."""
    return replace(options, count_sectors=False)


def _determinism(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> Check:
    """Compare two runs bit by bit; they differ in the poison of outputs and scratch alone."""
    different = [name for name in first if not same_bits({name: first[name]}, second)]
    if not different:
        return Check(
            name="determinism", verdict=Verdict.PASS, summary="a repeat with other poison gives the same bits"
        )
    return Check(
        name="determinism",
        verdict=Verdict.FAIL,
        summary=f"a repeat with other poison changes {', '.join(different)}: it depends on memory that "
        "nothing wrote",
    )


def _state_carried(carried: Iterable[str], label: str, wrong: str) -> Check:
    names = ", ".join(carried)
    finding = Finding(
        rule="state-carried",
        severity=Severity.ERROR,
        message="a launch on other inputs after an earlier one gives another result than a first launch on "
        f"them would: it uses what the earlier launch left in {names}",
        fix="compute from the inputs of each launch; leave flags and counters as the next launch needs them",
        buffer=next(iter(carried)),
    )
    return Check(
        name="honesty/relaunch", verdict=Verdict.FAIL, summary=f"{label}: {wrong}", findings=(finding,)
    )


def check_artifact(
    artifact: Artifact,
    op: Op,
    *,
    level: Level = Level.FULL,
    seed: int = 0,
    cases: CaseCache | None = None,
    cache: ArtifactCache | None = None,
    processes: int = 1,
    time_limit: float = 60.0,
    generators: Sequence[str] | None = None,
) -> Verification:
    """Check an artifact's ordering, memory accesses, numerics and determinism.

    Args:
        level: which generators run; see `Level`.
        seed: of the inputs.
        cases: keeps inputs and golden results between artifacts.
        cache: keeps the disassembled cubin, as long as it keeps the artifact.
        processes: processes that share the CTAs of a launch.
        time_limit: seconds for one run of all launches.
        generators: names to run instead of those of `level`.

    Raises:
        WorkbenchError: if the op has no such generator, or simulated memory cannot be had.
    """
    started = time.monotonic()
    workload = op.workload(artifact.workload)
    runs = _Runs(
        artifact,
        op,
        workload,
        cases or CaseCache(),
        SimulationOptions(processes=processes, time_limit=time_limit, count_sectors=True),
    )
    runs.schedules = level is Level.FULL
    sass = _disassembled(artifact, cache)
    runs.checks.append(audit(artifact, sass))
    runs.checks.append(check_honesty(artifact, op))
    wanted = list(generators) if generators is not None else _generators(op, level)
    plan = [(name, seed, name == "ordinary") for name in wanted]
    if level is Level.FULL and generators is None:
        plan.append(("ordinary", seed + 1, False))
    try:
        for name, input_seed, repeat in plan:
            # Later inputs say little about a kernel that is wrong on the first; a search saves their time.
            if not runs.run(name, input_seed, repeat=repeat) and level is Level.SCREEN:
                break
            if not runs.ended:
                break  # another would only take its time
    except UnsupportedInstruction as e:
        runs.checks.append(Check(name="simulation", verdict=Verdict.UNKNOWN, summary=str(e)))
    runs.checks.append(runs.memory_check())
    if runs.counted == "ordinary":
        runs.checks.append(check_moved(op, workload, runs.counters))
    if (relaunch := runs.relaunch_check()) is not None:
        runs.checks.append(relaunch)
    report = Report(
        op=op.name,
        workload=workload.name,
        template=artifact.template,
        knobs=artifact.knobs,
        arch=artifact.arch,
        artifact_key=artifact.key,
        device="simulator",
        checks=tuple(runs.checks),
        seconds=time.monotonic() - started,
    )
    return Verification(report, runs.counters, runs.lane_instructions, sass)


def _disassembled(artifact: Artifact, cache: ArtifactCache | None) -> SassModule | None:
    """Read the cubin, the same one only once: nvdisasm takes a third of a second to start."""
    try:
        text = disassemble(artifact.cubin) if cache is None else cache.sass(artifact, disassemble)
        return parse_sass(text)
    except MissingToolError:
        return None  # the audit then says that it could not see the SASS


def _generators(op: Op, level: Level) -> list[str]:
    if level is Level.FULL:
        return list(op.generators)
    return [name for name in op.generators if name in SCREENED]
