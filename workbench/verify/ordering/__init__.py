"""Memory ordering, decided statically on PTX and SASS; no GPU and no run of the kernel is needed."""

from workbench.verify.ordering.files import AuditDocument, AuditFinding, AuditTarget, audit_file
from workbench.verify.ordering.static import RULES, KernelAudit, audit, audit_chain, audit_kernel

__all__ = [
    "RULES",
    "AuditDocument",
    "AuditFinding",
    "AuditTarget",
    "KernelAudit",
    "audit",
    "audit_chain",
    "audit_file",
    "audit_kernel",
]
