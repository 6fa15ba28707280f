"""An exact floating-point machine in unsigned integers, to compare the simulator's arithmetic with.

It shares nothing with the code under test: no floating-point instruction is executed here. A finite value is
(-1)**sign * m * 2**e with m < 2**62 in uint64, the last bit of m being "sticky" (set if anything below was
lost), which one rounding to at most 53 bits cannot tell from the exact value. Larger intermediates are Python
integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

U = np.uint64


@dataclass(frozen=True)
class Fmt:
    """Width, significand bits with the hidden one, exponent of the last place of subnormals, special
    codes."""

    width: int
    p: int
    low: int
    top: int
    """Largest finite code."""
    inf: int | None
    nan: int | None

    @property
    def sign(self):
        return 1 << (self.width - 1)


FMT = {
    "f64": Fmt(64, 53, -1074, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF),
    "f32": Fmt(32, 24, -149, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF),
    "tf32": Fmt(19, 11, -136, 0x3FBFF, 0x3FC00, 0x3FFFF),
    "f16": Fmt(16, 11, -24, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": Fmt(16, 8, -133, 0x7F7F, 0x7F80, 0x7FFF),
    "e4m3": Fmt(8, 4, -9, 0x7E, None, 0x7F),
    "e5m2": Fmt(8, 3, -16, 0x7B, 0x7C, 0x7F),
    "e2m3": Fmt(6, 4, -3, 0x1F, None, None),
    "e3m2": Fmt(6, 3, -4, 0x1F, None, None),
    "e2m1": Fmt(4, 2, -1, 0x7, None, None),
}


@dataclass
class Num:
    """Arrays: sign (bool), m (uint64), e (int64), and masks of NaN and infinite lanes."""

    sign: np.ndarray
    m: np.ndarray
    e: np.ndarray
    nan: np.ndarray
    inf: np.ndarray

    def take(self, mask):
        return Num(self.sign[mask], self.m[mask], self.e[mask], self.nan[mask], self.inf[mask])


def bit_length(m):
    n = np.zeros(m.shape, np.int64)
    m = m.copy()
    for step in (32, 16, 8, 4, 2, 1):
        big = m >> U(step) != 0
        n += step * big
        m = np.where(big, m >> U(step), m)
    return n + (m != 0)


def decode(bits, fmt):
    f = FMT[fmt]
    bits = bits.astype(U)
    mag = bits & U(f.sign - 1)
    field = (mag >> U(f.p - 1)).astype(np.int64)
    fraction = mag & U((1 << (f.p - 1)) - 1)
    m = np.where(field > 0, fraction | U(1 << (f.p - 1)), fraction)
    e = np.maximum(field, 1) - 1 + f.low
    if f.inf is not None:
        nan, inf = mag > U(f.inf), mag == U(f.inf)
    else:
        nan = mag == U(f.nan) if f.nan is not None else np.zeros(mag.shape, bool)
        inf = np.zeros(mag.shape, bool)
    return Num(bits & U(f.sign) != 0, m, e, nan, inf)


def flush(bits, fmt="f32"):
    """Subnormal codes to zeros of the same sign."""
    f = FMT[fmt]
    kind = bits.dtype.type
    small = (bits & kind(f.sign - 1)) < kind(1 << (f.p - 1))
    return np.where(small, bits & kind(f.sign), bits)


def shift_jam(m, n):
    """m >> n with everything lost or-ed into the last bit; n is any non-negative int64."""
    n = np.minimum(n, 63)
    kept = m >> n.astype(U)
    lost = m != kept << n.astype(U)
    return kept | lost.astype(U)


def normalise(x, top=61):
    """Shift left so that the highest bit of every nonzero m is bit `top`."""
    n = np.where(x.m == 0, 0, top + 1 - bit_length(x.m))
    left = np.maximum(n, 0)
    right = np.maximum(-n, 0)
    m = np.where(n >= 0, x.m << left.astype(U), shift_jam(x.m, right))
    return Num(x.sign, m, x.e - n, x.nan, x.inf)


def multiply(x, y):
    """Exact for significands of at most 62 bits together."""
    zero_x, zero_y = (x.m == 0) & ~x.inf & ~x.nan, (y.m == 0) & ~y.inf & ~y.nan
    nan = x.nan | y.nan | (x.inf & zero_y) | (y.inf & zero_x)
    return Num(x.sign ^ y.sign, x.m * y.m, x.e + y.e, nan, (x.inf | y.inf) & ~nan)


def negate(x):
    return Num(~x.sign, x.m, x.e, x.nan, x.inf)


def add(x, y, mode="rn"):
    """Sum with a sticky last bit; `mode` decides the sign of an exact zero."""
    nan = x.nan | y.nan | (x.inf & y.inf & (x.sign != y.sign))
    inf = (x.inf | y.inf) & ~nan
    a, b = normalise(x, 60), normalise(y, 60)
    # Zeros take part with the other's exponent.
    ae = np.where(a.m == 0, b.e, a.e)
    be = np.where(b.m == 0, ae, b.e)
    swap = be > ae
    hi_m, lo_m = np.where(swap, b.m, a.m), np.where(swap, a.m, b.m)
    hi_e, lo_e = np.where(swap, be, ae), np.where(swap, ae, be)
    hi_s, lo_s = np.where(swap, b.sign, a.sign), np.where(swap, a.sign, b.sign)
    lo_m = shift_jam(lo_m, hi_e - lo_e)
    same = hi_s == lo_s
    less = lo_m > hi_m
    difference = np.where(less, lo_m - hi_m, hi_m - lo_m)
    m = np.where(same, hi_m + lo_m, difference)
    sign = np.where(same, hi_s, np.where(less, lo_s, hi_s))
    cancelled = ~same & (m == 0)
    sign = np.where(cancelled, mode == "rm", sign)
    sign = np.where(x.inf, x.sign, np.where(y.inf, y.sign, sign))
    return Num(sign, m, hi_e, nan, inf)


def divide(x, y):
    """Quotient with a sticky last bit, for significands of at most 24 bits."""
    a, b = normalise(x, 61), normalise(y, 23)
    zero_x, zero_y = (x.m == 0) & ~x.inf & ~x.nan, (y.m == 0) & ~y.inf & ~y.nan
    nan = x.nan | y.nan | (x.inf & y.inf) | (zero_x & zero_y)
    inf = (x.inf | zero_y) & ~nan
    divisor = np.where(b.m == 0, U(1), b.m)
    q = a.m // divisor
    m = (q << U(1)) | (q * divisor != a.m)
    m = np.where(y.inf, U(0), m)
    return Num(x.sign ^ y.sign, m, a.e - b.e - 1, nan, inf)


def _isqrt(values):
    from math import isqrt

    return np.array([isqrt(v) for v in values.tolist()], U)


def root(x):
    """Square root with a sticky last bit."""
    a = normalise(x, 60)
    odd = a.e & 1
    m, e = a.m << odd.astype(U), a.e - odd
    r = _isqrt(m)
    nan = x.nan | (x.sign & ((x.m != 0) | x.inf))
    # 31 bits are not enough for float64, but are for float32 with the sticky bit.
    return Num(x.sign, (r << U(1)) | (r * r != m), e // 2 - 1, nan, x.inf & ~nan)


def from_python(sign, numerators, exponents, nan, inf):
    """Reduce big non-negative integers times 2**exponents to 62 bits and a sticky one."""
    ms, es = [], []
    for n, e in zip(numerators, exponents, strict=True):
        extra = n.bit_length() - 61
        if extra > 0:
            kept = n >> extra
            n, e = kept | (kept << extra != n), e + extra
        ms.append(n)
        es.append(e)
    return Num(np.asarray(sign), np.array(ms, U), np.array(es, np.int64), nan, inf)


def integer(values):
    """Signed or unsigned integer arrays, exactly."""
    negative = values < 0
    m = values.astype(np.int64).view(U) if values.dtype.kind == "i" else values.astype(U)
    m = np.where(negative, U(0) - m, m)
    e = np.zeros(m.shape, np.int64)
    wide = m >> U(62) != 0
    m = np.where(wide, shift_jam(m, np.full(m.shape, 2)), m)
    no = np.zeros(m.shape, bool)
    return Num(negative, m, np.where(wide, 2, e), no, no.copy())


def pack(x, fmt, mode="rn", satfinite=False, random=None, random_bits=0):
    """Round to a format and return codes (uint64). Modes: rn, rz, rm, rp, rna, and rs with `random`."""
    f = FMT[fmt]
    length = bit_length(x.m)
    q = np.maximum(length + x.e - f.p, f.low)
    shift = q - x.e
    right = np.clip(shift, 0, 63)
    left = np.clip(-shift, 0, 63)
    kept = np.where(shift >= 0, x.m >> right.astype(U), x.m << left.astype(U))
    rest = np.where(shift > 0, x.m - (kept << right.astype(U)), U(0))
    # Twice the rest against the unit; a shift of 63 stands for all longer ones, m < 2**62 then is below half.
    unit = U(1) << right.astype(U)
    above_half, tie = rest > unit >> U(1), (rest == unit >> U(1)) & (rest != 0)
    inexact = rest != 0
    if mode == "rn":
        up = above_half | (tie & (kept & U(1) != 0))
    elif mode == "rna":
        up = above_half | tie
    elif mode == "rz":
        up = np.zeros(kept.shape, bool)
    elif mode == "rm":
        up = inexact & x.sign
    elif mode == "rp":
        up = inexact & ~x.sign
    elif mode == "rs":
        # The bits just below the last kept one, `random_bits` of them, plus the random number: does it carry?
        few = shift - random_bits
        below = np.where(few >= 0, shift_right(rest, few), rest << np.clip(-few, 0, 63).astype(U))
        up = (below + random.astype(U)) >> U(random_bits) != 0
    else:
        raise ValueError(mode)
    kept = kept + up
    code = ((q - f.low).astype(U) << U(f.p - 1)) + kept
    code = np.where(kept == 0, U(0), code)
    over = code > U(f.top)
    finite_over = over & ~x.inf
    if f.inf is None or satfinite:
        code = np.where(over | x.inf, U(f.top), code)
    else:
        stays = {"rz": np.ones(over.shape, bool), "rm": ~x.sign, "rp": x.sign}.get(
            mode, np.zeros(over.shape, bool)
        )
        code = np.where(finite_over, np.where(stays, U(f.top), U(f.inf)), code)
        code = np.where(x.inf, U(f.inf), code)
    code = code | (x.sign.astype(U) * U(f.sign))
    nan = f.nan if f.nan is not None else f.top
    return np.where(x.nan, U(nan), code)


def shift_right(m, n):
    n = np.clip(n, 0, 63)
    return m >> n.astype(U)


def big(x, scale):
    """Signed Python integers x * 2**-scale (x's exponents must be at least `scale`)."""
    return [
        (-m if s else m) << (e - scale)
        for s, m, e in zip(x.sign.tolist(), x.m.tolist(), x.e.tolist(), strict=True)
    ]
