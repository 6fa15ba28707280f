"""The expected results of an instruction form, from its text alone."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import oracle_integer
import oracle_softfloat as soft
from oracle_operands import PACKED, width
from oracle_softfloat import FMT

MODES = ("rn", "rz", "rm", "rp", "rna", "rs", "rni", "rzi", "rmi", "rpi")
TYPE = re.compile(r"(b|s|u|f|bf|tf)\d+(x\d)?|pred|ue8m0x2|e\dm\dx\d")


class NoOracleError(Exception):
    """The form has no oracle: write one."""


def parse(text):
    """Return opcode, flags and types of a form."""
    name = text.partition(" ")[0]
    opcode, *parts = name.split(".")
    types = [p for p in parts if TYPE.fullmatch(p)]
    flags = [p for p in parts if not TYPE.fullmatch(p)]
    if opcode == "cvt" and flags[:1] == ["pack"]:
        opcode, flags = "cvt.pack", flags[1:]
    return opcode, flags, types


def mode_of(flags, default="rn"):
    return next((f for f in flags if f in MODES), default)


def is_float(t):
    return t.startswith(("f", "bf"))


def expected(form, operands, immediate=None):
    """Return the tuple of result codes for tuples of operand codes."""
    opcode, flags, types = parse(form.text)
    float_types = [t for t in types if is_float(t)]
    if opcode == "cvt":
        import oracle_convert

        return oracle_convert.expected(flags, types, operands)
    if opcode == "cvt.pack":
        return (pack_integers(types, operands),)
    if opcode in ("set", "setp"):
        import oracle_compare

        return oracle_compare.expected(opcode, flags, types, operands, len(form.result_types))
    if opcode == "selp":
        a, b, c = operands
        return (np.where(c, a, b),)
    if opcode == "slct":
        return (slct(flags, types, operands),)
    if opcode == "testp":
        return (testp(flags, types[0], operands[0]),)
    if opcode == "lop3":
        return lop3(flags, operands, immediate)
    if opcode in ("and", "or", "xor", "not") and types == ["pred"]:
        x = [o.astype(int) for o in operands]
        value = {"and": lambda: x[0] * x[1], "or": lambda: x[0] + x[1], "xor": lambda: x[0] + x[1] == 1}
        return ((value[opcode]() if opcode != "not" else x[0] == 0).astype(bool),)
    if float_types:
        return (float_arithmetic(opcode, flags, types, operands),)
    if types[-1] in PACKED:
        return (packed_integer(opcode, flags, types[-1], operands),)
    if opcode == "prmt" and immediate is not None:
        operands = (*operands, np.full(operands[0].shape, immediate, np.uint32))
        function = oracle_integer.lane_function(opcode, flags, types)
        return oracle_integer.run(function, operands, ("b32", "b32", "b32"), ("b32",))
    function = oracle_integer.lane_function(opcode, flags, types)
    return oracle_integer.run(function, operands, form.operand_types, form.result_types)


def lop3(flags, operands, immediate):
    a, b, c = (o.tolist() for o in operands[:3])
    d = np.array(
        [oracle_integer.lop3(x, y, z, immediate) for x, y, z in zip(a, b, c, strict=True)], np.uint32
    )
    if "or" in flags:
        return d, (d != 0) | operands[3]
    if "and" in flags:
        return d, (d != 0) & operands[3]
    return (d,)


def packed_integer(opcode, flags, t, operands):
    base = PACKED[t][0]
    function = oracle_integer.lane_function(opcode, flags, [base])
    halves = []
    for shift in (0, 16):
        lanes = [(o >> np.uint32(shift)).astype(np.uint16) for o in operands]
        (half,) = oracle_integer.run(function, lanes, [base] * len(lanes), [base])
        halves.append(half.astype(np.uint32))
    return halves[0] | (halves[1] << np.uint32(16))


def pack_integers(types, operands):
    kind = types[0]
    size = int(kind[1:])
    low, high = (0, (1 << size) - 1) if kind[0] == "u" else (-(1 << (size - 1)), (1 << (size - 1)) - 1)
    a, b, *c = (
        oracle_integer.python_values(o, t) for o, t in zip(operands, ("s32", "s32", "b32"), strict=False)
    )
    mask = (1 << size) - 1
    words = [
        (oracle_integer.clamp(x, low, high) & mask) << size | (oracle_integer.clamp(y, low, high) & mask)
        for x, y in zip(a, b, strict=True)
    ]
    if c:
        words = [(w | (z << (2 * size))) & 0xFFFFFFFF for w, z in zip(words, c[0], strict=True)]
    return np.array(words, np.uint32)


def is_nan(code, fmt):
    f = FMT[fmt]
    kind = code.dtype.type
    return (code & kind(f.sign - 1)) > kind(f.inf)


def slct(flags, types, operands):
    a, b, c = operands
    if types[1] == "s32":
        return np.where(c.view(np.int32) >= 0, a, b)
    if "ftz" in flags:
        c = soft.flush(c)
    negative = (c >> np.uint32(31) != 0) & (c != np.uint32(0x80000000))
    return np.where(negative | is_nan(c, "f32"), b, a)


def testp(flags, t, code):
    f = FMT[t]
    kind = code.dtype.type
    magnitude = code & kind(f.sign - 1)
    normal = (magnitude >= kind(1 << (f.p - 1))) & (magnitude < kind(f.inf)) | (magnitude == 0)
    return {
        "finite": magnitude < kind(f.inf),
        "infinite": magnitude == kind(f.inf),
        "number": magnitude <= kind(f.inf),
        "notanumber": magnitude > kind(f.inf),
        "normal": normal,
        "subnormal": ~normal & (magnitude < kind(f.inf)),
    }[flags[0]]


def float_arithmetic(opcode, flags, types, operands):
    """Codes of the result of an exact f32, f64, f16 or bf16 instruction."""
    t = types[0]
    if t in PACKED:
        base, bits = PACKED[t]
        dtype = np.dtype(f"uint{bits}")
        parts = []
        for shift in (0, bits):
            lanes = tuple((o >> o.dtype.type(shift)).astype(dtype) for o in operands)
            parts.append(scalar(opcode, flags, [base] * len(lanes), base, lanes))
        wide = operands[0].dtype
        return parts[0].astype(wide) | (parts[1].astype(wide) << wide.type(bits))
    sources = [t] * len(operands)
    if len(types) == 2:  # mixed precision: f32 result, the last operand f32
        sources = [types[1]] * (len(operands) - 1) + ["f32"]
    return scalar(opcode, flags, sources, t, operands)


def scalar(opcode, flags, sources, t, operands):
    dtype = np.dtype(f"uint{FMT[t].width}")
    ftz = "ftz" in flags
    if ftz:
        operands = tuple(soft.flush(o, s) for o, s in zip(operands, sources, strict=True))
    if opcode in ("min", "max"):
        code = extreme(opcode, flags, t, operands)
    elif opcode in ("abs", "neg", "copysign"):
        code = signs(opcode, t, operands)
    else:
        mode = mode_of(flags)
        if "f64" in sources:
            value = arithmetic64(opcode, operands, mode)
        else:
            value = arithmetic(
                opcode, [soft.decode(o, s) for o, s in zip(operands, sources, strict=True)], mode
            )
        code = soft.pack(value, t, mode)
    code = code.astype(dtype)
    if ftz:
        code = soft.flush(code, t)
    return finish(code, t, flags)


def finish(code, t, flags):
    """Apply .sat and .relu."""
    f = FMT[t]
    kind = code.dtype.type
    nan = is_nan(code, t)
    negative = code & kind(f.sign) != 0
    if "sat" in flags:
        one = kind((-(f.low + f.p - 2)) << (f.p - 1))
        code = np.where(negative | nan, kind(0), np.minimum(code, one))
    if "relu" in flags:
        code = np.where(negative & ~nan, kind(0), code)
    return code


def arithmetic(opcode, x, mode):
    if opcode == "add":
        return soft.add(x[0], x[1], mode)
    if opcode == "sub":
        return soft.add(x[0], soft.negate(x[1]), mode)
    if opcode == "mul":
        return soft.multiply(x[0], x[1])
    if opcode in ("fma", "mad"):
        return soft.add(soft.multiply(x[0], x[1]), x[2], mode)
    if opcode == "div":
        return soft.divide(x[0], x[1])
    if opcode == "rcp":
        return soft.divide(soft.decode(np.full(x[0].m.shape, 0x3F800000, np.uint32), "f32"), x[0])
    if opcode == "sqrt":
        return soft.root(x[0])
    raise NoOracleError(opcode)


def arithmetic64(opcode, operands, mode):
    """float64 arithmetic in Python integers."""
    x = [soft.decode(o, "f64") for o in operands]
    if opcode == "sub":
        x[1], opcode = soft.negate(x[1]), "add"
    if opcode == "rcp":
        x = [soft.decode(np.full(x[0].m.shape, 0x3FF0000000000000, np.uint64), "f64"), x[0]]
        opcode = "div"
    if opcode in ("add", "fma", "mad"):
        if opcode == "add":
            one = soft.decode(np.full(x[0].m.shape, 0x3FF0000000000000, np.uint64), "f64")
            a, b, c = x[0], one, x[1]
        else:
            a, b, c = x
        return sum64(a, b, c, mode)
    if opcode == "mul":
        return product64(*x)
    if opcode == "div":
        return quotient64(*x)
    if opcode == "sqrt":
        return root64(x[0])
    raise NoOracleError(opcode)


def _zero(x):
    return (x.m == 0) & ~x.inf & ~x.nan


def product64(x, y):
    nan = x.nan | y.nan | (x.inf & _zero(y)) | (y.inf & _zero(x))
    numbers = [a * b for a, b in zip(x.m.tolist(), y.m.tolist(), strict=True)]
    return soft.from_python(x.sign ^ y.sign, numbers, (x.e + y.e).tolist(), nan, (x.inf | y.inf) & ~nan)


def sum64(x, y, z, mode):
    infinite = x.inf | y.inf
    sign = x.sign ^ y.sign
    nan = (
        x.nan
        | y.nan
        | z.nan
        | (x.inf & _zero(y))
        | (y.inf & _zero(x))
        | (infinite & z.inf & (sign != z.sign))
    )
    numbers, exponents, signs = [], [], []
    columns = (sign, x.m, y.m, x.e + y.e, z.sign, z.m, z.e)
    for s, mx, my, e, sz, mz, ez in zip(*(c.tolist() for c in columns), strict=True):
        low = min(e, ez)
        product = mx * my << (e - low)
        addend = mz << (ez - low)
        total = (-product if s else product) + (-addend if sz else addend)
        numbers.append(abs(total))
        exponents.append(low)
        signs.append(total < 0 if total else (s if s == sz else mode == "rm"))
    inf = (infinite | z.inf) & ~nan
    signs = np.where(infinite, sign, np.where(z.inf, z.sign, np.array(signs)))
    return soft.from_python(signs, numbers, exponents, nan, inf)


def quotient64(x, y):
    nan = x.nan | y.nan | (x.inf & y.inf) | (_zero(x) & _zero(y))
    numbers = []
    for a, b, infinite in zip(x.m.tolist(), y.m.tolist(), y.inf.tolist(), strict=True):
        if b == 0 or infinite:
            numbers.append(0)
            continue
        q, r = divmod(a << 120, b)
        numbers.append(2 * q + (r != 0))
    return soft.from_python(
        x.sign ^ y.sign, numbers, (x.e - y.e - 121).tolist(), nan, (x.inf | _zero(y)) & ~nan
    )


def root64(x):
    from math import isqrt

    nan = x.nan | (x.sign & ~_zero(x))
    numbers, exponents = [], []
    for m, e in zip(x.m.tolist(), x.e.tolist(), strict=True):
        shift = 120 + (e & 1)
        r = isqrt(m << shift)
        numbers.append(2 * r + (r * r != m << shift))
        exponents.append((e - shift) // 2 - 1)
    return soft.from_python(x.sign, numbers, exponents, nan, x.inf & ~nan)


def order(code, f):
    """Signed integers that order like the values, -0 below +0."""
    kind = code.dtype.type
    magnitude = (code & kind(f.sign - 1)).astype(np.int64)
    return np.where(code & kind(f.sign), -1 - magnitude, magnitude)


def extreme(opcode, flags, t, operands):
    f = FMT[t]
    kind = operands[0].dtype.type
    xorsign = "xorsign" in flags
    sign = (operands[0] ^ operands[1]) & kind(f.sign)
    if "abs" in flags:
        operands = tuple(o & kind(f.sign - 1) for o in operands)
    d = operands[0]
    for other in operands[1:]:
        a_nan, b_nan = is_nan(d, t), is_nan(other, t)
        first = order(d, f) < order(other, f) if opcode == "min" else order(d, f) > order(other, f)
        picked = np.where(first, d, other)
        picked = np.where(a_nan, other, np.where(b_nan, d, picked))
        drop = (a_nan | b_nan) if "NaN" in flags else (a_nan & b_nan)
        d = np.where(drop, kind(f.nan), picked)
    if xorsign:
        d = np.where(is_nan(d, t), d, (d & kind(f.sign - 1)) | sign)
    return np.where(is_nan(d, t), kind(f.nan), d)


def signs(opcode, t, operands):
    f = FMT[t]
    kind = operands[0].dtype.type
    if opcode == "copysign":
        a, b = operands
        return (a & kind(f.sign)) | (b & kind(f.sign - 1))
    code = operands[0]
    code = code & kind(f.sign - 1) if opcode == "abs" else code ^ kind(f.sign)
    return np.where(is_nan(code, t), kind(f.nan), code)


@cache
def storage(t):
    return np.dtype(f"uint{max(8, width(t))}")
