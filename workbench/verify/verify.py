"""Verification of an artifact: everything that decides whether a kernel may be used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from workbench.artifact import Artifact
from workbench.compile import ArtifactCache
from workbench.ops.model import Op
from workbench.verify.held_out import check_held_out
from workbench.verify.report import Verdict
from workbench.verify.runs import CaseCache, Level, Verification, check_artifact

__all__ = ["CaseCache", "Level", "Verification", "verify_artifact"]


def verify_artifact(
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
    """Check an artifact's ordering, memory accesses, numerics and determinism; at `FULL` held-out shapes too.

    Held-out shapes are left out where named generators are asked for, or where the kernel has failed already.

    Args:
        level: how much is checked; see `Level`.
        seed: of the inputs.
        cases: keeps inputs and golden results between artifacts.
        cache: for the artifacts of held-out shapes, and for what is disassembled.
        processes: processes that share the CTAs of a launch.
        time_limit: seconds for one run of all launches.
        generators: names of input generators to run instead of those of `level`.

    Raises:
        WorkbenchError: if the op has no such generator, or simulated memory cannot be had.
    """
    started = time.monotonic()
    verification = check_artifact(
        artifact,
        op,
        level=level,
        seed=seed,
        cases=cases,
        cache=cache,
        processes=processes,
        time_limit=time_limit,
        generators=generators,
    )
    report = verification.report
    if level is not Level.FULL or generators is not None or report.verdict is Verdict.FAIL:
        return verification
    checks = report.checks + check_held_out(artifact, op, cache=cache, seed=seed)
    whole = report.model_copy(update={"checks": checks, "seconds": time.monotonic() - started})
    return replace(verification, report=whole)
