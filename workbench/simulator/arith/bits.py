"""Bits: logic, shifts, fields, permutations (PTX ISA 9.7.1, 9.7.8 and 9.7.9.7), element functions only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workbench.simulator.arith.integer import is_signed, unsigned
from workbench.simulator.arith.semantics import Array

_U32 = np.uint32
_ALL = np.uint32(0xFFFFFFFF)


def cnot(a: Array) -> Array:
    """1 where a is 0, else 0."""
    out: Array = (a == 0).astype(a.dtype)
    return out


def shl(a: Array, amount: Array) -> Array:
    """Shift left; NumPy gives 0 for amounts of the width and more, which is PTX's clamping."""
    out: Array = a << amount.astype(a.dtype)
    return out


def shr(a: Array, amount: Array) -> Array:
    """Shift right, filling with the sign of signed types."""
    width = a.dtype.type(8 * a.dtype.itemsize)
    if a.dtype.itemsize < 4 or is_signed(a):
        # A huge amount must not turn negative or wrap in a's own type.
        amount = np.minimum(amount, _U32(width))
    out: Array = a >> amount.astype(a.dtype)
    return out


def shl_narrow(a: Array, amount: Array) -> Array:
    """`shl` for 16-bit types, whose dtype cannot hold every amount."""
    out: Array = a << np.minimum(amount, _U32(8 * a.dtype.itemsize)).astype(a.dtype)
    return out


def shf_l_wrap(a: Array, b: Array, c: Array) -> Array:
    """High word of {b, a} shifted left by c modulo 32."""
    n = c & _U32(31)
    out: Array = (b << n) | (a >> (_U32(32) - n))
    return out


def shf_r_wrap(a: Array, b: Array, c: Array) -> Array:
    """Low word of {b, a} shifted right by c modulo 32."""
    n = c & _U32(31)
    out: Array = (a >> n) | (b << (_U32(32) - n))
    return out


def shf_l_clamp(a: Array, b: Array, c: Array) -> Array:
    """High word of {b, a} shifted left by min(c, 32)."""
    n = np.minimum(c, _U32(32))
    return (b << n) | (a >> (_U32(32) - n))


def shf_r_clamp(a: Array, b: Array, c: Array) -> Array:
    """Low word of {b, a} shifted right by min(c, 32)."""
    n = np.minimum(c, _U32(32))
    return (a >> n) | (b << (_U32(32) - n))


# Two-input functions by their truth table: bit (2a + b) of the index.
_TWO_INPUT: tuple[Callable[[Array, Array], Array], ...] = (
    lambda a, b: np.zeros_like(a & b),
    lambda a, b: ~(a | b),
    lambda a, b: ~a & b,
    lambda a, b: ~a | (b & np.zeros_like(b)),
    lambda a, b: a & ~b,
    lambda a, b: ~b | (a & np.zeros_like(a)),
    lambda a, b: a ^ b,
    lambda a, b: ~(a & b),
    lambda a, b: a & b,
    lambda a, b: ~(a ^ b),
    lambda a, b: b,
    lambda a, b: ~a | b,
    lambda a, b: a,
    lambda a, b: a | ~b,
    lambda a, b: a | b,
    lambda a, b: ~np.zeros_like(a & b),
)


def lop3(table: int) -> Callable[[Array, Array, Array], Array]:
    """Return the function with truth table `table`: bit (4a + 2b + c).

    With c = 0 and c = 1 it is one of two functions of a and b; their exclusive or says where c matters.
    """
    at_zero = sum(((table >> (2 * i)) & 1) << i for i in range(4))
    at_one = sum(((table >> (2 * i + 1)) & 1) << i for i in range(4))
    depends = at_zero ^ at_one
    base, switch = _TWO_INPUT[at_zero], _TWO_INPUT[depends]
    if depends == 0:
        return lambda a, b, c: base(a, b)
    if depends == 15:
        return lambda a, b, c: c if at_zero == 0 else base(a, b) ^ c
    if at_zero == 0:
        return lambda a, b, c: switch(a, b) & c
    return lambda a, b, c: base(a, b) ^ (switch(a, b) & c)


def lop3_bool(table: int, operator: str) -> Callable[[Array, Array, Array, Array], tuple[Array, Array]]:
    """Return lop3 with a predicate: (d, (d != 0) `operator` q)."""
    function = lop3(table)

    def both(a: Array, b: Array, c: Array, q: Array) -> tuple[Array, Array]:
        d = function(a, b, c)
        return d, ((d != 0) | q) if operator == "or" else ((d != 0) & q)

    return both


