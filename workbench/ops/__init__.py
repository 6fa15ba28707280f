"""Ops: what a kernel must compute, as declared in `verifiers/<op>.py`, and the arithmetic that verifiers
share.

Importing this package does not import torch; `rounding`, `mxfp4`, `random`, `routing`, `situ`, `linear`
and `experts` do.
"""

from workbench.ops.dtypes import DType
from workbench.ops.loader import load_op
from workbench.ops.model import (
    Allocate,
    Buffer,
    Fault,
    Generator,
    Op,
    Reference,
    Role,
    Tolerance,
    Workload,
)

__all__ = [
    "Allocate",
    "Buffer",
    "DType",
    "Fault",
    "Generator",
    "Op",
    "Reference",
    "Role",
    "Tolerance",
    "Workload",
    "load_op",
]
