"""Descriptors and number formats of tcgen05 against element-by-element oracles."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.tcgen05_kernels import descriptor, idesc, place
from workbench.simulator import tcgen05_math as maths
from workbench.simulator.tcgen05_descriptors import (
    DescriptorError,
    instruction,
    pieces,
    shared_matrix,
    swizzled,
)


@pytest.mark.parametrize("swizzle", [0, 6, 4, 2])
@pytest.mark.parametrize("element", [1, 2, 4])
@pytest.mark.parametrize("k_major", [True, False])
def test_pieces_find_every_element(swizzle, element, k_major):
    rng = np.random.default_rng(swizzle)
    rows, depth = 128, 32 // element
    dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32}[element]
    matrix = rng.integers(0, 1 << 8 * element, (rows, depth), dtype=dtype)
    image = np.zeros(1 << 15, np.uint8)
    start = 2048
    _, leading, stride = place(image, start, matrix, swizzle, k_major)
    d = shared_matrix(descriptor(start, leading, stride, swizzle))
    at = pieces(d, k_major, rows, depth, element).at
    found = image[at[..., None] + np.arange(16)].view(dtype)
    if not k_major:
        found = found.transpose(0, 2, 1)
    np.testing.assert_array_equal(found.reshape(rows, depth), matrix)


@pytest.mark.parametrize("swizzle", [6, 4, 2])
def test_a_start_inside_a_swizzle_atom_advances_along_k(swizzle):
    width = {6: 32, 4: 64, 2: 128}[swizzle]
    matrix = np.random.default_rng(1).integers(0, 256, (64, width), dtype=np.uint8)
    image = np.zeros(1 << 15, np.uint8)
    _, leading, stride = place(image, 1024, matrix, swizzle)
    for k in range(0, width, 32):
        at = pieces(shared_matrix(descriptor(1024 + k, leading, stride, swizzle)), True, 64, 32, 1).at
        found = image[at[..., None] + np.arange(16)].reshape(64, 32)
        np.testing.assert_array_equal(found, matrix[:, k : k + 32])


def test_swizzle_with_32_byte_atoms_exchanges_pairs_of_pieces():
    at = swizzled(np.arange(0, 512, 16), 1).reshape(4, 8)
    for row in range(4):
        for c in range(8):
            assert at[row, c] == row * 128 + ((c // 2 ^ row) * 2 + c % 2) * 16


@pytest.mark.parametrize(
    "bits", [0, 1 << 46 | 3 << 61, 1 << 46 | 1 << 49, 1 << 46 | 1 << 52, 1 << 46 | 7 << 61]
)
def test_unknown_shared_descriptors_are_refused(bits):
    with pytest.raises(DescriptorError):
        shared_matrix(bits)


def test_instruction_fields():
    s = instruction(idesc(64, 24, a=1, b=1, a_mn=True), "f16", 1)
    assert (s.m, s.n, s.k, s.a, s.b, s.d, s.a_k_major, s.b_k_major) == (
        64,
        24,
        16,
        "bf16",
        "bf16",
        "f32",
        False,
        True,
    )
    s = instruction(idesc(256, 256, a=0, b=5, more=1 << 14), "f8f6f4", 2)
    assert (s.m, s.n, s.k, s.a, s.b, s.negate_a, s.negate_b) == (256, 256, 32, "e4m3", "e2m1", False, True)
    s = instruction(idesc(128, 8, a=1, b=1, d=0, more=1 << 23 | 2 << 29 | 2 << 4), "mxf4", 1)
    assert (s.scale_format, s.a_scale_id, s.b_scale_id, s.k, s.a) == ("ue8m0", 2, 2, 64, "e2m1")
    s = instruction(idesc(128, 32, a=1, b=0, d=2, more=1 << 3), "i8", 1)
    assert (s.a, s.b, s.d, s.saturate) == ("s8", "u8", "s32", True)


@pytest.mark.parametrize(
    ("bits", "kind", "group"),
    [
        (idesc(128, 64, more=1 << 2), "f16", 1),
        (idesc(128, 8), "f16", 2),
        (idesc(32, 64), "f16", 1),
        (idesc(256, 64), "f16", 1),
        (idesc(128, 64, a=2), "f16", 1),
        (idesc(128, 64, a=1, b=1, d=0), "f16", 1),
        (idesc(64, 64, more=1 << 23), "mxf8f6f4", 1),
        (idesc(128, 64, a=5, a_mn=True), "f8f6f4", 1),
        (idesc(128, 64, a=1, b=1, d=0, more=1 << 31 | 1 << 23), "mxf4", 1),
        (idesc(128, 64, a=1, b=1, d=2, more=1 << 13), "i8", 1),
        (idesc(128, 64, more=1 << 3), "f16", 1),
    ],
)
def test_illegal_instructions_are_refused(bits, kind, group):
    with pytest.raises(DescriptorError):
        instruction(bits, kind, group)


def value_of(code: int, exponent: int, mantissa: int, bias: int) -> float:
    sign = -1.0 if code >> (exponent + mantissa) & 1 else 1.0
    e, m = code >> mantissa & ((1 << exponent) - 1), code & ((1 << mantissa) - 1)
    if e == 0:
        return sign * m * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + m / (1 << mantissa)) * 2.0 ** (e - bias)


SMALL = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1)}


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_eight_bit_floats(name):
    raw = np.arange(256, dtype=np.uint8)[None]
    got = maths.decode(raw, "f8f6f4", name)[0]
    for code in range(256):
        magnitude = code & 0x7F
        if (name == "e4m3" and magnitude == 0x7F) or (name == "e5m2" and magnitude > 0x7C):
            assert np.isnan(got[code])
        elif name == "e5m2" and magnitude == 0x7C:
            assert np.isinf(got[code])
        else:
            assert got[code] == value_of(code, *SMALL[name])


@pytest.mark.parametrize("name", ["e2m3", "e3m2", "e2m1"])
def test_small_floats_are_packed_in_groups_of_sixteen(name):
    bits = {"e2m1": 4}.get(name, 6)
    codes = np.random.default_rng(0).integers(0, 1 << bits, (3, 32))
    raw = np.full((3, 32), 0xFF, np.uint8)
    for row in range(3):
        for group in range(2):
            number = sum(int(codes[row, 16 * group + j]) << (bits * j) for j in range(16))
            packed = number.to_bytes(2 * bits, "little")
            raw[row, 16 * group : 16 * group + 2 * bits] = np.frombuffer(packed, np.uint8)
    got = maths.decode(raw, "f8f6f4", name)
    want = [[value_of(int(c), *SMALL[name]) for c in row] for row in codes]
    np.testing.assert_array_equal(got, want)


def test_packed_e2m1_has_the_low_nibble_first():
    got = maths.decode(np.array([[0x72, 0x9F]], np.uint8), "mxf4", "e2m1")
    np.testing.assert_array_equal(got, [[1.0, 6.0, -6.0, -0.5]])


def test_halves_tf32_and_integers():
    x = np.array([[1.5, -2.25, np.inf, 6e-5]], np.float16)
    np.testing.assert_array_equal(maths.decode(x.view(np.uint8), "f16", "f16"), x.astype(np.float64))
    y = np.array([[0x3FC0, 0xC010]], np.uint16)
    np.testing.assert_array_equal(maths.decode(y.view(np.uint8), "f16", "bf16"), [[1.5, -2.25]])
    z = np.array([[1 + 2**-10 + 2**-11 + 2**-20]], np.float32)
    np.testing.assert_array_equal(maths.decode(z.view(np.uint8), "tf32", "tf32"), [[1 + 2**-10]])
    i = np.array([[0x80, 0x7F, 0xFF]], np.uint8)
    np.testing.assert_array_equal(maths.decode(i, "i8", "s8"), [[-128, 127, -1]])
    np.testing.assert_array_equal(maths.decode(i, "i8", "u8"), [[128, 127, 255]])


def test_scale_factors():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 255, (128, 4), dtype=np.uint8)
    cells = np.zeros((32, 4), np.uint32)
    for row in range(128):
        for j in range(4):
            cells[row % 32, row // 32] |= np.uint32(int(codes[row, j]) << (8 * j))
    for count, first in ((1, 0), (1, 3), (2, 2), (4, 0)):
        got = maths.scale_factors(cells, 128, count, first, "ue8m0")
        np.testing.assert_array_equal(got, 2.0 ** (codes[:, first : first + count].astype(int) - 127))
    got = maths.scale_factors(cells, 40, 1, 1, "ue4m3")
    want = [value_of(int(c) & 0x7F, 4, 3, 7) if c & 0x7F != 0x7F else np.nan for c in codes[:40, 1]]
    np.testing.assert_array_equal(got[:, 0], want)


def test_accumulators_round_once_and_saturate():
    got = maths.accumulator_cells(np.array([1 + 2**-24, 1 + 2**-24 + 2**-40, np.nan, 1e300]), "f32", False)
    want = np.array([1, 1 + 2**-23, 0, np.inf], np.float32).view(np.uint32)
    want[2] = 0x7FFFFFFF
    np.testing.assert_array_equal(got, want)
    wide = np.array([2.0**31, -(2.0**31) - 1])
    np.testing.assert_array_equal(maths.accumulator_cells(wide, "s32", True), [0x7FFFFFFF, 0x80000000])
    np.testing.assert_array_equal(maths.accumulator_cells(wide, "s32", False), [0x80000000, 0x7FFFFFFF])
    half = maths.accumulator_cells(np.array([1.5, np.nan, 65520.0]), "f16", False)
    np.testing.assert_array_equal(half, [0x3E00, 0x7FFF, 0x7C00])
    assert maths.accumulator_values(half, "f16")[0] == 1.5
