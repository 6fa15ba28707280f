"""What a verification says of an artifact that was not run."""

from pathlib import Path

from workbench.compile import CompileRequest, compile_candidate
from workbench.ops import load_op
from workbench.templates import load_template
from workbench.verify.report import Verdict
from workbench.verify.runs import check_artifact
from workbench.workspace import Workspace


def test_without_a_run_the_memory_check_is_undecided() -> None:
    workspace = Workspace(Path(__file__).parents[2])
    op, template = load_op(workspace, "rmsnorm"), load_template(workspace.template("rmsnorm", "row"))
    artifact = compile_candidate(
        CompileRequest.of(op, op.workload("small_b1"), template, template.default), None
    )
    report = check_artifact(artifact, op, generators=()).report
    assert {c.name: c.verdict for c in report.checks}["memory"] is Verdict.UNKNOWN
    assert report.verdict is Verdict.UNKNOWN
