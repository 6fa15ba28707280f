"""Waivers of single audit findings: a person accepts one that the audit could not decide, for one source.

A waiver names the finding by its fingerprint and the source by its hash: any change of the source, and any
change of the finding (another place, another reason), leaves it without effect. What is an error cannot be
waived, and neither can a check that could not decide for another reason than its findings.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from workbench.artifact import stable_hash
from workbench.errors import ContentError
from workbench.files import read_toml
from workbench.findings import Finding
from workbench.verify.report import AUDITS, BESIDE_AUDITS, Check, Report, Verdict

UNDECIDED = "undecided"
"""Rule of the findings that can be waived."""

_Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=3, max_length=2000)]


class Waiver(BaseModel):
    """One entry `[[waiver]]` of a file of waivers."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    finding: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    """Fingerprint of the finding."""
    source: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the kernel's source; with another source the waiver has expired."""
    person: _Line
    """Who accepts the finding."""
    reason: _Line
    """Why it is right all the same."""


def fingerprint(check: str, finding: Finding) -> str:
    """Sixteen hex digits that stand for a finding: its check, rule, place, buffer and message.

    How often it was seen, and in which thread or at which address first, does not count.
    """
    told = finding.model_dump(mode="json", exclude={"count", "thread", "address", "fix"})
    return stable_hash({"check": check, **told})[:16]


def undecided_findings(check: Check) -> list[tuple[str, Finding]]:
    """Fingerprint and finding of what an audit could not decide, at the kernel's shape or at a held-out one.

    Empty if the check's verdict is no `unknown`, or if it has reasons besides such findings.
    """
    held_out = check.name.startswith("held-out/") and check.measures.get(BESIDE_AUDITS) == 0
    if check.verdict is not Verdict.UNKNOWN or not (check.name in AUDITS or held_out):
        return []
    return [(fingerprint(check.name, f), f) for f in check.findings if f.rule == UNDECIDED]


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Read a TOML file of waivers.

    Raises:
        ContentError: naming the file and what is wrong with it: an entry without reason, one given twice.
    """
    document = read_toml(path)
    entries = document.pop("waiver", [])
    if document or not isinstance(entries, list):
        odd = ", ".join(document) or "waiver"
        raise ContentError(path, f"holds {odd}; it may hold entries [[waiver]] alone")
    waivers: list[Waiver] = []
    for n, entry in enumerate(entries, 1):
        try:
            waiver = Waiver.model_validate(entry)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ContentError(path, f"waiver {n}: {where}: {first['msg']}") from e
        if any((w.finding, w.source) == (waiver.finding, waiver.source) for w in waivers):
            raise ContentError(path, f"waiver {n} waives finding {waiver.finding} a second time")
        waivers.append(waiver)
    return tuple(waivers)


def waivers_for(check: Check, source_hash: str, waivers: Iterable[Waiver]) -> tuple[Waiver, ...] | None:
    """The waivers that cover an undecided check: one for each of its findings; None if one is missing."""
    found = undecided_findings(check)
    known = {w.finding: w for w in waivers if w.source == source_hash}
    if not found or any(f not in known for f, _ in found):
        return None
    return tuple(known[f] for f in dict.fromkeys(f for f, _ in found))


def uncovered(check: Check, source_hash: str, waivers: Iterable[Waiver]) -> str:
    """One line on what a person may waive of an undecided check; empty if there is nothing of the kind."""
    found, waivers = dict(undecided_findings(check)), list(waivers)
    if not found:
        return ""
    expired = {w.finding for w in waivers if w.source != source_hash} & found.keys()
    known = {w.finding for w in waivers if w.source == source_hash}
    open_ = [f for f in found if f not in known]
    line = f"finding {', '.join(open_[:8])}{f' and {len(open_) - 8} more' if len(open_) > 8 else ''}"
    if expired:
        line += f"; the waiver of {', '.join(sorted(expired))} is for another source and has expired"
    return f"{line}; source {source_hash}"


def draft(report: Report, source_hash: str) -> str:
    """A file of waivers for all that a report's audits left undecided, person and reason left empty."""
    parts = ["# Fill in person and reason of each finding that you accept, and delete the others.\n"]
    for check in report.checks:
        for mark, f in undecided_findings(check):
            place = ", ".join(
                str(p) for p in (f.source, f"PTX line {f.ptx_line}" if f.ptx_line else None) if p is not None
            )
            parts.append(
                f"\n# {check.name}, {f.kernel or 'module'}{f' at {place}' if place else ''}: "
                f"{' '.join(f.message.split())}\n"
                f'[[waiver]]\nfinding = "{mark}"\nsource = "{source_hash}"\nperson = ""\nreason = ""\n'
            )
    return "".join(parts)
