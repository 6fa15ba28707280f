"""Verification on a device: the simulator behind the device's interface."""

from __future__ import annotations

import re

import pytest

from tests.export.conftest import REPOSITORY
from tests.export.module_winners import compiled
from workbench.artifact import Artifact
from workbench.devices import DeviceError, SimulatedDevice
from workbench.export import ExportRefused, export_winner
from workbench.ops import load_op
from workbench.verify.on_device import verify_on_device
from workbench.verify.report import Report, Verdict
from workbench.verify.runs import Level
from workbench.workspace import Workspace


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return compiled("rmsnorm", "small_b1", arch="sm_90a")


def verified(artifact: Artifact, level: Level = Level.FULL) -> Report:
    return verify_on_device(artifact, load_op(REPOSITORY, artifact.op), SimulatedDevice(), level=level)


def verdicts(report: Report) -> dict[str, Verdict]:
    return {c.name: c.verdict for c in report.checks}


def test_a_right_kernel_passes_all_inputs_and_memory_stays_undecided(artifact: Artifact) -> None:
    op = load_op(REPOSITORY, artifact.op)
    found = verified(artifact)
    assert found.device == "simulator" and found.verdict is Verdict.UNKNOWN
    each = verdicts(found)
    assert {f"numerics/{g}" for g in op.generators} <= set(each)
    assert [n for n, v in each.items() if v is not Verdict.PASS] == ["memory"]
    assert len(verified(artifact, Level.SCREEN).checks) < len(found.checks)


def test_such_a_report_admits_no_export(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> None:
    space = Workspace(tmp_path_factory.mktemp("space"))
    with pytest.raises(ExportRefused, match="memory could not decide"):
        export_winner(space, artifact, verified(artifact, Level.SCREEN))


def test_a_wrong_kernel_fails_by_its_numbers(artifact: Artifact) -> None:
    wrong = artifact.model_copy(update={"ptx": artifact.ptx.replace("rsqrt.approx", "sqrt.approx")})
    found = verified(wrong)
    assert found.verdict is Verdict.FAIL and verdicts(found)["numerics/ordinary"] is Verdict.FAIL


def test_an_output_that_nothing_writes_shows_in_the_repeat(artifact: Artifact) -> None:
    start = artifact.ptx.index("{", artifact.ptx.index(".entry")) + 1
    body = artifact.ptx[:start] + "\nret;\n}\n"
    found = verified(artifact.model_copy(update={"ptx": body}))
    failed = [n for n, v in verdicts(found).items() if v is Verdict.FAIL]
    assert "numerics/ordinary" in failed and "determinism/ordinary" in failed


def test_a_kernel_that_faults_fails_and_nothing_more_is_run(artifact: Artifact) -> None:
    wild = re.sub(r"(st\.global[\w.]*\s+\[%rd\d+)\]", r"\1+268435456]", artifact.ptx)
    assert wild != artifact.ptx
    found = verified(artifact.model_copy(update={"ptx": wild}))
    ran = [c for c in found.checks if c.name.startswith("numerics/")]
    assert len(ran) == 1 and ran[0].verdict is Verdict.FAIL and "it did not run" in ran[0].summary


def test_a_device_that_does_not_take_the_kernel_says_so(artifact: Artifact) -> None:
    with pytest.raises(DeviceError, match="no PTX"):
        verified(artifact.model_copy(update={"ptx": ""}))


def test_the_command_names_what_is_missing() -> None:
    from workbench import api
    from workbench.devices import available
    from workbench.errors import UnknownNameError

    assert api.check_device("simulator") is None
    with pytest.raises(UnknownNameError, match="nearest: cuda"):
        api.check_device("gpu")
    if not available():
        with pytest.raises(DeviceError, match=r"CUDA driver.*leave --device out"):
            api.check_device("cuda")
