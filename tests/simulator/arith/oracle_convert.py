"""The expected results of `cvt`."""

from __future__ import annotations

import numpy as np
import oracle_softfloat as soft
from oracle_forms import NoOracleError, finish, is_nan, mode_of
from oracle_softfloat import FMT, U

INTEGRAL = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
MINIFLOATS = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2")


def is_integer(t):
    return t[0] in "us" and "x" not in t


def expected(flags, types, operands):
    to, source = types
    if "x2" in to or "x2" in source:
        return (packs(flags, to, source, operands),)
    (code,) = operands
    if is_integer(to) and is_integer(source):
        return (integers(flags, to, source, code),)
    if is_integer(source):
        value = soft.integer(
            code.view(np.int64 if source == "s64" else _signed(source)) if source[0] == "s" else code
        )
        result = soft.pack(value, to, mode_of(flags)).astype(f"uint{FMT[to].width}")
        return (finish(result, to, flags),)
    if source == "f32" and "ftz" in flags:
        code = soft.flush(code)
    if is_integer(to):
        return (float_to_integer(flags, to, source, code),)
    return (floats(flags, to, source, code),)


def _signed(t):
    return np.dtype(f"int{t[1:]}")


def _values(code, t):
    return code.view(_signed(t)).tolist() if t[0] == "s" else code.tolist()


def _limits(t):
    w = int(t[1:])
    return (0, (1 << w) - 1) if t[0] == "u" else (-(1 << (w - 1)), (1 << (w - 1)) - 1)


def integers(flags, to, source, code):
    w = int(to[1:])
    low, high = _limits(to)
    values = _values(code, source)
    if "sat" in flags:
        values = [min(max(v, low), high) for v in values]
    return np.array([v & ((1 << w) - 1) for v in values], f"uint{w}")


def to_integral(x, mode):
    """Round a decoded value to an integer: (sign, magnitude as uint64 below 2**62 or a flag that it is
    larger)."""
    length = soft.bit_length(x.m)
    large = length + x.e > 62
    shift = np.clip(-x.e, 0, 63)
    kept = np.where(x.e < 0, x.m >> shift.astype(U), x.m << np.clip(np.where(large, 0, x.e), 0, 63).astype(U))
    rest = np.where(x.e < 0, x.m - (kept << shift.astype(U)), U(0))
    half = (U(1) << shift.astype(U)) >> U(1)
    up = {
        "rn": (rest > half) | ((rest == half) & (rest != 0) & (kept & U(1) != 0)),
        "rz": np.zeros(rest.shape, bool),
        "rm": (rest != 0) & x.sign,
        "rp": (rest != 0) & ~x.sign,
    }[mode]
    return kept + up, large


def float_to_integer(flags, to, source, code):
    x = soft.decode(code, source)
    magnitude, large = to_integral(x, INTEGRAL[mode_of(flags)])
    w = int(to[1:])
    low, high = _limits(to)
    result = []
    indefinite = 1 << (w - 1) if source == "f64" or w == 64 else 0
    columns = (x.sign, magnitude, large, x.m, x.e, x.nan, x.inf)
    for s, n, big, m, e, nan, inf in zip(*(c.tolist() for c in columns), strict=True):
        if nan:
            result.append(indefinite)
            continue
        if inf:
            n = 1 << 200
        elif big:
            n = m << e if e >= 0 else m >> -e
        value = min(max(-n if s else n, low), high)
        result.append(value & ((1 << w) - 1))
    return np.array(result, f"uint{w}")


def floats(flags, to, source, code):
    mode = mode_of(flags, default=None)
    x = soft.decode(code, source)
    dtype = f"uint{max(FMT[to].width, 32 if to == 'tf32' else 16)}"
    if mode in INTEGRAL:
        magnitude, large = to_integral(x, INTEGRAL[mode])
        whole = soft.Num(x.sign, np.where(large, x.m, magnitude), np.where(large, x.e, 0), x.nan, x.inf)
        result = soft.pack(whole, to)
    else:
        result = soft.pack(x, to, mode or "rn", satfinite="satfinite" in flags)
    if to == "tf32":
        nan = result > U(0x3FC00)
        nan &= x.nan
        result = result.astype(np.uint32)
        if "relu" in flags:
            result = np.where((result >> np.uint32(18) != 0) & ~x.nan, np.uint32(0), result)
        return np.where(x.nan, np.uint32(0x7FFFFFFF), result << np.uint32(13))
    result = result.astype(dtype)
    if "ftz" in flags and to == "f32":
        result = soft.flush(result)
    return finish(result, to, flags)


