"""Findings on a kernel's source text, joined to the audit of what was compiled from it."""

from __future__ import annotations

from workbench.findings import Severity
from workbench.verify.ordering.files import AuditDocument, AuditFinding
from workbench.verify.ordering.rules.asm import audit_source
from workbench.verify.report import Verdict


def linted(document: AuditDocument, text: str, name: str) -> AuditDocument:
    """Add what the source says of inline assembly to every kernel that was compiled from it.

    Args:
        document: the audit of the kernels.
        text: the source of all of them.
        name: the file's name, as findings show it.
    """
    found = tuple(
        AuditFinding(
            rule=f.rule,
            severity=f.severity,
            ptx_line=None,
            sass_offset=None,
            source=f.source,
            buffer=None,
            message=f.message,
            fix=f.fix,
        )
        for f in audit_source(text, name)
    )
    if not found:
        return document
    fails = any(f.severity is Severity.ERROR for f in found)
    targets = tuple(
        t.model_copy(
            update={
                "findings": (*t.findings, *found),
                "verdict": Verdict.FAIL if fails else t.verdict,
            }
        )
        for t in document.targets
    )
    return document.model_copy(update={"targets": targets})
