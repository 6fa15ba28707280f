"""SiTU, the activation of Kimi K3's experts, and the accuracy that the hardware's tanh has.

`situ(g, u) = beta tanh(g / beta) sigmoid(g) * lambda tanh(u / lambda)`
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BETA = 4.0
LAMBDA = 25.0

_DROPPED_BITS = 24 - 11


def situ(
    gate: torch.Tensor,
    up: torch.Tensor,
    tanh: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
    beta: float = BETA,
    lam: float = LAMBDA,
) -> torch.Tensor:
    """SiTU of equal-shaped float tensors, in their dtype. `gate = -inf` gives a zero, `+inf` gives beta."""
    return beta * tanh(gate / beta) * torch.sigmoid(gate) * (lam * tanh(up / lam))


def tanh_of_hardware(x: torch.Tensor) -> torch.Tensor:
    """Tanh of float32 kept to 11 significant bits: a relative error of at most 2^-11.

    That is the bound of `tanh.approx.f32` (PTX ISA 9.x, "tanh"), which the model's own expert kernels
    use; 0, 1 and -1 stay exact. An honest baseline has this error.
    """
    bits = torch.tanh(x).view(torch.int32)
    half, mask = 1 << (_DROPPED_BITS - 1), -(1 << _DROPPED_BITS)
    rounded = ((bits + half) & mask).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)
