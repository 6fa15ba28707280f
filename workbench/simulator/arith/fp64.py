"""float64 arithmetic with the rounding modes of PTX (ISA 9.7.3), element functions only.

NumPy rounds to nearest. Everything else here comes from the sign of the rounding error of the nearest result:
error-free transformations find it where no intermediate can overflow or underflow, exact integer arithmetic
in Python elsewhere.
"""

from __future__ import annotations

from math import frexp, isqrt

import numpy as np

from workbench.simulator.arith.rounding import odd_sum, pick
from workbench.simulator.arith.semantics import Array

_SPLIT = np.float64(2.0**27 + 1)
_SAFE_LOW, _SAFE_HIGH = 2.0**-400, 2.0**400


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the nearest product and its exact error (Dekker); operands must be of moderate size."""
    high = a * b
    t = _SPLIT * a
    a_high = t - (t - a)
    a_low = a - a_high
    t = _SPLIT * b
    b_high = t - (t - b)
    b_low = b - b_high
    low = ((a_high * b_high - high) + a_high * b_low + a_low * b_high) + a_low * b_low
    return high, low


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _safe(*values: Array) -> Array:
    """Tell where all values are zero or of moderate size, so that no transformation can lose a bit."""
    result: Array | None = None
    for value in values:
        size = np.abs(value)
        fine = ((size > _SAFE_LOW) & (size < _SAFE_HIGH)) | (size == 0)
        result = fine if result is None else result & fine
    assert result is not None
    return result


def _step(nearest: Array, error: Array, mode: str) -> Array:
    """Move the nearest result by one where `error` (the sign of exact - nearest) and the mode ask for it."""
    if mode == "rn":
        return nearest
    up = (error > 0) & ((mode == "rp") | ((mode == "rz") & np.signbit(nearest)))
    down = (error < 0) & ((mode == "rm") | ((mode == "rz") & ~np.signbit(nearest)))
    moved = np.where(
        up, np.nextafter(nearest, np.inf), np.where(down, np.nextafter(nearest, -np.inf), nearest)
    )
    # Moving to zero keeps the sign.
    return np.where(moved == 0, np.copysign(moved, nearest), moved)


def _integer(value: float) -> tuple[int, int]:
    """Return (m, e) with value == m * 2**e."""
    mantissa, exponent = frexp(value)
    return int(mantissa * 2.0**53), exponent - 53


def _nearest(numerator: int, exponent: int) -> tuple[float, int]:
    """Round numerator * 2**exponent to the nearest float64; return it and the sign of exact - rounded."""
    if numerator == 0:
        return 0.0, 0
    magnitude = abs(numerator)
    sign = 1 if numerator > 0 else -1
    drop = max(magnitude.bit_length() - 53, -1074 - exponent, 0)
    kept = magnitude >> drop
    rest = magnitude - (kept << drop)
    if drop:
        half = 1 << (drop - 1)
        if rest > half or (rest == half and kept & 1):
            kept += 1
            rest -= 1 << drop
    try:
        rounded = (
            float(kept) * 2.0 ** (exponent + drop)
            if exponent + drop >= -1022
            else _ldexp(kept, exponent + drop)
        )
    except OverflowError:
        rounded = float("inf")
    if rounded == float("inf"):
        return sign * rounded, -sign
    return sign * rounded, sign * ((rest > 0) - (rest < 0))


def _ldexp(kept: int, exponent: int) -> float:
    return float(kept) * 2.0**-1022 * 2.0 ** (exponent + 1022)


def _patch(
    nearest: Array, error: Array, lanes: Array, exact: object, *operands: Array
) -> tuple[Array, Array]:
    """Redo `lanes` one by one with integers; `exact(*floats)` gives numerator and exponent."""
    nearest, error = (
        np.array(np.broadcast_to(nearest, lanes.shape)),
        np.array(np.broadcast_to(error, lanes.shape)),
    )
    index, columns = pick(lanes, *operands)
    results = [_nearest(*exact(*row)) for row in zip(*(c.tolist() for c in columns), strict=True)]  # type: ignore[operator]
    if results:
        values, signs = zip(*results, strict=True)
        kept_sign = nearest.flat[index]
        new = np.array(values)
        nearest.flat[index] = np.where(new == 0, np.copysign(new, kept_sign), new)
        error.flat[index] = np.array(signs, np.float64)
    return nearest, error


def _exact_product_sum(a: float, b: float, c: float) -> tuple[int, int]:
    (ma, ea), (mb, eb), (mc, ec) = _integer(a), _integer(b), _integer(c)
    low = min(ea + eb, ec)
    return (ma * mb << (ea + eb - low)) + (mc << (ec - low)), low


def add(a: Array, b: Array, mode: str = "rn") -> Array:
    """float64 `a + b`."""
    total = a + b
    if mode == "rn":
        return total
    _, error = _two_sum(a, b)
    overflow = np.isinf(total) & np.isfinite(a) & np.isfinite(b)
    error = np.where(overflow, -np.copysign(1.0, total), error)
    result = _step(total, error, mode)
    if mode == "rm":
        zero = (total == 0) & (np.signbit(a) | np.signbit(b))
        result = np.where(zero, -0.0, result)
    return result


def mul(a: Array, b: Array, mode: str = "rn") -> Array:
    """float64 `a * b`."""
    product = a * b
    if mode == "rn":
        return product
    _, error = _two_product(a, b)
    risky = ~_safe(*np.broadcast_arrays(a, b)) & np.isfinite(a) & np.isfinite(b)
    near, error = _patch(product, error, risky, lambda x, y: _exact_product_sum(x, y, 0.0), a, b)
    return _step(near, error, mode)


def fma(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """float64 `a * b + c`, rounded once (Boldo and Melquiond's emulation with rounding to odd)."""
    high, low = _two_product(a, b)
    total_low, rest_low = _two_sum(c, low)
    total_high, rest_high = _two_sum(high, total_low)
    tail = odd_sum(rest_high, rest_low)
    near = total_high + tail
    error = (total_high - near) + tail
    # For infinities, NaN and zeros; a product of finite numbers must not overflow against an infinite c.
    simple = np.where(np.isinf(c) & np.isfinite(a) & np.isfinite(b), c, a * b + c)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    zero = (a == 0) | (b == 0)
    near = np.where(finite & ~zero, near, simple)
    error = np.where(finite & ~zero, error, 0.0)
    risky = finite & ~zero & ~_safe(*np.broadcast_arrays(a, b, c))
    near, error = _patch(near, error, risky, _exact_product_sum, a, b, c)
    # A sum that cancels is +0, but -0 rounding down; one that underflows to zero keeps the exact sign.
    exact_zero = finite & (near == 0) & (error == 0) & ~zero
    near = np.where(exact_zero, -0.0 if mode == "rm" else 0.0, near)
    near = np.where((near == 0) & (error != 0), np.copysign(near, error), near)
    result = _step(near, error, mode)
    if mode == "rm":
        negative = np.signbit(a) ^ np.signbit(b) | np.signbit(c)
        result = np.where(zero & finite & (simple == 0) & negative, -0.0, result)
    return result


def div(a: Array, b: Array, mode: str = "rn") -> Array:
    """float64 `a / b`."""
    quotient = a / b
    if mode == "rn":
        return quotient
    high, low = _two_product(quotient, b)
    rest = (a - high) - low
    error = np.where(b > 0, rest, -rest)
    normal = np.isfinite(a) & np.isfinite(b) & (b != 0) & (a != 0)
    error = np.where(normal, error, 0.0)
    risky = normal & ~_safe(*np.broadcast_arrays(a, b, quotient))
    near, error = _patch(quotient, error, risky, _exact_quotient, a, b)
    return _step(near, error, mode)


def _exact_quotient(a: float, b: float) -> tuple[int, int]:
    """Return a / b as integer and exponent with a sticky last bit, good for rounding to 53 bits."""
    (ma, ea), (mb, eb) = _integer(a), _integer(b)
    sign = -1 if (ma < 0) != (mb < 0) else 1
    whole, rest = divmod(abs(ma) << 120, abs(mb))
    return sign * (2 * whole + (rest != 0)), ea - eb - 121


def sqrt(a: Array, mode: str = "rn") -> Array:
    """float64 square root."""
    root = np.sqrt(a)
    if mode == "rn":
        return root
    high, low = _two_product(root, root)
    error = (a - high) - low
    normal = (a > 0) & np.isfinite(a)
    error = np.where(normal, error, 0.0)
    near, error = _patch(root, error, normal & ~_safe(a), _exact_root, a)
    return _step(near, error, mode)


def _exact_root(a: float) -> tuple[int, int]:
    mantissa, exponent = _integer(a)
    shift = 120 + (exponent & 1)
    whole = isqrt(mantissa << shift)
    return 2 * whole + (whole * whole != mantissa << shift), (exponent - shift) // 2 - 1
