"""One traced run of an artifact on inputs of its op."""

from __future__ import annotations

import math
import re

from pydantic import BaseModel, ConfigDict

from workbench.artifact import Artifact
from workbench.errors import WorkbenchError
from workbench.findings import Finding, Severity
from workbench.ops.model import Op, Role
from workbench.simulator import Memory, SimulationOptions, Trace, simulate
from workbench.simulator.trace import Place, TraceRecord
from workbench.verify.inputs import POISONS, Case, place_scratch
from workbench.verify.report import Report


class TraceDocument(BaseModel):
    """A traced run."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    op: str
    workload: str
    template: str
    arch: str
    generator: str
    """Name of the inputs."""
    seed: int
    traced: str
    """What was asked for."""
    trace: TraceRecord
    findings: tuple[Finding, ...]
    """What the run found."""


def trace_artifact(
    artifact: Artifact, op: Op, what: Trace, text: str, *, generator: str = "ordinary", seed: int = 0
) -> TraceDocument:
    """Run an artifact once and record what `what` asks for.

    Raises:
        UnsupportedInstruction: if the simulator lacks an instruction.
        WorkbenchError: if the thread, buffer or generator does not exist.
    """
    _refuse_absent_thread(artifact, what)
    workload = op.workload(artifact.workload)
    memory = Memory()
    Case.create(op, workload, generator, seed, memory)
    place_scratch(memory, op, artifact.buffers)
    for b in op.buffers:
        if b.role.is_writable and b.role not in (Role.STATE, Role.FLAG):
            memory.poison(b.name, POISONS[0])
    outcome = simulate(artifact, memory, SimulationOptions(trace=what))
    return TraceDocument(
        op=op.name, workload=workload.name, template=artifact.template, arch=artifact.arch,
        generator=generator, seed=seed, traced=text, trace=outcome.trace, findings=outcome.findings,
    )  # fmt: skip


def _refuse_absent_thread(artifact: Artifact, what: Trace) -> None:
    """Raise WorkbenchError if no launch has the thread that is to be traced."""
    if what.thread is None:
        return
    cta, thread = what.thread
    if any(_within(cta, launch.grid) and _within(thread, launch.block) for launch in artifact.launches):
        return
    sizes = "; ".join(f"{x.kernel} has grid {x.grid} and block {x.block}" for x in artifact.launches)
    raise WorkbenchError(f"no launch has CTA {cta} with thread {thread}, counted from 0: {sizes}")


def _within(place: Place, extent: tuple[int, int, int]) -> bool:
    if isinstance(place, int):
        return place < math.prod(extent)
    return all(at < size for at, size in zip(place, extent, strict=True))


_THREAD = re.compile(r"cta=\((\d+),(\d+),(\d+)\) thread=\((\d+),(\d+),(\d+)\)")


def witness(report: Report) -> tuple[Finding, tuple[Place, Place]] | None:
    """Return the first error of a simulated run that names a thread, and that thread."""
    for check in report.checks:
        for f in check.findings:
            match = _THREAD.fullmatch(f.thread or "")
            if f.severity is Severity.ERROR and f.ptx_line is not None and match is not None:
                a, b, c, x, y, z = map(int, match.groups())
                return f, ((a, b, c), (x, y, z))
    return None