# prmt

_PRMT_MODES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    # selector 0..3 -> source bytes for d.b0, d.b1, d.b2, d.b3
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def prmt(a: Array, b: Array, c: Array) -> Array:
    """Generic byte permutation with a selector per lane."""
    source = (b.astype(np.uint64) << np.uint64(32)) | a
    result: Array = np.zeros((1, 1), _U32)
    for i in range(4):
        nibble = c >> _U32(4 * i)
        byte = (source >> ((nibble & _U32(7)) << _U32(3)).astype(np.uint64)).astype(_U32) & _U32(0xFF)
        sign = (byte >> _U32(7)) * _U32(0xFF)
        byte = np.where((nibble & _U32(8)) != 0, sign, byte)
        result = result | (byte << _U32(8 * i))
    return result


def prmt_immediate(selector: int) -> Callable[[Array, Array], Array]:
    """Return the permutation of (a, b) for a constant selector: a few shifts and masks."""
    masks: dict[tuple[int, int], int] = {}
    signs: list[tuple[int, int]] = []
    for i in range(4):
        nibble = (selector >> (4 * i)) & 0xF
        byte = nibble & 7
        if nibble & 8:
            signs.append((byte, i))
        else:
            key = (byte // 4, 8 * (i - byte % 4))
            masks[key] = masks.get(key, 0) | (0xFF << (8 * i))

    def function(a: Array, b: Array) -> Array:
        result: Array | None = None
        for (source, shift), mask in masks.items():
            word = b if source else a
            if shift > 0:
                word = word << _U32(shift)
            elif shift < 0:
                word = word >> _U32(-shift)
            surviving = (0xFFFFFFFF << shift) & 0xFFFFFFFF if shift >= 0 else 0xFFFFFFFF >> -shift
            if mask != surviving:
                word = word & _U32(mask)
            result = word if result is None else result | word
        for byte, i in signs:
            word = b if byte >= 4 else a
            top = (word >> _U32(8 * (byte % 4) + 7)) & _U32(1)
            field = top * _U32(0xFF << (8 * i))
            result = field if result is None else result | field
        assert result is not None
        return result

    return function


def prmt_mode(mode: str) -> Callable[[Array, Array, Array], Array]:
    """Return the permutation of a special mode; the two low bits of c select."""
    choices = [sum(byte << (4 * i) for i, byte in enumerate(row)) for row in _PRMT_MODES[mode]]
    table = np.array(choices, _U32)

    def function(a: Array, b: Array, c: Array) -> Array:
        return prmt(a, b, table.take(c & _U32(3)))

    return function


# Counting


def popc(a: Array) -> Array:
    """Number of ones, as uint32."""
    return np.bitwise_count(a).astype(_U32)


def _top_bit32(x: Array) -> Array:
    """Position of the highest one of uint32 words, as uint32; 0xffffffff for 0."""
    exponent = (x.astype(np.float64).view(np.uint64) >> np.uint64(52)).astype(_U32)
    return np.where(x == 0, _ALL, exponent - _U32(1023))


def top_bit(a: Array) -> Array:
    """Position of the highest one, as uint32; 0xffffffff where there is none."""
    x = unsigned(a)
    if x.dtype.itemsize < 8:
        return _top_bit32(x)
    high, low = (x >> np.uint64(32)).astype(_U32), x.astype(_U32)
    return np.where(high != 0, _top_bit32(high) + _U32(32), _top_bit32(low))


def clz(a: Array) -> Array:
    """Leading zeros, as uint32: the width for 0."""
    return _U32(8 * a.dtype.itemsize - 1) - top_bit(a)


def bfind(a: Array) -> Array:
    """Position of the most significant non-sign bit; 0xffffffff if there is none."""
    return top_bit(np.where(a < 0, ~a, a) if is_signed(a) else a)


def bfind_shiftamt(a: Array) -> Array:
    """Left shift that brings the bit of `bfind` to the top; 0xffffffff if there is none."""
    found = bfind(a)
    return np.where(found == _ALL, _ALL, _U32(8 * a.dtype.itemsize - 1) - found)


def brev(a: Array) -> Array:
    """Reverse the bits."""
    width = 8 * a.dtype.itemsize
    x, step = a, 1
    ones = (1 << width) - 1
    while step < width:
        mask = ones // ((1 << step) + 1)  # ...0011 0011 for step 2
        kind = a.dtype.type
        x = ((x >> kind(step)) & kind(mask)) | ((x & kind(mask)) << kind(step))
        step *= 2
    return x


def fns(mask: Array, base: Array, offset: Array) -> Array:
    """Position of the n-th set bit from `base` on, upwards or downwards; 0xffffffff if there is none."""
    shape = np.broadcast_shapes(mask.shape, base.shape, offset.shape)
    result: Array = np.full(shape, _ALL, _U32)
    position = np.broadcast_to(base, shape).astype(np.int64)
    count = np.maximum(np.abs(offset.astype(np.int64)) - 1, 0)
    count = np.broadcast_to(count, shape).copy()
    step = np.where(offset >= 0, 1, -1)
    single = offset == 0
    searching = (position >= 0) & (position < 32)
    for turn in range(32):
        bit = searching & (((mask >> (position & 31).astype(_U32)) & _U32(1)) != 0)
        found = bit & (count == 0)
        result = np.where(found, position.astype(_U32), result)
        count = count - (bit & ~found)
        position = position + step
        searching = searching & ~found & (position >= 0) & (position < 32)
        if turn == 0:
            searching = searching & ~single
        if not searching.any():
            break
    return result


# Fields


def _ones(length: Array, kind: type[np.unsignedinteger]) -> Array:
    """Words with `length` low ones; all ones from the width on."""
    out: Array = (kind(1) << length) - kind(1)
    return out


def bfe(a: Array, b: Array, c: Array) -> Array:
    """Extract the field of c bits from position b, extended by its sign for signed types."""
    x = unsigned(a)
    kind = x.dtype.type
    width = 8 * x.dtype.itemsize
    position = (b & _U32(0xFF)).astype(x.dtype)
    length = (c & _U32(0xFF)).astype(x.dtype)
    field = (x >> position) & _ones(length, kind)
    if not is_signed(a):
        plain: Array = field
        return plain
    there = np.where(position < kind(width), kind(width) - np.minimum(position, kind(width)), kind(0))
    valid = np.minimum(length, there)
    sign_at = np.minimum(position + length - kind(1), kind(width - 1))
    negative = (length != 0) & (((x >> sign_at) & kind(1)) != 0)
    filled = field | ~_ones(valid, kind)
    out: Array = np.where(negative, filled, field).view(a.dtype)
    return out


def bfi(a: Array, b: Array, c: Array, d: Array) -> Array:
    """Insert the low d bits of a into b at position c."""
    kind = a.dtype.type
    position = (c & _U32(0xFF)).astype(a.dtype)
    length = (d & _U32(0xFF)).astype(a.dtype)
    mask = _ones(length, kind) << position
    out: Array = (b & ~mask) | ((a << position) & mask)
    return out


def bmsk(a: Array, b: Array, *, clamp: bool) -> Array:
    """Mask of b ones from position a."""
    start, length = a & _U32(31), b & _U32(31)
    end = start + length
    low = _ALL << start
    wide = end >= _U32(32)
    if clamp:
        low = np.where(a >= _U32(32), _U32(0), low)
        wide = wide | (a >= _U32(32)) | (b >= _U32(32))
    high = np.where(wide, _U32(0), np.where(length == 0, _ALL, _ALL << end))
    return low & ~high


def bmsk_clamp(a: Array, b: Array) -> Array:
    """`bmsk.clamp`: positions and lengths of 32 and more reach the end."""
    return bmsk(a, b, clamp=True)


def bmsk_wrap(a: Array, b: Array) -> Array:
    """`bmsk.wrap`: positions and lengths modulo 32."""
    return bmsk(a, b, clamp=False)


def _szext(a: Array, b: Array, clamp: bool) -> Array:
    x = unsigned(a)
    length = b & _U32(31)
    mask = _ALL << length
    plain = length == 0
    if clamp:
        large = b >= _U32(32)
        mask = np.where(large, _U32(0), mask)
        plain = plain | large
    result = x & ~mask
    if is_signed(a):
        sign = ((x >> ((length - _U32(1)) & _U32(31))) & _U32(1)) != 0
        result = np.where(sign & ~plain, result | mask, result)
    out: Array = result.view(a.dtype)
    return out


def szext_clamp(a: Array, b: Array) -> Array:
    """Extend the low b bits of a; from 32 on a itself."""
    return _szext(a, b, True)


def szext_wrap(a: Array, b: Array) -> Array:
    """Extend the low b modulo 32 bits of a."""
    return _szext(a, b, False)
