"""Conversions between integers and floating-point values (PTX ISA 9.7.9.21 `cvt`), element functions only.

f16 and bf16 values are uint16 codes, f32 and f64 arrays of floats, integers arrays of their own dtype.
"""

from __future__ import annotations

import numpy as np

from workbench.simulator.arith import fp64, half
from workbench.simulator.arith.rounding import (
    BF16,
    F16,
    f64_to_f32,
    flush_f32,
    narrow,
    odd_sum,
    quantise,
)
from workbench.simulator.arith.semantics import Array

INTEGER_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FORMATS = {"f16": F16, "bf16": BF16}


def int_to_int(x: Array, to: str, *, sat: bool = False) -> Array:
    """Keep the low bits (extended by the sign of the source type), or clamp to the range of `to`."""
    if sat:
        limits = np.iinfo(to)
        own = np.iinfo(x.dtype)
        x = np.clip(x, max(limits.min, own.min), min(limits.max, own.max))
    return x.astype(to)


def _halves(x: Array) -> tuple[Array, Array]:
    """Return float64 (high, low) whose exact sum is the integer."""
    if x.dtype.itemsize < 8:
        value = x.astype(np.float64)
        return value, np.zeros((1, 1))
    shift, mask = x.dtype.type(32), x.dtype.type(0xFFFFFFFF)
    return (x >> shift).astype(np.float64) * 2.0**32, (x & mask).astype(np.float64)


def int_to_float(x: Array, to: str, mode: str) -> Array:
    """Round an integer to `to` (f16, bf16, f32, f64)."""
    if mode == "rn" and to in ("f32", "f64"):
        return x.astype(np.float32 if to == "f32" else np.float64)
    high, low = _halves(x)
    if to == "f64":
        return fp64.add(high, low, mode) if x.dtype.itemsize == 8 else high
    exact = odd_sum(high, low) if x.dtype.itemsize == 8 else high
    if to == "f32":
        return f64_to_f32(exact, mode)
    return narrow(exact, _FORMATS[to], mode).astype(np.uint16)


def float_to_int(x: Array, to: str, mode: str) -> Array:
    """Round a float32 or float64 to an integral value and clamp it to the integer type `to`.

    NaN gives 0, but 1 << (width - 1) when the source is float64 or the destination has 64 bits (ISA, Integer
    Notes).
    """
    rounded = INTEGER_ROUNDING[mode](x)
    limits = np.iinfo(to)
    # Both bounds as Python numbers: exact, and false for NaN.
    if float(rounded.min()) >= limits.min and float(rounded.max()) <= limits.max:
        return rounded.astype(to)
    nan = np.isnan(x)
    high = float(limits.max)  # 64 bits: rounds up to the power of two
    if limits.bits < 64:
        wide = rounded.astype(np.float64)
        inside = np.clip(np.where(nan, 0.0, wide), float(limits.min), high)
        result = inside.astype(np.int64).astype(to)
    else:
        low = float(limits.min)
        result = np.where((rounded >= low) & (rounded < high), rounded, 0).astype(to)
        result = np.where(rounded >= high, result.dtype.type(limits.max), result)
        result = np.where(rounded < low, result.dtype.type(limits.min), result)
    if nan.any():
        wide_rule = x.dtype == np.float64 or limits.bits == 64
        pattern = limits.min if limits.min else 1 << (limits.bits - 1)
        result = np.where(nan, result.dtype.type(pattern if wide_rule else 0), result)
    return result


def half_to_int(x: Array, kind: str, to: str, mode: str) -> Array:
    """`float_to_int` from f16 or bf16 codes."""
    return float_to_int(half.widen(x, kind), to, mode)


def round_integral(x: Array, mode: str) -> Array:
    """Round float32 or float64 to an integral value of the same type."""
    return INTEGER_ROUNDING[mode](x)


def round_integral_half(x: Array, kind: str, mode: str) -> Array:
    """Round f16 or bf16 codes to integral values, which are always representable."""
    value = INTEGER_ROUNDING[mode](half.widen(x, kind))
    return half.f32_to_f16(value) if kind == "f16" else half.f32_to_bf16(value)


