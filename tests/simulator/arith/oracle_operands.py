"""Operands for the oracle comparison: random bit patterns and the places where arithmetic goes wrong."""

from __future__ import annotations

from functools import cache

import numpy as np
from oracle_softfloat import FMT

N = 100_800
"""Lanes of every comparison."""
WIDTH = {"pred": 1, "f32x2": 64, "ue8m0x2": 16}
STORAGE = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
PACKED = {
    "f16x2": ("f16", 16),
    "bf16x2": ("bf16", 16),
    "u16x2": ("u16", 16),
    "s16x2": ("s16", 16),
    "f32x2": ("f32", 32),
}
FLOATS = ("f16", "bf16", "f32", "f64")


def width(t):
    if t in WIDTH:
        return WIDTH[t]
    return int("".join(c for c in t if c.isdigit()))


def _compose(fmt, sign, exponent, fraction):
    """Codes with the given unbiased exponents (clipped to the format's range) and fraction bits (left-aligned
    in 52)."""
    f = FMT[fmt]
    bias = -(f.low + f.p - 2)
    top = (f.inf >> (f.p - 1)) - 1
    field = np.clip(exponent + bias, 0, top).astype(np.uint64)
    code = (field << np.uint64(f.p - 1)) | (fraction >> np.uint64(53 - f.p))
    return code | (sign.astype(np.uint64) << np.uint64(f.width - 1))


def special_codes(fmt):
    """Zeros, subnormals, limits, infinities, NaN, numbers around one: the codes where branches are."""
    f = FMT[fmt]
    one = (-(f.low + f.p - 2)) << (f.p - 1)
    half = 1 << (f.p - 2)
    base = [
        0, 1, 2, 3, (1 << (f.p - 1)) - 1, 1 << (f.p - 1), (1 << (f.p - 1)) + 1, f.top, f.top - 1, f.inf,
        f.inf + 1, f.inf | half, f.nan, one, one + 1, one - 1, one + half, one - half,
        one + (1 << (f.p - 1)), one + (2 << (f.p - 1)), one - (1 << (f.p - 1)),
    ]  # fmt: skip
    return np.array(base + [b | f.sign for b in base], np.uint64)


