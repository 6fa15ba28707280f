"""Operands by PTX type: the places where arithmetic goes wrong, and random bits."""

from __future__ import annotations

from typing import Any

import numpy as np

WIDTH = {
    "pred": 8, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32,
    "u32": 32, "s32": 32, "f32": 32, "tf32": 32, "f16x2": 32, "bf16x2": 32, "u16x2": 32, "s16x2": 32, "b64": 64,
    "u64": 64, "s64": 64, "f64": 64, "e4m3x2": 16, "e5m2x2": 16,
}  # fmt: skip
"""Bits in memory."""
_FLOATS = {"f16": (16, 5), "bf16": (16, 8), "f32": (32, 8), "tf32": (32, 8), "f64": (64, 11)}


def operands(kind: str, position: int, count: int, within: str = "") -> Any:
    """`count` codes of a type; the same for the same arguments.

    Args:
        kind: PTX type.
        position: of the operand; tells equal types apart.
        count: how many.
        within: `zero`, `nonzero`, `angle` (-pi to pi), `lane` (0 to 31), `near` (-40 to 40), or empty for all.
    """
    codes = _all(kind, position, count)
    if within == "zero":
        return np.zeros_like(codes)
    if within == "nonzero":
        return np.where(codes == 0, codes.dtype.type(3), codes)
    if within == "lane":
        return codes & codes.dtype.type(31)
    if within in ("angle", "near"):
        rng = np.random.default_rng([position, *within.encode()])
        if within == "near":
            return rng.integers(-40, 41, count, np.int32).view(np.uint32)
        return (rng.uniform(-3.14159, 3.14159, count).astype(np.float32)).view(np.uint32)
    return codes


def _all(kind: str, position: int, count: int) -> Any:
    rng = np.random.default_rng([position, *kind.encode()])
    base = kind.removesuffix("x2")
    if kind == "pred":
        return rng.integers(0, 2, count, np.uint8)
    if base in _FLOATS:
        if kind.endswith("x2"):
            low, high = _floats(base, count, rng), _floats(base, count, rng)
            return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
        return _floats(base, count, rng)
    return _integers(WIDTH[kind], count, rng)


def _integers(bits: int, count: int, rng: Any) -> Any:
    dtype = np.dtype(f"uint{bits}")
    top = 1 << bits
    edges = np.array(
        [0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, top - 1, top - 2, top // 2, top // 2 - 1, top // 2 + 1],
        object,
    ) % top  # fmt: skip
    wild = rng.integers(0, top - 1, count, np.uint64, endpoint=True)
    small = rng.integers(0, min(70, top), count, np.uint64)
    narrow = wild >> rng.integers(0, bits, count, np.uint64)
    chosen = np.array(edges.astype(np.uint64))[rng.integers(0, len(edges), count)]
    which = rng.integers(0, 4, count)
    return np.choose(which, [wild, small, narrow, chosen]).astype(dtype)


def _floats(fmt: str, count: int, rng: Any) -> Any:
    bits, exponent = _FLOATS[fmt]
    fraction = bits - 1 - exponent
    dtype = np.dtype(f"uint{bits}")
    bias = (1 << (exponent - 1)) - 1
    infinity = ((1 << exponent) - 1) << fraction
    one = bias << fraction
    half = 1 << (fraction - 1)
    edges = [
        0, 1, 2, (1 << fraction) - 1, 1 << fraction, (1 << fraction) + 1, infinity - 1, infinity, infinity | half,
        infinity + 1, one, one + 1, one - 1, one + half, one + half - 1, one + (1 << fraction),
    ]  # fmt: skip
    sign = 1 << (bits - 1)
    special = np.array(edges + [e | sign for e in edges], np.uint64)
    wild = rng.integers(0, (1 << bits) - 1, count, np.uint64, endpoint=True)
    field = (bias + rng.integers(-6, 7, count)).astype(np.uint64) << np.uint64(fraction)
    signs = rng.integers(0, 2, count).astype(np.uint64) << np.uint64(bits - 1)
    near = signs | field | rng.integers(0, 1 << fraction, count, np.uint64)
    few = near & ~np.uint64((1 << max(fraction - 8, 1)) - 1)
    chosen = special[rng.integers(0, len(special), count)]
    which = rng.choice(5, count, p=[0.25, 0.3, 0.2, 0.15, 0.1])
    halfway = signs | field | np.uint64(half) | (near & np.uint64(3))
    return np.choose(which, [wild, near, few, chosen, halfway]).astype(dtype)
