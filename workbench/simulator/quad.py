"""mma.m8n8k4 of f16: four products of 8 by 4 by 8 in a warp, each of eight lanes (PTX ISA 9.7.14.5.1).

Product q belongs to lanes 4q to 4q + 3 and 16 + 4q to 19 + 4q. Rounding as in `workbench.simulator.matrix`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.matrix import by_lane, by_warp, check_warps, numbers, rounded

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class QuadMma:
    """One form: the orders of A and B (`row` or `col`) and the types of D and C (f16 or f32)."""

    a: str
    b: str
    d: str
    c: str


def form_of(item: Instruction) -> QuadMma | None:
    """Return the form of an instruction, None if it is another one."""
    m = item.modifiers
    if m[:3] != ("sync", "aligned", "m8n8k4") or len(m) != 9 or m[6:8] != ("f16", "f16"):
        return None
    a, b, d, c = m[3], m[4], m[5], m[8]
    right = {a, b} <= {"row", "col"} and {d, c} <= {"f16", "f32"} and not (d == "f16" and c == "f32")
    return QuadMma(a, b, d, c) if right else None


def registers(kind: str) -> int:
    """Registers of an accumulator of this type."""
    return 4 if kind == "f16" else 8


@cache
def _places(order: str, kind: str) -> tuple[Array, Array, Array]:
    """Return product, row (M or N for B) and column (K, or N for C) of each lane's elements, (32, elements).

    `kind` is a, b, or an accumulator's type.
    """
    lane = np.arange(32)[:, None]
    which, low, high = lane % 16 // 4, lane % 4, lane // 16 * 4
    i = np.arange(4 if kind in ("a", "b") else 8)[None, :]
    if kind in ("a", "b"):
        along = order == ("row" if kind == "a" else "col")
        row, column = (low + high, i) if along else (i + high, low)
    elif kind == "f16":
        row, column = low + high, i
    else:
        row, column = (lane & 1) + (i & 2) + high, (i & 4) + (lane & 2) + (i & 1)
    shape = (32, i.shape[1])
    return np.broadcast_to(which, shape), np.broadcast_to(row, shape), np.broadcast_to(column, shape)


def multiply(
    form: QuadMma, a: tuple[Array, ...], b: tuple[Array, ...], c: tuple[Array, ...], co: Cohort, ck: Chunk,
    item: Instruction,
) -> tuple[Array, ...]:  # fmt: skip
    """Return the registers of D."""
    w = check_warps(co, ck, item)
    rows = max(x.shape[0] for x in (*a, *b, *c))
    warps = rows * w.groups

    def matrix(values: tuple[Array, ...], order: str, kind: str, shape: tuple[int, int]) -> Array:
        words = np.stack([by_warp(w, x, rows).reshape(warps, 32) for x in values], axis=-1)
        out = np.empty((warps, 4, *shape), np.float64)
        which, row, column = _places(order, kind)
        out[:, which, row, column] = words if kind == "f32" else numbers(words, "f16")
        return out

    with np.errstate(all="ignore"):
        left, right = matrix(a, form.a, "a", (8, 4)), matrix(b, form.b, "b", (8, 4))
        total = np.matmul(left, right.swapaxes(2, 3)) + matrix(c, "", form.c, (8, 8))
        which, row, column = _places("", form.d)
        result = rounded(total[:, which, row, column], form.d)
    if form.d == "f16":
        result = np.ascontiguousarray(result).view(np.uint32)
    grid = result.reshape(rows, w.groups, 32, -1)
    return tuple(by_lane(w, grid[..., k]) for k in range(registers(form.d)))
