"""Descriptors of tcgen05: how matrices lie in shared memory, and what an instruction computes.

Shared-memory matrix descriptor: PTX ISA "tcgen05 shared memory descriptor"; all its layouts move pieces of
16 bytes, so a matrix is described by the addresses of its pieces. Instruction descriptor: PTX ISA "tcgen05
instruction descriptor".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PIECE = 16
"""Bytes that every layout keeps together."""
_SWIZZLES = {0: 0, 1: 128, 2: 128, 4: 64, 6: 32}
_BASE32 = 1
"""Swizzle code of 128 bytes with 32-byte atoms."""


class DescriptorError(Exception):
    """A descriptor that the ISA does not define or the simulator lacks; says which."""


@dataclass(frozen=True, slots=True)
class SharedMatrix:
    """A decoded shared-memory matrix descriptor; addresses and offsets in bytes."""

    start: int
    leading: int
    """Leading dimension byte offset."""
    stride: int
    """Stride dimension byte offset."""
    swizzle: int
    """The field as it is: 0 none, 1 128 B with 32-byte atoms, 2 128 B, 4 64 B, 6 32 B."""

    @property
    def width(self) -> int:
        """Bytes of a swizzled row, 0 without swizzle."""
        return _SWIZZLES[self.swizzle]


def shared_matrix(bits: int) -> SharedMatrix:
    """Decode a 64-bit shared-memory matrix descriptor.

    Raises:
        DescriptorError: for reserved values, a base offset, or absolute leading addresses.
    """
    swizzle = bits >> 61 & 7
    if swizzle not in _SWIZZLES:
        raise DescriptorError(f"swizzle mode {swizzle} of the shared-memory descriptor is reserved")
    if bits >> 46 & 7 != 1:
        raise DescriptorError(
            f"bits 46 to 48 of the shared-memory descriptor are {bits >> 46 & 7}, but have to be 1"
        )
    if bits >> 49 & 7:
        raise DescriptorError("a shared-memory descriptor with a base offset")
    if bits >> 52 & 1:
        raise DescriptorError("a shared-memory descriptor with an absolute leading address")
    return SharedMatrix((bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, swizzle)


def swizzled(address: Array, swizzle: int) -> Array:
    """Exchange pieces as a swizzle mode does; `address` in bytes of shared memory."""
    if swizzle == 0:
        return address
    if swizzle == _BASE32:
        exchanged: Array = address ^ ((address >> 7 & 3) << 5)
    else:
        mask = {2: 7, 4: 3, 6: 1}[swizzle]
        exchanged = address ^ ((address >> 7 & mask) << 4)
    return exchanged


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where the 16-byte pieces of a matrix lie in shared memory; byte addresses."""

    at: Array
    """K-major (rows, bytes along K / 16), else (bytes along M or N / 16, K); int64."""
    low: int
    high: int
    """First address after the last byte."""


