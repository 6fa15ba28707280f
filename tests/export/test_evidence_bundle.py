from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.export.evidence_bundles import (
    Evidence,
    Members,
    clone,
    consistent,
    with_file,
    with_manifest,
    with_report,
    written,
)
from workbench.errors import ContentError, UnknownNameError, WorkbenchError
from workbench.export.evidence import bundle as bundles
from workbench.export.evidence.archive import CONTAINER, unpack
from workbench.export.evidence.check import check_bundle, load_bundle
from workbench.export.evidence.make import find_kernels, make_bundle
from workbench.records import Objective, Record, RecordKey, RecordStore
from workbench.report.evidence import EvidenceCheckDocument
from workbench.report.evidence_text import check_markdown
from workbench.verify.report import Verdict
from workbench.workspace import Workspace

Change = Callable[[dict[str, Any]], None]


def checked(path: Path, members: Members) -> EvidenceCheckDocument:
    return check_bundle(written(path / "b.tar", members))


def wrong(document: EvidenceCheckDocument) -> list[str]:
    return [f"{p.where}: {p.what}" for p in document.problems]


# -- making ----------------------------------------------------------------------------------------


def test_a_bundle_holds_the_evidence(evidence: Evidence) -> None:
    names = {n.removeprefix(f"{evidence.folder}/") for n in evidence.members}
    assert names == {
        *bundles.EXPORTED, "bundle.json", "README.md", "verifiers/rmsnorm.py", "machines/gb300.toml",
    }  # fmt: skip
    (entry,) = bundles.read_manifest(evidence.members).kernels
    for name, digest in (
        ("kernel.py", entry.source_sha256),
        ("kernel.ptx", entry.ptx_sha256),
        ("kernel.cubin", entry.cubin_sha256),
        ("kernel.sass", entry.sass_sha256),
    ):
        assert bundles.sha256(evidence.members[evidence.inside(name)]) == digest
    assert entry.provenance is not None and entry.provenance.seed == 3
    assert entry.toolchain.ptxas and entry.verdict is Verdict.PASS


def test_every_number_has_its_premises(evidence: Evidence) -> None:
    (entry,) = bundles.read_manifest(evidence.members).kernels
    (figure,) = entry.figures
    assert figure.kind == "predicted" and figure.samples == 0
    (shown,) = check_bundle(evidence.path).kernels
    assert shown.rests_on["seed"] == "3" and len(shown.rests_on["verifier"]) == 64
    assert "torch" in shown.rests_on["libraries"]
    for name in (
        "machine",
        "machine_hash",
        "axes",
        "batch",
        "parallelism",
        "speculation",
        "baseline",
        "assumptions",
    ):
        assert name in figure.premises, name
    assert figure.premises["machine_hash"] == bundles.read_manifest(evidence.members).machines["gb300"]


