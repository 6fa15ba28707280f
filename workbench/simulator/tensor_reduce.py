"""The element-wise operations of cp.reduce.async.bulk.tensor (PTX ISA 9.7.9.27.1.3)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from workbench.simulator.tensormap import Element

Array = npt.NDArray[Any]

_TYPES = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("u32", "s32", "u64", "s64"),
    "or": ("u32", "s32", "u64", "s64"),
    "xor": ("u32", "s32", "u64", "s64"),
}
OPERATIONS = frozenset(_TYPES)


def reduction_known(operation: str, element: Element) -> bool:
    """Whether an operation exists for an element type."""
    return element.name in _TYPES[operation]


def _extreme(operation: str, old: Array, new: Array) -> Array:
    """Minimum or maximum of floats: a NaN loses against a number, -0 is below +0."""
    wide, other = old.astype(np.float64), new.astype(np.float64)
    less = (wide < other) | ((wide == other) & np.signbit(wide) & ~np.signbit(other)) | np.isnan(other)
    first = less if operation == "min" else ~less | np.isnan(other)
    return np.where(np.isnan(wide), new, np.where(first, old, new))


def reduced(operation: str, element: Element, there: Array, block: Array) -> Array:
    """Combine the bytes `there` (uint8, any strides) with those of `block`; both with dimension 0 last."""
    kind = np.dtype(ml_dtypes.bfloat16) if element.kind == "bf16" else np.dtype(element.kind)
    old = np.ascontiguousarray(there).view(kind)
    new = np.ascontiguousarray(block).view(kind)
    if operation == "add":
        result: Array = old + new
    elif operation in ("min", "max"):
        if element.floating:
            result = _extreme(operation, old, new)
        else:
            result = np.minimum(old, new) if operation == "min" else np.maximum(old, new)
    elif operation == "inc":
        result = np.where(old >= new, kind.type(0), old + kind.type(1))
    elif operation == "dec":
        result = np.where((old == 0) | (old > new), new, old - kind.type(1))
    else:
        function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation]
        result = function(old, new)
    return np.ascontiguousarray(result.astype(kind)).view(np.uint8)
