"""Approximate functions (PTX ISA 9.7.3), within the error bounds that the ISA states.

The ISA bounds the error and fixes special cases; the bits in between are the implementation's. Here they come
from NumPy, whose functions are within about 2 ulp of the true value, or from float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workbench.simulator.arith.semantics import Array


def rcp(x: Array) -> Array:
    """1 / x (ISA: 1 ulp)."""
    return np.float32(1) / x


def sqrt(x: Array) -> Array:
    """Square root (ISA: 2**-23 relative)."""
    return np.sqrt(x)


def rsqrt(x: Array) -> Array:
    """1 / sqrt(x) (ISA: 2**-22.9 relative)."""
    return (1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32)


def rsqrt_f64(x: Array) -> Array:
    """1 / sqrt(x) of float64 (the ISA states no bound)."""
    return 1.0 / np.sqrt(x)


def sin(x: Array) -> Array:
    """Sine (ISA: 2**-20.5 absolute in [-2 pi, 2 pi], 2**-14.7 in [-100 pi, 100 pi], no bound outside)."""
    return np.sin(x)


def cos(x: Array) -> Array:
    """Cosine, with the bounds of `sin`."""
    return np.cos(x)


def lg2(x: Array) -> Array:
    """log2 (ISA: 2**-22 absolute in (0.5, 2), 2**-22 relative elsewhere)."""
    return np.log2(x)


def ex2(x: Array) -> Array:
    """2**x (ISA: 2 ulp)."""
    return np.exp2(x)


def tanh(x: Array) -> Array:
    """Hyperbolic tangent (ISA: 2**-11 relative)."""
    return np.tanh(x)


def div_full(a: Array, b: Array) -> Array:
    """a / b (ISA: 2 ulp)."""
    return a / b


def div_approx(a: Array, b: Array) -> Array:
    """a / b (ISA: 2 ulp for |b| in [2**-126, 2**126]); above a zero of the right sign, NaN for infinite a."""
    quotient = a / b
    size = np.abs(b)
    huge = (size > np.float32(2.0**126)) & (size < np.inf)
    if huge.any():
        # quotient * 0 is a zero of the right sign, and NaN for an infinite quotient.
        quotient = np.where(huge, quotient * np.float32(0), quotient)
    return quotient


_HIGH = np.uint64(0xFFFFFFFF00000000)
_NAN = np.uint64(0x7FFFFFFF00000000)


def _coarse(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Make a function of the high words: low words in and out are zero, subnormals are flushed."""

    def coarse(x: Array) -> Array:
        top = (x.view(np.uint64) & _HIGH).view(np.float64)
        tiny = np.finfo(np.float64).tiny
        value = function(np.multiply(top, np.abs(top) >= tiny, dtype=np.float64))
        value = np.multiply(value, np.abs(value) >= tiny, dtype=np.float64)
        bits = value.view(np.uint64) & _HIGH
        return np.where(np.isnan(value), _NAN, bits).view(np.float64)

    return coarse


rcp_coarse_f64 = _coarse(lambda x: 1.0 / x)
rsqrt_coarse_f64 = _coarse(lambda x: 1.0 / np.sqrt(x))
