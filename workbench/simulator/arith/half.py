"""f16 and bf16 arithmetic on raw bits, each result rounded once (PTX ISA 9.7.4); element functions only.

Operands and results are uint16 codes. Sums and products go through float32, whose 24 bits are enough for a
second rounding to do no harm (24 >= 2 * 11 + 2); fused operations go through exact or round-to-odd float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workbench.simulator.arith import fp32
from workbench.simulator.arith.rounding import BF16, F16, narrow, odd_sum, pick
from workbench.simulator.arith.semantics import Array

_NAN = np.uint16(0x7FFF)
_SIGN = np.uint16(0x8000)
_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = {"f16": np.uint16(0x7C00), "bf16": np.uint16(0x7F80)}
_ONE = {"f16": np.uint16(0x3C00), "bf16": np.uint16(0x3F80)}
_SIGN_AND_28_BITS = np.int32(-0x70000001)
_F16_MIN_NORMAL = np.float32(2.0**-14)
_BIAS_GAP = np.float32(2.0 ** (127 - 15))
_F16_INFINITY = np.float32(2.0**16)
FORMATS = {"f16": F16, "bf16": BF16}


def f16_to_f32(x: Array) -> Array:
    """Exact.

    With its exponent and fraction shifted into place an f16 is a float32 whose exponent is short of the right
    one by the difference of the biases, subnormals included: one multiplication mends it. Twice as fast as
    NumPy's conversion.
    """
    bits = x.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= _SIGN_AND_28_BITS
    value: Array = bits.view(np.float32)
    value *= _BIAS_GAP
    if value.max() >= _F16_INFINITY or value.min() <= -_F16_INFINITY:
        return x.view(np.float16).astype(np.float32)
    return value


def bf16_to_f32(x: Array) -> Array:
    """Exact."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_f16(x: Array) -> Array:
    """Round to nearest even; NaN gives 0x7fff."""
    bits: Array = x.astype(np.float16).view(np.uint16)
    return canonicalise(bits, "f16")


