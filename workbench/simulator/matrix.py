"""mma.sync: products of small matrices spread over the lanes of a warp (PTX ISA 9.7.14.5).

All warps of a cohort are multiplied at once. Floating-point products are exact in float64; they are summed
in float64 with the accumulator and rounded once, to nearest even, to the accumulator's type.

The ISA leaves the order and the precision of the accumulation open (hardware adds several products at a
time and truncates), so a result may differ from silicon's: for k products of a tile by about k units in the
last place of the largest addend, not of the result. Compare with a tolerance of that kind and never bit by
bit, unless every partial sum is exact. tf32 operands lose their low 13 bits, which the ISA leaves undefined.
Integer and single-bit products are exact and wrap or, with `.satfinite`, saturate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.warp import FULL, Lanes, lanes_of

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]

BITS = {
    "f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4,
    "b1": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mma:
    """One form of `mma.sync` with 8 columns: D (m, 8) = A (m, k) B (k, 8) + C."""

    m: int
    k: int
    a: str
    b: str
    c: str
    """Type of C and D: f16, f32, f64 or s32."""
    saturate: bool = False
    bitwise: str = ""
    """`and` or `xor` for single-bit operands."""

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of A, B and C a lane."""
        bits = max(32, BITS[self.a])
        accumulator = 16 if self.c == "f16" else 32
        lanes = 32
        return (
            self.m * self.k * BITS[self.a] // bits // lanes,
            8 * self.k * BITS[self.b] // bits // lanes,
            self.m * 8 // lanes * accumulator // 32 if self.c != "f64" else self.m * 8 // lanes,
        )


_SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "f16": ((16, 8), (16, 16)),
    "bf16": ((16, 8), (16, 16)),
    "tf32": ((16, 4), (16, 8)),
    "f64": ((8, 4), (16, 4), (16, 8), (16, 16)),
    "8": ((16, 16), (16, 32)),
    "int8": ((8, 16), (16, 16), (16, 32)),
    "int4": ((8, 32), (16, 32), (16, 64)),
    "b1": ((8, 128), (16, 128), (16, 256)),
}


def form_of(item: Instruction) -> Mma | str:
    """Return the form of an `mma` instruction, or why it is not known."""
    m = list(item.modifiers)
    if any(x in ("sp", "sp::ordered_metadata") for x in m):
        return "sparse matrices"
    if m[:2] != ["sync", "aligned"]:
        return "not .sync.aligned"
    m = m[2:]
    for x in m:
        if x.startswith("kind::") or x == "block_scale":
            return f".{x}, which needs sm_120a"
    shape = m.pop(0)
    if m[:2] != ["row", "col"]:
        return "only A row-major and B column-major are known"
    m = m[2:]
    saturate = m[:1] == ["satfinite"]
    if saturate:
        m = m[1:]
    if m[:1] == ["rn"]:
        m = m[1:]
    bitwise = ""
    if m[-1:] == ["popc"]:
        bitwise, m = m[-2], m[:-2]
    if len(m) != 4 or m[0] != m[3]:
        return "these types"
    d, a, b, _ = m
    if not shape.startswith(("m16n8k", "m8n8k")):
        return f"shape .{shape}"
    rows, depth = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    accumulators: tuple[str, ...]
    if a in ("e4m3", "e5m2") and b in ("e4m3", "e5m2"):
        family, accumulators = "8", ("f16", "f32")
    elif a in ("s8", "u8") and b in ("s8", "u8"):
        family, accumulators = "int8", ("s32",)
    elif a in ("s4", "u4") and b in ("s4", "u4"):
        family, accumulators = "int4", ("s32",)
    elif a == b and a in ("f16", "bf16", "tf32", "f64", "b1"):
        family = a
        accumulators = {"f16": ("f16", "f32"), "f64": ("f64",), "b1": ("s32",)}.get(a, ("f32",))
    else:
        return f"types .{a} and .{b}"
    if (rows, depth) not in _SHAPES[family]:
        return f"shape .{shape} of .{a}"
    if d not in accumulators:
        return f"accumulators of .{d}"
    if (family == "b1") != (bitwise in ("and", "xor")):
        return "operation"
    if saturate and not family.startswith("int"):
        return ".satfinite"
    return Mma(rows, depth, a, b, d, saturate, bitwise)