def test_the_same_exports_give_the_same_bytes(evidence: Evidence, tmp_path: Path) -> None:
    copy = clone(tmp_path / "elsewhere", "rmsnorm")
    shutil.copytree(evidence.workspace.generated, copy.generated)
    for path in copy.generated.rglob("*"):
        os.utime(path, (1, 1))
    document = make_bundle(copy, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == evidence.path.read_bytes()
    assert document.sha256 == bundles.sha256(evidence.path.read_bytes())


def test_a_bundle_names_no_machine(evidence: Evidence) -> None:
    for place in (evidence.workspace.root, Path.cwd(), Path.home()):
        assert f"{place}/".encode() not in evidence.path.read_bytes()


def test_records_with_raw_samples_travel(evidence: Evidence, tmp_path: Path) -> None:
    copy = clone(tmp_path / "space", "rmsnorm")
    shutil.copytree(evidence.workspace.generated, copy.generated)
    artifact = load_bundle(evidence.path)[0][0].exported.artifact
    hashes = {"premises": "p" * 64, "tolerance_hash": "t" * 64, "verifier_hash": "v" * 64}
    key = RecordKey.of(artifact, device="H200", objective=Objective.MEASURED, **hashes)
    samples = (4.0, 5.0, 6.0)
    stamp = {"started": "2026-01-01T00:00:00Z", "finished": "2026-01-01T00:00:01Z"}
    record = Record.model_validate(
        {
            "key": key,
            "value_us": 5.0,
            "samples_us": samples,
            "verdict": "pass",
            "artifact_key": artifact.key,
            **stamp,
        }
    )
    other = record.model_copy(update={"artifact_key": "0" * 64, "value_us": 9.0})
    RecordStore(copy.tuning_db / "records.sqlite").add(record, other)
    make_bundle(copy, tmp_path / "b.tar")
    document = check_bundle(tmp_path / "b.tar")
    assert document.verdict is Verdict.PASS, wrong(document)
    (kernel,) = load_bundle(tmp_path / "b.tar")[0]
    assert [r.samples_us for r in kernel.records] == [samples]
    measured = [f for f in document.kernels[0].figures if f.kind == "measured"]
    assert [(f.us, f.samples, f.premises["device"]) for f in measured] == [(5.0, 3, "H200")]


def test_a_damaged_export_is_not_bundled(evidence: Evidence, tmp_path: Path) -> None:
    copy = clone(tmp_path / "space", "rmsnorm")
    shutil.copytree(evidence.workspace.generated, copy.generated)
    (next(copy.generated.rglob("kernel.ptx"))).write_text("x")
    with pytest.raises(ContentError, match=r"kernel\.ptx"):
        make_bundle(copy, tmp_path / "b.tar")
    assert not (tmp_path / "b.tar").exists()


def test_nothing_but_a_bundle_is_replaced(evidence: Evidence, tmp_path: Path) -> None:
    out = tmp_path / "b.tar"
    out.write_text("my letters")
    with pytest.raises(WorkbenchError, match="no evidence bundle; choose another"):
        make_bundle(evidence.workspace, out)
    assert out.read_text() == "my letters"
    shutil.copy(evidence.path, out)
    make_bundle(evidence.workspace, out)


def test_a_workspace_without_exports_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="workbench propose"):
        make_bundle(clone(tmp_path / "space", "rmsnorm"), tmp_path / "b.tar")


def test_kernels_are_found_by_folder_and_by_key(evidence: Evidence) -> None:
    for name in (str(evidence.kernel), str(evidence.kernel / "manifest.json"), evidence.kernel.name[:5]):
        assert find_kernels(evidence.workspace, [name]) == [evidence.kernel]
    with pytest.raises(UnknownNameError, match=evidence.kernel.name):
        find_kernels(evidence.workspace, ["zzz"])
    key = json.loads((evidence.kernel / "manifest.json").read_text())["key"]
    assert find_kernels(evidence.workspace, [key]) == [evidence.kernel]
    wrong = key[:-1] + ("0" if key[-1] != "0" else "1")
    with pytest.raises(UnknownNameError, match=wrong):
        find_kernels(evidence.workspace, [wrong])
    with pytest.raises(WorkbenchError, match="name each kernel once"):
        make_bundle(evidence.workspace, evidence.path, [evidence.kernel, evidence.kernel])


# -- checking --------------------------------------------------------------------------------------


def test_a_bundle_as_it_was_written_passes(evidence: Evidence) -> None:
    document = check_bundle(evidence.path)
    assert document.verdict is Verdict.PASS and not document.problems and not document.notes
    assert document.sha256 == bundles.sha256(evidence.path.read_bytes())
    assert check_bundle(evidence.path, sha256=document.sha256.upper()).verdict is Verdict.PASS


def test_another_file_than_the_one_that_was_meant_is_noticed(evidence: Evidence) -> None:
    assert wrong(check_bundle(evidence.path, sha256="0" * 64))[0].startswith("file: its SHA-256 is")


