from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.export.conftest import make_report
from tests.export.evidence_bundles import clone, with_manifest, written
from workbench.artifact import Artifact
from workbench.errors import ContentError
from workbench.export import ExportRefused, Waiver, export_winner, load_manifest, read_waivers
from workbench.export.evidence.agreement import Points, compare_reports
from workbench.export.evidence.archive import read_file, unpack
from workbench.export.evidence.check import check_bundle, load_bundle
from workbench.export.evidence.make import make_bundle
from workbench.export.waivers import draft, fingerprint, waivers_for
from workbench.findings import Finding, Severity
from workbench.verify.report import BESIDE_AUDITS, Check, Report, Verdict
from workbench.workspace import Workspace

OPEN = Finding(
    rule="undecided", severity=Severity.INFO, kernel="rms_norm_0", ptx_line=40, source="kernel.py:104",
    buffer="x", message="access to x before the wait: whether a waiting thread orders it cannot be decided",
)  # fmt: skip
OTHER = OPEN.model_copy(update={"ptx_line": 44, "source": "kernel.py:105"})
REMARK = Finding(rule="prefetch-sunk", severity=Severity.PERFORMANCE, message="a prefetch came to nothing")


def undecided(artifact: Artifact, *findings: Finding, name: str = "ordering/static") -> Report:
    report = make_report(artifact, ("memory", Verdict.PASS))
    check = Check(name=name, verdict=Verdict.UNKNOWN, summary="1 undecided", findings=findings)
    return report.model_copy(update={"checks": (check, *report.checks)})


def waiver(artifact: Artifact, of: Finding = OPEN, **other: str) -> Waiver:
    fields = {
        "finding": fingerprint("ordering/static", of), "source": artifact.source_hash,
        "person": "A. Reviewer", "reason": "x is written two launches before",
    }  # fmt: skip
    return Waiver(**{**fields, **other})


def test_a_waived_finding_lets_the_kernel_be_exported_and_the_manifest_says_who_and_why(
    workspace: Workspace, artifact: Artifact
) -> None:
    report = undecided(artifact, OPEN, REMARK)
    accepted = waiver(artifact)
    manifest = load_manifest(export_winner(workspace, artifact, report, waivers=[accepted]))
    check = manifest.checks[0]
    assert (check.name, check.verdict, check.waived) == ("ordering/static", Verdict.UNKNOWN, True)
    assert check.waivers == (accepted,) and manifest.checks[1].waivers == ()


def test_without_a_waiver_the_refusal_names_the_finding_and_the_source(
    workspace: Workspace, artifact: Artifact
) -> None:
    mark = fingerprint("ordering/static", OPEN)
    with pytest.raises(ExportRefused, match=f"finding {mark}; source {artifact.source_hash}"):
        export_winner(workspace, artifact, undecided(artifact, OPEN))
    assert not workspace.generated.exists()


def test_every_undecided_finding_needs_its_own_waiver(workspace: Workspace, artifact: Artifact) -> None:
    report = undecided(artifact, OPEN, OTHER)
    with pytest.raises(ExportRefused, match=f"finding {fingerprint('ordering/static', OTHER)};"):
        export_winner(workspace, artifact, report, waivers=[waiver(artifact)])
    export_winner(workspace, artifact, report, waivers=[waiver(artifact), waiver(artifact, OTHER)])


def test_a_waiver_expires_with_the_source(workspace: Workspace, artifact: Artifact) -> None:
    old = waiver(artifact, source="0" * 64)
    with pytest.raises(ExportRefused, match="is for another source and has expired"):
        export_winner(workspace, artifact, undecided(artifact, OPEN), waivers=[old])


@pytest.mark.parametrize(
    "change",
    [{"ptx_line": 41}, {"sass_offset": 16}, {"buffer": "w"}, {"message": "another"}, {"kernel": "k"},
     {"severity": Severity.WARNING}],
)  # fmt: skip
def test_another_finding_is_not_covered(artifact: Artifact, change: dict[str, Any]) -> None:
    moved = OPEN.model_copy(update=change)
    check = undecided(artifact, moved).checks[0]
    assert waivers_for(check, artifact.source_hash, [waiver(artifact)]) is None


def test_how_often_and_where_first_it_was_seen_does_not_count() -> None:
    again = OPEN.model_copy(
        update={"count": 9, "thread": "cta=(0,0,0)", "address": 4096, "fix": "other words"}
    )
    assert fingerprint("ordering/static", again) == fingerprint("ordering/static", OPEN)
    assert fingerprint("ordering/dynamic", OPEN) != fingerprint("ordering/static", OPEN)


def test_an_error_cannot_be_waived(workspace: Workspace, artifact: Artifact) -> None:
    wrong = OPEN.model_copy(update={"rule": "pdl-load-before-wait", "severity": Severity.ERROR})
    report = undecided(artifact, wrong)
    failed = report.checks[0].model_copy(update={"verdict": Verdict.FAIL})
    report = report.model_copy(update={"checks": (failed, *report.checks[1:])})
    with pytest.raises(ExportRefused, match="failed"):
        export_winner(workspace, artifact, report, waivers=[waiver(artifact, wrong)])


@pytest.mark.parametrize("name", ["numerics/ordinary", "memory", "held-out/small_b3", "simulation"])
def test_a_check_that_is_no_audit_is_not_covered(workspace: Workspace, artifact: Artifact, name: str) -> None:
    report = undecided(artifact, OPEN, name=name)
    named = waiver(artifact, finding=fingerprint(name, OPEN))
    with pytest.raises(ExportRefused, match="could not decide"):
        export_winner(workspace, artifact, report, waivers=[named])