def floats(fmt, count, operands, rng):
    """Return `operands` arrays of codes (uint64) of a floating-point format, correlated where that
    matters."""
    f = FMT[fmt]
    blocks = 13
    size = count // blocks
    out = [np.empty(count, np.uint64) for _ in range(operands)]

    def put(block, arrays):
        for target, a in zip(out, arrays, strict=True):
            target[block * size : (block + 1) * size if block < blocks - 1 else count] = a

    last = count - (blocks - 1) * size
    for block in range(blocks):
        n = size if block < blocks - 1 else last

        def bits(high, n=n):
            return rng.integers(0, high, n, np.uint64)

        def any_bits(n=n):
            return (
                rng.integers(0, 1 << f.width, n, np.uint64, endpoint=False)
                if f.width < 64
                else rng.integers(0, 1 << 64, n, np.uint64, endpoint=False)
            )

        def sign(n=n):
            return rng.integers(0, 2, n).astype(bool)

        def few_bits(n=n):
            """Fractions of one to thirteen bits."""
            return (
                rng.integers(0, 1 << 52, n, np.uint64)
                & (~np.uint64(0) << (52 - rng.integers(0, min(f.p, 14), n)).astype(np.uint64))
                & np.uint64((1 << 52) - 1)
            )

        bias = -(f.low + f.p - 2)
        if block in (0, 1):
            arrays = [any_bits() for _ in range(operands)]
        elif block == 2:
            s = special_codes(fmt)
            arrays = [s[rng.integers(0, len(s), n)] for _ in range(operands)]
        elif block == 3:
            s = special_codes(fmt)
            arrays = [any_bits() for _ in range(operands)]
            which = rng.integers(0, operands, n)
            for i in range(operands):
                arrays[i] = np.where(which == i, s[rng.integers(0, len(s), n)], arrays[i])
        elif block == 4:  # moderate exponents, full fractions
            arrays = [
                _compose(fmt, sign(), rng.integers(-4, 5, n), rng.integers(0, 1 << 52, n, np.uint64))
                for _ in range(operands)
            ]
        elif block == 5:  # near each other anywhere in the range
            base = rng.integers(-bias, bias, n)
            spread = rng.integers(-f.p - 4, f.p + 5, (operands, n))
            arrays = [
                _compose(fmt, sign(), base + spread[i], rng.integers(0, 1 << 52, n, np.uint64))
                for i in range(operands)
            ]
        elif block == 6:  # few bits: products and sums that fall halfway
            arrays = [_compose(fmt, sign(), rng.integers(-3, 4, n), few_bits()) for _ in range(operands)]
            if operands == 3:  # with an addend far below, to either side of the tie
                tiny = _compose(fmt, sign(), rng.integers(-3 * f.p, -f.p, n), few_bits())
                arrays[2] = np.where(rng.integers(0, 4, n) > 0, tiny, arrays[2])
        elif block == 7:  # few bits, any exponents
            arrays = [
                _compose(fmt, sign(), rng.integers(-bias, bias, n), few_bits()) for _ in range(operands)
            ]
        elif block == 8:  # products at the edge of the subnormal range
            split = rng.integers(-bias // 2 - 8, 8 - bias // 2, n)
            low = -bias + rng.integers(-f.p - 2, 4, n)
            exponents = [split, low - split, low + rng.integers(-6, 7, n)]
            arrays = [
                _compose(
                    fmt,
                    sign(),
                    exponents[i % 3],
                    few_bits() if i % 2 else rng.integers(0, 1 << 52, n, np.uint64),
                )
                for i in range(operands)
            ]
        elif block == 9:  # cancellation: the last operand is minus the first, give or take some places
            arrays = [any_bits() for _ in range(operands)]
            if operands == 3:
                one = _compose(fmt, sign(), rng.integers(-1, 2, n), few_bits())
                arrays = [arrays[0] & ~np.uint64((1 << (f.p // 2)) - 1), one, arrays[0]]
            delta = rng.integers(-3, 4, n).astype(np.uint64)
            arrays[-1] = ((arrays[0] ^ np.uint64(f.sign)) + delta) & np.uint64((1 << f.width) - 1)
        elif block == 10:  # small integers, halves and quarters
            arrays = []
            for _ in range(operands):
                value = rng.integers(1, 1 << min(f.p, 20), n).astype(np.uint64)
                length = np.floor(np.log2(value.astype(np.float64))).astype(np.int64)
                fraction = (value << (52 - length).astype(np.uint64)) & np.uint64((1 << 52) - 1)
                arrays.append(_compose(fmt, sign(), length - rng.integers(0, 3, n), fraction))
        elif block == 12 and operands == 3:
            # The product is half a unit of the addend's last place, give or take very little: rounding in two
            # steps falls for it. The addend may be subnormal.
            exponent = rng.integers(-bias - f.p, 40, n)
            last = np.maximum(exponent, 1 - bias) - f.p  # exponent of half the last place
            split = np.clip(rng.integers(-20, 21, n), last - bias, last + bias - 1)
            near_one = [
                np.where(rng.integers(0, 3, n) == 0, np.uint64(0), _one_bit(n, f.p, rng)) for _ in range(2)
            ]
            below = rng.integers(0, 2, n).astype(
                bool
            )  # 2 - ulp at half the exponent instead of 1 + something
            near_one[1] = np.where(below, ~near_one[1] & np.uint64((1 << 52) - 1), near_one[1])
            arrays = [
                _compose(fmt, sign(), split, near_one[0]),
                _compose(fmt, sign(), last - split - below, near_one[1]),
                _compose(fmt, sign(), exponent, rng.integers(0, 1 << 52, n, np.uint64)),
            ]
            small = exponent < 1 - bias
            fraction = rng.integers(0, 1 << (f.p - 1), n, np.uint64)
            arrays[2] = np.where(small, (arrays[2] & np.uint64(f.sign)) | fraction, arrays[2])
        else:  # the limits of integer types and of narrower formats, and midpoints between narrower values
            arrays = [_edges(fmt, n, rng) for _ in range(operands)]
        put(block, arrays)
    return out


def _one_bit(n, p, rng):
    """Fractions (of 52 bits) with one bit set, among the first p - 1."""
    return np.uint64(1) << (52 - rng.integers(1, p, n)).astype(np.uint64)


def _edges(fmt, n, rng):
    """Midpoints of narrower formats and integer limits, one step to either side included."""
    f = FMT[fmt]
    half = n // 2
    exponent = rng.choice([-1, 0, 4, 7, 8, 15, 16, 31, 32, 62, 63, 64], half)
    fraction = np.where(rng.integers(0, 2, half), np.uint64((1 << 52) - 1), np.uint64(0))
    sign = rng.integers(0, 2, half).astype(bool)
    limits = _compose(fmt, sign, exponent, fraction)
    rest = n - half
    kept = rng.integers(1, f.p, rest)  # bits of the narrower significand
    scale = rng.choice([0, 3, 8, 14, 15, 16, -1, -3, -6, -14, -20, -24, 126, 127, -126, -130, -140], rest)
    fraction = rng.integers(0, 1 << 52, rest, np.uint64) & (~np.uint64(0) << (52 - kept).astype(np.uint64))
    fraction = (fraction | (np.uint64(1) << (51 - kept).astype(np.uint64))) & np.uint64((1 << 52) - 1)
    middles = _compose(fmt, rng.integers(0, 2, rest).astype(bool), scale, fraction)
    both = np.concatenate([limits, middles])
    both = both + rng.integers(-1, 2, n).astype(np.uint64)
    return both & np.uint64((1 << f.width) - 1)


def integers(w, count, operands, rng):
    """Return arrays of codes (uint64) of a width."""
    mask = np.uint64((1 << w) - 1)
    edges = [0, 1, 2, 3, (1 << w) - 1, (1 << w) - 2, 1 << (w - 1), (1 << (w - 1)) - 1, (1 << (w - 1)) + 1]
    for k in range(w):
        edges += [1 << k, (1 << k) - 1, (1 << k) + 1, (1 << w) - (1 << k)]
    pool = np.array(edges, np.uint64) & mask
    out = []
    for i in range(operands):
        random = rng.integers(0, 1 << 64, count, np.uint64, endpoint=False) & mask
        short = random >> rng.integers(0, w, count).astype(np.uint64)
        small = rng.integers(0, 80, count).astype(np.uint64) & mask
        kind = rng.integers(0, 6, count)
        picked = np.where(kind == 0, pool[rng.integers(0, len(pool), count)], random)
        picked = np.where(kind == 1, short, picked)
        picked = np.where(kind == 2, small, picked)
        picked = np.where(kind == 3, mask - short, picked)
        if i > 0:
            picked = np.where(rng.integers(0, 16, count) == 0, out[0], picked)
        out.append(picked & mask)
    return out


def _base(t):
    return PACKED[t][0] if t in PACKED else t


@cache
def codes(types, seed=0):
    """Return one array of codes (the storage dtype of each type) per operand type, N lanes each.

    Operands of the same floating-point type are drawn together. A single operand of at most 16 bits, and each
    half of a single pack, takes every code at least once.
    """
    rng = np.random.default_rng([seed, *[ord(c) for c in "".join(types)]])
    result = [None] * len(types)
    for t in dict.fromkeys(types):
        places = [i for i, x in enumerate(types) if x == t]
        base = _base(t)
        w = width(base)

        def draw(base=base, w=w, places=places):
            if base in FLOATS:
                return floats(base, N, len(places), rng)
            if base == "pred":
                return [rng.integers(0, 2, N).astype(np.uint64) for _ in places]
            return integers(w, N, len(places), rng)

        arrays = draw()
        if w <= 16 and len(places) == 1:
            arrays[0][: 1 << w] = rng.permutation(1 << w)
        if t in PACKED:
            high = draw()
            if w <= 16 and len(places) == 1:
                high[0][: 1 << w] = rng.permutation(1 << w)
            arrays = [a | (b << np.uint64(w)) for a, b in zip(arrays, high, strict=True)]
            w *= 2
        for place, a in zip(places, arrays, strict=True):
            if t == "pred":
                result[place] = a.astype(bool)
            else:
                result[place] = a.astype(STORAGE[max(8, w if w in STORAGE else 32)])
    return tuple(result)
