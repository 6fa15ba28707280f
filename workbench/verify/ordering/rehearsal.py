"""The check `ordering/dynamic`: an artifact under adversarial schedules, on the inputs of its op.

The contents are real here, so every fault counts. How many schedules are run follows from the work of a plain
run, not from the clock: the same artifact gives the same report everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.artifact import Artifact
from workbench.findings import Finding
from workbench.simulator import Memory, Outcome, SimulationOptions, simulate
from workbench.simulator.simulate import KernelLaunch
from workbench.verify.ordering.schedules import schedules
from workbench.verify.report import Check, verdict_of

WORK = 400_000_000
"""Lane-instructions that all schedules of one artifact may take together."""
_FINE = 4
"""How much more a schedule costs than a plain run: its cohorts are smaller."""


def rehearse(
    artifact: Artifact,
    memory: Memory,
    restore: Callable[[], None],
    plain: Outcome,
    options: SimulationOptions,
) -> Check | None:
    """Run an artifact under as many schedules as its size allows; None if it allows none.

    Args:
        artifact: what to run; its buffers are in `memory`.
        memory: changed.
        restore: brings all buffers into the state before the first launch.
        plain: the outcome of a plain run, whose findings are reported elsewhere.
        options: of the plain run.
    """
    name = "ordering/dynamic"
    launches = [
        KernelLaunch(x.kernel, x.grid, x.block, b"", x.cluster, x.smem_bytes, x.pdl)
        for x in artifact.launches
    ]
    count = WORK // max(1, _FINE * plain.lane_instructions)
    if not count:
        return None
    known = {(f.rule, f.kernel, f.ptx_line) for f in plain.findings}
    found: dict[tuple[str, str | None, int | None], Finding] = {}
    ran = []
    for schedule in schedules(launches)[1 : 1 + count]:
        restore()
        outcome = simulate(
            artifact,
            memory,
            replace(
                options, seed=schedule.seed, adversary=schedule.adversary, count_sectors=False, processes=1
            ),
        )
        ran.append(str(schedule))
        for f in outcome.findings:
            key = (f.rule, f.kernel, f.ptx_line)
            if key not in known:
                text = f"{f.message} (schedule: {schedule})"
                found.setdefault(key, f.model_copy(update={"message": text}))
    findings = tuple(found.values())
    summary = f"{len(findings)} kinds of fault" if findings else "no fault"
    return Check(
        name=name,
        verdict=verdict_of(findings),
        summary=f"{summary} under {len(ran)} schedules: {'; '.join(ran)}",
        findings=findings,
        measures={"schedules": float(len(ran))},
    )
