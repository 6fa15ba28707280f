from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.export.evidence_bundles import (
    Evidence,
    clone,
    consistent,
    with_file,
    with_manifest,
    with_report,
    written,
)
from workbench import api
from workbench.artifact import Artifact
from workbench.compile import CompileError, CompileRequest, compile_candidate
from workbench.errors import ContentError, MissingToolError, UnknownNameError, WorkbenchError
from workbench.export import export_winner
from workbench.export.evidence import run as running
from workbench.export.evidence.bundle import BundledKernel, MeasuredTime
from workbench.export.evidence.check import check_bundle, load_bundle
from workbench.export.evidence.make import make_bundle
from workbench.export.evidence.run import Gpu, run_bundle
from workbench.isa.sass import disassemble
from workbench.ops import load_op
from workbench.report.evidence import EvidencePoint, EvidenceRunDocument
from workbench.report.evidence_text import run_markdown
from workbench.templates import parse_template
from workbench.verify.report import Report, Verdict
from workbench.workspace import Workspace

NOBODY = Gpu("no CUDA device here (no CUDA driver)", None)


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A fresh clone in another folder: contracts and templates, nothing exported, nothing compiled."""
    return clone(tmp_path_factory.mktemp("elsewhere"), "rmsnorm")


@pytest.fixture
def verified(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of the bundle is not compiled and verified again and again, in tests of the rest."""
    monkeypatch.setattr(running, "verify_artifact", lambda *_, **__: evidence.verification)
    monkeypatch.setattr(running, "check_artifact", lambda *_, **__: evidence.verification)
    monkeypatch.setattr(running, "compile_candidate", lambda request: _compiled(request.model_dump_json()))
    monkeypatch.setattr(running, "disassemble", _disassembled)


@cache
def _compiled(request: str) -> Artifact:
    return compile_candidate(CompileRequest.model_validate_json(request))


_disassembled = cache(disassemble)


def of(document: EvidenceRunDocument, name: str) -> EvidencePoint:
    (point,) = [p for p in document.points if p.name == name]
    return point


def statuses(document: EvidenceRunDocument, status: str) -> set[str]:
    return {p.name for p in document.points if p.kind == "result" and p.status == status}


# -- what is repeated ------------------------------------------------------------------------------


def test_a_bundle_is_repeated_in_another_folder_without_a_gpu(
    evidence: Evidence, elsewhere: Workspace
) -> None:
    before = sorted(p for p in elsewhere.root.rglob("*"))
    said: list[str] = []
    document = run_bundle(elsewhere, evidence.path, note=said.append, gpu=NOBODY)
    assert document.verdict is Verdict.PASS, [p for p in document.points if p.status != "agree"]
    assert not statuses(document, "differ") and not statuses(document, "not repeated")
    report = Report.model_validate_json(evidence.members[evidence.inside("report.json")])
    wanted = {f"check {c.name}" for c in report.checks} | {
        "source", "buffers", "key", "PTX", "cubin", "SASS", "launches", "resources", "predicted time",
    }  # fmt: skip
    assert statuses(document, "agree") == wanted
    assert {"seed", "verifier", "contract", "CuTe DSL", "ptxas", "libraries"} <= {
        p.name for p in document.points if p.kind == "premise" and p.status == "agree"
    }
    assert of(document, "seed").found == "3"
    assert document.timing.startswith("timing not repeated, everything else was: no CUDA device here")
    assert of(document, "measured time").status == "not repeated"
    assert sorted(p for p in elsewhere.root.rglob("*") if "__pycache__" not in p.parts) == before
    assert any("compiling" in line for line in said) and any("verifying" in line for line in said)
    text = run_markdown(document)
    assert (
        document.sha256 in text and "Timing not repeated" in text and "workbench evidence run b.tar" in text
    )


