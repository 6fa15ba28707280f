"""The expected results of `set` and `setp`, by comparing integers that order like the operands."""

from __future__ import annotations

import numpy as np
import oracle_softfloat as soft
from oracle_softfloat import FMT

TRUE = {"u16": 0xFFFF, "s16": 0xFFFF, "u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f32": 0x3F800000}
TRUE |= {"f16": 0x3C00, "bf16": 0x3F80}
_cache = {}


def relations(t, ftz, a, b):
    """Return (less, equal, unordered); remembered, since hundreds of forms ask for the same operands."""
    key = (t, ftz, id(a), id(b))
    if key not in _cache:
        if len(_cache) > 40:
            _cache.clear()
        _cache[key] = (_relations(t, ftz, a, b), a, b)
    return _cache[key][0]


def _relations(t, ftz, a, b):
    if t.startswith(("f", "bf")):
        f = FMT[t]
        kind = a.dtype.type
        if ftz:
            a, b = soft.flush(a, t), soft.flush(b, t)
        magnitudes = [x & kind(f.sign - 1) for x in (a, b)]
        unordered = (magnitudes[0] > kind(f.inf)) | (magnitudes[1] > kind(f.inf))
        # Both zeros become 0; negative numbers count down from there.
        x, y = (
            np.where(v & kind(f.sign), -m.astype(np.int64), m.astype(np.int64))
            for v, m in zip((a, b), magnitudes, strict=True)
        )
        return x < y, x == y, unordered
    if t.startswith("s"):
        flip = a.dtype.type(1 << (8 * a.dtype.itemsize - 1))
        a, b = a ^ flip, b ^ flip
    return a < b, a == b, np.zeros(a.shape, bool)


def holds(operator, less, equal, unordered):
    operator = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(operator, operator)
    if operator == "num":
        return ~unordered
    if operator == "nan":
        return unordered
    base = operator[:2]
    greater = ~less & ~equal
    plain = {
        "eq": equal,
        "ne": less | greater,
        "lt": less,
        "le": less | equal,
        "gt": greater,
        "ge": greater | equal,
    }[base]
    return np.where(unordered, operator.endswith("u"), plain)


def join(flags, value, c):
    if "and" in flags:
        return value & c
    if "or" in flags:
        return value | c
    if "xor" in flags:
        return value ^ c
    return value


_halves = {}


def halves(word):
    if id(word) not in _halves:
        if len(_halves) > 20:
            _halves.clear()
        low, high = (word & np.uint32(0xFFFF)).astype(np.uint16), (word >> np.uint32(16)).astype(np.uint16)
        _halves[id(word)] = (low, high, word)
    return _halves[id(word)][:2]


def expected(opcode, flags, types, operands, results):
    operator, *rest = flags
    ftz = "ftz" in rest
    t = types[-1]
    a, b, *c = operands
    c = c[0] if c else None
    if t in ("f16x2", "bf16x2"):
        base = t[:-2]
        (a_low, a_high), (b_low, b_high) = halves(a), halves(b)
        low = holds(operator, *relations(base, ftz, a_low, b_low))
        high = holds(operator, *relations(base, ftz, a_high, b_high))
        low, high = join(rest, low, c), join(rest, high, c)
        if opcode == "setp":
            return low, high
        true = TRUE[base] if types[0] == t else 0xFFFF
        return (
            np.where(low, np.uint32(true), np.uint32(0))
            | np.where(high, np.uint32(true << 16), np.uint32(0)),
        )
    value = holds(operator, *relations(t, ftz, a, b))
    if opcode == "setp":
        return (join(rest, value, c), join(rest, ~value, c))[:results]
    dtype = np.dtype("uint16" if types[0] in ("u16", "s16", "f16", "bf16") else "uint32")
    return (np.where(join(rest, value, c), dtype.type(TRUE[types[0]]), dtype.type(0)),)
