from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.evidence_bundles import clone
from workbench import api
from workbench.artifact import Artifact
from workbench.errors import MissingToolError
from workbench.export import ExportRefused, load_manifest
from workbench.export.evidence.check import check_bundle
from workbench.export.evidence.make import make_bundle
from workbench.export.evidence.run import Gpu, run_bundle
from workbench.verify import runs
from workbench.verify.ordering import static
from workbench.verify.report import Verdict
from workbench.workspace import Workspace


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a disassembler: no audit of it can decide on the SASS."""

    def missing(cubin: bytes) -> str:
        raise MissingToolError("nvdisasm is not installed")

    monkeypatch.setattr(runs, "disassemble", missing)
    monkeypatch.setattr(static, "disassemble", missing)


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Workspace, Artifact]:
    workspace = clone(tmp_path / "space", "rmsnorm")
    return workspace, api.compile_kernel("row", op="rmsnorm", workload="small_b1", workspace=workspace)


@pytest.mark.slow
@pytest.mark.usefixtures("blind")
def test_what_the_audits_leave_open_is_drafted_waived_exported_and_repeated(
    kernel: tuple[Workspace, Artifact], tmp_path: Path
) -> None:
    workspace, artifact = kernel
    file = tmp_path / "waivers.toml"
    with pytest.raises(ExportRefused, match="ordering/static could not decide"):
        api.export_kernel(artifact, draft_waivers=file, workspace=workspace)
    draft = file.read_text()
    assert draft.count("[[waiver]]") == 2, draft  # the kernel's own shape and the held-out one
    assert "# ordering/static" in draft and "# held-out/small_b3" in draft
    file.write_text(
        draft.replace('person = ""', 'person = "A. Reviewer"').replace('reason = ""', 'reason = "see 12"')
    )
    document = api.export_kernel(artifact, waivers=file, workspace=workspace)
    assert document.waived == ("ordering/static", "held-out/small_b3")
    manifest = load_manifest(workspace.root / document.folder)
    assert [len(c.waivers) for c in manifest.checks if c.waived] == [1, 1]
    path = tmp_path / "b.tar"
    make_bundle(workspace, path)
    assert check_bundle(path).verdict is Verdict.PASS
    run = run_bundle(workspace, path, gpu=Gpu("none", None))
    waived = {p.name: p for p in run.points if p.name.startswith("waiver of ")}
    assert [p.status for p in waived.values()] == ["agree", "agree"]
    assert {p.found for p in waived.values()} == {"covers what is undecided here"}
    assert run.verdict is Verdict.PASS