# -- numbers ---------------------------------------------------------------------------------------


@cache
def _table(kind: str) -> Array:
    """Return the value of each f16 pattern (float32), or float64 of each byte: an fp8 number, or the two
    numbers of four bits in it (low first).
    """
    if kind == "f16":
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    octets = np.arange(256, dtype=np.uint8)
    if kind in ("e4m3", "e5m2"):
        narrow = ml_dtypes.float8_e4m3fn if kind == "e4m3" else ml_dtypes.float8_e5m2
        result: Array = octets.view(narrow).astype(np.float64)
        return result
    pairs = np.stack([octets & 15, octets >> 4], axis=1).astype(np.int64)
    if kind == "s4":
        pairs = (pairs ^ 8) - 8
    return pairs.astype(np.float64)


def numbers(words: Array, kind: str) -> Array:
    """Return packed numbers as float64: the last axis of contiguous `words` (uint32, or float64 for f64)
    grows by the numbers in a word.
    """
    if kind == "f64":
        return words
    if kind == "f16":
        return _table(kind).take(words.view(np.uint16)).astype(np.float64)
    if kind == "bf16":
        out = np.empty((*words.shape[:-1], words.shape[-1] * 2), np.uint32)
        out[..., 0::2] = words << np.uint32(16)
        out[..., 1::2] = words & np.uint32(0xFFFF0000)
        return out.view(np.float32).astype(np.float64)
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    octets = words.view(np.uint8)
    if kind in ("s8", "u8"):
        return (octets.view(np.int8) if kind == "s8" else octets).astype(np.float64)
    if kind in ("s4", "u4"):
        pairs = _table(kind).take(octets, axis=0)
        return pairs.reshape(*octets.shape[:-1], -1)
    return _table(kind).take(octets)


def rounded(value: Array, kind: str) -> Array:
    """Round float64 once, to f32, f16 bits (uint16) or f64; a NaN among f16 becomes PTX's 0x7fff."""
    if kind == "f64":
        return value
    if kind == "f32":
        return value.astype(np.float32)
    half = value.astype(np.float16)
    bits = half.view(np.uint16)
    bits[np.isnan(half)] = 0x7FFF
    return bits


def integers(total: Array, saturate: bool) -> Array:
    """Return int64 sums as s32, wrapped or saturated."""
    if saturate:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return total.astype(np.int32)


# -- lanes and fragments ---------------------------------------------------------------------------


def check_warps(co: Cohort, ck: Chunk, item: Instruction) -> Lanes:
    """Return the cohort's warps; report those with lanes missing, whatever became of them."""
    w = lanes_of(co)
    if not w.dense:
        absent = (w.active != FULL)[w.group][None, :]
        if absent.any():
            text = f"{item.opcode} wants all 32 lanes of a warp; the part of absent lanes is undefined"
            ck.report("inactive-lane", item, text, co, absent)
    return w


def by_warp(w: Lanes, value: Array, rows: int) -> Array:
    """Return (rows, warps, 32) from a value of a cohort with `rows` rows; absent lanes repeat a present
    one.
    """
    if w.dense and value.shape == (rows, len(w.lane)):
        return value.reshape(rows, w.groups, 32)
    if w.dense:
        spread = value[:, :, None] if value.shape[1] == 1 else value.reshape(value.shape[0], w.groups, 32)
    else:
        full = np.broadcast_to(value, (value.shape[0], len(w.lane)))
        spread = full[:, np.maximum(w.position, 0)]
    return np.broadcast_to(spread, (rows, w.groups, 32))


def by_lane(w: Lanes, value: Array) -> Array:
    """Return (rows, columns) from (rows, warps, 32)."""
    if w.dense:
        return np.ascontiguousarray(value).reshape(value.shape[0], -1)
    return np.ascontiguousarray(value[:, w.group, w.lane])


def operand_words(registers: tuple[Array, ...], w: Lanes, rows: int, bands: int) -> Array:
    """Gather an operand: words (rows * warps, bands * 8, words along k), one lane's register a word."""
    return _words([by_warp(w, x, rows).reshape(-1, 32) for x in registers], bands)


