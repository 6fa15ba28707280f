"""SiTU, the activation of Kimi K3's experts, and the accuracy that the hardware's tanh has.

`situ(g, u) = beta tanh(g / beta) sigmoid(g) * lambda tanh(u / lambda)`
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BETA = 4.0
LAMBDA = 25.0

TANH_ERROR = 2.0**-11
"""Largest relative error of `tanh.approx.f32` (PTX ISA 9.x, "tanh"), which the model's own expert kernels
use.

An honest baseline has the error that the hardware may have. An error of one sign is the worst of those,
and unlike a random one it makes the baseline's error nearly the same for every seed.
"""


def situ(
    gate: torch.Tensor,
    up: torch.Tensor,
    tanh: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
    beta: float = BETA,
    lam: float = LAMBDA,
) -> torch.Tensor:
    """SiTU of equal-shaped float tensors, in their dtype. `gate = -inf` gives a zero, `+inf` gives beta."""
    return beta * tanh(gate / beta) * torch.sigmoid(gate) * (lam * tanh(up / lam))


def tanh_low(x: torch.Tensor) -> torch.Tensor:
    """Tanh of float32, too small by `TANH_ERROR` (relative) wherever it is not yet 1 or -1."""
    return _tanh_off(x, -TANH_ERROR)


def tanh_high(x: torch.Tensor) -> torch.Tensor:
    """Tanh of float32, too large by `TANH_ERROR` (relative) wherever it is not yet 1 or -1."""
    return _tanh_off(x, TANH_ERROR)


def _tanh_off(x: torch.Tensor, error: float) -> torch.Tensor:
    exact = torch.tanh(x)
    return torch.where(exact.abs() < 1, exact * (1 + error), exact)
