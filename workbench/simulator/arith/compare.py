"""Comparison and selection (PTX ISA 9.7.6 and 9.7.7), element functions only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workbench.simulator.arith.semantics import Array

Comparison = Callable[[Array, Array], Array]


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


INTEGER: dict[str, Comparison] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNSIGNED_ALIASES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
FLOAT: dict[str, Comparison] = {
    "eq": np.equal,
    # NumPy's != is true for NaN; PTX's ne is ordered.
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~_unordered(a, b),
    "nan": _unordered,
}
BOOLEAN: dict[str, Comparison] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def selp(a: Array, b: Array, c: Array) -> Array:
    """`a` where the predicate c holds, else `b`, by bits; cheaper than np.where on irregular masks."""
    mask = -c.astype(a.dtype)
    out: Array = b ^ ((a ^ b) & mask)
    return out


def slct(a: Array, b: Array, c: Array) -> Array:
    """`a` where c >= 0 (an int32, or a float32 that is not NaN), else `b`."""
    return selp(a, b, c >= 0)


TESTP: dict[str, Callable[[Array], Array]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= np.finfo(x.dtype).tiny) | (x == 0)),
    "subnormal": lambda x: (np.abs(x) < np.finfo(x.dtype).tiny) & (x != 0),
}