def test_a_changed_byte_is_named_all_over_a_real_bundle(evidence: Evidence, tmp_path: Path) -> None:
    data = evidence.path.read_bytes()
    path = tmp_path / "b.tar"
    for position in range(0, len(data), len(data) // 60):
        changed = bytearray(data)
        changed[position] ^= 0x10
        path.write_bytes(changed)
        document = check_bundle(path)
        assert document.verdict is Verdict.FAIL
        (problem,) = document.problems
        assert problem.where == CONTAINER or problem.where in (*evidence.members, "SHA256SUMS")
        if problem.where in evidence.members:
            start = data.index(evidence.members[problem.where])
            assert start <= position < start + len(evidence.members[problem.where])
        with pytest.raises(ContentError, match=problem.where):
            load_bundle(path)


@pytest.mark.slow
def test_every_single_changed_byte_of_a_real_bundle_is_named(evidence: Evidence) -> None:
    data = bytearray(evidence.path.read_bytes())
    spans = [(data.index(d), len(d), n) for n, d in evidence.members.items()]
    for position in range(len(data)):
        data[position] ^= 1
        (damage,) = unpack(bytes(data), "b").damages
        data[position] ^= 1
        owner = next((n for start, size, n in spans if start <= position < start + size), None)
        assert damage.where == (owner or damage.where) and damage.where in (owner, CONTAINER, "SHA256SUMS")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: r.update(artifact_key="0" * 64), "report.json: is of another artifact"),
        (lambda r: r.update(workload="tp8_b1"), "report.json: is of another workload"),
        (lambda r: r["checks"][0].update(verdict="fail"), "ordering/static failed"),
        (lambda r: r["checks"][0].update(verdict="unknown"), "could not decide and is not waived"),
        (lambda r: r["checks"].pop(), "other checks than report.json"),
        (lambda r: r.clear(), "report.json: is damaged"),
    ],
)
def test_a_report_that_does_not_fit_is_named(
    evidence: Evidence, tmp_path: Path, change: Change, what: str
) -> None:
    document = checked(tmp_path, with_report(evidence.members, evidence.folder, change))
    assert document.verdict is Verdict.FAIL and any(what in line for line in wrong(document)), wrong(document)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: m["checks"][0].update(waived=True), "is waived, though it passed"),
        (lambda m: m["prediction"].update(us=0.001), "bundle.json: "),
        (
            lambda m: m["prediction"]["premises"].update(artifact_key="0" * 64),
            "prediction is of another kernel",
        ),
        (lambda m: m["prediction"]["premises"].update(machine_hash="0" * 64), "not in the bundle"),
        (lambda m: m.update(arch="sm_100a"), "another arch"),
        (lambda m: m["launches"][0].update(grid=[1, 1, 99]), "launches"),
        (lambda m: m["launches"][0].update(block=[2048, 1, 1]), "do not fit"),
        (lambda m: m["launches"][0].update(kernel="other"), "do not fit"),
        (lambda m: m.update(resources={}), "other resources than the cubin's"),
        (lambda m: m["files"].pop("kernel.sass"), "is not listed"),
        (lambda m: m["files"].update({"../../x": m["files"]["kernel.py"]}), "../../x"),
        (lambda m: m.update(format=2), "newer workbench"),
        (lambda m: m.clear(), "manifest.json: is damaged"),
    ],
)
def test_a_manifest_that_does_not_fit_is_named(
    evidence: Evidence, tmp_path: Path, change: Change, what: str
) -> None:
    document = checked(tmp_path, with_manifest(evidence.members, evidence.folder, change))
    if what == "launches":  # nothing contradicts it here: the repetition finds it
        assert document.verdict is Verdict.PASS
        return
    assert document.verdict is Verdict.FAIL and any(what in line for line in wrong(document)), wrong(document)


@pytest.mark.parametrize("name", ["kernel.py", "kernel.ptx", "kernel.cubin", "report.json", "manifest.json"])
def test_a_missing_file_of_a_kernel_is_named(evidence: Evidence, tmp_path: Path, name: str) -> None:
    members = {n: d for n, d in evidence.members.items() if n != evidence.inside(name)}
    document = checked(tmp_path, members)
    assert any(evidence.inside(name) in line for line in wrong(document)), wrong(document)


@pytest.mark.parametrize("name", ["bundle.json", "verifiers/rmsnorm.py", "machines/gb300.toml"])
def test_a_missing_member_is_named(evidence: Evidence, tmp_path: Path, name: str) -> None:
    document = checked(tmp_path, {n: d for n, d in evidence.members.items() if n != name})
    assert document.verdict is Verdict.FAIL and any("missing" in line for line in wrong(document))


@pytest.mark.parametrize("name", ["evil.py", "verifiers/moe.py", "kernels/x/y"])
def test_a_member_that_nothing_lists_is_named(evidence: Evidence, tmp_path: Path, name: str) -> None:
    document = checked(tmp_path, {**evidence.members, name: b"x"})
    assert wrong(document) == [f"{name}: belongs to nothing that the bundle lists"]
    more = checked(tmp_path, {**evidence.members, evidence.inside("evil.so"): b"x"})
    assert "evil.so: is no file of an exported kernel" in wrong(more)[0]


def test_other_figures_of_a_machine_are_named(evidence: Evidence, tmp_path: Path) -> None:
    name = "machines/gb300.toml"
    text = evidence.members[name].replace(b"[chip]\n", b"[chip]\n", 1)
    fast = text.replace(b"sms = { value = ", b"sms = { value = 9", 1)
    assert fast != text
    assert any("other figures" in x for x in wrong(checked(tmp_path, {**evidence.members, name: fast})))
    assert any("is not TOML" in x for x in wrong(checked(tmp_path, {**evidence.members, name: b"[["})))


