"""Evaluation of one candidate: compile, verify, predict. Runs inside a worker process."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from workbench.agent.run import Candidate, Proposal, Status
from workbench.artifact import Artifact
from workbench.compile import ArtifactCache, CompileError, CompileRequest, Limits, compile_candidate
from workbench.cost import Machine, load_machine, predict
from workbench.errors import ContentError, WorkbenchError
from workbench.findings import Severity
from workbench.ops import load_op
from workbench.ops.model import Op
from workbench.templates import Template, load_template, parse_template
from workbench.verify.identical import object_hash
from workbench.verify.report import Report, Verdict
from workbench.verify.verify import CaseCache, Level, verify_artifact
from workbench.workspace import Workspace


class Job(BaseModel):
    """What a worker needs to evaluate one candidate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workspace: Path
    op: str
    workload: str
    arch: str
    machine: str
    seed: int
    level: Level
    processes: int = 1
    """Processes that share the CTAs of a simulated launch."""
    limits: Limits = Limits()
    """Of its compile."""
    run_seconds: float = 60.0
    """Of one simulated run of all its launches."""
    proposal: Proposal


class Evaluator:
    """Evaluates jobs one after another, keeping inputs and golden results between them."""

    def __init__(self) -> None:
        self._cases = CaseCache()
        self._machines: dict[str, Machine] = {}

    def __call__(self, job: Job) -> Candidate:
        """Evaluate one candidate; a candidate's own fault is an outcome, not an exception."""
        workspace = Workspace(job.workspace)
        op = load_op(workspace, job.op)
        workload = op.workload(job.workload)
        try:
            template = template_of(workspace, job.op, job.proposal)
            request = CompileRequest.of(op, workload, template, job.proposal.knobs, job.arch)
        except ContentError as e:
            if not job.proposal.source:
                raise
            place = f" (line {e.line})" if e.line else ""
            reason = f"template: {e.message}{place}"
            return Candidate(proposal=job.proposal, status=Status.FAILED, reason=reason)
        outcome = Candidate(proposal=job.proposal, status=Status.FAILED, source_hash=template.source_hash)
        cache = ArtifactCache(workspace.cache)
        started = time.monotonic()
        try:
            artifact = compile_candidate(request, cache, job.limits)
        except CompileError as e:
            reason = f"{e.kind}: {e.message}" + (f" (line {e.line})" if e.line else "")
            return outcome.model_copy(
                update={"reason": reason, "compile_seconds": time.monotonic() - started}
            )
        compiled = time.monotonic()
        outcome = outcome.model_copy(
            update={
                "artifact_key": artifact.key,
                "object_hash": object_hash(artifact),
                "same_as_template": _same_template(workspace, op, artifact, job, cache),
                "resources": artifact.resources,
                "compile_seconds": compiled - started,
            }
        )
        verification = verify_artifact(
            artifact,
            op,
            level=job.level,
            seed=job.seed,
            cases=self._cases,
            cache=cache,
            processes=job.processes,
            time_limit=job.run_seconds,
        )
        report = verification.report
        status = Status.VERIFIED if report.verdict is Verdict.PASS else Status.REFUSED
        prediction = None
        if verification.counters:
            prediction = predict(
                artifact, verification.counters, self._machine(job.machine), verification.sass
            )
        return outcome.model_copy(
            update={
                "status": status,
                "reason": "" if status is Status.VERIFIED else reason_of(report),
                "report": report,
                "prediction": prediction,
                "lane_instructions": verification.lane_instructions,
                "verify_seconds": time.monotonic() - compiled,
            }
        )

    def _machine(self, name: str) -> Machine:
        if name not in self._machines:
            self._machines[name] = load_machine(name)
        return self._machines[name]


def _same_template(workspace: Workspace, op: Op, artifact: Artifact, job: Job, cache: ArtifactCache) -> str:
    """The template that a candidate with its own source is a copy of, as far as compiled code shows it."""
    if not job.proposal.source:
        return ""
    knobs, wanted = job.proposal.knobs, object_hash(artifact)
    for name in workspace.template_names(job.op):
        try:
            template = load_template(workspace.template(job.op, name))
            if template.space(artifact.axes).why_invalid(knobs) is not None:
                continue
            request = CompileRequest.of(op, job.workload, template, knobs, job.arch)
            if object_hash(compile_candidate(request, cache, job.limits)) == wanted:
                return name
        except WorkbenchError:
            continue
    return ""


def template_of(workspace: Workspace, op: str, proposal: Proposal) -> Template:
    """The template of a proposal: the workspace's, or the one that its own source declares.

    Raises:
        ContentError: if the source declares no template, or one of another op.
    """
    if not proposal.source:
        return load_template(workspace.template(op, proposal.template))
    path = Path(f"{proposal.template}.py")
    template = parse_template(proposal.source, path)
    if template.op != op:
        raise ContentError(path, f"TEMPLATE says op {template.op!r}; this run is about {op!r}")
    return template


def reason_of(report: Report) -> str:
    """One line that says why a report does not pass."""
    for check in report.checks:
        if check.verdict is Verdict.FAIL:
            error = next((f for f in check.findings if f.severity is Severity.ERROR), None)
            return (
                f"{check.name}: {error.rule}: {error.message}" if error else f"{check.name}: {check.summary}"
            )
    undecided = next((c for c in report.checks if c.verdict is Verdict.UNKNOWN), None)
    return f"{undecided.name}: undecided: {undecided.summary}" if undecided else "nothing was checked"


def load_artifact(workspace: Workspace, key: str) -> Artifact:
    """Read an artifact that an evaluation left in the cache; raises KeyError if it is gone."""
    artifact = ArtifactCache(workspace.cache).get(key)
    if artifact is None:
        raise KeyError(key)
    return artifact
