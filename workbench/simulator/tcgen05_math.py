"""Operands and products of tcgen05.mma (PTX ISA "tcgen05.mma").

The ISA leaves open in which order and how exactly an instruction adds its products. Here each instruction
computes the exact products' sum in float64, adds the accumulator, and rounds once to the accumulator's type;
hardware may differ by a few units in the last place of the largest term.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.arith.minifloat import FORMATS
from workbench.simulator.arith.rounding import decode_table
from workbench.simulator.tcgen05_descriptors import MmaShape

Array = npt.NDArray[Any]

STORAGE = {
    "f16": 2, "bf16": 2, "tf32": 4, "u8": 1, "s8": 1, "e4m3": 1, "e5m2": 1, "e2m3": 1, "e3m2": 1, "e2m1": 1,
}  # fmt: skip
"""Bytes an element takes in shared memory outside kind::mxf4 and mxf4nvf4."""
_PACKED = {"e2m3": 6, "e3m2": 6}
"""Bits of elements that lie packed at the low end of their group of 16 in 16 bytes, as e2m1 does too."""


@cache
def _table(name: str) -> Array:
    table = decode_table(FORMATS[name]).astype(np.float64)
    return np.resize(table, 256)


@cache
def _pairs() -> Array:
    """Values of the two e2m1 codes in a byte, the low one first; (256, 2)."""
    octets = np.arange(256)
    return np.stack((_table("e2m1")[octets & 15], _table("e2m1")[octets >> 4]), axis=-1)


def decode(raw: Array, kind: str, name: str) -> Array:
    """Return float64 values (rows, elements) of operand bytes (rows, bytes) that are contiguous along K."""
    rows = raw.shape[0]
    raw = np.ascontiguousarray(raw)
    if name == "f16":
        return raw.view(np.float16).astype(np.float64)
    if name == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if name == "tf32":
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if name == "u8":
        return raw.astype(np.float64)
    if name == "s8":
        return raw.view(np.int8).astype(np.float64)
    if kind in ("mxf4", "mxf4nvf4"):
        raw = raw[:, None]
    elif name == "e2m1":
        raw = raw.reshape(rows, -1, 16)[:, :, :8]
    if name == "e2m1":
        pairs: Array = _pairs().take(raw, axis=0)
        return pairs.reshape(rows, -1)
    if name in _PACKED:
        bits = _PACKED[name]
        groups = np.unpackbits(raw.reshape(rows, -1, 16)[:, :, : 2 * bits], axis=-1, bitorder="little")
        fields = groups.reshape(rows, -1, 16, bits)
        codes = (fields << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
        raw = codes.reshape(rows, -1)
    values: Array = _table(name).take(raw)
    return values


@cache
def _scales(name: str) -> Array:
    if name == "ue4m3":
        return np.abs(np.resize(decode_table(FORMATS["e4m3"]).astype(np.float64), 256))
    table = np.ldexp(1.0, np.arange(256) - 127)
    table[255] = np.nan
    return table


def scale_factors(cells: Array, rows: int, count: int, first: int, name: str) -> Array:
    """Return the scale factors (rows, count) that lie in tensor memory cells.

    Args:
        cells: uint32 (32, rows / 32); row r of the matrix has its factors in lane r % 32, column r // 32.
        rows: rows of A, or columns of B.
        count: factors a row: 1, 2 or 4.
        first: byte of the cell with the first one, the scale factor ID.
        name: `ue8m0` or `ue4m3`.
    """
    octets = np.ascontiguousarray(cells.T).reshape(-1, 1).view(np.uint8)[:rows, first : first + count]
    result: Array = _scales(name).take(octets)
    return result


def product(
    shape: MmaShape, a: Array, b: Array, scale_a: Array | None = None, scale_b: Array | None = None
) -> Array:
    """Return A times the transpose of B in float64, scaled and negated as the descriptor says.

    Args:
        shape: the decoded instruction descriptor.
        a: float64 (rows, K).
        b: float64 (N, K).
        scale_a: factors of A, (rows, blocks along K); None without block scaling.
        scale_b: factors of B, (N, blocks along K).
    """
    if scale_a is not None and scale_b is not None:
        block = shape.k // scale_a.shape[1]
        a = a * np.repeat(scale_a, block, axis=1)
        b = b * np.repeat(scale_b, block, axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        result: Array = a @ b.T
    if shape.negate_a != shape.negate_b:
        result = -result
    return result


def accumulator_values(cells: Array, kind: str) -> Array:
    """Return float64 values of accumulator cells (uint32); `kind` is f32, f16 or s32."""
    if kind == "f32":
        return cells.view(np.float32).astype(np.float64)
    if kind == "s32":
        return cells.view(np.int32).astype(np.float64)
    return (cells & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float64)


def accumulator_cells(values: Array, kind: str, saturate: bool) -> Array:
    """Round float64 values to accumulator cells; integers wrap around unless `saturate`."""
    if kind == "s32":
        if saturate:
            return np.clip(values, -(2.0**31), 2.0**31 - 1).astype(np.int32).view(np.uint32)
        return values.astype(np.int64).astype(np.uint32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if kind == "f16":
            half = values.astype(np.float16).view(np.uint16).astype(np.uint32)
            return np.where(np.isnan(values), np.uint32(0x7FFF), half)
        cells = values.astype(np.float32).view(np.uint32)
    nan = np.isnan(values)
    return np.where(nan, np.uint32(0x7FFFFFFF), cells) if nan.any() else cells
