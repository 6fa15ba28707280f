"""What integer instructions do, one lane at a time in Python integers, written from the ISA's pseudo-code."""

from __future__ import annotations

import numpy as np
from oracle_operands import width

TWO_HALVES = ("u16x2", "s16x2")


def signed(value, w):
    value &= (1 << w) - 1
    return value - (1 << w) if value >> (w - 1) else value


def clamp(value, low, high):
    return min(max(value, low), high)


def quotient(a, b):
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def div(a, b):
    return -1 if b == 0 else quotient(a, b)


def rem(a, b):
    return a if b == 0 else a - b * quotient(a, b)


def wrap24(a, is_signed):
    return signed(a, 24) if is_signed else a & 0xFFFFFF


def bfe(a, b, c, w, is_signed):
    pos, length = b & 0xFF, c & 0xFF
    a &= (1 << w) - 1
    msb = w - 1
    sbit = (a >> min(pos + length - 1, msb)) & 1 if is_signed and length else 0
    d = (a >> pos) & ((1 << min(length, w)) - 1)
    if sbit:
        present = max(min(length, w - pos), 0)
        d |= ((1 << w) - 1) >> present << present
    return d


def bfi(a, b, c, d, w):
    pos, length = c & 0xFF, d & 0xFF
    count = max(min(length, w - pos), 0)
    mask = ((1 << count) - 1) << pos
    return b & ~mask | (a << pos) & mask


def bfind(a, w, is_signed, shiftamt):
    if is_signed and a < 0:
        a = ~a
    a &= (1 << w) - 1
    if a == 0:
        return 0xFFFFFFFF
    d = a.bit_length() - 1
    return w - 1 - d if shiftamt else d


def fns(mask, base, offset):
    if offset == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    pos, count, inc = base, abs(offset) - 1, 1 if offset > 0 else -1
    while 0 <= pos < 32:
        if mask >> pos & 1:
            if count == 0:
                return pos
            count -= 1
        pos += inc
    return 0xFFFFFFFF


def bmsk(a, b, clamped):
    a1, b1 = a & 31, b & 31
    ones = 0xFFFFFFFF
    mask0 = ones << a1 & ones
    total = a1 + b1
    position_overflow = width_overflow = False
    if clamped:
        if a >= 32:
            position_overflow, mask0 = True, 0
        if b >= 32:
            width_overflow = True
    if total >= 32 or position_overflow or width_overflow:
        mask1 = 0
    elif b1 == 0:
        mask1 = ones
    else:
        mask1 = ones << total & ones
    return mask0 & ~mask1


def szext(a, b, is_signed, clamped):
    b1 = b & 31
    too_large = b >= 32 and clamped
    mask = 0 if too_large else 0xFFFFFFFF << b1 & 0xFFFFFFFF
    sign_bit = 0 if b1 == 0 or too_large or not is_signed else a >> ((b1 - 1) & 31) & 1
    return (a & ~mask & 0xFFFFFFFF) | (mask if sign_bit else 0)


def prmt(a, b, c):
    source = (b << 32) | a
    d = 0
    for i in range(4):
        control = c >> (4 * i) & 15
        byte = source >> (8 * (control & 7)) & 0xFF
        if control & 8:
            byte = 0xFF if byte & 0x80 else 0
        d |= byte << (8 * i)
    return d


# Table rows of the ISA read from d.b3 to d.b0, one a selector.
PRMT = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def fields(word, bits, count, is_signed):
    raw = [word >> (bits * i) & ((1 << bits) - 1) for i in range(count)]
    return [signed(v, bits) for v in raw] if is_signed else raw


def dp4a(a, b, c, sa, sb):
    return c + sum(x * y for x, y in zip(fields(a, 8, 4, sa), fields(b, 8, 4, sb), strict=True))


def dp2a(a, b, c, sa, sb, high):
    x, y = fields(a, 16, 2, sa), fields(b, 8, 4, sb)
    first = 2 if high else 0
    return c + x[0] * y[first] + x[1] * y[first + 1]


def shf(a, b, c, left, clamped):
    n = min(c, 32) if clamped else c & 31
    both = (b << 32) | a
    return (both << n >> 32) & 0xFFFFFFFF if left else (both >> n) & 0xFFFFFFFF


def lop3(a, b, c, table):
    d = 0
    for i in range(8):
        if table >> i & 1:
            d |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return d & 0xFFFFFFFF


