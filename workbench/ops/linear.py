"""Matrix products with few rows, `out = bf16(x @ weight.T)`: their arithmetic, honest and wrong, and inputs.

`x` is `[B, K]`, `weight` `[N, K]`, both bf16; products are exact in float32, sums wide in any order, one
rounding at the end. Shared by the projections' contracts (`skinny_gemm`, `splitk_gemm`, `o_proj`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from workbench.ops.dtypes import DType
from workbench.ops.model import Allocate, Buffer, Fault, Generator, Role, Tolerance
from workbench.ops.random import fill_normal, stream
from workbench.ops.rounding import to_bf16

Axes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]

_ROWS = 512
"""Rows of the weight converted at a time."""


@dataclass(frozen=True)
class Product:
    """How the product is computed. The defaults are the golden; other values are a dtype or a mistake."""

    dtype: torch.dtype = torch.float64
    positive_zero: bool = False
    """Zeros of either sign are stored as +0 (they travel in mailboxes whose empty mark is -0)."""
    drop: int = 0
    """Elements missing from the end of the sum over K."""
    first_token: bool = False
    """Every token gets the first token's result."""
    parts: int = 1
    """Partial sums along K, each rounded to bf16 before they are added."""

    def __call__(self, inputs: Mapping[str, torch.Tensor], axes: Axes) -> Tensors:
        """Return `out` `[B, N]` in `dtype`, rounded to bf16."""
        keep = axes["K"] - self.drop
        x = inputs["x"][:, :keep].to(self.dtype)
        out = torch.empty(x.shape[0], axes["N"], dtype=self.dtype)
        for first in range(0, axes["N"], _ROWS):
            rows = inputs["weight"][first : first + _ROWS, :keep].to(self.dtype)
            out[:, first : first + _ROWS] = self._sum(x, rows)
        out = to_bf16(out).to(self.dtype)
        if self.first_token:
            out = out[:1].expand_as(out).clone()
        return {"out": out + 0.0 if self.positive_zero else out}

    def _sum(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self.parts == 1:
            return x @ rows.T
        pairs = zip(x.chunk(self.parts, -1), rows.chunk(self.parts, -1), strict=True)
        return torch.stack([to_bf16(a @ b.T).to(self.dtype) for a, b in pairs]).sum(0)


def buffers(x: str, weight: str, out: str) -> tuple[Buffer, ...]:
    """The three buffers; the arguments describe them."""
    return (
        Buffer("x", ("B", "K"), DType.BF16, Role.ACTIVATION, x),
        Buffer("weight", ("N", "K"), DType.BF16, Role.WEIGHT, weight),
        Buffer("out", ("B", "N"), DType.BF16, Role.OUTPUT, out),
    )


TOLERANCE = Tolerance(factor=3.0, floor_rms=1e-3, floor_worst=8e-3, cap_rms=1e-2, cap_worst=4e-2)
"""One bf16 rounding that may fall on the other side of a boundary, and what float32 sums lose."""


PARTIAL = replace(TOLERANCE, positive_zero=True)
"""The same for results that travel in mailboxes."""


def flops(axes: Axes) -> int:
    """A multiplication and an addition a product."""
    return 2 * axes["B"] * axes["N"] * axes["K"]


def compulsory_bytes(axes: Axes) -> int:
    """The weight once, the rows in and out."""
    b, n, k = axes["B"], axes["N"], axes["K"]
    return 2 * (n * k + b * k + b * n)


def faults(positive_zero: bool = False) -> dict[str, Fault]:
    """Known mistakes by name."""

    def wrong(**change: int | bool) -> Product:
        return Product(torch.float32, positive_zero, **change)  # type: ignore[arg-type]

    made = {
        "bf16-partials": Fault(
            "wrong-rounding",
            "partial sums along K are rounded to bf16 before they are added",
            wrong(parts=4),
            lambda axes: axes["K"] % 4 == 0,
        ),
        "first-token": Fault(
            "wrong-token",
            "every token gets the first token's result",
            wrong(first_token=True),
            lambda axes: axes["B"] > 1,
        ),
    }
    for n in (1, 8, 32, 64, 128, 256, 512):
        made[f"dropped-{n}"] = Fault(
            "dropped-tail",
            f"the last {n} elements of K are not in the sum",
            wrong(drop=n),
            lambda axes, n=n: n < axes["K"],  # type: ignore[misc]
        )
    return made


def _fill(axes: Axes, seed: int, allocate: Allocate, name: str) -> Tensors:
    x, weight = allocate("x"), allocate("weight")
    fill_normal(x, stream(seed, name, "x"))
    rng = stream(seed, name, "weight")
    for first in range(0, axes["N"], _ROWS):  # a few rows at a time: drawn in float32
        fill_normal(weight[first : first + _ROWS], rng, std=axes["K"] ** -0.5)
    return {"x": x, "weight": weight}


def ordinary(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Normal rows, weights of standard deviation K^-1/2: results of standard deviation 1."""
    return _fill(axes, seed, allocate, "ordinary")


def cancelling(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """The two halves of K cancel but for a remainder of a few hundredths of their size.

    Sums kept in bf16 between the parts of a split are far off; float32 sums are not.
    """
    t, half = _fill(axes, seed, allocate, "cancelling"), axes["K"] // 2
    large = t["x"][:, :half].float() * 32
    rest = torch.randn(large.shape, generator=stream(seed, "cancelling", "rest"))
    t["x"][:, :half] = large
    t["x"][:, half : 2 * half] = rest - large
    t["weight"][:, half : 2 * half] = t["weight"][:, :half]
    return t


def uneven(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """The last sixteenth of each row is 16 times as large: a sum that misses it is far off."""
    t = _fill(axes, seed, allocate, "uneven")
    t["x"][:, -(axes["K"] // 16) :] *= 16
    return t


def large(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Products of magnitude 2^110: sums stay below the largest float32, in any order."""
    t = _fill(axes, seed, allocate, "large")
    t["x"] *= 2.0**56
    t["weight"] *= 2.0**54
    return t


def denormals(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every other element of x and every fourth row of the weight is subnormal."""
    t = _fill(axes, seed, allocate, "denormals")
    t["x"][:, ::2] *= 2.0**-130
    t["weight"][::4] *= 2.0**-128
    return t


def negative_zero(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every third element of x is -0, every fifth row of the weight is -0 throughout."""
    t = _fill(axes, seed, allocate, "negative_zero")
    t["x"][:, ::3] = -0.0
    t["weight"][::5] = -0.0
    return t


def all_equal(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every x is 3; every row of the weight has one value, another for the next row."""
    t = _fill(axes, seed, allocate, "all_equal")
    t["x"].fill_(3.0)
    t["weight"].copy_(t["weight"][:, :1].clone().expand_as(t["weight"]))
    return t


def nan_inf(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """One row of the weight holds a NaN: its column is NaN. One holds an infinity: its column has the
    infinity of the sign of x there. With several tokens the first holds a NaN too: all of it is NaN."""
    t = _fill(axes, seed, allocate, "nan_inf")
    n, k = axes["N"], axes["K"]
    t["x"][:, 1] = torch.where(t["x"][:, 1] < 0, -1.5, 1.5)
    t["weight"][1, 1] = torch.inf
    t["weight"][n - 1, k - 1] = torch.nan
    if axes["B"] > 1:
        t["x"][0, k // 2] = torch.nan
    return t


GENERATORS: dict[str, Generator] = {
    f.__name__: f for f in (ordinary, cancelling, uneven, large, denormals, negative_zero, all_equal, nan_inf)
}
"""Generators by name, for any contract whose inputs are `x` and `weight`."""