def f64_to_half(x: Array, kind: str, mode: str, *, satfinite: bool = False) -> Array:
    """Round float64 to f16 or bf16 codes."""
    return narrow(x, _FORMATS[kind], mode, satfinite=satfinite).astype(np.uint16)


def f32_to_half(x: Array, kind: str, mode: str, *, satfinite: bool = False) -> Array:
    """Round float32 to f16 or bf16 codes."""
    if mode == "rn":
        code = half.f32_to_f16(x) if kind == "f16" else half.f32_to_bf16(x)
        if satfinite:
            code = half.clamp_infinity(code, kind)
        return code
    if kind == "bf16" and mode == "rz":
        # Truncation never overflows, so .satfinite only concerns infinities.
        bits = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        nan = np.isnan(x)
        if nan.any():
            bits = np.where(nan, np.uint16(0x7FFF), bits)
        return half.clamp_infinity(bits, kind) if satfinite else bits
    return f64_to_half(x.astype(np.float64), kind, mode, satfinite=satfinite)


def f32_to_tf32(x: Array, mode: str, *, satfinite: bool = False, relu: bool = False) -> Array:
    """Round float32 to TF32, as uint32 bits of a float32 whose 13 low bits are zero; NaN gives 0x7fffffff.

    TF32 has float32's exponents, so the bits themselves can be rounded; a carry runs into the exponent, up to
    infinity.
    """
    bits = x.view(np.uint32)
    kept = ~np.uint32(0x1FFF)
    if mode == "rn":
        rounded = (bits + (np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1)))) & kept
    elif mode == "rna":
        rounded = (bits + np.uint32(0x1000)) & kept
    else:
        rounded = bits & kept
    if satfinite:
        infinite = (rounded & np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)
        rounded = np.where(infinite, rounded - np.uint32(0x2000), rounded)
    if relu:
        rounded = np.where((bits >> np.uint32(31)) != 0, np.uint32(0), rounded)
    nan = np.isnan(x)
    return np.where(nan, np.uint32(0x7FFFFFFF), rounded) if nan.any() else rounded


def f32_stochastic(x: Array, random: Array, kind: str, *, satfinite: bool = False) -> Array:
    """Round float32 to f16 or bf16 stochastically.

    `random` (uint32, 13 bits for f16, 16 for bf16) is added to as many bits below the last kept one; the
    magnitude goes up where that carries.
    """
    fmt = _FORMATS[kind]
    bits = 13 if kind == "f16" else 16
    value = x.astype(np.float64)
    down = quantise(value, fmt, "rz")
    # One step of the format at this value, from the distance to the next one up.
    exponent = (value.view(np.uint64) >> np.uint64(52)) & np.uint64(0x7FF)
    low = np.uint64(fmt.min_exponent + 1023)
    step = ((np.maximum(exponent, low) - np.uint64(fmt.precision - 1)) << np.uint64(52)).view(np.float64)
    rest = np.abs(value - down) / step * 2.0**bits
    carry = np.floor(rest) + random.astype(np.float64) >= 2.0**bits
    stepped = np.where(carry, down + np.copysign(step, value), down)
    code = narrow(np.where(np.isfinite(value), stepped, value), fmt, "rn", satfinite=satfinite)
    return code.astype(np.uint16)


def flush_if(x: Array, ftz: bool) -> Array:
    """Flush float32 subnormals when asked to."""
    return flush_f32(x) if ftz else x


def pack_saturated(a: Array, b: Array, to_bits: int, signed: bool) -> Array:
    """Clamp two int32 to `to_bits` bits and pack them, b low; bits above are zero."""
    low, high = (-(1 << (to_bits - 1)), (1 << (to_bits - 1)) - 1) if signed else (0, (1 << to_bits) - 1)
    mask = np.uint32((1 << to_bits) - 1)
    x = np.clip(a, low, high).view(np.uint32) & mask
    y = np.clip(b, low, high).view(np.uint32) & mask
    return (x << np.uint32(to_bits)) | y