def test_prose_that_says_something_else_is_noted(evidence: Evidence, tmp_path: Path) -> None:
    report = evidence.members[evidence.inside("REPORT.md")] + b"\nTwice as fast.\n"
    members = with_file(evidence.members, evidence.folder, "REPORT.md", report)
    document = checked(tmp_path, {**members, "README.md": b"Buy this.\n"})
    assert document.verdict is Verdict.PASS
    assert [n.split(" is not")[0] for n in document.notes] == ["README.md", evidence.inside("REPORT.md")]


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b'{"format": 1}', b"\xff"])
def test_a_damaged_manifest_of_the_bundle_is_named(evidence: Evidence, tmp_path: Path, data: bytes) -> None:
    document = checked(tmp_path, {**evidence.members, "bundle.json": data})
    assert wrong(document)[0].startswith("bundle.json: is damaged")


@pytest.mark.parametrize(
    "change",
    [
        lambda k: k.update(folder="../../etc"),
        lambda k: k.update(folder="verifiers"),
        lambda k: k.update(op="../x"),
        lambda k: k.update(cubin_sha256="0" * 64),
        lambda k: k.update(checks=99),
        lambda k: k["figures"][0].update(us=0.5),
        lambda k: k.update(provenance=None),
    ],
)
def test_an_entry_that_is_not_that_of_its_files_is_named(
    evidence: Evidence, tmp_path: Path, change: Change
) -> None:
    manifest = json.loads(evidence.members["bundle.json"])
    change(manifest["kernels"][0])
    document = checked(tmp_path, {**evidence.members, "bundle.json": json.dumps(manifest).encode()})
    assert document.verdict is Verdict.FAIL and wrong(document)[0].startswith("bundle.json")


def test_a_strangers_text_does_not_reach_terminal_or_markdown_as_markup(
    evidence: Evidence, tmp_path: Path
) -> None:
    def poison(manifest: dict[str, Any]) -> None:
        manifest["toolchain"]["dsl"] = "\x1b[2J<script>`|\n@all"
        manifest["knobs"]["a`<b>|\x1b"] = "x"

    members = consistent(with_manifest(evidence.members, evidence.folder, poison))
    document = checked(tmp_path, members)
    text = check_markdown(document)
    assert "\x1b" not in text and "<script>" not in text and "@all" not in text


def test_samples_that_are_no_times_are_named(evidence: Evidence, tmp_path: Path) -> None:
    timing: dict[str, Any] = {
        "kind": "measured", "artifact_key": evidence.members and "0" * 64, "device": {"name": "H200"},
        "method": "graph", "l2": "flushed", "flush_bytes": 1, "warmup": 1, "chains": 1,
        "generator": "ordinary", "seed": 0, "samples_us": [1.0], "host_us": 1.0,
    }  # fmt: skip
    name = evidence.inside("timing.json")
    for samples in ([], [0.0], [-1.0], [1e12], ["x"]):
        data = json.dumps({**timing, "samples_us": samples}).encode()
        assert any(name in x for x in wrong(checked(tmp_path, {**evidence.members, name: data})))
    document = checked(tmp_path, consistent({**evidence.members, name: json.dumps(timing).encode()}))
    assert wrong(document) == [f"{name}: is of another artifact"]


@pytest.mark.parametrize("line", [b".entry a(\n", b".entry a()\n", b"\n", b".visible \n", b"/*"])
def test_long_hostile_ptx_is_refused_like_any_other(evidence: Evidence, tmp_path: Path, line: bytes) -> None:
    ptx = b".version 9.4\n.target sm_103a\n" + line * 200_000  # hours, if a pattern ran on quadratically
    document = checked(tmp_path, consistent(with_file(evidence.members, evidence.folder, "kernel.ptx", ptx)))
    assert any("do not fit" in x for x in wrong(document))


def test_reading_a_bundle_writes_nothing(
    evidence: Evidence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(evidence.path, tmp_path / "b.tar")
    check_bundle(tmp_path / "b.tar")
    load_bundle(tmp_path / "b.tar")
    assert [p.name for p in tmp_path.iterdir()] == ["b.tar"]


def test_the_workspace_of_the_tests_is_one(evidence: Evidence) -> None:
    assert evidence.workspace.is_valid() and isinstance(evidence.workspace, Workspace)
