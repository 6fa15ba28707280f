"""The verification report: checks, each with a verdict and its findings."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, WithJsonSchema, computed_field

from workbench.findings import Finding, Severity

Figure = Annotated[
    float, WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["Infinity", "-Infinity", "NaN"]}]})
]
"""A float whose JSON form is a number or, where JSON has none, the name of the value."""


AUDITS = ("ordering/static", "ordering/dynamic")
"""Checks whose verdict, where it is `unknown`, rests on findings of the rule `undecided` and nothing else."""
BESIDE_AUDITS = "undecided_beside_audits"
"""Measure of an undecided check at a held-out shape: how many checks but the audits could not decide."""


class Verdict(StrEnum):
    """Outcome of a check. `UNKNOWN` blocks an export until a person waives it by name."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Check(BaseModel):
    """One check of one artifact."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="strings")

    name: str
    """For instance `numerics/ordinary`, `memory`, `ordering/static`, `determinism`."""
    verdict: Verdict
    summary: str = ""
    """One line: what was compared and how it came out."""
    findings: tuple[Finding, ...] = ()
    measures: dict[str, Figure] = {}
    """Figures behind the verdict, for instance error ratios."""
    assumptions: tuple[str, ...] = ()


class Report(BaseModel):
    """All checks of one artifact at one workload."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    op: str
    workload: str
    template: str
    knobs: dict[str, int | str | bool]
    arch: str
    artifact_key: str
    device: str
    """`simulator` or the CUDA device's name."""
    checks: tuple[Check, ...]
    seconds: float = 0.0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        """Fail if any check fails, else unknown if any is unknown, else pass."""
        verdicts = {c.verdict for c in self.checks}
        if Verdict.FAIL in verdicts or not self.checks:
            return Verdict.FAIL
        return Verdict.UNKNOWN if Verdict.UNKNOWN in verdicts else Verdict.PASS

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of all checks."""
        return tuple(f for c in self.checks for f in c.findings)


def verdict_of(findings: tuple[Finding, ...] | list[Finding]) -> Verdict:
    """Fail if any finding is an error."""
    if any(f.severity is Severity.ERROR for f in findings):
        return Verdict.FAIL
    return Verdict.UNKNOWN if any(f.rule == "undecided" for f in findings) else Verdict.PASS
