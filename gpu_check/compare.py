"""Bits against bits: how many differ, by how many units in the last place, and whether that is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_check.family import Part
from workbench.devices.model import Bytes

_FLOATS = {"f16": (16, 5), "bf16": (16, 8), "f32": (32, 8), "f64": (64, 11)}
"""Bits and exponent bits."""


@dataclass(frozen=True)
class Difference:
    """Hardware against simulator for one part."""

    name: str
    elements: int
    different: int
    """Elements whose bits differ."""
    nan_payloads: int
    """Of these: both are NaN, with other bits."""
    max_ulp: int | None
    """Largest distance of two numbers; None where the elements are no floats or nothing differs."""
    beyond: int
    """Elements that differ by more than the ISA allows; of an exact form every one that differs."""
    exact: bool
    bound: str
    example: str = ""
    """The first element that differs."""

    @property
    def status(self) -> str:
        """`equal`, `allowed` (what the ISA leaves open, an approximate form within its bound), `differs`."""
        if not self.different:
            return "equal"
        return "differs" if self.beyond else "allowed"


def compare(part: Part, simulated: Bytes, hardware: Bytes) -> Difference:
    """Compare a part's bytes."""
    kind = f"u{_FLOATS[part.format][0]}" if part.format in _FLOATS else part.format
    dtype = np.dtype(f"uint{kind[1:]}")
    region = slice(part.offset, part.offset + part.nbytes)
    want = np.ascontiguousarray(simulated[region]).view(dtype)
    got = np.ascontiguousarray(hardware[region]).view(dtype)
    bad = want != got
    count = int(bad.sum())
    example = ""
    if count:
        i = int(np.flatnonzero(bad)[0])
        width = dtype.itemsize * 2
        example = f"element {i}: simulated 0x{int(want[i]):0{width}x}, hardware 0x{int(got[i]):0{width}x}"
    if part.format not in _FLOATS or not count:
        beyond = count if part.exact else 0
        return Difference(part.name, want.size, count, 0, None, beyond, part.exact, part.bound, example)
    nan = bad & _is_nan(want, part.format) & _is_nan(got, part.format)
    distance = _ulp(want, got, part.format)
    numbers = bad & ~_is_nan(want, part.format) & ~_is_nan(got, part.format)
    largest = int(distance[numbers].max()) if numbers.any() else None
    beyond = bad if part.exact else bad & ~_allowed(part, want, got, distance)
    if part.any_nan:
        beyond = beyond & ~nan
    return Difference(
        part.name,
        want.size,
        count,
        int(nan.sum()),
        largest,
        int(beyond.sum()),
        part.exact,
        part.bound,
        example,
    )


def _allowed(part: Part, want: Any, got: Any, distance: Any) -> Any:
    """Elements that two results may differ by which are both within the ISA's bound of the true value."""
    nan = _is_nan(want, part.format)
    both = ~(nan | _is_nan(got, part.format))
    allowed = nan & _is_nan(got, part.format)
    if part.ulp is not None:
        allowed |= both & (distance <= 2 * part.ulp + 1)
    a, b = _values(want, part.format), _values(got, part.format)
    with np.errstate(all="ignore"):
        gap = np.abs(a - b)
        if part.relative is not None:
            allowed |= both & ((gap <= 2 * part.relative * np.abs(a)) | (distance <= 1))
        if part.absolute is not None:
            allowed |= both & ((gap <= 2 * part.absolute) | (distance <= 1))
    return allowed


def _is_nan(codes: Any, fmt: str) -> Any:
    bits, exponent = _FLOATS[fmt]
    infinity = ((1 << exponent) - 1) << (bits - 1 - exponent)
    return (codes & codes.dtype.type((1 << (bits - 1)) - 1)) > codes.dtype.type(infinity)


def _ulp(want: Any, got: Any, fmt: str) -> Any:
    """Distance in units in the last place, saturating; +0 and -0 are one apart."""
    bits = _FLOATS[fmt][0]
    if bits == 64:
        a, b = _ordered(want, bits).astype(object), _ordered(got, bits).astype(object)
        return np.array([min(abs(x - y), 2**62) for x, y in zip(a, b, strict=True)], np.int64)
    return np.abs(_ordered(want, bits) - _ordered(got, bits))


def _ordered(codes: Any, bits: int) -> Any:
    """Integers in the order of the numbers, neighbours one apart."""
    magnitude = (codes & codes.dtype.type((1 << (bits - 1)) - 1)).astype(np.int64)
    negative = (codes >> codes.dtype.type(bits - 1)).astype(bool)
    return np.where(negative, -magnitude - 1, magnitude)


def _values(codes: Any, fmt: str) -> Any:
    if fmt == "bf16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return codes.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[fmt]).astype(np.float64)