def halves16(word):
    return (word >> np.uint32(16)).astype(np.uint16), (word & np.uint32(0xFFFF)).astype(np.uint16)


def packs(flags, to, source, operands):
    if to == "ue8m0x2":
        return to_scales(flags, source, operands)
    if source == "ue8m0x2":
        high, low = operands[0] >> np.uint16(8), operands[0] & np.uint16(0xFF)
        return (scale_to_bf16(high) << np.uint32(16)) | scale_to_bf16(low)
    if to in MINIFLOATS:
        fmt = to[:-2]
        if source == "f32":
            pairs = operands
            kind = "f32"
        else:
            pairs, kind = halves16(operands[0]), source[:-2]
        high, low = (minifloat(flags, fmt, kind, p) for p in pairs)
        bits = 4 if fmt == "e2m1" else 8
        return ((high << U(bits)) | low).astype(np.uint8 if bits == 4 else np.uint16)
    if source in MINIFLOATS:
        return from_minifloats(flags, to[:-2], source[:-2], operands)
    kind = to[:-2]
    mode = mode_of(flags)
    random = [None, None]
    bits = 13 if kind == "f16" else 16
    if mode == "rs":
        r = operands[2]
        mask = np.uint32((1 << bits) - 1)
        random = [(r >> np.uint32(16)) & mask, r & mask]
    results = []
    for code, rnd in zip(operands[:2], random, strict=True):
        x = soft.decode(code, "f32")
        value = soft.pack(x, kind, mode, satfinite="satfinite" in flags, random=rnd, random_bits=bits)
        results.append(finish(value.astype(np.uint16), kind, flags).astype(np.uint32))
    return (results[0] << np.uint32(16)) | results[1]


def minifloat(flags, fmt, kind, code):
    f = FMT[fmt]
    x = soft.decode(code, kind)
    result = soft.pack(x, fmt, "rn", satfinite=True)
    if "relu" in flags:
        result = np.where((result & U(f.sign) != 0) & ~x.nan, U(0), result)
    return result


def from_minifloats(flags, kind, fmt, operands):
    f = FMT[fmt]
    word = operands[0].astype(U)
    bits = 4 if fmt == "e2m1" else 8
    mask = U((1 << f.width) - 1)
    lanes = ((word >> U(bits)) & mask, word & mask)
    scales = [None, None]
    if "scaled::n2::ue8m0" in flags:
        scales = [operands[1] >> np.uint16(8), operands[1] & np.uint16(0xFF)]
    results = []
    for code, scale in zip(lanes, scales, strict=True):
        x = soft.decode(code, fmt)
        if scale is not None:
            s = scale.astype(np.int64)
            nan = x.nan | (s == 255)
            x = soft.Num(x.sign, x.m, x.e + s - 127, nan, x.inf & ~nan)
        value = soft.pack(x, kind, "rn", satfinite="satfinite" in flags).astype(np.uint16)
        results.append(finish(value, kind, flags).astype(np.uint32))
    return (results[0] << np.uint32(16)) | results[1]


def to_scales(flags, source, operands):
    if source == "f32":
        pairs, kind = operands, "f32"
    elif source == "bf16x2":
        pairs, kind = halves16(operands[0]), "bf16"
    else:
        raise NoOracleError(source)
    codes = []
    for code in pairs:
        x = soft.decode(code, kind)
        # The magnitude lies in [2**k, 2**(k + 1)) with k below; codes are exponents plus 127.
        k = soft.bit_length(x.m) - 1 + x.e
        exact = x.m & (x.m - U(1)) == 0
        up = ~exact if "rp" in flags else np.zeros(exact.shape, bool)
        scale = np.maximum(np.where(x.m == 0, -127, k + up), -127) + 127
        scale = np.where((k < -127), 0, scale)
        top = 254 if "satfinite" in flags else 255
        scale = np.where(x.inf, top, np.minimum(scale, top))
        codes.append(np.where(x.nan, 255, scale).astype(np.uint16))
    return (codes[0] << np.uint16(8)) | codes[1]


def scale_to_bf16(scale):
    s = scale.astype(np.int64)
    # 2**-127 is subnormal in bf16: half of the smallest normal number.
    return np.where(s == 255, 0x7FFF, np.where(s == 0, 0x40, s << 7)).astype(np.uint32)


NAN_CODES = is_nan