def lying_bundle(evidence: Evidence, root: Path, old: str, new: str) -> Path:
    """A bundle of a kernel that is wrong, under the report and the prediction of the right one."""
    (kernel,) = load_bundle(evidence.path)[0]
    m = kernel.exported.manifest
    assert kernel.exported.artifact.source.count(old) == 1
    source = kernel.exported.artifact.source.replace(old, new)
    op = load_op(evidence.workspace, "rmsnorm")
    template = parse_template(source, Path(f"{m.template}.py"))
    artifact = compile_candidate(CompileRequest.of(op, m.workload, template, m.knobs))
    report = kernel.exported.report.model_copy(update={"artifact_key": artifact.key})
    space = clone(root / "lies", "rmsnorm")
    export_winner(space, artifact, report, seed=3)
    make_bundle(space, root / "lies.tar")
    assert check_bundle(root / "lies.tar").verdict is Verdict.PASS
    return root / "lies.tar"


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("        cute.arch.griddepcontrol_wait()\n", "", "check ordering/static"),
        pytest.param(
            "total * Float32(1.0 / self.width)",
            "total * Float32(1.1 / self.width)",
            "check numerics/ordinary/seed3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_kernel_under_a_good_report_is_found_out(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path, old: str, new: str, check: str
) -> None:
    document = run_bundle(elsewhere, lying_bundle(evidence, tmp_path, old, new), gpu=NOBODY)
    assert document.verdict is Verdict.FAIL
    assert check in statuses(document, "differ")
    assert {"PTX", "cubin", "key"} <= statuses(document, "agree")
    assert (of(document, check).stated, of(document, check).found) == ("pass", "fail")


@pytest.mark.usefixtures("verified")
def test_compiled_code_of_another_source_is_found_out(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path
) -> None:
    """PTX, cubin and launches are those of another point of the template: right, but not this source's."""
    (kernel,) = load_bundle(evidence.path)[0]
    other = api.compile_kernel(
        "row", op="rmsnorm", workload="small_b1", knobs={"weight_early": False}, workspace=elsewhere
    )
    assert other.key != kernel.entry.key and other.ptx != kernel.exported.artifact.ptx
    members = dict(evidence.members)
    for name, data in (("kernel.ptx", other.ptx.encode()), ("kernel.cubin", other.cubin)):
        members = with_file(members, evidence.folder, name, data)

    def fit(manifest: dict[str, Any]) -> None:
        manifest["resources"] = {n: r.model_dump() for n, r in other.resources.items()}

    path = written(tmp_path / "b.tar", consistent(with_manifest(members, evidence.folder, fit)))
    assert check_bundle(path).verdict is Verdict.PASS
    document = run_bundle(elsewhere, path, gpu=NOBODY)
    assert document.verdict is Verdict.FAIL
    assert {"PTX", "cubin", "SASS"} <= statuses(document, "differ")
    assert of(document, "cubin of the bundle's PTX").status == "agree"
    assert of(document, "verdict on the code compiled here").found == "pass"


