"""Documents as plain text, for readers that have no terminal: models and logs."""

from __future__ import annotations

from workbench.report.documents import OpDocument


def contract_text(document: OpDocument) -> str:
    """An op's contract: what it computes, its buffers, tolerances and workloads."""
    lines = [document.doc, "", "Buffers:"]
    for b in document.buffers:
        shape = ", ".join(b.shape)
        lines.append(f"- {b.name}: [{shape}] {b.dtype}, {b.role}" + (f"; {b.doc}" if b.doc else ""))
    if document.constants:
        lines.append("Constants: " + ", ".join(f"{k}={v}" for k, v in document.constants.items()))
    lines.append("Workloads:")
    for w in document.workloads:
        lines.append(f"- {w.name}: " + ", ".join(f"{k}={v}" for k, v in w.axes.items()))
    return "\n".join(lines)
