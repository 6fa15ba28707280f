from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.export.conftest import make_report
from workbench.artifact import Artifact
from workbench.errors import ContentError, UnknownNameError, WorkbenchError
from workbench.export import ExportRefused, export_winner, load_exported, load_manifest, winner
from workbench.verify.report import Report, Verdict
from workbench.workspace import Workspace


@pytest.fixture
def folder(workspace: Workspace, artifact: Artifact, report: Report) -> Path:
    return export_winner(workspace, artifact, report, run_id="run-1", candidates=9)


def test_the_folder_holds_the_kernel_and_its_evidence(
    folder: Path, workspace: Workspace, artifact: Artifact
) -> None:
    place = workspace.generated / "rmsnorm" / "small_b1-sm_103a" / artifact.key[:12]
    assert folder == place
    assert {p.name for p in folder.iterdir()} == {
        "kernel.py", "kernel.ptx", "kernel.cubin", "kernel.sass", "manifest.json", "report.json", "REPORT.md",
    }  # fmt: skip
    assert (folder / "kernel.py").read_text() == artifact.source
    assert (folder / "kernel.cubin").read_bytes() == artifact.cubin
    assert "EXIT" in (folder / "kernel.sass").read_text()
    assert "ordering/static" in (folder / "REPORT.md").read_text()
    assert "Compiled in a sandbox; fences that held: " in (folder / "REPORT.md").read_text()
    fences = load_manifest(folder).fences
    assert fences is not None and {"seccomp", "rlimits"} <= set(fences)


def test_the_manifest_suffices_to_launch(folder: Path, artifact: Artifact) -> None:
    manifest = load_manifest(folder)
    assert manifest.launches == artifact.launches and manifest.buffers == artifact.buffers
    assert manifest.toolchain == artifact.toolchain and manifest.resources == artifact.resources
    assert manifest.source_hash == hashlib.sha256((folder / "kernel.py").read_bytes()).hexdigest()
    assert manifest.run is not None and (manifest.run.run_id, manifest.run.candidates) == ("run-1", 9)
    assert [(c.name, c.verdict) for c in manifest.checks] == [
        ("numerics/ordinary", Verdict.PASS),
        ("ordering/static", Verdict.PASS),
    ]
    assert "NVIDIA" in manifest.licence


def test_what_was_exported_reads_back_as_it_was(folder: Path, artifact: Artifact, report: Report) -> None:
    exported = load_exported(folder)
    assert exported.artifact == artifact and exported.report == report
    assert load_exported(folder / "manifest.json") == exported


def test_exporting_again_changes_nothing(
    folder: Path, workspace: Workspace, artifact: Artifact, report: Report
) -> None:
    before = {p: p.stat().st_ino for p in folder.iterdir()}
    assert export_winner(workspace, artifact, report, run_id="run-1", candidates=9) == folder
    assert {p: p.stat().st_ino for p in folder.iterdir()} == before


def test_a_damaged_export_is_replaced_whole(
    folder: Path, workspace: Workspace, artifact: Artifact, report: Report
) -> None:
    (folder / "kernel.ptx").write_text("broken")
    (folder / "stray").write_text("x")
    export_winner(workspace, artifact, report)
    assert load_exported(folder).artifact == artifact and not (folder / "stray").exists()
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.UNKNOWN])
def test_a_kernel_that_did_not_pass_is_refused(
    workspace: Workspace, artifact: Artifact, verdict: Verdict
) -> None:
    report = make_report(artifact, ("memory", Verdict.PASS), ("ordering/static", verdict))
    with pytest.raises(ExportRefused, match="ordering/static"):
        export_winner(workspace, artifact, report)
    assert not workspace.generated.exists()


def test_an_undecided_check_can_be_waived_by_name_and_the_manifest_says_so(
    workspace: Workspace, artifact: Artifact
) -> None:
    report = make_report(artifact, ("memory", Verdict.PASS), ("ordering/static", Verdict.UNKNOWN))
    manifest = load_manifest(export_winner(workspace, artifact, report, waive=["ordering/static"]))
    assert [(c.name, c.waived) for c in manifest.checks] == [("memory", False), ("ordering/static", True)]


def test_one_waiver_does_not_cover_another_check(workspace: Workspace, artifact: Artifact) -> None:
    report = make_report(artifact, ("a", Verdict.UNKNOWN), ("b", Verdict.UNKNOWN))
    with pytest.raises(ExportRefused, match="check b could not decide"):
        export_winner(workspace, artifact, report, waive=["a"])


def test_a_failed_check_cannot_be_waived(workspace: Workspace, artifact: Artifact) -> None:
    report = make_report(artifact, ("memory", Verdict.FAIL), ("ordering", Verdict.UNKNOWN))
    with pytest.raises(ExportRefused, match="cannot be waived"):
        export_winner(workspace, artifact, report, waive=["memory", "ordering"])