@pytest.mark.usefixtures("verified")
def test_a_cubin_that_is_not_that_of_its_ptx_is_found_out(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path
) -> None:
    cubin = bytearray(evidence.members[evidence.inside("kernel.cubin")])
    members = None
    for position in range(len(cubin) // 2, len(cubin), 8):
        changed = bytearray(cubin)
        changed[position] ^= 1
        candidate = consistent_or_none(evidence, bytes(changed))
        if candidate is not None:
            members = candidate
            break
    assert members is not None
    document = run_bundle(elsewhere, written(tmp_path / "b.tar", members), gpu=NOBODY)
    assert document.verdict is Verdict.FAIL
    assert {"cubin", "cubin of the bundle's PTX"} <= statuses(document, "differ")
    assert "PTX" in statuses(document, "agree")


def consistent_or_none(evidence: Evidence, cubin: bytes) -> dict[str, bytes] | None:
    """The bundle with another cubin, if a check lets it pass."""
    members = consistent(with_file(evidence.members, evidence.folder, "kernel.cubin", cubin))
    path = written(evidence.path.with_name("probe.tar"), members)
    return members if check_bundle(path).verdict is Verdict.PASS else None


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize(
    ("field", "point"),
    [("grid", "launches"), ("seconds", None)],
)
def test_other_launches_are_found_out(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path, field: str, point: str | None
) -> None:
    members = evidence.members
    if field == "grid":
        members = with_manifest(members, evidence.folder, lambda m: m["launches"][0].update(grid=[1, 1, 2]))
    else:  # how long the verification took is no statement about the kernel
        members = with_report(members, evidence.folder, lambda r: r.update(seconds=1e9))
    document = run_bundle(elsewhere, written(tmp_path / "b.tar", consistent(members)), gpu=NOBODY)
    assert statuses(document, "differ") == ({point} if point else set())


@pytest.mark.usefixtures("verified")
def test_a_prettier_figure_is_found_out(evidence: Evidence, elsewhere: Workspace, tmp_path: Path) -> None:
    def better(report: dict[str, Any]) -> None:
        check = next(c for c in report["checks"] if c["name"] == "numerics/large/seed3")
        name = next(n for n in check["measures"] if n.endswith("worst"))
        check["measures"][name] += check["measures"][f"{name}_limit"] / 2

    members = consistent(with_report(evidence.members, evidence.folder, better))
    document = run_bundle(elsewhere, written(tmp_path / "b.tar", members), gpu=NOBODY)
    assert statuses(document, "differ") == {"check numerics/large/seed3"}
    assert "figures differ" in of(document, "check numerics/large/seed3").detail


@pytest.mark.usefixtures("verified")
def test_a_shorter_predicted_time_is_found_out(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path
) -> None:
    def faster(manifest: dict[str, Any]) -> None:
        manifest["prediction"]["us"] *= 0.9

    members = consistent(with_manifest(evidence.members, evidence.folder, faster))
    document = run_bundle(elsewhere, written(tmp_path / "b.tar", members), gpu=NOBODY)
    assert statuses(document, "differ") == {"predicted time"}


@pytest.mark.usefixtures("verified")
def test_a_prediction_of_another_model_is_not_compared(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path
) -> None:
    def older(manifest: dict[str, Any]) -> None:
        manifest["prediction"]["us"] *= 0.9
        manifest["prediction"]["premises"]["model_version"] = 0

    members = consistent(with_manifest(evidence.members, evidence.folder, older))
    document = run_bundle(elsewhere, written(tmp_path / "b.tar", members), gpu=NOBODY)
    point = of(document, "predicted time")
    assert document.verdict is Verdict.UNKNOWN and point.status == "not repeated"
    assert point.detail == "premises differ: model_version" and "times" not in point.detail


# -- what this machine or workspace lacks ----------------------------------------------------------


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize(
    "error", [MissingToolError("CuTe DSL is not installed"), CompileError("tool", "broken")]
)
def test_without_a_compiler_the_rest_is_repeated(
    evidence: Evidence, elsewhere: Workspace, monkeypatch: pytest.MonkeyPatch, error: WorkbenchError
) -> None:
    def missing(request: object) -> None:
        raise error

    monkeypatch.setattr(running, "compile_candidate", missing)
    document = run_bundle(elsewhere, evidence.path, gpu=NOBODY)
    assert document.verdict is Verdict.UNKNOWN
    assert statuses(document, "not repeated") == {"compile"}
    assert "check memory" in statuses(document, "agree")
    assert "everything else was" not in document.timing


@pytest.mark.usefixtures("verified")
def test_another_toolchain_explains_other_code(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path
) -> None:
    members = evidence.members
    ptx = members[evidence.inside("kernel.ptx")]
    members = with_file(members, evidence.folder, "kernel.ptx", ptx + b"\n// another line\n")
    members = with_manifest(members, evidence.folder, lambda m: m["toolchain"].update(dsl="4.0.0"))
    document = run_bundle(elsewhere, written(tmp_path / "b.tar", consistent(members)), gpu=NOBODY)
    assert of(document, "CuTe DSL").status == "differ" and of(document, "CuTe DSL").kind == "premise"
    assert of(document, "PTX").status == "not repeated" and "CuTe DSL" in of(document, "PTX").detail
    assert document.verdict is Verdict.UNKNOWN and not statuses(document, "differ")


@pytest.mark.usefixtures("verified")
def test_a_source_that_does_not_compile_is_found_out(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path
) -> None:
    source = evidence.members[evidence.inside("kernel.py")] + b"\nimport os\n"
    members = consistent(with_file(evidence.members, evidence.folder, "kernel.py", source))
    document = run_bundle(elsewhere, written(tmp_path / "b.tar", members), gpu=NOBODY)
    assert document.verdict is Verdict.FAIL and "rejected" in of(document, "compile").detail


def test_a_contract_without_the_workload_is_said(
    evidence: Evidence, elsewhere: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = load_op(elsewhere, "rmsnorm")
    fewer = replace(op, workloads=tuple(w for w in op.workloads if w.name != "small_b1"))
    monkeypatch.setattr(running, "load_op", lambda *_: fewer)
    document = run_bundle(elsewhere, evidence.path, gpu=NOBODY)
    assert statuses(document, "differ") == {"contract"} and "small_b1" in document.points[-1].found


def test_a_workspace_without_the_op_is_bad_input(evidence: Evidence, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="rmsnorm"):
        run_bundle(clone(tmp_path / "clone", "moe_topk"), evidence.path, gpu=NOBODY)


def test_a_kernel_that_is_not_in_the_bundle_is_bad_input(evidence: Evidence, elsewhere: Workspace) -> None:
    with pytest.raises(WorkbenchError, match="the key of the kernel is empty"):
        run_bundle(elsewhere, evidence.path, pick=[""], gpu=NOBODY)
    with pytest.raises(UnknownNameError, match=load_bundle(evidence.path)[0][0].entry.key[:12]):
        run_bundle(elsewhere, evidence.path, ["zzz"], gpu=NOBODY)


def test_nothing_of_a_damaged_bundle_is_run(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "compile_candidate", lambda *_: pytest.fail("it was compiled"))
    data = bytearray(evidence.path.read_bytes())
    data[data.index(evidence.members[evidence.inside("kernel.py")])] ^= 1
    (tmp_path / "b.tar").write_bytes(data)
    with pytest.raises(ContentError, match=r"kernel\.py: is not what SHA256SUMS says"):
        run_bundle(elsewhere, tmp_path / "b.tar", gpu=NOBODY)


def test_the_verifier_of_a_bundle_is_never_executed(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap"
    code = f"open({str(trap)!r}, 'w').close()\n".encode()
    members = {**evidence.members, "verifiers/rmsnorm.py": code}
    monkeypatch.setattr(
        running, "compile_candidate", lambda *_: (_ for _ in ()).throw(MissingToolError("no"))
    )
    monkeypatch.setattr(
        running, "check_artifact", lambda *_, **__: (_ for _ in ()).throw(WorkbenchError("no"))
    )
    path = written(tmp_path / "b.tar", members)
    check_bundle(path)
    run_bundle(elsewhere, path, gpu=NOBODY)
    assert not trap.exists()


# -- times -----------------------------------------------------------------------------------------


def measured(kernel_key: str, *samples: float, **other: Any) -> MeasuredTime:
    fields: dict[str, Any] = {
        "artifact_key": kernel_key, "device": {"name": "GB300", "driver": "13.0"}, "method": "graph",
        "l2": "flushed", "flush_bytes": 1 << 28, "warmup": 20, "chains": 1,
        "generator": "ordinary", "seed": 0, "samples_us": samples, "host_us": 2.0,
    }  # fmt: skip
    return MeasuredTime.model_validate({**fields, **other})


def timed_bundle(evidence: Evidence, path: Path, timing: MeasuredTime) -> Path:
    data = timing.model_dump_json().encode()
    return written(path, consistent({**evidence.members, evidence.inside("timing.json"): data}))


@pytest.fixture
def key(evidence: Evidence) -> str:
    return load_bundle(evidence.path)[0][0].entry.key


def gpu_that_takes(*samples: float, **other: Any) -> Gpu:
    def take(kernel: BundledKernel, op: object) -> MeasuredTime:
        return measured(kernel.entry.key, *samples, **other)

    return Gpu("GB300", "sm_103a", take)


@pytest.mark.usefixtures("verified")
def test_a_measured_time_without_a_gpu_is_undecided_and_said(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path, key: str
) -> None:
    path = timed_bundle(evidence, tmp_path / "b.tar", measured(key, 2.0, 3.0, 4.0))
    document = run_bundle(elsewhere, path, gpu=NOBODY)
    assert document.verdict is Verdict.UNKNOWN and statuses(document, "not repeated") == {"measured time"}
    assert of(document, "measured time").stated == "3.000 us, median of 3 on GB300, L2 flushed"
    assert document.timing.startswith("timing not repeated, everything else was")
    assert document.timing.endswith("the bundle states 1 measured time")


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize(("again", "status"), [(3.2, "agree"), (3.4, "differ"), (2.0, "differ")])
def test_a_measured_time_is_repeated_on_a_gpu(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path, key: str, again: float, status: str
) -> None:
    path = timed_bundle(evidence, tmp_path / "b.tar", measured(key, 3.0))
    document = run_bundle(elsewhere, path, gpu=gpu_that_takes(again))
    point = of(document, "measured time")
    assert point.status == status and f"{again / 3:.3f} times" in point.detail
    assert document.timing.startswith("timing repeated on GB300 for 1 of 1 kernels")


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"l2": "warm"}, "l2"),
        ({"device": {"name": "H200", "driver": "13.0"}}, "device"),
        ({"seed": 1}, "input seed"),
    ],
)
def test_times_of_other_premises_are_shown_and_not_compared(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path, key: str, other: dict[str, Any], name: str
) -> None:
    path = timed_bundle(evidence, tmp_path / "b.tar", measured(key, 3.0))
    document = run_bundle(elsewhere, path, gpu=gpu_that_takes(1.0, **other))
    point = of(document, "measured time")
    assert point.status == "not repeated" and point.detail == f"premises differ: {name}"
    assert "1.000 us" in point.found and "times" not in point.detail


