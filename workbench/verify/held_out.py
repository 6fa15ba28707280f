"""The same source at workloads it was not tuned for: small shapes with every kind of input.

A kernel that has learnt its benchmark's shape, or that is right only where extents divide evenly, fails here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workbench.artifact import Artifact
from workbench.compile import ArtifactCache, CompileError, CompileRequest, compile_candidate
from workbench.errors import ContentError
from workbench.expressions import Value
from workbench.ops.model import Op, Workload
from workbench.templates import Template, parse_template
from workbench.verify.differential import check_differential
from workbench.verify.report import AUDITS, BESIDE_AUDITS, Check, Verdict
from workbench.verify.runs import CaseCache, Level, check_artifact


def check_held_out(
    artifact: Artifact, op: Op, *, cache: ArtifactCache | None = None, seed: int = 0
) -> tuple[Check, ...]:
    """One check for each small workload other than the artifact's, at the valid point nearest to its knobs.

    The artifact's source is compiled anew, in the child like any other candidate.
    """
    try:
        template = parse_template(artifact.source, Path(f"{artifact.template}.py"))
    except ContentError as e:
        return (Check(name="held-out", verdict=Verdict.UNKNOWN, summary=f"the source is no template: {e}"),)
    return tuple(
        _check_at(op, template, artifact.knobs, other, artifact.arch, cache, seed)
        for other in op.workloads
        if not other.real and other.name != artifact.workload
    )


def _check_at(
    op: Op,
    template: Template,
    knobs: Mapping[str, Value],
    workload: Workload,
    arch: str,
    cache: ArtifactCache | None,
    seed: int,
) -> Check:
    name = f"held-out/{workload.name}"
    point = template.space(workload.axes).nearest(knobs)
    if point is None:
        return Check(
            name=name, verdict=Verdict.UNKNOWN, summary="the template has no valid point at this workload"
        )
    changed = ", ".join(f"{k}={v}" for k, v in point.items() if v != knobs.get(k))
    at = f"with {changed}" if changed else "with the same knobs"
    try:
        artifact = compile_candidate(CompileRequest.of(op, workload, template, point, arch), cache)
    except CompileError as e:
        return Check(name=name, verdict=Verdict.FAIL, summary=f"{at}: does not compile: {e}")
    report = check_artifact(
        artifact, op, level=Level.FULL, seed=seed, cases=CaseCache(capacity=1), cache=cache
    ).report
    if report.verdict is not Verdict.FAIL:
        more = check_differential(artifact, op, workload, seed)
        report = report.model_copy(update={"checks": (*report.checks, more)})
    bad = [c for c in report.checks if c.verdict is not Verdict.PASS]
    summary = f"{at}: {len(report.checks)} checks pass"
    if bad:
        summary = f"{at}: " + "; ".join(f"{c.name} {c.verdict.value}: {c.summary}" for c in bad[:3])
    beside = sum(c.name not in AUDITS for c in bad)
    return Check(
        name=name,
        verdict=report.verdict,
        summary=summary,
        findings=tuple(f for c in bad for f in c.findings),
        measures={BESIDE_AUDITS: float(beside)} if report.verdict is Verdict.UNKNOWN else {},
    )
