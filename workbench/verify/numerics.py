"""Numerics: one set of outputs judged against golden, with a finding that says what is wrong.

Acceptance is `workbench.ops.compare`: error relative to the output's own scale, at most `factor` times
the error of the op's honest computations. What that separates was measured with simulated kernels
(tests/verify/test_tolerances.py repeats it at small sizes): every admissible variant passed in every
generator: random split-K order, tanh off by a random or constant 2^-11. rms errors at tp8_b1 (limit about
twice the honest error):

    variant                                   moe_experts, negative_gates    moe, large
    tanh.approx at its bound, any sign        1.9e-3 .. 4.7e-3               0
    gate and up rounded to bf16               2.9e-2 .. 3.3e-2   refused     0
    running sum over slots rounded to bf16    (no sum)                       5.3e-3   refused (limit 1e-3)
    accumulator rounded to bf16 every 32      1.5e-1 .. 1.8e-1   refused     1.1e-1   refused
    accumulator rounded to f16 every 32       1.8e-2 .. 1.9e-2   refused     1.4      refused

With ordinary inputs the second and third are hidden by the rounding of the outputs (3.7e-3 against an
honest 3.2e-3), which is why those generators exist. Rounding only the up accumulator costs no more than
tanh.approx may and is not told from it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workbench.findings import Finding, Severity
from workbench.ops.compare import Comparison, Standard, compare
from workbench.ops.model import Op
from workbench.verify.diagnose import Diagnosis, diagnose
from workbench.verify.report import Check, verdict_of

SUSPICIOUS = 100.0
"""A result this many times more exact than the honest computations is reported."""


def judge(
    op: Op,
    axes: Mapping[str, int],
    standard: Standard,
    got: Mapping[str, torch.Tensor],
    label: str,
    *,
    inputs: Mapping[str, torch.Tensor] | None = None,
    poison: int | None = None,
) -> Check:
    """Judge all outputs of one run.

    Args:
        op: the contract.
        axes: the workload's axes.
        standard: golden and the honest errors for these inputs.
        got: outputs and updated state, in storage types.
        label: names the check `numerics/<label>`.
        inputs: state as before the run; with them a failure is compared with the op's known mistakes.
        poison: byte that filled the outputs before the run; with it unwritten elements are told apart.
    """
    findings: list[Finding] = []
    measures: dict[str, float] = {}
    outcomes: dict[str, Comparison] = {}
    for b in op.outputs:
        if b.name not in got:
            findings.append(_missing(b.name))
            continue
        outcomes[b.name] = c = compare(
            standard.golden[b.name], got[b.name], op.tolerances[b.name], standard.honest[b.name]
        )
        measures |= _measures(b.name, c, op.tolerances[b.name].exact)
    failed = {name: c for name, c in outcomes.items() if not c.passed}
    if failed:
        known = diagnose(op, axes, standard, got, failed, inputs, poison)
        findings += [_failure(name, c, known[name]) for name, c in failed.items()]
    findings += [
        _suspicious(name, c, standard.least[name])
        for name, c in outcomes.items()
        # Below the floor honest errors are a few flipped roundings: whether there are any is chance.
        if c.passed and max(c.errors.rms * SUSPICIOUS, op.tolerances[name].floor_rms) < standard.least[name]
    ]
    return Check(
        name=f"numerics/{label}",
        verdict=verdict_of(findings),
        summary=_summary(op, outcomes),
        findings=tuple(findings),
        measures=measures,
    )


def _measures(name: str, c: Comparison, exact: bool) -> dict[str, float]:
    if exact:
        return {f"{name}.wrong": float(c.bad)}
    return {
        f"{name}.rms": c.errors.rms,
        f"{name}.rms_limit": c.limits.rms,
        f"{name}.worst": c.errors.worst,
        f"{name}.worst_limit": c.limits.worst,
    }


def _summary(op: Op, outcomes: Mapping[str, Comparison]) -> str:
    parts = []
    for name, c in outcomes.items():
        if not c.passed and c.bad:
            parts.append(f"{name} has {c.bad} wrong elements")
        elif op.tolerances[name].exact:
            parts.append(f"{name} exact")
        else:
            parts.append(f"{name} rms {c.errors.rms:.2g} (limit {c.limits.rms:.2g}), "
                         f"worst {c.errors.worst:.2g} (limit {c.limits.worst:.2g})")  # fmt: skip
    return "; ".join(parts)


def _missing(name: str) -> Finding:
    return Finding(
        rule="numerics", severity=Severity.ERROR, buffer=name, message=f"the run left no output {name!r}"
    )


def _failure(name: str, c: Comparison, d: Diagnosis) -> Finding:
    at = f"{name}[{', '.join(map(str, c.index))}]" if c.index else name
    place = f": expected {c.expected:.6g}, got {c.got:.6g} at {at}" if c.index else ""
    return Finding(
        rule=d.rule,
        severity=Severity.ERROR,
        buffer=name,
        message=f"{d.message}; {name} {c.reason}{place}",
        fix=d.fix,
        count=max(c.bad, 1),
    )


def _suspicious(name: str, c: Comparison, honest: float) -> Finding:
    words = f"an error of {c.errors.rms:.2g} where honest computations have at least {honest:.2g}"
    return Finding(
        rule="better-than-honest",
        severity=Severity.INFO,
        buffer=name,
        message=f"{name} has {words}: make sure that it is computed",
    )
