"""Tensor maps: against maps that CuTe DSL wrote, against the fields as ptxas writes them, and refusals."""

from __future__ import annotations

import random
import struct

import pytest

from workbench.simulator.swizzle import (
    NONE,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    SWIZZLE_128B_ATOM_32B,
    SWIZZLE_128B_ATOM_32B_FLIP_8B,
    SWIZZLE_128B_ATOM_64B,
)
from workbench.simulator.tensormap import (
    BY_NAME,
    ELEMENTS,
    TensorMap,
    TensorMapError,
    decode,
    encode,
    replace,
)


def words(**values: int) -> bytes:
    """Return a map from `w<k>=value`."""
    out = [0] * 32
    for name, value in values.items():
        out[int(name[1:])] = value
    return struct.pack("<32I", *out)


# What CuTe DSL 4.8.1 wrote for tensors (shape, tile, element, swizzle), the address aside.
WRITTEN = [
    (
        (5, 256),
        (5, 32),
        "f32",
        NONE,
        {"w2": 0x40392, "w3": 0x40, "w8": 0xFF, "w9": 4, "w13": 0x1F000000, "w14": 4},
    ),
    (
        (5, 256),
        (5, 32),
        "f32",
        SWIZZLE_128B,
        {"w2": 0x46392, "w3": 0x40, "w8": 0xFF, "w9": 4, "w13": 0x1F000000, "w14": 4},
    ),
    (
        (64, 256),
        (64, 32),
        "bf16",
        SWIZZLE_64B,
        {"w2": 0x44512, "w3": 0x20, "w8": 255, "w9": 63, "w13": 0x1F000000, "w14": 63},
    ),
    (
        (64, 256),
        (64, 16),
        "bf16",
        SWIZZLE_32B,
        {"w2": 0x42512, "w3": 0x20, "w8": 255, "w9": 63, "w13": 0xF000000, "w14": 63},
    ),
    ((1024,), (128,), "bf16", NONE, {"w2": 0x40502, "w8": 0x3FF, "w13": 0x7F000000}),
    (
        (3, 5, 64),
        (2, 3, 32),
        "f16",
        NONE,
        {"w2": 0x40322, "w3": 8, "w4": 0x28, "w8": 63, "w9": 4, "w10": 2, "w13": 0x1F000000, "w14": 0x102},
    ),
    (
        (3, 5, 7, 64),
        (2, 3, 2, 32),
        "f16",
        NONE,
        {
            "w2": 0x40332,
            "w3": 8,
            "w4": 0x38,
            "w5": 0x118,
            "w8": 63,
            "w9": 6,
            "w10": 4,
            "w11": 2,
            "w13": 0x1F000000,
            "w14": 0x10201,
        },
    ),
    (
        (64, 256),
        (64, 128),
        "u8",
        SWIZZLE_128B,
        {"w2": 0x46012, "w3": 0x10, "w8": 255, "w9": 63, "w13": 0x7F000000, "w14": 63},
    ),
    (
        (64, 256),
        (64, 32),
        "f32",
        SWIZZLE_128B_ATOM_32B,
        {"w2": 0xC6392, "w3": 0x40, "w8": 255, "w9": 63, "w13": 0x1F000000, "w14": 63},
    ),
]


@pytest.mark.parametrize("case", WRITTEN)
def test_reads_and_writes_what_cute_dsl_writes(case: tuple) -> None:
    shape, tile, element, swizzle, bits = case
    m = decode(words(w0=0x1230, w1=0x7F, **bits))
    size = BY_NAME[element].data
    strides = []
    step = size
    for d in reversed(shape[1:]):
        step *= d
        strides.append(step)
    assert m == TensorMap(
        0x7F_0000_1230,
        BY_NAME[element],
        shape[::-1],
        tuple(strides),
        tile[::-1],
        swizzle=swizzle,
        l2_promotion=2,
    )
    assert encode(m) == words(w0=0x1230, w1=0x7F, **bits)