def lane_function(opcode, flags, types):
    """Return a function of Python integers (already extended by the sign of their type) that gives the
    result(s)."""
    t = types[-1]
    w = width(t)
    s = t.startswith("s")
    low, high = (-(1 << (w - 1)), (1 << (w - 1)) - 1) if s else (0, (1 << w) - 1)
    mask = (1 << w) - 1
    flags = set(flags)
    if "cc" in flags or opcode in ("addc", "subc", "madc"):
        return carry_function(opcode, flags, w)
    product = {"lo": lambda x: x & mask, "hi": lambda x: x >> w, "wide": lambda x: x}
    part = next((product[k] for k in product if k in flags), None)
    if opcode in ("mul24", "mad24"):
        shift = 16 if "hi" in flags else 0

        def p24(a, b):
            v = wrap24(a, s) * wrap24(b, s) >> shift & 0xFFFFFFFF
            return signed(v, 32) if s else v

        if opcode == "mul24":
            return p24
        if "sat" in flags:
            return lambda a, b, c: clamp(p24(a, b) + c, low, high)
        return lambda a, b, c: p24(a, b) + c
    if opcode == "mul":
        return lambda a, b: part(a * b)
    if opcode == "mad":
        if "sat" in flags:
            return lambda a, b, c: clamp(part(a * b) + c, low, high)
        return lambda a, b, c: part(a * b) + c
    if opcode in ("dp4a", "dp2a"):
        sa, sb = types[0] == "s32", types[1] == "s32"
        if opcode == "dp4a":
            return lambda a, b, c: dp4a(a, b, c, sa, sb)
        return lambda a, b, c: dp2a(a, b, c, sa, sb, "hi" in flags)
    if opcode in ("min", "max"):
        pick = min if opcode == "min" else max
        if "relu" in flags:
            return lambda a, b: max(pick(a, b), 0)
        return pick
    if opcode == "prmt":
        mode = next((m for m in PRMT if m in flags), None)
        if mode is None:
            return prmt
        rows = [int(r, 16) for r in PRMT[mode]]
        return lambda a, b, c: prmt(a, b, rows[c & 3])
    if opcode == "shf":
        return lambda a, b, c: shf(a, b, c, "l" in flags, "clamp" in flags)
    simple = {
        "add": (lambda a, b: clamp(a + b, low, high)) if "sat" in flags else (lambda a, b: a + b),
        "sub": (lambda a, b: clamp(a - b, low, high)) if "sat" in flags else (lambda a, b: a - b),
        "div": div,
        "rem": rem,
        "abs": abs,
        "neg": lambda a: -a,
        "sad": lambda a, b, c: c + abs(a - b),
        "popc": lambda a: bin(a).count("1"),
        "clz": lambda a: w - a.bit_length(),
        "brev": lambda a: int(f"{a:0{w}b}"[::-1], 2),
        "bfind": lambda a: bfind(a, w, s, "shiftamt" in flags),
        "bfe": lambda a, b, c: bfe(a, b, c, w, s),
        "bfi": lambda a, b, c, d: bfi(a, b, c, d, w),
        "fns": fns,
        "bmsk": lambda a, b: bmsk(a, b, "clamp" in flags),
        "szext": lambda a, b: szext(a & 0xFFFFFFFF, b, s, "clamp" in flags),
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "not": lambda a: ~a,
        "cnot": lambda a: int(a == 0),
        "shl": lambda a, b: a << min(b, w),
        "shr": lambda a, b: a >> min(b, w),
    }
    return simple[opcode]


def carry_function(opcode, flags, w):
    mask = (1 << w) - 1
    out = "cc" in flags

    def both(total, difference=False):
        carry = total < 0 if difference else total > mask
        return (total & mask, carry) if out else total & mask

    def part(a, b):
        return (a * b >> w if "hi" in flags else a * b) & mask

    return {
        "add": lambda a, b: both((a & mask) + (b & mask)),
        "addc": lambda a, b, k: both((a & mask) + (b & mask) + k),
        "sub": lambda a, b: both((a & mask) - (b & mask), True),
        "subc": lambda a, b, k: both((a & mask) - (b & mask) - k, True),
        "mad": lambda a, b, c: both(part(a, b) + (c & mask)),
        "madc": lambda a, b, c, k: both(part(a, b) + (c & mask) + k),
    }[opcode]


def python_values(codes, t):
    """Lists of Python integers of a type."""
    if t == "pred":
        return codes.astype(int).tolist()
    if t.startswith("s") and "x" not in t:
        return codes.view(f"int{8 * codes.dtype.itemsize}").tolist()
    return codes.tolist()


def run(function, operands, operand_types, result_types):
    """Apply a lane function; returns arrays of codes."""
    columns = [python_values(c, t) for c, t in zip(operands, operand_types, strict=True)]
    rows = list(map(function, *columns))
    if len(result_types) == 1:
        rows = [(r,) for r in rows]
    results = []
    for values, t in zip(zip(*rows, strict=True), result_types, strict=True):
        if t == "pred":
            results.append(np.array(values, bool))
        else:
            w = width(t) if "x2" not in t else 32
            mask = (1 << w) - 1
            results.append(np.array([v & mask for v in values], f"uint{max(w, 8)}"))
    return tuple(results)
