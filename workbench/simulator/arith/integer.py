"""Integer arithmetic (PTX ISA 9.7.1 and 9.7.2), element functions only.

Signed and unsigned types differ by the dtype of the operands; sums and low products wrap as NumPy arrays do.
"""

from __future__ import annotations

import numpy as np

from workbench.simulator.arith.semantics import Array

UNSIGNED = {"int8": "uint8", "int16": "uint16", "int32": "uint32", "int64": "uint64"}


def unsigned(x: Array) -> Array:
    """View as the unsigned type of the same width."""
    name = UNSIGNED.get(x.dtype.name)
    return x if name is None else x.view(name)


def is_signed(x: Array) -> bool:
    """Tell whether the dtype is signed."""
    return x.dtype.kind == "i"


def add(a: Array, b: Array) -> Array:
    """`a + b` modulo 2**width."""
    return a + b


def sub(a: Array, b: Array) -> Array:
    """`a - b` modulo 2**width."""
    return a - b


def _clamp32(x: Array) -> Array:
    return np.clip(x, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def add_sat(a: Array, b: Array) -> Array:
    """Saturating s32 sum."""
    return _clamp32(np.add(a, b, dtype=np.int64))


def sub_sat(a: Array, b: Array) -> Array:
    """Saturating s32 difference."""
    return _clamp32(np.subtract(a, b, dtype=np.int64))


def mul_lo(a: Array, b: Array) -> Array:
    """Low half of the product."""
    return a * b


def mul_wide(a: Array, b: Array) -> Array:
    """Full product of 16 or 32-bit operands, twice as wide."""
    return np.multiply(a, b, dtype=np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}"))


def mul_hi(a: Array, b: Array) -> Array:
    """High half of the product."""
    width = 8 * a.dtype.itemsize
    if width < 64:
        wide = mul_wide(a, b)
        out: Array = (wide >> wide.dtype.type(width)).astype(a.dtype)
        return out
    x, y = unsigned(a), unsigned(b)
    high = _mul_hi_u64(x, y)
    if is_signed(a):
        zero = np.uint64(0)
        high = high - np.where(a < 0, y, zero) - np.where(b < 0, x, zero)
    return high.view(a.dtype)


def _mul_hi_u64(x: Array, y: Array) -> Array:
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & mask, x >> half, y & mask, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)  # cannot overflow: (2**32 - 1)**2 + 2**32 - 1 < 2**64
    other = x0 * y1 + (middle & mask)
    out: Array = x1 * y1 + (middle >> half) + (other >> half)
    return out


def mad_lo(a: Array, b: Array, c: Array) -> Array:
    """Low half of the product, plus c."""
    return a * b + c


def mad_hi(a: Array, b: Array, c: Array) -> Array:
    """High half of the product, plus c."""
    return mul_hi(a, b) + c


def mad_wide(a: Array, b: Array, c: Array) -> Array:
    """Full product plus a c of twice the width."""
    return mul_wide(a, b) + c


def mad_hi_sat(a: Array, b: Array, c: Array) -> Array:
    """s32: high half of the product plus c, saturating."""
    return add_sat(mul_hi(a, b), c)


def _product24(a: Array, b: Array) -> Array:
    if is_signed(a):
        shift = np.int32(8)
        out: Array = np.multiply((a << shift) >> shift, (b << shift) >> shift, dtype=np.int64)
        return out
    mask = np.uint32(0xFFFFFF)
    plain: Array = np.multiply(a & mask, b & mask, dtype=np.uint64)
    return plain


def mul24_lo(a: Array, b: Array) -> Array:
    """Bits 31..0 of the product of the low 24 bits."""
    return _product24(a, b).astype(a.dtype)


def mul24_hi(a: Array, b: Array) -> Array:
    """Bits 47..16 of the product of the low 24 bits."""
    product = _product24(a, b)
    out: Array = (product >> product.dtype.type(16)).astype(a.dtype)
    return out


def mad24_lo(a: Array, b: Array, c: Array) -> Array:
    """`mul24_lo` plus c."""
    return mul24_lo(a, b) + c


def mad24_hi(a: Array, b: Array, c: Array) -> Array:
    """`mul24_hi` plus c."""
    return mul24_hi(a, b) + c


def mad24_hi_sat(a: Array, b: Array, c: Array) -> Array:
    """s32 `mul24_hi` plus c, saturating."""
    return add_sat(mul24_hi(a, b), c)


def _magnitude(x: Array) -> Array:
    return unsigned(np.abs(x)) if is_signed(x) else x


def div(a: Array, b: Array) -> Array:
    """Quotient rounded towards zero.

    The ISA leaves division by zero open; here it gives all ones, as the integer division sequences of NVIDIA
    GPUs do for unsigned operands.
    """
    zero = b == 0
    quotient = _magnitude(a) // np.where(zero, b.dtype.type(1), b if not is_signed(b) else np.abs(b)).view(
        unsigned(b).dtype
    )
    if is_signed(a):
        negative = (a < 0) != (b < 0)
        quotient = np.where(negative, -quotient.view(a.dtype), quotient.view(a.dtype))
    return np.where(zero, ~a.dtype.type(0), quotient)


