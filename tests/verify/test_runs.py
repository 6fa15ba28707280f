"""What a verification says of an artifact that was not run."""

import contextlib
from pathlib import Path

import pytest

from workbench.compile import ArtifactCache, CompileRequest, compile_candidate
from workbench.errors import WorkbenchError
from workbench.ops import load_op
from workbench.templates import load_template
from workbench.verify import runs
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


def test_the_same_cubin_is_disassembled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(Path(__file__).parents[2])
    op, template = load_op(workspace, "rmsnorm"), load_template(workspace.template("rmsnorm", "row"))
    artifact = compile_candidate(CompileRequest.of(op, "small_b1", template, template.default))
    real, read = runs.disassemble, []

    def count(cubin: bytes) -> str:
        read.append(cubin)
        return real(cubin)

    monkeypatch.setattr(runs, "disassemble", count)
    cache = ArtifactCache(tmp_path)
    first, second = (check_artifact(artifact, op, cache=cache, generators=()) for _ in range(2))
    assert read == [artifact.cubin] and first.sass is not None and second.sass is not None
    assert first.sass == second.sass and first.report.checks[0] == second.report.checks[0]
    other = artifact.model_copy(update={"cubin": artifact.cubin[:-1] + b"\1"})  # under the same key
    with contextlib.suppress(WorkbenchError):
        check_artifact(other, op, cache=cache, generators=())
    assert len(read) == 2
