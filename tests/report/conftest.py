from __future__ import annotations

from collections.abc import Callable

import pytest

from workbench.agent.run import Candidate, Proposal, RunResult, RunSettings, Status
from workbench.cost import LaunchPrediction, Occupancy, Prediction, Premises
from workbench.findings import Finding, Severity
from workbench.verify.report import Check, Report, Verdict

MakeResult = Callable[..., RunResult]


def prediction(us: float) -> Prediction:
    fit = Occupancy(ctas_per_sm=1, warps_per_sm=8, fraction=0.125, limited_by=("CTAs",), limits={"CTAs": 1})
    launch = LaunchPrediction(
        kernel="k",
        us=us - 1,
        gap_us=1.0,
        limit="latency",
        terms_us={"latency": us - 1},
        reason="a <long> chain | here",
        occupancy=fit,
        waves=1,
        busiest_sm_ctas=1,
        imbalance=1.0,
        hbm_bytes=1,
        l2_bytes=1,
        bandwidth_tb_s=1.0,
        bandwidth_limit="hbm",
    )
    premises = Premises(
        machine="gb300",
        machine_hash="0",
        model_version=1,
        op="rmsnorm",
        workload="latent_b1",
        axes={"B": 1, "N": 3584},
        arch="sm_103a",
        artifact_key="k",
        code="sass",
        assumptions=("memory is cold",),
    )
    return Prediction(us=us, launches=(launch,), premises=premises)


def report(verdict: Verdict = Verdict.PASS, **knobs: int) -> Report:
    findings = ()
    if verdict is Verdict.FAIL:
        message = "reads <x> & more [before] the wait"
        findings = (
            Finding(rule="pdl-load-before-wait", severity=Severity.ERROR, message=message, fix="wait"),
        )
    check = Check(name="ordering/static", verdict=verdict, summary="all | decided", findings=findings)
    return Report(
        op="rmsnorm",
        workload="latent_b1",
        template="row",
        knobs=knobs,
        arch="sm_103a",
        artifact_key="key",
        device="simulator",
        checks=(check,),
    )


@pytest.fixture
def result() -> RunResult:
    """A run of four candidates: two verified, one refused, one that did not compile; the third won."""

    def candidate(index: int, us: float | None, status: Status, reason: str = "") -> Candidate:
        proposal = Proposal(index=index, round=0, template="row", knobs={"threads": 32 << index})
        verdict = Verdict.PASS if status is Status.VERIFIED else Verdict.FAIL
        return Candidate(
            proposal=proposal,
            status=status,
            reason=reason,
            report=None if status is Status.FAILED else report(verdict),
            prediction=None if us is None else prediction(us),
        )

    settings = RunSettings(
        run_id="rmsnorm-latent_b1-1",
        op="rmsnorm",
        workload="latent_b1",
        arch="sm_103a",
        machine="gb300",
        agent="offline",
        seed=0,
        rounds=1,
        batch=4,
        templates=("row",),
        template_hashes=("t",),
        verifier_hash="v",
    )
    return RunResult(
        settings=settings,
        candidates=(
            candidate(0, 5.5, Status.VERIFIED),
            candidate(1, None, Status.REFUSED, "ordering/static: reads <x> & more [before] the wait"),
            candidate(2, 4.25, Status.VERIFIED),
            candidate(3, None, Status.FAILED, "compiler: it | broke\nbadly"),
        ),
        winner=2,
        exported="generated_kernels/rmsnorm/latent_b1-sm_103a/abc",
        roofline_us=0.5,
        seconds=12.0,
    )
