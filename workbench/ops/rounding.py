"""Rounding of float64 results to storage types with ONE rounding.

`tensor.to(torch.bfloat16)` rounds float64 to float32 first and then again: 1 + 2^-8 + 2^-30 becomes 1.0
instead of 1 + 2^-7. Rounding to odd on the way (truncate, then set the last bit if anything was lost)
makes the second rounding see what the first one dropped; float32 keeps 16 bits more than bf16 and 20 more
than e4m3, two suffice (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
"""

from __future__ import annotations

import torch

_E4M3_MAX = 448.0


def to_odd_f32(x: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32, to odd: exact values stay, others get the neighbour whose last bit is 1."""
    nearest = x.to(torch.float32)
    back = nearest.to(torch.float64)
    bits = nearest.view(torch.int32)
    # One step towards zero where the nearest value is beyond x; magnitude order is integer order of the bits.
    bits = torch.where(back.abs() > x.abs(), bits - 1, bits)
    inexact = (back != x) & ~x.isnan()
    return torch.where(inexact, bits | 1, bits).view(torch.float32)


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round float64 or float32 to bfloat16, nearest even, once; overflow gives infinity."""
    return (to_odd_f32(x) if x.dtype == torch.float64 else x).to(torch.bfloat16)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round float64 or float32 to e4m3 (fn), nearest even, once, saturating at 448 (`cvt.rn.satfinite`)."""
    return (
        (to_odd_f32(x) if x.dtype == torch.float64 else x)
        .clamp(-_E4M3_MAX, _E4M3_MAX)
        .to(torch.float8_e4m3fn)
    )
