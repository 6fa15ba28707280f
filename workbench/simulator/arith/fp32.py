"""float32 arithmetic with the rounding modes of PTX (ISA 9.7.3), element functions only."""

from __future__ import annotations

import numpy as np

from workbench.simulator.arith.rounding import F32_MIN_NORMAL, f64_to_f32, odd_sum, pick
from workbench.simulator.arith.semantics import Array

_LOW29 = np.uint64(0x1FFFFFFF)
_HALFWAY = np.uint64(0x10000000)
_TINY = np.float32(F32_MIN_NORMAL)


def saturate(x: Array) -> Array:
    """Clamp float32 or float64 to [0, 1]; NaN and -0 give +0."""
    one = x.dtype.type(1)
    # Comparing is false for NaN and both zeros.
    kept: Array = np.where(x > 0, np.minimum(x, one), x.dtype.type(0))
    return kept


def _zero_sign_rm(total: Array, x: Array, y: Array) -> Array:
    """Make an exactly zero sum -0 unless both addends are +0: rounding down (IEEE 754, 6.3)."""
    zero = total == 0
    if not zero.any():
        return total
    minus = zero & (np.signbit(x) | np.signbit(y))
    return np.where(minus, np.copysign(total, total.dtype.type(-1)), total)


def add(a: Array, b: Array, mode: str = "rn") -> Array:
    """float32 `a + b`."""
    if mode == "rn":
        return a + b
    x, y = a.astype(np.float64), b.astype(np.float64)
    total = odd_sum(x, y)
    if mode == "rm":
        total = _zero_sign_rm(total, x, y)
    return f64_to_f32(total, mode)


def mul(a: Array, b: Array, mode: str = "rn") -> Array:
    """float32 `a * b`; the float64 product is exact (48 bits)."""
    if mode == "rn":
        return a * b
    return f64_to_f32(np.multiply(a, b, dtype=np.float64), mode)


def fma(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """float32 `a * b + c`, rounded once."""
    if mode == "rn":
        return fma_rn(a, b, c)
    product = np.multiply(a, b, dtype=np.float64)
    addend = c.astype(np.float64)
    total = odd_sum(product, addend)
    if mode == "rm":
        total = _zero_sign_rm(total, product, addend)
    return f64_to_f32(total, mode)


def fma_rn(a: Array, b: Array, c: Array) -> Array:
    """float32 `a * b + c` rounded once to nearest.

    The float64 product is exact, so only the two roundings of the sum (to 53, then to 24 bits) can differ
    from one. They can only where the 53-bit sum sits exactly halfway between two float32 numbers, or where
    float32's precision is less than 24 bits (subnormal results): those lanes are done again with rounding to
    odd.
    """
    total = np.multiply(a, b, dtype=np.float64) + c
    result = total.astype(np.float32)
    doubtful = (total.view(np.uint64) & _LOW29) == _HALFWAY
    small = np.abs(result) <= _TINY
    if small.any():
        doubtful |= small & (total != 0)  # an exact zero, common in real data, is not doubtful
    if doubtful.any():
        index, (x, y, z) = pick(doubtful, a, b, c)
        again = odd_sum(np.multiply(x, y, dtype=np.float64), z.astype(np.float64))
        result.flat[index] = again.astype(np.float32)
    return result


def fma_rn_narrow(a: Array, b: Array, c: Array) -> Array:
    """`fma_rn` for factors whose significands have at most 24 bits together.

    The float32 product then is exact unless it overflows or underflows; the floating-point status flags,
    which NumPy reads after every operation anyway, tell.
    """
    try:
        with np.errstate(over="raise", under="raise"):
            return a * b + c
    except FloatingPointError:
        return fma_rn(a, b, c)


def div(a: Array, b: Array, mode: str = "rn") -> Array:
    """float32 `a / b`."""
    quotient = a / b
    if mode == "rn":
        return quotient
    # Exact: quotient * b has 48 bits and lies within a unit of the last place of a.
    x, y, q = a.astype(np.float64), b.astype(np.float64), quotient.astype(np.float64)
    rest = x - q * y
    above = (rest > 0) == (y > 0)
    nudged = np.nextafter(q, np.where(above, np.inf, -np.inf))
    # An infinite quotient of finite numbers is an overflow: any finite value past the range stands for it.
    overflow = np.isinf(q) & np.isfinite(x) & (y != 0)
    exact = (rest == 0) | np.isnan(rest)
    nudged = np.where(overflow, np.copysign(2.0**200, q), np.where(exact, q, nudged))
    # A quotient that underflowed to zero must keep its sign while it steps away from it.
    return np.copysign(f64_to_f32(nudged, mode), quotient)


def sqrt(a: Array, mode: str = "rn") -> Array:
    """float32 square root; negative numbers give NaN, -0 gives -0."""
    root = np.sqrt(a)
    if mode == "rn":
        return root
    r = root.astype(np.float64)
    rest = a.astype(np.float64) - r * r
    nudged = np.nextafter(r, np.where(rest > 0, np.inf, -np.inf))
    return f64_to_f32(np.where((rest == 0) | ~np.isfinite(rest), r, nudged), mode)


def minimum(a: Array, b: Array, *, nan: bool = False) -> Array:
    """Smaller of two float32 or float64, -0 below +0; a NaN operand is dropped, or wins with `nan`."""
    picked = np.minimum(a, b) if nan else _drop_nan(np.minimum(a, b), a, b)
    return _settle_zeros(picked, a, b, smaller=True)


def maximum(a: Array, b: Array, *, nan: bool = False) -> Array:
    """Larger of two float32 or float64, +0 above -0; a NaN operand is dropped, or wins with `nan`."""
    picked = np.maximum(a, b) if nan else _drop_nan(np.maximum(a, b), a, b)
    return _settle_zeros(picked, a, b, smaller=False)


def _drop_nan(picked: Array, a: Array, b: Array) -> Array:
    """Replace NaN results by the operand that is a number.

    Not np.fmin and np.fmax: for signalling NaN they return NaN in the lanes that fill no vector register,
    while GPUs treat signalling NaN as quiet.
    """
    nan = np.isnan(picked)
    return np.where(nan, np.where(np.isnan(a), b, a), picked) if nan.any() else picked


def _settle_zeros(picked: Array, a: Array, b: Array, *, smaller: bool) -> Array:
    """Fix the sign where +0 met -0, which NumPy orders by operand position."""
    zero = picked == 0
    if not zero.any():
        return picked
    pair = (a == 0) & (b == 0) & zero
    negative = np.signbit(a) | np.signbit(b) if smaller else np.signbit(a) & np.signbit(b)
    one = picked.dtype.type(1)
    return np.where(pair, np.copysign(picked, np.where(negative, -one, one)), picked)