def _words(registers: list[Array], bands: int) -> Array:
    """Gather words (warps, bands * 8, words along k) from registers (warps, 32).

    Register r holds rows `8 * (r % bands) + lane // 4` and words `4 * (r // bands) + lane % 4` along k; with
    one band that is B by columns.
    """
    warps, deep = len(registers[0]), len(registers) // bands
    out = np.empty((warps, bands, 8, deep, 4), registers[0].dtype)
    for r, register in enumerate(registers):
        out[:, r % bands, :, r // bands, :] = register.reshape(warps, 8, 4)
    return out.reshape(warps, bands * 8, deep * 4)


_SLAB = 1 << 15
"""Elements of A that are multiplied at a time: as float64 they stay in the cache."""
_RESULTS = {"f16": np.uint32, "f32": np.float32, "f64": np.float64, "s32": np.int32}


def multiply(
    form: Mma, a: tuple[Array, ...], b: tuple[Array, ...], c: tuple[Array, ...], co: Cohort, ck: Chunk,
    item: Instruction,
) -> tuple[Array, ...]:  # fmt: skip
    """mma.sync: return the registers of D. Operand registers are uint32 (float64 for f64), those of C are
    of the accumulator's type, f16 packed in uint32.
    """
    w = check_warps(co, ck, item)
    rows = max(x.shape[0] for x in (*a, *b, *c))
    operands = [[by_warp(w, x, rows).reshape(-1, 32) for x in part] for part in (a, b, c)]
    warps = rows * w.groups
    result = [np.empty((warps, 32), _RESULTS[form.c]) for _ in c]
    with np.errstate(all="ignore"):
        step = max(1, _SLAB // (form.m * form.k))
        for start in range(0, warps, step):
            slab = slice(start, start + step)
            left, right, old = ([x[slab] for x in part] for part in operands)
            product = _products(form, left, right)
            _accumulate(form, product, old, [x[slab] for x in result])
    return tuple(by_lane(w, x.reshape(rows, w.groups, 32)) for x in result)


def _products(form: Mma, a: list[Array], b: list[Array]) -> Array:
    """Return A B, (warps, m, 8), float64 or for single bits int64."""
    left, right = _words(a, form.m // 8), _words(b, 1)
    if form.bitwise:
        join = np.bitwise_and if form.bitwise == "and" else np.bitwise_xor
        bits = join(left[:, :, None, :], right[:, None, :, :])
        counts: Array = np.bitwise_count(bits).sum(axis=-1, dtype=np.int64)
        return counts
    columns = np.ascontiguousarray(numbers(right, form.b).transpose(0, 2, 1))
    product: Array = np.matmul(numbers(left, form.a), columns)
    return product


def _accumulate(form: Mma, product: Array, c: list[Array], d: list[Array]) -> None:
    """Add C and round into D; of each band of 8 rows a lane has columns 2 * (lane % 4) and the next one."""
    grid = product.reshape(len(product), form.m // 8, 32, 2)
    for band in range(form.m // 8):
        if form.c == "f16":
            halves = np.ascontiguousarray(c[band]).view(np.float16).reshape(-1, 32, 2)
            d[band][...] = rounded(grid[:, band] + halves, "f16").view(np.uint32)[..., 0]
            continue
        for which in (0, 1):
            part, k = grid[:, band, :, which], 2 * band + which
            if form.c == "s32":
                d[k][...] = integers(part.astype(np.int64) + c[k], form.saturate)
            else:
                np.add(part, c[k], out=d[k], casting="unsafe")


def transpose(value: Array, co: Cohort, ck: Chunk, item: Instruction) -> Array:
    """movmatrix: transpose an 8 by 8 matrix of 16-bit elements, a row in four lanes."""
    w = check_warps(co, ck, item)
    rows = value.shape[0]
    words = np.ascontiguousarray(by_warp(w, value, rows)).view(np.uint16).reshape(rows, w.groups, 8, 8)
    turned = np.ascontiguousarray(words.swapaxes(2, 3)).reshape(rows, w.groups, 64)
    return by_lane(w, turned.view(np.uint32))