# Field writes as ptxas expands tensormap.replace (sm_90a, sm_103a): byte offset, mask, shift, bias.
EXPANSION = {
    "rank": [(0x8, 0x70, 4, 0)],
    "interleave_layout": [(0x8, 0x1800, 11, 0)],
    "swizzle_mode": [(0x8, 0x6000, 13, 0)],
    "fill_mode": [(0x8, 0x8000, 15, 0)],
    "swizzle_atomicity": [(0x8, 0x180000, 19, 0)],
    "box_dim": [
        (0x34, 0xFF000000, 24, 1),
        (0x38, 0xFF, 0, 1),
        (0x38, 0xFF00, 8, 1),
        (0x38, 0xFF0000, 16, 1),
        (0x38, 0xFF000000, 24, 1),
    ],
    "element_stride": [(0x34, 7 << 3 * i, 3 * i, 1) for i in range(5)],
    "global_dim": [(0x20 + 4 * i, 0xFFFFFFFF, 0, 1) for i in range(5)],
}
LIMIT = {
    "rank": 5,
    "interleave_layout": 3,
    "swizzle_mode": 4,
    "fill_mode": 2,
    "swizzle_atomicity": 4,
    "box_dim": 256,
    "element_stride": 8,
    "global_dim": 1 << 32,
}


@pytest.mark.parametrize("name", EXPANSION)
def test_replaces_the_bits_that_ptxas_replaces(name: str) -> None:
    rng = random.Random(7)
    for ordinal, (offset, mask, shift, bias) in enumerate(EXPANSION[name]):
        for _ in range(20):
            raw = bytearray(rng.randbytes(128))
            value = rng.randrange(bias, LIMIT[name] + bias)
            expected = bytearray(raw)
            (old,) = struct.unpack_from("<I", raw, offset)
            new = old & ~mask | (value - bias) << shift & mask
            if name == "swizzle_mode":
                new &= ~0x400000
            struct.pack_into("<I", expected, offset, new & 0xFFFFFFFF)
            replace(raw, name, ordinal, value)
            assert raw == expected


def test_replaces_strides_address_and_element_types() -> None:
    raw = bytearray(128)
    for i in range(4):
        replace(raw, "global_stride", i, (0xA000000000 + 0x10 * (i + 1)))
    low = [(0xA000000000 + 0x10 * (i + 1) >> 4) & 0xFFFFFFFF for i in range(4)]
    assert struct.unpack_from("<4I", raw, 0xC) == tuple(low)
    assert struct.unpack_from("<I", raw, 0x1C)[0] == 0xAAAA
    struct.pack_into("<I", raw, 8, 0x200000)
    replace(raw, "global_address", 0, 0x123456789ABCDEF0)
    assert struct.unpack_from("<Q", raw, 0) == (0x123456789ABCDEF0,)
    assert struct.unpack_from("<I", raw, 8) == (0,)
    for value, bits in ((0, 0), (7, 0x380), (11, 0x10380), (12, 0x10400), (15, 0x780)):
        other = bytearray(128)
        replace(other, "elemtype", 0, value)
        assert struct.unpack_from("<I", other, 8)[0] == bits
    replace(raw, "swizzle_mode", 0, 4)
    assert struct.unpack_from("<I", raw, 8)[0] == 0x400000


