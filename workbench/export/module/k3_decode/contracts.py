"""The ops' contracts as the workbench verified them, in `contract/`, and the axes of given tensors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from .table import Buffer, Op

Shape = tuple[int, ...]


@functools.cache
def contract(op: str) -> Any:
    """The op's declaration: its reference, generators and tolerances. Needs torch."""
    return importlib.import_module(f"{__package__}.contract.verifiers.{op}").OP


def evaluate(expression: str | int, axes: Mapping[str, int]) -> int:
    """Value of an extent; raises ValueError for an axis that is not known."""
    if isinstance(expression, int):
        return expression
    return int(_expressions().evaluate(expression, axes))


def storage_shape(buffer: Buffer, axes: Mapping[str, int]) -> Shape:
    """Shape of the tensor that holds a buffer: packed E2M1 has half as many bytes as elements."""
    shape = tuple(evaluate(extent, axes) for extent in buffer.shape)
    return (*shape[:-1], shape[-1] // 2) if buffer.dtype == "e2m1" else shape


def infer(op: Op, shapes: Mapping[str, Shape], given: Mapping[str, int]) -> dict[str, int]:
    """Axes from the shapes of tensors, every shape checked.

    Args:
        op: the op.
        shapes: by buffer; those of outputs may be left out where the axes follow without them.
        given: the axes that no shape tells.

    Raises:
        ValueError: naming the buffer whose shape does not fit, or the axis that cannot be told.
    """
    axes = dict(given)
    elements = {
        b.name: (*shapes[b.name][:-1], shapes[b.name][-1] * 2) if b.dtype == "e2m1" else shapes[b.name]
        for b in op.buffers
        if b.name in shapes
    }
    for b in op.buffers:
        if b.name in elements and len(elements[b.name]) != len(b.shape):
            raise ValueError(
                f"{op.name}: {b.name} has {len(elements[b.name])} dimensions, not {len(b.shape)}"
            )
    for axis, how in op.inferred.items():
        if axis not in axes and how.buffer in elements:
            zero, one = evaluate(how.zero, axes), evaluate(how.one, axes)
            axes[axis] = (elements[how.buffer][how.dimension] - zero) // (one - zero)
    for axis in (*op.inferred, *op.given):
        if axis not in axes:
            raise ValueError(f"{op.name}: axis {axis} does not follow from the tensors; give it")
    for b in op.buffers:
        if b.name in shapes:
            wanted = storage_shape(b, axes)
            if tuple(shapes[b.name]) != wanted:
                raise ValueError(f"{op.name}: {b.name} has shape {list(shapes[b.name])}, not {list(wanted)}")
    return axes


@functools.cache
def _expressions() -> Any:
    return importlib.import_module(f"{__package__}.contract.expressions")