@lru_cache(maxsize=1024)
def pieces(matrix: SharedMatrix, k_major: bool, rows: int, depth: int, element: int) -> Pieces:
    """Return the shared addresses of a matrix's 16-byte pieces.

    Args:
        matrix: the descriptor.
        k_major: whether neighbours along K are neighbours in memory.
        rows: size along M or N.
        depth: size along K in elements.
        element: bytes an element.

    Raises:
        DescriptorError: for a layout that does not exist.
    """
    width = matrix.width
    if k_major:
        if matrix.swizzle == _BASE32:
            raise DescriptorError("a K-major matrix with 32-byte swizzle atoms")
        r = np.arange(rows, dtype=np.int64)[:, None]
        c = np.arange(depth * element // PIECE, dtype=np.int64)[None, :]
        if width:
            at = r % 8 * width + r // 8 * matrix.stride + c * PIECE
        else:
            at = r % 8 * PIECE + r // 8 * matrix.stride + c * matrix.leading
    else:
        r = np.arange(rows * element // PIECE, dtype=np.int64)[:, None]
        k = np.arange(depth, dtype=np.int64)[None, :]
        if width:
            across = width // PIECE
            deep = 4 if matrix.swizzle == _BASE32 else 8
            at = r % across * PIECE + r // across * matrix.leading
            at = at + k % deep * width + k // deep * matrix.stride
        else:
            at = r * matrix.stride + k % 8 * PIECE + k // 8 * matrix.leading
    result = swizzled(matrix.start + at, matrix.swizzle)
    result.flags.writeable = False
    return Pieces(result, int(result.min()), int(result.max()) + PIECE)


FLOAT_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "mxf8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
"""Operand types by MMA kind and code."""
DEPTH = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
"""K of one dense instruction."""


@dataclass(frozen=True, slots=True)
class MmaShape:
    """A decoded instruction descriptor."""

    kind: str
    m: int
    n: int
    k: int
    a: str
    """Type of A's elements."""
    b: str
    d: str
    """Type of the accumulator: f16, f32 or s32."""
    a_k_major: bool
    b_k_major: bool
    negate_a: bool
    negate_b: bool
    saturate: bool
    scale_format: str = ""
    """ue8m0 or ue4m3; empty without block scaling."""
    a_scale_id: int = 0
    b_scale_id: int = 0


def instruction(bits: int, kind: str, group: int, stationary: bool = False) -> MmaShape:
    """Decode a 32-bit instruction descriptor for an MMA kind and a CTA group of 1 or 2, or for `.ws`.

    Raises:
        DescriptorError: for what the ISA does not allow, and for sparsity and K = 96.
    """
    scaled = kind.startswith("mx")
    if bits >> 2 & 1:
        raise DescriptorError("sparse matrices")
    if scaled and bits >> 31 & 1:
        raise DescriptorError("K = 96")
    formats = FLOAT_FORMATS[kind]
    names = []
    for operand, code in (("A", bits >> 7 & 7), ("B", bits >> 10 & 7)):
        if code not in formats:
            raise DescriptorError(f"kind::{kind} with type code {code} for {operand}")
        names.append(formats[code])
    accumulator = "f32"
    if not scaled:
        code = bits >> 4 & 3
        allowed = {"i8": {2: "s32"}, "tf32": {1: "f32"}}.get(kind, {0: "f16", 1: "f32"})
        if code not in allowed or (code == 0 and "bf16" in names):
            raise DescriptorError(f"kind::{kind} with type code {code} for D")
        accumulator = allowed[code]
    m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
    _check_shape(kind, group, m, n, stationary)
    if stationary and bits >> 30:
        raise DescriptorError("a shift of B")
    majors = [not bits >> 15 & 1, not bits >> 16 & 1]
    if not all(majors) and kind in ("mxf4", "mxf4nvf4"):
        raise DescriptorError(f"kind::{kind} with an MN-major operand")
    for name, k_major in zip(names, majors, strict=True):
        if not k_major and name in ("e2m3", "e3m2", "e2m1"):
            raise DescriptorError(f"an MN-major operand of type {name}")
    negate_a, negate_b, saturate = bool(bits >> 13 & 1), bool(bits >> 14 & 1), bool(bits >> 3 & 1)
    if kind == "i8" and (negate_a or negate_b):
        raise DescriptorError("kind::i8 with negation")
    if saturate and kind != "i8":
        raise DescriptorError(f"kind::{kind} with saturation")
    return MmaShape(
        kind, m, n, DEPTH[kind], names[0], names[1], accumulator, majors[0], majors[1], negate_a, negate_b,
        saturate,
        ("ue8m0" if bits >> 23 & 1 else "ue4m3") if scaled else "",
        bits >> 29 & 3 if scaled else 0,
        bits >> 4 & 3 if scaled else 0,
    )  # fmt: skip


def _check_shape(kind: str, group: int, m: int, n: int, stationary: bool) -> None:
    """Refuse shapes that do not exist; N = 8 with M = 128 is not in the table, but shipped kernels use it."""
    scaled = kind.startswith("mx")
    sizes = {1: (128,) if scaled else (64, 128), 2: (128, 256)}[group]
    if stationary:
        if m not in (32, 64, 128) or n not in (64, 128, 256):
            raise DescriptorError(f"kind::{kind} with M = {m} and N = {n} for .ws")
        return
    step = 8 if group == 1 else 16
    if kind == "i8" and n not in (8, 24):
        step = 16
    if m not in sizes or n % step or not step <= n <= 256:
        raise DescriptorError(f"kind::{kind} with M = {m} and N = {n} for cta_group::{group}")
