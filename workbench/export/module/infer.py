"""Which axes of an op the shapes of its tensors tell, and how."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from workbench.errors import WorkbenchError
from workbench.expressions import evaluate, names_in
from workbench.ops import Op

Rules = dict[str, dict[str, str | int]]


def inference(op: Op) -> tuple[Rules, list[str]]:
    """Rules for the axes that follow from shapes, in the order to apply them, and the axes that do not.

    Inputs are looked at before outputs, so that outputs may be left out where possible. An extent tells an
    axis if all its other names are known and it is linear in the axis.

    Raises:
        WorkbenchError: if no shape and no argument could tell the batch.
    """
    rules: Rules = {}
    buffers = sorted(op.buffers, key=lambda b: b.role.value == "output")
    missing = list(op.workloads[0].axes)
    progress = True
    while progress:
        progress = False
        for b in buffers:
            for d, extent in enumerate(b.shape):
                unknown = [a for a in missing if isinstance(extent, str) and a in names_in(extent)]
                if len(unknown) == 1 and _linear(str(extent), unknown[0], [w.axes for w in op.workloads]):
                    axis = unknown[0]
                    rules[axis] = {
                        "buffer": b.name,
                        "dimension": d,
                        "zero": _with(str(extent), axis, 0),
                        "one": _with(str(extent), axis, 1),
                    }
                    missing.remove(axis)
                    progress = True
    if "B" in missing:
        raise WorkbenchError(f"no shape of {op.name} tells the batch B; it cannot be exported as an op")
    return rules, missing


def _linear(extent: str, axis: str, workloads: list[Mapping[str, int]]) -> bool:
    """True if the extent is linear in the axis, and not constant, at the axes of every workload."""
    for axes in workloads:
        values = [evaluate(extent, {**axes, axis: n}) for n in (0, 1, 2, 5, axes[axis])]
        step = values[1] - values[0]
        expected = [values[0] + step * n for n in (0, 1, 2, 5, axes[axis])]
        if values != expected or step == 0:
            return False
    return True


def _with(extent: str, axis: str, value: int) -> str:
    class Put(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.Constant(value) if node.id == axis else node

    return ast.unparse(Put().visit(ast.parse(extent, mode="eval")))
