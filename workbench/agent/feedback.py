"""What a candidate's author is told: the text of a report, the same whenever it is made again.

No times, paths or addresses stand in it: a replayed conversation must be the same to the letter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from workbench.agent.run import Candidate, Status
from workbench.artifact import Artifact
from workbench.findings import Finding, Severity
from workbench.verify.report import Check, Verdict

_AROUND = 2
"""Lines of source shown before and after one that is named."""
_MOST_FINDINGS = 3
_LONGEST = 6000
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{7,}\b")
_LINE = re.compile(r"(?:\bc\d+_\d+\.py:|\(line )(\d+)")
_SOURCE_LINE = re.compile(r":(\d+)$")


def name_of(index: int) -> str:
    """A candidate's name in a conversation: `c<chain>-<number>`."""
    return f"c{index // CHAIN_STRIDE}-{index % CHAIN_STRIDE}"


CHAIN_STRIDE = 10_000
"""Candidates of chain n have indices from n times this."""


def describe(
    candidate: Candidate, roofline_us: float, artifact: Artifact | None = None, earlier: str = ""
) -> str:
    """All that helps the author of a candidate to the next one.

    Args:
        candidate: what is described.
        roofline_us: least time of the workload.
        artifact: its compiled code, for lines of PTX.
        earlier: name of what compiled to the same kernels before.
    """
    p = candidate.proposal
    knobs = " ".join(f"{k}={v}" for k, v in p.knobs.items()) or "no knobs"
    lines = [f"candidate {name_of(p.index)} ({knobs}): {candidate.status.value.upper()}"]
    if earlier:
        lines.append(
            f"identical-object (info): it compiles to the same kernels as {earlier}, so that nothing new was "
            f"tried; it does not win over {earlier}"
        )
    if candidate.status is Status.FAILED:
        lines += _failure(candidate)
    if candidate.status is Status.LOST:
        lines += [candidate.reason, "this says nothing about the kernel; submit it again, or a smaller one"]
    if candidate.report is not None:
        failing = [c for c in candidate.report.checks if c.verdict is not Verdict.PASS]
        for check in failing:
            lines += _check(check, p.source, artifact)
        passed = len(candidate.report.checks) - len(failing)
        lines.append(f"{passed} of {len(candidate.report.checks)} checks passed")
        hints = [f for f in candidate.report.findings if f.severity is Severity.PERFORMANCE]
        lines += [f"performance: {f.rule}: {f.message} Fix: {f.fix}" for f in hints[:_MOST_FINDINGS]]
    if candidate.prediction is not None:
        lines.append(candidate.prediction.explain())
        times = candidate.prediction.us / roofline_us
        lines.append(f"{times:.2f} times the roofline of {roofline_us:.2f} us")
    text = _ADDRESS.sub("0x…", "\n".join(lines))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "\n[shortened]"


def _failure(candidate: Candidate) -> list[str]:
    lines = [candidate.reason]
    at = _LINE.search(candidate.reason)
    if at is not None and candidate.proposal.source:
        lines += _excerpt(candidate.proposal.source, int(at[1]))
    return lines


def _check(check: Check, source: str, artifact: Artifact | None) -> list[str]:
    lines = [f"{check.verdict.value.upper()} {check.name}: {check.summary}"]
    serious = [f for f in check.findings if f.severity is not Severity.PERFORMANCE]
    for finding in serious[:_MOST_FINDINGS]:
        lines += _finding(finding, source, artifact)
    if len(serious) > _MOST_FINDINGS:
        lines.append(f"  and {len(serious) - _MOST_FINDINGS} more")
    return lines


def _finding(f: Finding, source: str, artifact: Artifact | None) -> list[str]:
    where = [f"thread {f.thread}"] if f.thread else []
    where += [f"{f.count} times"] if f.count > 1 else []
    lines = [f"  {f.rule} ({f.severity.value}): {f.message}" + (f" [{', '.join(where)}]" if where else "")]
    if f.ptx_line is not None and artifact is not None:
        ptx = artifact.ptx.splitlines()
        if 0 < f.ptx_line <= len(ptx):
            lines.append(f"    PTX line {f.ptx_line}: {ptx[f.ptx_line - 1].strip()}")
    at = _SOURCE_LINE.search(f.source or "")
    if at is not None and source:
        lines += _excerpt(source, int(at[1]))
    if f.fix:
        lines.append(f"    fix: {f.fix}")
    return lines


def _excerpt(source: str, line: int) -> list[str]:
    rows: Sequence[str] = source.splitlines()
    if not 0 < line <= len(rows):
        return []
    first, last = max(1, line - _AROUND), min(len(rows), line + _AROUND)
    return [f"    {'>' if n == line else ' '} {n:4d} | {rows[n - 1]}" for n in range(first, last + 1)]


def compare(a: Candidate, b: Candidate) -> str:
    """Two candidates side by side: outcome, predicted time, resources, and the lines that differ."""
    import difflib

    lines = []
    for c in (a, b):
        us = f"{c.prediction.us:.2f} us predicted" if c.prediction is not None else "no prediction"
        lines.append(f"{name_of(c.proposal.index)}: {c.status.value}, {us}")
        if c.prediction is not None:
            launches = c.prediction.launches
            lines += [f"  {p.kernel}: {p.us:.2f} us, {p.limit}-bound ({p.reason})" for p in launches]
        for kernel, r in sorted(c.resources.items()):
            spilled = f"{r.spill_stores + r.spill_loads} B spilled"
            lines.append(f"  {kernel}: {r.registers} registers, {r.static_smem} B shared, {spilled}")
    knobs = sorted(a.proposal.knobs.keys() | b.proposal.knobs.keys())
    for k in knobs:
        x, y = a.proposal.knobs.get(k), b.proposal.knobs.get(k)
        if x != y:
            lines.append(f"knob {k}: {x} / {y}")
    diff = difflib.unified_diff(
        a.proposal.source.splitlines(), b.proposal.source.splitlines(),
        name_of(a.proposal.index), name_of(b.proposal.index), lineterm="", n=1,
    )  # fmt: skip
    lines += list(diff)[:120]
    return "\n".join(lines)
