"""Bounds for the approximate instructions: float64 (or integer) truth and the error that the ISA allows."""

from __future__ import annotations

import numpy as np
import oracle_softfloat as soft
from oracle_softfloat import FMT


def value(code, fmt):
    """float64 values of codes."""
    if fmt == "f64":
        return code.view(np.float64)
    if fmt == "f32":
        return code.view(np.float32).astype(np.float64)
    if fmt == "f16":
        return code.view(np.float16).astype(np.float64)
    return (code.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


TRUTH = {
    "rcp": lambda a: 1.0 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "ex2": np.exp2,
    "tanh": np.tanh,
    "div": lambda a, b: a / b,
}
SMALLEST = {"f32": 2.0**-149, "f16": 2.0**-24, "bf16": 2.0**-133, "f64": 0.0}
NORMAL = {"f32": 2.0**-126, "f16": 2.0**-14, "bf16": 2.0**-126, "f64": 2.0**-1022}


def allowed(opcode, flags, fmt, operands, got):
    """Return a mask of the lanes whose result the ISA allows."""
    ftz = "ftz" in flags
    if ftz:
        operands = [soft.flush(o, fmt) for o in operands]
    x = [value(o, fmt) for o in operands]
    coarse = fmt == "f64" and ftz
    if coarse:
        high = np.uint64(0xFFFFFFFF00000000)
        x = [(o & high).view(np.float64) for o in operands]
    truth = TRUTH[opcode](*x)
    result = value(got, fmt)
    both_nan = np.isnan(truth) & np.isnan(result)
    bound = error_bound(opcode, flags, fmt, x, truth)
    top = float(value(np.array([FMT[fmt].top], got.dtype), fmt)[0])
    with np.errstate(all="ignore"):
        close = np.abs(result - truth) <= bound
    same = (result == truth) & (np.signbit(result) == np.signbit(truth))
    # A true value that rounds to infinity, within the bound, may come out as either.
    over = (
        (np.abs(truth) + bound >= top) & (np.abs(result) >= top) & (np.signbit(result) == np.signbit(truth))
    )
    zero_sign = (result != 0) | (np.abs(truth) > 0) | (np.signbit(result) == np.signbit(truth))
    ok = both_nan | same | (close & np.isfinite(truth) & zero_sign) | over
    if ftz:
        flushed = (np.abs(truth) <= NORMAL[fmt] * 1.001) & (result == 0)
        ok = (ok | flushed) & ((result == 0) | (np.abs(result) >= NORMAL[fmt]) | np.isnan(result))
    if opcode == "div" and "approx" in flags:
        ok = _div_approx(x, result, ok)
    if opcode in ("sin", "cos"):
        far = np.abs(x[0]) > 100 * np.pi
        ok = np.where(far & np.isfinite(x[0]), np.abs(result) <= 1, ok)
    if coarse:
        ok &= got & np.uint64(0xFFFFFFFF) == 0
        ok &= ~np.isnan(result) | (got == np.uint64(0x7FFFFFFF00000000))
    return ok


def _div_approx(x, result, ok):
    a, b = np.abs(x[0]), np.abs(x[1])
    huge = (b > 2.0**126) & (b < 2.0**128)
    sign = np.signbit(x[0]) ^ np.signbit(x[1])
    rule = np.where(np.isinf(a) | np.isnan(a), np.isnan(result), (result == 0) & (np.signbit(result) == sign))
    # For subnormal divisors the ISA states no bound: only NaN must come from NaN.
    tiny = (b < 2.0**-126) & (b > 0)
    return np.where(huge, rule, ok | (tiny & (np.isnan(result) == np.isnan(x[0]))))


def ulp(truth, fmt):
    f = FMT[fmt]
    with np.errstate(all="ignore"):
        _, e = np.frexp(truth)
    return np.ldexp(1.0, np.maximum(e.astype(np.int64) - f.p, f.low))


def error_bound(opcode, flags, fmt, x, truth):
    size = np.abs(truth)
    if fmt == "f64":
        return size * (2.0**-19 if "ftz" in flags else 2.0**-51)
    if fmt in ("f16", "bf16"):
        relative = {"f16": 2.0**-9.9, "bf16": 2.0**-7}[fmt]
        if opcode == "ex2":
            # A subnormal result cannot be closer than half its spacing.
            return size * relative + SMALLEST[fmt] / 2
        return np.full(size.shape, {"f16": 2.0**-10.987, "bf16": 2.0**-8}[fmt])
    units = {"rcp": 1, "ex2": 2, "div": 2}
    if opcode in units:
        # "ulp from the correctly rounded result": half a unit more from the true one.
        return (units[opcode] + 0.5) * ulp(truth, fmt)
    if opcode in ("sin", "cos"):
        near = np.abs(x[0]) <= 2 * np.pi
        return np.where(near, 2.0**-20.5, 2.0**-14.7)
    if opcode == "lg2":
        inner = (x[0] > 0.5) & (x[0] < 2)
        return np.where(inner, 2.0**-22, size * 2.0**-22)
    return size * {"sqrt": 2.0**-23, "rsqrt": 2.0**-22.9, "tanh": 2.0**-11}[opcode]
