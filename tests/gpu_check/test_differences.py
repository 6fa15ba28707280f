"""Bits against bits: what is equal, what is allowed, what differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_check.compare import Difference, compare
from gpu_check.family import Part

TYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def of(fmt: str, simulated: Any, hardware: Any, **more: Any) -> Difference:
    a, b = (np.asarray(x) for x in (simulated, hardware))
    return compare(
        Part("p", "out", 4, a.nbytes, fmt, **more),
        np.concatenate([np.full(4, 1, np.uint8), a.view(np.uint8)]),
        np.concatenate([np.full(4, 2, np.uint8), b.view(np.uint8)]),  # bytes before the part do not count
    )


@pytest.mark.parametrize("fmt", ["u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64"])
def test_equal_bits_are_equal(fmt: str) -> None:
    codes = np.arange(64, dtype=np.uint64)
    d = of(fmt, codes, codes.copy())
    assert d.status == "equal" and d.different == 0 and d.example == ""
    assert d.elements == 512 // (2 if fmt == "bf16" else int(fmt[1:]) // 8)


def test_one_flipped_bit_of_an_exact_form_differs_and_is_shown() -> None:
    a = np.arange(8, dtype=np.uint32)
    b = a.copy()
    b[5] ^= 1 << 31
    d = of("u32", a, b)
    assert d.status == "differs" and d.different == d.beyond == 1
    assert d.example == "element 5: simulated 0x00000005, hardware 0x80000005"


@pytest.mark.parametrize("fmt", ["f16", "f32", "f64"])
def test_distance_in_ulp(fmt: str) -> None:
    x = np.array([1.0, -2.0, 0.0, 1e-7], TYPES[fmt])
    near = np.nextafter(x, TYPES[fmt](np.inf))
    assert of(fmt, x, near).max_ulp == 1
    assert of(fmt, x[2:3], -x[2:3]).max_ulp == 1, "+0 and -0"
    assert of(fmt, x[2:3], -near[2:3]).max_ulp == 2
    assert of(fmt, x[:1], -x[:1]).max_ulp > 1000


def test_bf16_steps() -> None:
    one = np.array([0x3F80, 0x3F80], np.uint16)
    d = of("bf16", one, np.array([0x3F80, 0x3F83], np.uint16))
    assert (d.max_ulp, d.different) == (3, 1)


def test_nan_payloads_are_counted_and_differ_in_exact_forms() -> None:
    a = np.array([0x7FFFFFFF, 0x3F800000], np.uint32)
    b = np.array([0xFFC00000, 0x3F800000], np.uint32)
    exact, loose = of("f32", a, b), of("f32", a, b, exact=False, ulp=2.0)
    assert (exact.nan_payloads, exact.status, exact.max_ulp) == (1, "differs", None)
    assert (loose.nan_payloads, loose.status) == (1, "allowed")
    open_bits = of("f32", a, b, any_nan=True)
    assert (open_bits.status, open_bits.different, open_bits.beyond) == ("allowed", 1, 0)
    number = np.array([0x3F800000, 0x3F800000], np.uint32)
    assert of("f32", a, number, exact=False, ulp=2.0).status == "differs", "a NaN against a number"


@pytest.mark.parametrize(
    ("bound", "apart", "status"),
    [
        ({"ulp": 2.0}, 5, "allowed"),
        ({"ulp": 2.0}, 6, "differs"),
        ({"relative": 2.0**-11}, 2**13, "allowed"),
        ({"relative": 2.0**-11}, 2**14, "differs"),
        ({"absolute": 2.0**-21}, 8, "allowed"),
        ({"absolute": 2.0**-21}, 9, "differs"),
        ({}, 1, "differs"),
    ],
)
def test_what_two_results_within_the_bound_may_lie_apart(
    bound: dict[str, float], apart: int, status: str
) -> None:
    a = np.full(3, 1.0, np.float32)
    b = a.copy()
    b[1] = (a.view(np.uint32)[1] + np.uint32(apart)).view(np.float32)
    d = of("f32", a, b, exact=False, **bound)
    assert d.status == status and d.max_ulp == apart and d.different == 1