def random_map(rng: random.Random) -> TensorMap:
    rank = rng.randint(1, 5)
    element = rng.choice(ELEMENTS)
    swizzle = rng.choice(
        [
            NONE,
            SWIZZLE_32B,
            SWIZZLE_64B,
            SWIZZLE_128B,
            SWIZZLE_128B_ATOM_32B,
            SWIZZLE_128B_ATOM_64B,
            SWIZZLE_128B_ATOM_32B_FLIP_8B,
        ]
    )
    padded = element.pitch == 16
    if padded and (swizzle.span not in (0, 128) or swizzle.flip):
        swizzle = NONE
    quantum = 16 * element.group // element.data
    inner = (
        128
        if padded
        else quantum * rng.randint(1, max(1, min(swizzle.span or 128, 256 * element.data) // 16))
    )
    inner = min(inner, 256 // quantum * quantum)
    if swizzle.span and inner // element.group * element.pitch > swizzle.span:
        inner = quantum
    return TensorMap(
        rng.randrange(1 << 57) * 32,
        element,
        (128 * rng.randint(1, 1 << 20), *(rng.randint(1, 1 << 32) for _ in range(rank - 1))),
        tuple(rng.randrange(1 << 35) * 32 for _ in range(rank - 1)),
        (inner, *(rng.randint(1, 256) for _ in range(rank - 1))),
        (1, *(rng.randint(1, 8) for _ in range(rank - 1))),
        swizzle,
        element.floating and rng.random() < 0.5,
        rng.randrange(4),
    )


def test_what_is_encoded_is_decoded() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        m = random_map(rng)
        assert decode(encode(m)) == m


GOOD = TensorMap(0x1000, BY_NAME["f32"], (64, 8), (256,), (32, 8))


@pytest.mark.parametrize(
    "bit",
    [
        *range(2 * 32 + 23, 2 * 32 + 32),
        2 * 32 + 21,
        *range(7 * 32 + 16, 8 * 32),
        *range(13 * 32 + 15, 13 * 32 + 24),
        *range(15 * 32, 1024, 37),
    ],
)
def test_refuses_bits_it_does_not_know(bit: int) -> None:
    raw = bytearray(encode(GOOD))
    raw[bit // 8] |= 1 << bit % 8
    with pytest.raises(TensorMapError, match=f"word {bit // 32}"):
        decode(bytes(raw))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (8, 0x40393, "im2col or unknown"),
        (8, 0x40390, "im2col or unknown"),
        (8, 0x40B92, "interleave"),
        (8, 0x440392, "96-byte"),
        (8, 0x403D2, "rank"),
        (8, 0x40592, "element type 11"),
        (8, 0x50512, "tf32 bit"),
        (8, 0x42392 | 1 << 19, "32-byte swizzle in atoms"),
        (8, 0x42392, "its swizzle 32"),
        (0x34, 0x02000000, "16 bytes"),
    ],
)
def test_refuses_what_it_cannot_do(offset: int, value: int, message: str) -> None:
    raw = bytearray(encode(GOOD))
    struct.pack_into("<I", raw, offset, value)
    with pytest.raises(TensorMapError, match=message):
        decode(bytes(raw))


def test_refuses_an_uninitialized_map() -> None:
    with pytest.raises(TensorMapError, match="uninitialized"):
        decode(bytes(128))
    with pytest.raises(TensorMapError, match="128 bytes"):
        decode(bytes(64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": (64, 8, 2)}, "rank 3"),
        ({"dims": (0, 8)}, "sizes"),
        ({"box": (32, 257)}, "box"),
        ({"steps": (1, 9)}, "element strides"),
        ({"strides": (24,)}, "multiples of 16"),
        ({"strides": (1 << 40,)}, "2\\^40"),
        ({"box": (2, 8)}, "16 bytes"),
        ({"element": BY_NAME["u32"], "fill_nan": True}, "NaN"),
        ({"box": (64, 8), "swizzle": SWIZZLE_128B}, "swizzle 128"),
        ({"element": BY_NAME["b4x16_p64"], "box": (64, 8)}, "a box 128 wide"),
        ({"element": BY_NAME["b4x16"], "dims": (63, 8)}, "multiples of 2"),
    ],
)
def test_checks_what_the_driver_checks(changes: dict, message: str) -> None:
    fields = {
        "address": 0x1000,
        "element": BY_NAME["f32"],
        "dims": (64, 8),
        "strides": (256,),
        "box": (32, 8),
    }
    with pytest.raises(TensorMapError, match=message):
        TensorMap(**{**fields, **changes})


def test_large_tensors_have_a_bit_of_their_own() -> None:
    raw = bytearray(encode(TensorMap(0x1000, BY_NAME["f32"], (64, 512), (256,), (32, 8))))
    raw[10] |= 1 << 5
    assert decode(bytes(raw)).dims == (64, 512)
    raw = bytearray(encode(TensorMap(0x1000, BY_NAME["f32"], (64, 511), (256,), (32, 8))))
    raw[10] |= 1 << 5
    with pytest.raises(TensorMapError, match="128 KiB"):
        decode(bytes(raw))
