"""Conversions to and from 8, 6 and 4-bit floats and e8m0 scales (PTX ISA 9.7.9.21), element functions only.

Packs hold their first source in the high part. Decoding is one look-up a pack (`take`, which is two to three
times faster than indexing).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from workbench.simulator.arith import half
from workbench.simulator.arith.rounding import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    Format,
    decode_table,
    encode_largest,
    narrow,
)
from workbench.simulator.arith.semantics import Array

FORMATS: dict[str, Format] = {"e4m3": E4M3, "e5m2": E5M2, "e2m3": E2M3, "e3m2": E3M2, "e2m1": E2M1}


def field_bits(fmt: Format) -> int:
    """Bits that a value takes in a pack: 4, or 8 (6-bit formats are padded with two zeros)."""
    return 4 if fmt.bits == 4 else 8


def encode_f32(x: Array, fmt: Format, *, relu: bool = False) -> Array:
    """Round float32 to nearest with saturation (`.rn.satfinite`); uint32 codes.

    The magnitude is rounded in the float32 bits themselves: adding half a unit of the target, plus the parity
    of the kept bit, carries into the exponent as it should. Below the smallest normal number a float addition
    aligns the value to the format's fixed quantum instead.
    """
    bits = x.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    drop = 24 - fmt.precision
    largest = np.float32(fmt.largest).view(np.uint32)
    limited = np.minimum(magnitude, largest)  # bits of non-negative floats order like the numbers
    odd = (limited >> np.uint32(drop)) & np.uint32(1)
    rebias = np.uint32(((127 - fmt.bias) << 23) - ((1 << (drop - 1)) - 1))
    normal = (limited + odd - rebias) >> np.uint32(drop)
    small = limited < np.uint32((fmt.min_exponent + 127) << 23)
    # 2**(min_exponent - precision + 1) is the quantum; a float32 of 2**23 quanta has it as its last place.
    anchor = np.float32(2.0 ** (fmt.min_exponent - fmt.precision + 1 + 23))
    fixed = (limited.view(np.float32) + anchor).view(np.uint32) - anchor.view(np.uint32)
    code = np.where(small, fixed, normal)
    code = code | ((bits >> np.uint32(31)) << np.uint32(fmt.bits - 1))
    if relu:
        code = np.where(bits >> np.uint32(31), np.uint32(0), code)
    nan = magnitude > np.uint32(0x7F800000)
    if nan.any():
        code = np.where(nan, np.uint32(fmt.nan if fmt.nan is not None else encode_largest(fmt)), code)
    out: Array = code
    return out


def pack_f32(fmt: Format, relu: bool) -> Callable[[Array, Array], Array]:
    """Return the conversion of two float32 to a pack; the first goes to the high part."""
    width = np.uint32(field_bits(fmt))
    dtype = np.uint8 if fmt.bits == 4 else np.uint16

    def function(a: Array, b: Array) -> Array:
        high, low = encode_f32(a, fmt, relu=relu), encode_f32(b, fmt, relu=relu)
        return ((high << width) | low).astype(dtype)

    return function


def pack_half(fmt: Format, kind: str, relu: bool) -> Callable[[Array], Array]:
    """Return the conversion of an f16x2 or bf16x2 to a pack."""
    pack = pack_f32(fmt, relu)

    def function(a: Array) -> Array:
        high = half.widen((a >> np.uint32(16)).astype(np.uint16), kind)
        return pack(high, half.widen(a.astype(np.uint16), kind))

    return function


@cache
def pair_table(name: str, kind: str, relu: bool, satfinite: bool) -> Array:
    """Return the f16x2 or bf16x2 bits (uint32) of every pack of two values of format `name`.

    `satfinite` replaces the infinities that e5m2 has by the largest finite number of the result's type.
    """
    fmt = FORMATS[name]
    values = decode_table(fmt)
    codes = half.f32_to_f16(values) if kind == "f16" else half.f32_to_bf16(values)
    if satfinite:
        codes = half.clamp_infinity(codes, kind)
    if relu:
        codes = half.relu(codes, kind)
    width = field_bits(fmt)
    single = np.tile(codes, (1 << width) // len(codes)).astype(np.uint32)  # padding bits do not matter
    table: Array = (single[:, None] << np.uint32(16)) | single[None, :]
    return table.ravel()


def unpack(name: str, kind: str, relu: bool, satfinite: bool = False) -> Callable[[Array], Array]:
    """Return the conversion of a pack of two `name` values to f16x2 or bf16x2; exact."""

    def function(a: Array) -> Array:
        return pair_table(name, kind, relu, satfinite).take(a, mode="wrap")  # each code is in the table

    return function


def unpack_scaled(name: str, relu: bool, satfinite: bool) -> Callable[[Array, Array], Array]:
    """Return the conversion of a pack to bf16x2, each value times its e8m0 scale, rounded once."""
    fmt = FORMATS[name]
    width = np.uint32(field_bits(fmt))
    mask = np.uint32((1 << fmt.bits) - 1)

    def one(code: Array, scale: Array) -> Array:
        product = decode_table(fmt).take(code & mask).astype(np.float64) * e8m0_values().take(scale)
        result = narrow(product, BF16, "rn", satfinite=satfinite)
        if relu:
            result = half.relu(result.astype(np.uint16), "bf16").astype(np.uint32)
        return result

    def function(a: Array, scale: Array) -> Array:
        word, factors = a.astype(np.uint32), scale.astype(np.uint32)
        high = one(word >> width, factors >> np.uint32(8))
        return (high << np.uint32(16)) | one(word, factors & np.uint32(0xFF))

    return function


# e8m0: 2**(code - 127), code 255 is NaN


@cache
def e8m0_values() -> Array:
    """Return the float32 value of every e8m0 code; 0 is the subnormal 2**-127, 255 is NaN."""
    values = np.ldexp(1.0, np.arange(256) - 127).astype(np.float32)
    values[255:].view(np.uint32)[:] = 0x7FFFFFFF
    return values


@cache
def e8m0_pair_table() -> Array:
    """Return the bf16x2 bits (uint32) of every pack of two e8m0 codes."""
    single = half.f32_to_bf16(e8m0_values()).astype(np.uint32)
    table: Array = (single[:, None] << np.uint32(16)) | single[None, :]
    return table.ravel()


def e8m0x2_to_bf16x2(a: Array) -> Array:
    """Exact; NaN gives 0x7fff."""
    return e8m0_pair_table().take(a, mode="wrap")  # each code is in the table


def encode_e8m0(x: Array, mode: str, satfinite: bool) -> Array:
    """Round the magnitude of float32 to a power of two, down (`rz`) or up (`rp`); uint32 codes.

    e8m0 has no sign, zero or infinity: the sign is dropped, magnitudes below 2**-127 give 2**-127, above
    2**127 NaN (255) or with `satfinite` the largest value (254); the same as NVIDIA's host version in
    cuda_fp8.hpp.
    """
    magnitude = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    code = magnitude >> np.uint32(23)
    if mode == "rp":
        more = (magnitude & np.uint32(0x7FFFFF)) != 0
        above = magnitude > np.uint32(0x400000)  # 2**-127 itself and less stay at code 0
        code = code + (more & above & (magnitude < np.uint32(0x7F800000)))
    if satfinite:
        code = np.minimum(code, np.uint32(254))
    return np.where(magnitude > np.uint32(0x7F800000), np.uint32(255), code).astype(np.uint32, copy=False)


def pack_e8m0_f32(mode: str, satfinite: bool) -> Callable[[Array, Array], Array]:
    """Return the conversion of two float32 to ue8m0x2."""

    def function(a: Array, b: Array) -> Array:
        high, low = encode_e8m0(a, mode, satfinite), encode_e8m0(b, mode, satfinite)
        return ((high << np.uint32(8)) | low).astype(np.uint16)

    return function


def pack_e8m0_bf16(mode: str, satfinite: bool) -> Callable[[Array], Array]:
    """Return the conversion of bf16x2 to ue8m0x2."""
    pack = pack_e8m0_f32(mode, satfinite)

    def function(a: Array) -> Array:
        high = (a & np.uint32(0xFFFF0000)).view(np.float32)
        return pack(high, (a << np.uint32(16)).view(np.float32))

    return function