@pytest.mark.usefixtures("verified")
def test_a_gpu_of_another_arch_times_nothing(
    evidence: Evidence, elsewhere: Workspace, tmp_path: Path, key: str
) -> None:
    path = timed_bundle(evidence, tmp_path / "b.tar", measured(key, 3.0))
    gpu = replace(gpu_that_takes(3.0), name="H200", arch="sm_90a")
    document = run_bundle(elsewhere, path, gpu=gpu)
    assert "H200 is sm_90a" in document.timing and of(document, "measured time").status == "not repeated"


@pytest.mark.usefixtures("verified")
def test_a_gpu_that_fails_is_said(evidence: Evidence, elsewhere: Workspace, tmp_path: Path, key: str) -> None:
    def fails(kernel: BundledKernel, op: object) -> MeasuredTime:
        raise WorkbenchError("cuLaunchKernelEx failed")

    path = timed_bundle(evidence, tmp_path / "b.tar", measured(key, 3.0))
    document = run_bundle(elsewhere, path, gpu=Gpu("GB300", "sm_103a", fails))
    assert of(document, "measured time").detail == "cuLaunchKernelEx failed"
    assert document.verdict is Verdict.UNKNOWN


@pytest.mark.usefixtures("verified")
def test_a_gpu_measures_where_the_bundle_states_nothing(evidence: Evidence, elsewhere: Workspace) -> None:
    document = run_bundle(elsewhere, evidence.path, gpu=gpu_that_takes(5.0))
    assert document.verdict is Verdict.PASS and of(document, "measured time").found.startswith("5.000 us")


def test_samples_taken_here_travel_with_the_bundle(evidence: Evidence, tmp_path: Path, key: str) -> None:
    taken = measured(key, 4.0, 2.0, 3.0)
    document = make_bundle(evidence.workspace, tmp_path / "b.tar", measure=lambda kernel: taken)
    (kernel,) = load_bundle(tmp_path / "b.tar")[0]
    assert kernel.timing == taken
    figures = {f.kind: f for f in document.kernels[0].figures}
    assert figures["measured"].us == 3.0 and figures["measured"].premises["device"] == "GB300"
    assert (
        json.loads((evidence.kernel / "manifest.json").read_text())["prediction"]["us"]
        == figures["predicted"].us
    )