@pytest.mark.parametrize(("beside", "covered"), [(0.0, True), (1.0, False)])
def test_an_audit_at_a_held_out_shape_is_covered_if_nothing_else_is_open(
    artifact: Artifact, beside: float, covered: bool
) -> None:
    check = undecided(artifact, OPEN, name="held-out/small_b3").checks[0]
    check = check.model_copy(update={"measures": {BESIDE_AUDITS: beside}})
    accepted = waiver(artifact, finding=fingerprint(check.name, OPEN))
    assert waivers_for(check, artifact.source_hash, [accepted]) == ((accepted,) if covered else None)
    assert waivers_for(check, artifact.source_hash, [waiver(artifact)]) is None


def test_an_audit_that_is_undecided_for_no_finding_is_not_covered(
    workspace: Workspace, artifact: Artifact
) -> None:
    with pytest.raises(ExportRefused, match="could not decide"):
        export_winner(workspace, artifact, undecided(artifact), waivers=[waiver(artifact)])


def test_a_check_can_still_be_waived_by_name(workspace: Workspace, artifact: Artifact) -> None:
    report = undecided(artifact, OPEN)
    manifest = load_manifest(export_winner(workspace, artifact, report, waive=["ordering/static"]))
    assert manifest.checks[0].waived and manifest.checks[0].waivers == ()


# -- the file --------------------------------------------------------------------------------------


def test_a_draft_is_a_file_that_a_person_must_fill_in(artifact: Artifact, tmp_path: Path) -> None:
    report, path = undecided(artifact, OPEN, OTHER, REMARK), tmp_path / "waivers.toml"
    text = draft(report, artifact.source_hash)
    path.write_text(text)
    with pytest.raises(ContentError, match="waiver 1: person"):
        read_waivers(path)
    assert text.count("[[waiver]]") == 2 and "kernel.py:104, PTX line 40" in text
    path.write_text(
        text.replace('person = ""', 'person = "A. Reviewer"').replace('reason = ""', 'reason = "seen"')
    )
    waivers = read_waivers(path)
    assert waivers_for(report.checks[0], artifact.source_hash, waivers) == waivers


ENTRY = (
    f'[[waiver]]\nfinding = "{"0" * 16}"\nsource = "{"1" * 64}"\nperson = "A. Reviewer"\nreason = "seen"\n'
)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x", "is not TOML"),
        (f"a = {'1' * 4400}", "is not TOML"),
        ("a = 1\n", "it may hold entries"),
        ("waiver = 3\n", "it may hold entries"),
        (ENTRY + "by = 1\n", "waiver 1: by"),
        (ENTRY.replace('reason = "seen"\n', ""), "waiver 1: reason"),
        (ENTRY.replace('"seen"', '"  "'), "waiver 1: reason"),
        (ENTRY.replace("A. Reviewer", ""), "waiver 1: person"),
        (ENTRY.replace("0" * 16, "0" * 15), "waiver 1: finding"),
        (ENTRY.replace("1" * 64, "abc"), "waiver 1: source"),
        (ENTRY + ENTRY, "waiver 2 waives finding 0000000000000000 a second time"),
        ("#" * (1 << 20) + "#", "too large"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(text)
    with pytest.raises(ContentError, match=what):
        read_waivers(path)


def test_a_file_that_is_not_there_or_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(ContentError, match="cannot be read"):
        read_waivers(tmp_path / "waivers.toml")
    (tmp_path / "waivers.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ContentError, match="is not TOML"):
        read_waivers(tmp_path / "waivers.toml")


# -- in a bundle -----------------------------------------------------------------------------------


def test_waivers_travel_and_one_for_another_source_is_named(artifact: Artifact, tmp_path: Path) -> None:
    space = clone(tmp_path / "space", "rmsnorm")
    export_winner(space, artifact, undecided(artifact, OPEN), waivers=[waiver(artifact)])
    make_bundle(space, tmp_path / "b.tar")
    document = check_bundle(tmp_path / "b.tar")
    assert document.verdict is Verdict.PASS
    assert [(w.person, w.reason) for w in document.kernels[0].waivers] == [
        ("A. Reviewer", "x is written two launches before")
    ]
    members = dict(unpack(read_file(tmp_path / "b.tar"), "b").members)
    folder = load_bundle(tmp_path / "b.tar")[0][0].entry.folder
    for field in ("source", "finding"):
        size = len(json.loads(members[f"{folder}/manifest.json"])["checks"][0]["waivers"][0][field])
        forged = with_manifest(
            members, folder, lambda m, f=field, n=size: m["checks"][0]["waivers"][0].update({f: "0" * n})
        )
        found = check_bundle(written(tmp_path / "forged.tar", forged)).problems
        assert any("not of its findings, or for another source" in p.what for p in found), field


@pytest.mark.parametrize(
    ("found", "status"), [((OPEN,), "agree"), ((OTHER,), "differ"), ((OPEN, OTHER), "differ"), ((), "agree")]
)
def test_a_repetition_says_whether_the_waivers_still_cover(
    artifact: Artifact, found: tuple[Finding, ...], status: str
) -> None:
    from workbench.export.manifest import CheckVerdict

    stated = undecided(artifact, OPEN)
    here = undecided(artifact, *found) if found else make_report(artifact, ("ordering/static", Verdict.PASS))
    verdicts = [
        CheckVerdict(
            name="ordering/static", verdict=Verdict.UNKNOWN, waived=True, waivers=(waiver(artifact),)
        )
    ]
    points = Points("k")
    compare_reports(points, stated, verdicts, artifact.source_hash, here, ["workbench"])
    (point,) = [p for p in points.all if p.name == "waiver of ordering/static"]
    assert point.status == status
