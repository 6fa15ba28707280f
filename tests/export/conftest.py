from __future__ import annotations

from pathlib import Path

import pytest

from workbench.artifact import Artifact
from workbench.compile import CompileRequest, compile_candidate
from workbench.ops import load_op
from workbench.templates import load_template
from workbench.verify.report import Check, Report, Verdict
from workbench.workspace import Workspace

REPOSITORY = Workspace(Path(__file__).parents[2])


@pytest.fixture(scope="session")
def artifact() -> Artifact:
    """The default point of the first rmsnorm template at its smallest workload."""
    op = load_op(REPOSITORY, "rmsnorm")
    template = load_template(REPOSITORY.template("rmsnorm", REPOSITORY.template_names("rmsnorm")[0]))
    workload = op.workload("small_b1")
    point = next(iter(template.space(workload.axes).points()))
    return compile_candidate(CompileRequest.of(op, workload, template, point))


def make_report(artifact: Artifact, *checks: tuple[str, Verdict]) -> Report:
    return Report(
        op=artifact.op,
        workload=artifact.workload,
        template=artifact.template,
        knobs=artifact.knobs,
        arch=artifact.arch,
        artifact_key=artifact.key,
        device="simulator",
        checks=tuple(Check(name=n, verdict=v, summary=f"{n} came to {v.value}") for n, v in checks),
    )


@pytest.fixture
def report(artifact: Artifact) -> Report:
    return make_report(artifact, ("numerics/ordinary", Verdict.PASS), ("ordering/static", Verdict.PASS))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "space")
