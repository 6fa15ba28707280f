"""Rounding exact or round-to-odd float64 values to narrower floating-point formats.

A float64 that was rounded *to odd* (truncated, last bit forced to 1 if anything was lost) can be rounded once
more to any format with at most 51 bits of precision, in any direction, with the result of a single rounding.
Every inexact operation here therefore makes such a float64 first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.simulator.arith.semantics import Array

F32_MIN_NORMAL = np.float32(2.0**-126)
F64_MIN_NORMAL = np.float64(2.0**-1022)
_EXPONENT_MASK = np.uint64(0x7FF)


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format of at most 32 bits."""

    name: str
    bits: int
    precision: int
    """Significand bits with the hidden one."""
    bias: int
    largest: float
    """Largest finite magnitude."""
    infinity: int | None
    """Code of +infinity, None if there is none."""
    nan: int | None
    """Canonical NaN code, None if there is none."""

    @property
    def sign(self) -> int:
        """Sign bit of a code."""
        return 1 << (self.bits - 1)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias


F32 = Format("f32", 32, 24, 127, float(np.finfo(np.float32).max), 0x7F800000, 0x7FFFFFFF)
TF32 = Format("tf32", 19, 11, 127, 2.0**128 - 2.0**117, 0x3FC00, 0x3FFFF)
F16 = Format("f16", 16, 11, 15, 65504.0, 0x7C00, 0x7FFF)
BF16 = Format("bf16", 16, 8, 127, 2.0**128 - 2.0**120, 0x7F80, 0x7FFF)
E4M3 = Format("e4m3", 8, 4, 7, 448.0, None, 0x7F)
E5M2 = Format("e5m2", 8, 3, 15, 57344.0, 0x7C, 0x7F)
E2M3 = Format("e2m3", 6, 4, 1, 7.5, None, None)
E3M2 = Format("e3m2", 6, 3, 3, 28.0, None, None)
E2M1 = Format("e2m1", 4, 2, 1, 6.0, None, None)


def flush_f32(x: Array) -> Array:
    """Replace float32 subnormals by zero of the same sign."""
    return np.multiply(x, np.abs(x) >= F32_MIN_NORMAL, dtype=np.float32)