def f32_to_bf16(x: Array) -> Array:
    """Round to nearest even; NaN gives 0x7fff."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    nan = np.isnan(x)
    if nan.any():
        rounded = np.where(nan, np.uint32(_NAN), rounded)
    return rounded.astype(np.uint16)


def widen(x: Array, kind: str) -> Array:
    """Return float32 values of f16 or bf16 bits."""
    return f16_to_f32(x) if kind == "f16" else bf16_to_f32(x)


def is_nan(x: Array, kind: str) -> Array:
    """Tell which codes are NaN."""
    return (x & _MAGNITUDE) > _INFINITY[kind]


def canonicalise(x: Array, kind: str) -> Array:
    """Replace NaN codes by 0x7fff; the array itself if there are none."""
    nan = is_nan(x, kind)
    return np.where(nan, _NAN, x) if nan.any() else x


def flush(x: Array, kind: str = "f16") -> Array:
    """Replace subnormals by zero of the same sign."""
    smallest = np.uint16(0x0400 if kind == "f16" else 0x0080)
    return np.where((x & _MAGNITUDE) < smallest, x & _SIGN, x)


def clamp_infinity(x: Array, kind: str) -> Array:
    """Replace infinities by the largest finite number of the same sign."""
    return np.where((x & _MAGNITUDE) == _INFINITY[kind], x - np.uint16(1), x)


def saturate(x: Array, kind: str) -> Array:
    """Clamp to [0, 1]; NaN and -0 give +0."""
    clamped = np.minimum(x, _ONE[kind])  # bits of non-negative numbers order like the numbers
    return np.where(((x & _SIGN) != 0) | is_nan(x, kind), np.uint16(0), clamped)


def negate(x: Array) -> Array:
    """Flip the sign bit."""
    return x ^ _SIGN


def absolute(x: Array) -> Array:
    """Clear the sign bit."""
    return x & _MAGNITUDE


def relu(x: Array, kind: str) -> Array:
    """Replace negative numbers, -0 among them, by +0; NaN, which must be canonical, stays."""
    return np.where((x & _SIGN) != 0, np.uint16(0), x)


def _through_f32(operation: Callable[..., Array]) -> Callable[[Array, Array], Array]:
    def function(a: Array, b: Array) -> Array:
        return f32_to_f16(operation(f16_to_f32(a), f16_to_f32(b)))

    return function


add_f16 = _through_f32(np.add)
sub_f16 = _through_f32(np.subtract)
mul_f16 = _through_f32(np.multiply)


def add_bf16(a: Array, b: Array) -> Array:
    """bf16 `a + b`; float32 sums of subnormals are exact, so one path through float32 does."""
    return f32_to_bf16(bf16_to_f32(a) + bf16_to_f32(b))


def sub_bf16(a: Array, b: Array) -> Array:
    """bf16 `a - b`."""
    return f32_to_bf16(bf16_to_f32(a) - bf16_to_f32(b))


def mul_bf16(a: Array, b: Array) -> Array:
    """bf16 `a * b`.

    The product has 16 bits. Where the last of them lies below float32's last place, 2**-149, the first is at
    most 2**-135, and half of bf16's smallest number is 2**-134: float32's rounding cannot cross a midpoint.
    """
    return f32_to_bf16(bf16_to_f32(a) * bf16_to_f32(b))


def fma_rz(a: Array, b: Array, c: Array, kind: str) -> Array:
    """f16 or bf16 `a * b + c`, rounded towards zero."""
    x, y, z = (widen(v, kind).astype(np.float64) for v in (a, b, c))
    return narrow(odd_sum(x * y, z), FORMATS[kind], "rz").astype(np.uint16)


def fma(a: Array, b: Array, c: Array, kind: str) -> Array:
    """f16 or bf16 `a * b + c`, rounded once to nearest.

    The float32 result is rounded once and serves unless it lies halfway between two 16-bit numbers, where its
    own rounding may have put it, or among f16's subnormals, which have their midpoints elsewhere: those lanes
    are rounded to odd from the exact product.
    """
    x, y, z = widen(a, kind), widen(b, kind), widen(c, kind)
    single = fp32.fma_rn_narrow(x, y, z)
    bits = single.view(np.uint32)
    if kind == "f16":
        result = f32_to_f16(single)
        doubtful = (bits & np.uint32(0x1FFF)) == np.uint32(0x1000)
        small = np.abs(single) < _F16_MIN_NORMAL
        if small.any():
            doubtful |= small & (single != 0)
    else:
        result = f32_to_bf16(single)
        doubtful = (bits & np.uint32(0xFFFF)) == np.uint32(0x8000)
    if doubtful.any():
        index, lanes = pick(doubtful, x, y, z)
        p, q, r = (v.astype(np.float64) for v in lanes)
        result.flat[index] = narrow(odd_sum(p * q, r), FORMATS[kind], "rn").astype(np.uint16)
    return result


def minimum(a: Array, b: Array, kind: str, *, nan: bool = False) -> Array:
    """Smaller of two; NaN as in `fp32.minimum`, canonical."""
    return _select(a, b, kind, nan, smaller=True)


def maximum(a: Array, b: Array, kind: str, *, nan: bool = False) -> Array:
    """Larger of two; NaN as in `fp32.maximum`, canonical."""
    return _select(a, b, kind, nan, smaller=False)


def _order(x: Array) -> Array:
    """Map bits to int16 that order like the numbers, -0 below +0."""
    signed = x.view(np.int16)
    return signed ^ ((signed >> np.int16(15)) & np.int16(0x7FFF))


def _select(a: Array, b: Array, kind: str, nan: bool, *, smaller: bool) -> Array:
    x, y = _order(a), _order(b)
    picked = np.where(x < y if smaller else x > y, a, b)
    a_nan, b_nan = is_nan(a, kind), is_nan(b, kind)
    if not (a_nan.any() or b_nan.any()):
        return picked
    if nan:
        return np.where(a_nan | b_nan, _NAN, picked)
    picked = np.where(a_nan, b, np.where(b_nan, a, picked))
    return np.where(a_nan & b_nan, _NAN, picked)


def ex2(x: Array, kind: str) -> Array:
    """2 to the power x; bf16 flushes subnormals (.ftz is part of the instruction)."""
    value = np.exp2(widen(x, kind))
    return f32_to_f16(value) if kind == "f16" else flush(f32_to_bf16(value), kind)


def tanh(x: Array, kind: str) -> Array:
    """Hyperbolic tangent."""
    value = np.tanh(widen(x, kind))
    return f32_to_f16(value) if kind == "f16" else f32_to_bf16(value)
