"""Whether rows may be added to a batch of an op: the contract's rows must not depend on each other.

A kernel verified at 32 rows serves 24 if the contract gives the first 24 rows the same results whatever the
other 8 hold. That is tried on the op's own reference, at a small workload, with the rows that the package
would add.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.ops import Buffer, Op, Role
from workbench.ops.trivial import zero_inputs

if TYPE_CHECKING:
    import torch

PADDING: Mapping[tuple[str, str], int] = {
    ("kda", "slots"): 0,
    ("mla_query", "slots"): -1,
    ("mla_value", "lengths"): 0,
}
"""What contracts call padding, by op and metadata buffer. Rows of other buffers repeat the last one."""

_CLOSE = 1e-2
"""Relative: sums of another batch may round the other way; rows that depend on each other differ by more."""


def padding_problem(op: Op) -> str:
    """Empty if rows may be added; else why not."""
    for b in op.buffers:
        if any("B" in re.findall(r"\w+", str(extent)) for extent in b.shape[1:]) or (
            b.shape and b.shape[0] != "B" and "B" in re.findall(r"\w+", str(b.shape[0]))
        ):
            return f"the batch is not the first dimension of {b.name}"
        if b.role is Role.METADATA and _batched(b) and (op.name, b.name) not in PADDING:
            return f"no value of {b.name} marks a row as padding"
    small = [w for w in op.workloads if w.axes.get("B", 1) >= 2]
    if not small:
        return "no workload has several rows to try it with"
    axes = min((w.axes for w in small), key=lambda a: sum(math.prod(b.resolve(a)) for b in op.buffers))
    return _try(op, axes)


def _try(op: Op, axes: Mapping[str, int]) -> str:
    """Compare the first rows of a batch with those of the same batch padded."""
    import torch

    storage = zero_inputs(op, axes)
    inputs = dict(op.generators["ordinary"](axes, 0, storage.__getitem__))
    total = axes["B"]
    short = total - 1
    alone = {b.name: inputs[b.name][:short] if _batched(b) else inputs[b.name] for b in op.inputs}
    padded = {b.name: _padded(op, b, inputs[b.name], short) for b in op.inputs}
    with torch.no_grad():
        wanted = op.reference(alone, {**axes, "B": short})
        got = op.reference(padded, axes)
    for b in op.outputs:
        rows = got[b.name][:short] if _batched(b) else got[b.name]
        if not torch.allclose(rows.double(), wanted[b.name].double(), _CLOSE, _CLOSE, equal_nan=True):
            return f"{b.name} of one row depends on other rows"
    return ""


def _padded(op: Op, buffer: Buffer, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    if not _batched(buffer):
        return tensor
    made = tensor.clone()
    pad = PADDING.get((op.name, buffer.name))
    made[rows:] = tensor[rows - 1] if pad is None else pad
    return made


def _batched(buffer: Buffer) -> bool:
    return bool(buffer.shape) and buffer.shape[0] == "B"