def rem(a: Array, b: Array) -> Array:
    """Remainder with the sign of the dividend; by zero, where the ISA says nothing, the dividend."""
    zero = b == 0
    divisor = np.where(zero, unsigned(b).dtype.type(1), _magnitude(b))
    rest = _magnitude(a) % divisor
    if is_signed(a):
        signed = rest.view(a.dtype)
        rest = np.where(a < 0, -signed, signed)
    return np.where(zero, a, rest)


def absolute(a: Array) -> Array:
    """`|a|`; the most negative number stays."""
    return np.abs(a)


def negate(a: Array) -> Array:
    """`-a` modulo 2**width."""
    return -a


def minimum(a: Array, b: Array) -> Array:
    """Smaller of two."""
    return np.minimum(a, b)


def maximum(a: Array, b: Array) -> Array:
    """Larger of two."""
    return np.maximum(a, b)


def relu(x: Array) -> Array:
    """Replace negative numbers by 0."""
    out: Array = np.maximum(x, x.dtype.type(0))
    return out


def sad(a: Array, b: Array, c: Array) -> Array:
    """`c + |a - b|` modulo 2**width."""
    return c + np.where(a < b, b - a, a - b)


# Extended precision: the carry flag is a bool array, last operand and last result.


def add_cc(a: Array, b: Array) -> tuple[Array, Array]:
    """Sum and carry out."""
    total = a + b
    return total, unsigned(total) < unsigned(a)


def addc(a: Array, b: Array, carry: Array) -> Array:
    """Sum with carry in."""
    out: Array = a + b + carry.astype(a.dtype)
    return out


def addc_cc(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    """Sum with carry in, and carry out."""
    first = unsigned(a) + unsigned(b)
    total = first + carry.astype(first.dtype)
    return total.view(a.dtype), (first < unsigned(a)) | (total < first)


def sub_cc(a: Array, b: Array) -> tuple[Array, Array]:
    """Difference and borrow out."""
    return a - b, unsigned(a) < unsigned(b)


def subc(a: Array, b: Array, borrow: Array) -> Array:
    """Difference with borrow in."""
    out: Array = a - b - borrow.astype(a.dtype)
    return out


def subc_cc(a: Array, b: Array, borrow: Array) -> tuple[Array, Array]:
    """Difference with borrow in, and borrow out."""
    x, y = unsigned(a), unsigned(b)
    first = x - y
    total = first - borrow.astype(first.dtype)
    return total.view(a.dtype), (x < y) | (first < total)


def mad_lo_cc(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """`mad_lo` and the carry of its addition."""
    return add_cc(mul_lo(a, b), c)


def mad_hi_cc(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """`mad_hi` and the carry of its addition."""
    return add_cc(mul_hi(a, b), c)


def madc_lo(a: Array, b: Array, c: Array, carry: Array) -> Array:
    """`mad_lo` with carry in."""
    return addc(mul_lo(a, b), c, carry)


def madc_hi(a: Array, b: Array, c: Array, carry: Array) -> Array:
    """`mad_hi` with carry in."""
    return addc(mul_hi(a, b), c, carry)


def madc_lo_cc(a: Array, b: Array, c: Array, carry: Array) -> tuple[Array, Array]:
    """`mad_lo` with carry in, and carry out."""
    return addc_cc(mul_lo(a, b), c, carry)


def madc_hi_cc(a: Array, b: Array, c: Array, carry: Array) -> tuple[Array, Array]:
    """`mad_hi` with carry in, and carry out."""
    return addc_cc(mul_hi(a, b), c, carry)


# Dot products


def _lanes(x: Array, bits: int, count: int) -> list[Array]:
    """Split 32-bit words into `count` fields, low first, extended by the dtype's sign to int64."""
    fields = []
    top = 32 - bits
    for i in range(count):
        shifted = x << x.dtype.type(top - bits * i)
        fields.append((shifted >> x.dtype.type(top)).astype(np.int64))
    return fields


def dp4a(a: Array, b: Array, c: Array) -> Array:
    """Sum of four byte products, plus c; the signs of a and b by their dtypes."""
    total = c.astype(np.int64)
    for x, y in zip(_lanes(a, 8, 4), _lanes(b, 8, 4), strict=True):
        total = total + x * y
    return total.astype(c.dtype)


def dp2a_lo(a: Array, b: Array, c: Array) -> Array:
    """Two 16-bit values of a times the low two bytes of b, plus c."""
    return _dp2a(a, b, c, 0)


def dp2a_hi(a: Array, b: Array, c: Array) -> Array:
    """Two 16-bit values of a times the high two bytes of b, plus c."""
    return _dp2a(a, b, c, 2)


def _dp2a(a: Array, b: Array, c: Array, first: int) -> Array:
    pair, quad = _lanes(a, 16, 2), _lanes(b, 8, 4)
    total = c.astype(np.int64) + pair[0] * quad[first] + pair[1] * quad[first + 1]
    out: Array = total.astype(c.dtype)
    return out