@pytest.mark.parametrize("name", ["orderng", "memory"])
def test_a_waiver_of_nothing_undecided_is_an_error(
    workspace: Workspace, artifact: Artifact, name: str
) -> None:
    report = make_report(artifact, ("memory", Verdict.PASS), ("ordering", Verdict.UNKNOWN))
    with pytest.raises(UnknownNameError, match="ordering"):
        export_winner(workspace, artifact, report, waive=["ordering", name])


def test_a_report_without_checks_is_refused(workspace: Workspace, artifact: Artifact) -> None:
    with pytest.raises(ExportRefused, match="no check"):
        export_winner(workspace, artifact, make_report(artifact))


def test_a_report_of_another_artifact_is_refused(
    workspace: Workspace, artifact: Artifact, report: Report
) -> None:
    with pytest.raises(ExportRefused, match="verify this artifact"):
        export_winner(workspace, artifact, report.model_copy(update={"artifact_key": "0" * 64}))


def test_nothing_names_this_machine(folder: Path, workspace: Workspace) -> None:
    for path in folder.iterdir():
        for place in (
            os.fsencode(workspace.root),
            os.fsencode(Path.cwd()),
            os.fsencode(Path.home()),
            b"/tmp/",
        ):
            assert place not in path.read_bytes(), (path.name, place)


@pytest.mark.parametrize("where", ["source", "ptx"])
def test_a_path_of_this_machine_is_refused(
    workspace: Workspace, artifact: Artifact, report: Report, where: str
) -> None:
    leak = f"\n// {workspace.root}/templates/x.py\n" if where == "ptx" else f"\n# {workspace.root}/x\n"
    leaking = artifact.model_copy(update={where: getattr(artifact, where) + leak})
    with pytest.raises(ExportRefused, match="path"):
        export_winner(workspace, leaking, report)
    assert not workspace.generated.exists()


@pytest.mark.parametrize(
    "name", ["kernel.py", "kernel.ptx", "kernel.cubin", "kernel.sass", "report.json", "REPORT.md"]
)
@pytest.mark.parametrize("damage", ["changed", "cut", "removed"])
def test_damage_is_named(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    data = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ContentError, match=name):
        load_manifest(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', '{"format": "x"}', "\0\0"])
def test_a_damaged_manifest_is_named(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ContentError, match=r"manifest\.json"):
        load_manifest(folder)


def test_a_newer_format_is_said(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 2, "news": 1}))
    with pytest.raises(ContentError, match=r"format 2.*newer workbench"):
        load_manifest(folder)


def test_a_manifest_cannot_name_files_outside_its_folder(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../../x"] = manifest["files"]["kernel.py"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ContentError, match="outside the folder"):
        load_manifest(folder)


def test_another_source_under_a_corrected_hash_is_noticed(folder: Path) -> None:
    (folder / "kernel.py").write_text("print(1)\n")
    data = (folder / "kernel.py").read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["kernel.py"] = {"sha256": hashlib.sha256(data).hexdigest(), "nbytes": len(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ContentError, match=r"kernel\.py"):
        load_exported(folder)


def test_no_manifest_is_said(tmp_path: Path) -> None:
    with pytest.raises(ContentError, match="no such manifest"):
        load_manifest(tmp_path)


def test_a_full_disk_leaves_nothing_behind(
    workspace: Workspace, artifact: Artifact, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def full(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(winner.os, "fsync", full)
    with pytest.raises(WorkbenchError, match="No space left on device; free space"):
        export_winner(workspace, artifact, report)
    assert [p for p in workspace.generated.rglob("*") if p.is_file()] == []


def test_a_failure_while_replacing_keeps_the_old_export(
    folder: Path, workspace: Workspace, artifact: Artifact, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if target == folder and self.parent == folder.parent:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(WorkbenchError, match="Input/output error"):
        export_winner(workspace, artifact, report, run_id="another", candidates=1)
    monkeypatch.undo()
    exported = load_exported(folder)
    assert exported.manifest.run is not None and exported.manifest.run.run_id == "run-1"


def test_without_a_disassembler_the_rest_is_exported(
    workspace: Workspace, artifact: Artifact, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.errors import MissingToolError
    from workbench.isa import sass

    def missing(cubin: bytes) -> str:
        raise MissingToolError("nvdisasm is not installed")

    monkeypatch.setattr(sass, "disassemble", missing)
    manifest = load_manifest(export_winner(workspace, artifact, report))
    assert "kernel.sass" not in manifest.files and "kernel.cubin" in manifest.files
