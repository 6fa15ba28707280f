"""Swizzles against the tables of the CUDA programming guide and CuTe's definition, address by address."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.simulator.swizzle import (
    NONE,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    SWIZZLE_128B_ATOM_32B,
    SWIZZLE_128B_ATOM_32B_FLIP_8B,
    SWIZZLE_128B_ATOM_64B,
    Swizzle,
    place,
    swizzled,
)

# CuTe's Swizzle<bits, base, shift>: exclusive-or of `bits` bits at base + shift into those at base.
CUTE = {
    SWIZZLE_32B: (1, 4, 3),
    SWIZZLE_64B: (2, 4, 3),
    SWIZZLE_128B: (3, 4, 3),
    SWIZZLE_128B_ATOM_32B: (2, 5, 2),
    SWIZZLE_128B_ATOM_64B: (1, 6, 1),
}


@pytest.mark.parametrize("swizzle", CUTE)
def test_agrees_with_cute_bit_by_bit(swizzle: Swizzle) -> None:
    bits, base, shift = CUTE[swizzle]
    for address in range(0, 4096, 4):
        expected = address
        for b in range(bits):
            if address >> (base + shift + b) & 1:
                expected ^= 1 << (base + b)
        assert int(swizzled(swizzle, np.array([address]))[0]) == expected


@pytest.mark.parametrize(("swizzle", "rows"), [(SWIZZLE_128B, 8), (SWIZZLE_64B, 4), (SWIZZLE_32B, 2)])
@pytest.mark.parametrize("base", [0, 128, 384, 1024 + 640])
def test_agrees_with_the_guides_index_relation(swizzle: Swizzle, rows: int, base: int) -> None:
    """smem[y][x] <-> smem[y][((y + offset) % rows) ^ x] for 16-byte x and 128-byte y."""
    offset = base // 128 % rows
    for y in range(16):
        for x in range(8):
            physical = base + y * 128 + (((y + offset) % rows) ^ x) * 16
            assert int(place(swizzle, base, np.array([y * 128 + x * 16]))[0]) == physical


def test_flip_exchanges_halves_in_every_second_line() -> None:
    address = np.arange(0, 2048, 8)
    plain = swizzled(SWIZZLE_128B_ATOM_32B, address)
    flipped = swizzled(SWIZZLE_128B_ATOM_32B_FLIP_8B, address)
    for a, p, f in zip(address, plain, flipped, strict=True):
        assert f == (p ^ 8 if a // 128 % 2 else p)


@pytest.mark.parametrize("swizzle", [NONE, SWIZZLE_128B_ATOM_32B_FLIP_8B, *CUTE])
def test_is_a_permutation_of_each_period_and_its_own_inverse(swizzle: Swizzle) -> None:
    address = np.arange(4096)
    there = swizzled(swizzle, address)
    assert sorted(there[: swizzle.repeat]) == list(range(swizzle.repeat))
    assert (swizzled(swizzle, there) == address).all()
    assert (there[swizzle.repeat : 2 * swizzle.repeat] == there[: swizzle.repeat] + swizzle.repeat).all()
    span = swizzle.span or 16
    assert (there // span == address // span).all()
    whole = there.reshape(-1, swizzle.granule)
    assert (np.diff(whole, axis=1) == 1).all()


@pytest.mark.parametrize(
    "repeat", [(NONE, 128), (SWIZZLE_32B, 256), (SWIZZLE_64B, 512), (SWIZZLE_128B, 1024)]
)
def test_repeats_as_the_guide_says(repeat: tuple[Swizzle, int]) -> None:
    assert repeat[0].repeat == repeat[1]


@pytest.mark.parametrize("bad", [(96, 16), (64, 32), (32, 64), (128, 8)])
def test_refuses_modes_that_do_not_exist(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no swizzle"):
        Swizzle(*bad)


def test_refuses_a_flip_without_32_byte_atoms() -> None:
    with pytest.raises(ValueError, match="flip"):
        Swizzle(128, 16, flip=True)