def pick(mask: Array, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    """Return the flat indices (C order) where `mask` holds and the elements there of arrays that broadcast to
    it.

    A flat index is found ten times faster than an index a dimension; write back through `result.flat[index]`,
    which is right for any memory order.
    """
    index = np.flatnonzero(mask)
    return index, tuple(np.broadcast_to(a, mask.shape).reshape(-1)[index] for a in arrays)


def odd_sum(x: Array, y: Array) -> Array:
    """Return float64 `x + y` rounded to odd.

    Knuth's TwoSum gives the rounding error of the nearest sum exactly; where it is not zero and the nearest
    sum is even in its last bit, the sum moves one step towards the error. No operand may be so large that the
    sum overflows.
    """
    total = x + y
    back = total - x
    error = (x - (total - back)) + (y - back)
    bits = total.view(np.int64)
    # One step in magnitude, up where the error has the sum's sign, else down: only for even bits and a real
    # error (comparing is false for the NaN error that infinite and NaN sums have).
    direction = ((error.view(np.int64) ^ bits) >> 63) | 1
    moves = (np.abs(error) > 0) & ((bits & 1) == 0)
    out: Array = (bits + direction * moves).view(np.float64)
    return out


def f64_to_f32(x: Array, mode: str) -> Array:
    """Round a float64 (exact or rounded to odd) to float32; `mode` is `rn`, `rz`, `rm` or `rp`."""
    nearest = x.astype(np.float32)
    if mode == "rn":
        return nearest
    back = nearest.astype(np.float64)
    if mode == "rz":
        wrong = np.abs(back) > np.abs(x)
    elif mode == "rm":
        wrong = back > x
    elif mode == "rp":
        wrong = back < x
    else:
        raise ValueError(mode)
    bits = nearest.view(np.int32)
    if mode == "rz":
        return (bits - wrong).view(np.float32)
    # One step down (rm) or up (rp); the sign bit says which way that is in magnitude. A nearest result of
    # zero steps to the smallest subnormal of the wanted sign, which keeps x's own sign: zero came from a
    # value of that sign.
    direction = (bits >> np.int32(31)) | np.int32(1)  # a step towards +infinity, in bits
    if mode == "rm":
        direction = -direction
    return (bits + direction * wrong).view(np.float32)


def quantise(x: Array, fmt: Format, mode: str) -> Array:
    """Round float64 `x` to the precision of `fmt` without an upper limit on the exponent; the result is a
    float64.

    `mode` is `rn`, `rz`, `rm`, `rp` or `rna`. NaN and infinities pass through.
    """
    exponent = (x.view(np.uint64) >> np.uint64(52)) & _EXPONENT_MASK
    low = np.uint64(fmt.min_exponent + 1023)
    quantum_exponent = np.maximum(exponent, low) - np.uint64(fmt.precision - 1)
    quantum = (quantum_exponent << np.uint64(52)).view(np.float64)
    # The quotient is exact: both are powers of two apart and x's exponent is far from float64's limits.
    y = x / quantum
    if mode == "rn":
        rounded = np.rint(y)
    elif mode == "rz":
        rounded = np.trunc(y)
    elif mode == "rm":
        rounded = np.floor(y)
    elif mode == "rp":
        rounded = np.ceil(y)
    elif mode == "rna":
        rounded = np.trunc(y)
        rounded = rounded + np.copysign(np.abs(y - rounded) >= 0.5, y)
    else:
        raise ValueError(mode)
    result = rounded * quantum
    return np.where(np.isfinite(x), result, x)


def encode(value: Array, fmt: Format) -> Array:
    """Return the uint32 codes of float64 values that `fmt` can represent exactly (finite; zeros keep their
    sign)."""
    # Scaling by this power of two makes float64's exponent field that of fmt, subnormals included.
    scaled = np.abs(value) * 2.0 ** (fmt.bias - 1023)
    code = (scaled.view(np.uint64) >> np.uint64(53 - fmt.precision)).astype(np.uint32)
    return code | (np.signbit(value).astype(np.uint32) << np.uint32(fmt.bits - 1))


def narrow(x: Array, fmt: Format, mode: str, *, satfinite: bool = False) -> Array:
    """Round float64 `x` (exact or rounded to odd) to `fmt` and return uint32 codes.

    Overflow gives infinity or the largest finite value as the mode says; with `satfinite`, or in a format
    without infinities, the largest finite value of the same sign. NaN gives the format's NaN, in formats
    without one the largest positive value (PTX ISA 9.7.9.21, `.satfinite`).
    """
    value = quantise(x, fmt, mode)
    magnitude = np.abs(value)
    over = magnitude > fmt.largest
    nan = np.isnan(x)
    code = encode(np.where(over | nan, np.copysign(fmt.largest, value), value), fmt)
    if fmt.infinity is not None and not satfinite and over.any():
        infinite = np.isinf(x)
        if mode == "rz":
            to_infinity = infinite
        elif mode == "rm":
            to_infinity = infinite | (value < 0)
        elif mode == "rp":
            to_infinity = infinite | (value > 0)
        else:
            to_infinity = over
        sign = code & np.uint32(fmt.sign)
        code = np.where(over & to_infinity, sign | np.uint32(fmt.infinity), code)
    if nan.any():
        code = np.where(nan, np.uint32(fmt.nan if fmt.nan is not None else encode_largest(fmt)), code)
    return code


def encode_largest(fmt: Format) -> int:
    """Return the code of the largest finite value."""
    return int(encode(np.array([fmt.largest]), fmt)[0])


def decode_table(fmt: Format) -> Array:
    """Return the float32 values of all codes of a format of at most 16 bits (index: code)."""
    codes = np.arange(1 << fmt.bits, dtype=np.uint64)
    magnitude = codes & np.uint64(fmt.sign - 1)
    value = (magnitude << np.uint64(53 - fmt.precision)).view(np.float64) * 2.0 ** (1023 - fmt.bias)
    if fmt.infinity is not None:
        value[magnitude == np.uint64(fmt.infinity)] = np.inf
        value[magnitude > np.uint64(fmt.infinity)] = np.nan
    elif fmt.nan is not None:
        value[magnitude == np.uint64(fmt.nan)] = np.nan
    value = np.where(codes & np.uint64(fmt.sign), -value, value)
    result: Array = value.astype(np.float32)
    result.view(np.uint32)[np.isnan(result)] = 0x7FFFFFFF
    return result
